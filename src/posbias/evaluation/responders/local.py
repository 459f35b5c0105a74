"""`LocalResponder`: a model in this process, which reads and answers as many prompts together as its memory takes.

Prompts that begin alike stand together in lexicographic order of their tokens. A portion of them, as large as the
memory for keys and values allows (`LocalOptions`), is read in few passes that run what they share once, if that takes
less (`pass_plan.py`), and is then decoded as one batch, whatever the lengths (`batching.py`). The answer to score runs
in the same pass as the end of its prompt; generation goes on from the same keys and values.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int64
from torch import Tensor, nn

from posbias.checks import check_size, check_whole, checked
from posbias.display.showing import Presented, Shown
from posbias.errors import RunError, UsageError
from posbias.evaluation.responders.base import SKIPPED, AnswerScore, Reply, Request, Responder, Response
from posbias.evaluation.responders.batching import (
    Ending,
    Kept,
    Runner,
    Started,
    counting_tokens,
    decode,
    trusted_runner,
)
from posbias.evaluation.responders.pass_plan import (
    UNBOUNDED,
    Reading,
    TokenIds,
    in_portions,
    plan_passes,
    visiting_order,
)
from posbias.evaluation.responders.thoughts import opens_thoughts
from posbias.limits import AT_ONCE
from posbias.models.devices import free_bytes
from posbias.models.loading import as_model
from posbias.models.model import Model
from posbias.progress import track
from posbias.prompts.control_tokens import spelled_in
from posbias.prompts.prompts import check_vocabulary, tokenise
from posbias.tasks.language import rendered

WITHIN_THOUGHTS = (
    "the prompts end where the model's thoughts begin, and an answer would be scored within them; --template-options "
    "'enable_thinking=False' closes them in templates that know it"
)
"""Why an answer is not scored."""
TOGETHER = ("nothing", "equal lengths", "all lengths")
"""Prompts that a model runs together: if its cache proved wrong, if its padding did, and if both proved right."""
MOST_ROWS, CACHE_BYTES = 256, 1 << 30
"""Most prompts at a time, and bytes of their keys and values on a processor, if nothing is said."""
CANNOT_READ = "so it cannot read a prompt; allowed: models with a tokenizer"


@checked
@dataclass(frozen=True)
class LocalOptions:
    """Limits on the prompts of a local model that are run together."""

    batch: int | None = None
    """Most prompts at a time (>= 1); None: as many as memory takes, at most MOST_ROWS."""
    cache_bytes: int | None = None
    """Memory that their keys and values may take (bytes, >= 1); None: 1 GiB on a processor, which so many prompts keep
    busy, and half of what an accelerator has free."""

    def __post_init__(self) -> None:
        if self.batch is not None:
            check_size("local responder: batch", self.batch, AT_ONCE)
        if self.cache_bytes is not None:
            check_whole("local responder: cache_bytes", self.cache_bytes, least=1)

    @property
    def rows(self) -> int:
        """Most prompts at a time."""
        return self.batch or MOST_ROWS

    def bytes_on(self, device: torch.device) -> int:
        """Memory that keys and values may take on a device."""
        if self.cache_bytes is not None:
            return self.cache_bytes
        free = None if device.type == "cpu" else free_bytes(device)
        return CACHE_BYTES if free is None else free // 2


@dataclass(frozen=True, eq=False)
class EncodedRequest:
    """One request in tokens."""

    prompt: TokenIds
    """The prompt with the special tokens that the tokenizer (text) or the chat template (messages) puts into it."""
    answer: TokenIds
    """Tokens to score; empty if the request has no answer."""
    thinks: bool = False
    """True if the prompt ends within thoughts, so that what follows it is no answer."""
    apart: bool = False
    """True if the answer was tokenised on its own, because in one text with the prompt it would form other tokens."""


def encode_requests(tokenizer: Any, requests: Sequence[Request]) -> list[EncodedRequest]:
    """Token ids of all requests.

    Texts are read as they are, conversations as the model's chat template renders them; what either spells of control
    tokens is ordinary text, unless the request says otherwise. Prompt and answer are tokenised
    as one text if that leaves the prompt's tokens as they are, and the answer on its own otherwise (its first
    characters would have merged into the prompt's last token).
    """
    if tokenizer is None:
        raise UsageError(f"the model has no tokenizer, {CANNOT_READ}")
    texts = [
        rendered(request.prompt, tokenizer, index=index, own_control=request.own_control)
        for index, request in enumerate(requests)
    ]
    answers = [request.answer or "" for request in requests]
    prompts = tokenise([text for (text, _), _ in texts], tokenizer, [ordinary for (_, ordinary), _ in texts])
    wholes = tokenise(
        [text + answer for ((text, _), _), answer in zip(texts, answers, strict=True)],
        tokenizer,
        [
            [*ordinary, *((len(text) + begin, len(text) + end) for begin, end in spelled_in(answer, tokenizer))]
            for ((text, ordinary), _), answer in zip(texts, answers, strict=True)
        ],
    )
    alone = tokenise(answers, tokenizer)
    encoded = []
    for index, ((text, _), before) in enumerate(texts):
        prompt, whole = prompts[index], wholes[index]
        continues = len(whole) > len(prompt) and np.array_equal(whole[: len(prompt)], prompt)
        answer = whole[len(prompt) :] if continues else alone[index]
        full = np.concatenate([np.array(before, dtype=np.int64), prompt])
        if not len(full):
            raise UsageError(f"prompt {index} has no tokens; give at least 1")
        if answers[index] and not len(answer):
            raise UsageError(f"the answer of prompt {index}, {answers[index]!r}, has no tokens; give at least 1")
        answer = answer if answers[index] else answer[:0]
        encoded.append(EncodedRequest(full, answer, thinks=opens_thoughts(text), apart=not continues))
    return encoded


def too_long(
    requests: Sequence[Request],
    encoded: Sequence[EncodedRequest],
    max_positions: int | None,
    *,
    generate: bool,
    behind: int = 0,
) -> dict[int, Response]:
    """The responses to requests that do not fit into a context, by number; `behind` an answer other tokens follow."""
    skipped = {}
    for index, (request, tokens) in enumerate(zip(requests, encoded, strict=True)):
        length = len(tokens.prompt)
        following = max(request.max_tokens if generate else 0, len(tokens.answer) + behind * bool(len(tokens.answer)))
        if max_positions is not None and length + following > max_positions:
            fact = f"{length} tokens and {following} of the answer; the model takes {max_positions}"
            skipped[index] = Response("", SKIPPED, prompt_tokens=length, tokens=0, skipped=fact)
    return skipped


def end_tokens_of(*settings: Any) -> frozenset[int]:
    """The tokens that end an answer: each setting, checked by nothing else yet, is one, several or none."""
    ends: list[Any] = []
    for setting in settings:
        ends += [] if setting is None else setting if isinstance(setting, list | tuple) else [setting]
    for token in ends:
        check_whole("eos_token_id of the model", token, least=0, below=2**63)
    return frozenset(ends)


@checked
class LocalResponder(Presented, Responder):
    """A loaded model with a tokenizer, and with a chat template if requests are conversations."""

    def __init__(self, model: Model | str | Path | nn.Module, options: LocalOptions | None = None) -> None:
        model = as_model(model)
        if model.tokenizer is None:
            raise UsageError(f"{model.no_tokenizer}, {CANNOT_READ}")
        self.model = model
        self.options = options or LocalOptions()
        self.tokenizer = model.tokenizer
        self.max_positions = model.max_positions
        self._runner: Runner | None = None
        self._plain = self._processed = self._apart = 0
        self._counting = False
        self._unscored = False
        """True once an answer was to be scored although the prompt ends within thoughts."""
        settings = getattr(model.network, "generation_config", None)
        end_tokens = end_tokens_of(getattr(settings, "eos_token_id", None), model.tokenizer.eos_token_id)
        self._ending = Ending(model.tokenizer, end_tokens)

    def shown(self) -> Shown:
        """Its model."""
        return replace(self.model.shown(), facts=self.model.facts())

    @property
    def together(self) -> str | None:
        """The prompts that are run together (TOGETHER); None before the first request, on which the model is tried."""
        if self._runner is None:
            return None
        return TOGETHER[self._runner.cached + self._runner.padded]

    @property
    def reading(self) -> tuple[int, ...]:
        """Numbers of the requests whose tokens the network now reads, row by row; empty if it reads none."""
        return () if self._runner is None else self._runner.reading

    @property
    def processed(self) -> int:
        """Tokens run through the network so far, of prompts, answers and continuations; see `counting_tokens`."""
        return self._processed

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Context in which all tokens that enter the model are counted."""
        if self._counting:
            yield
            return

        def count(slots: int) -> None:
            tokens, of_slots = (1, 1) if self._runner is None else self._runner.tokens_of_slots
            self._processed += slots * tokens // of_slots  # a method may run every row several times

        self._counting = True
        try:
            with counting_tokens(self.model, count):
                yield
        finally:
            self._counting = False

    def respond(
        self,
        requests: Sequence[Request],
        *,
        generate: bool = True,
        score: bool = False,
        alike: Sequence[int] | None = None,
    ) -> list[Reply]:
        """Answer requests (`Responder.respond`); one that does not fit into the context is skipped, never truncated.

        `alike`: number of first tokens of each prompt that the network reads as in any other prompt that begins with
        them; None: all.
        """
        with self.counting():
            return self._replies(requests, generate=generate, score=score, alike=alike)

    def _replies(
        self, requests: Sequence[Request], *, generate: bool, score: bool, alike: Sequence[int] | None
    ) -> list[Reply]:
        encoded, responses = self.prepared(requests, generate=generate)
        order = [index for index in visiting_order([tokens.prompt for tokens in encoded]) if index not in responses]
        scores: dict[int, AnswerScore] = {}
        if order:
            runner = self.tried(encoded[order[0]].prompt)
            readings, rooms = [], []
            for index in order:
                bound = UNBOUNDED if alike is None else alike[index]
                several = self._readings(runner, index, encoded[index], bound, generate=generate, score=score)
                readings += several
                rooms += [each.length + requests[index].max_tokens * bool(each.kept) for each in several]
            limit = self.options.bytes_on(self.model.device)
            slots = int(limit / runner.position_bytes) if runner.position_bytes else UNBOUNDED
            portions = list(in_portions(readings, rooms, rows=self.options.rows, slots=slots))
            try:
                for portion in track(portions, "answers"):
                    try:
                        started, scored = self._read(runner, portion, encoded, requests)
                    except RunError:
                        if not runner.padded:
                            raise
                        runner.padded = False  # what stands in padding may overflow, though no prompt does
                        started, scored = self._read(runner, portion, encoded, requests)
                    scores |= scored
                    continuations = decode(runner, started, self._ending)
                    for prompt, generated in zip(started, continuations, strict=True):
                        responses[prompt.index] = self._ending.response(generated, prompt)
            finally:
                runner.reading = ()
        return [Reply(responses.get(i), scores.get(i)) for i in range(len(requests))]

    def _readings(
        self, runner: Runner, index: int, tokens: "EncodedRequest", alike: int, *, generate: bool, score: bool
    ) -> list[Reading]:
        """Tokens to read for a request: its prompt with the answer, if any; the prompt, if it is continued."""
        prompt, given = tokens.prompt, score and len(tokens.answer) > 0
        self._unscored |= given and tokens.thinks
        scored = given and not tokens.thinks
        read = np.concatenate([prompt, tokens.answer[:-1]]) if scored else prompt
        self._plain += len(read) * (scored or generate)
        self._apart += scored and tokens.apart
        angles = runner.lengths.angles(len(read))
        continued = Reading(index, prompt, kept=len(prompt), alike=alike, angles=runner.lengths.angles(len(prompt)))
        if not scored:
            return [continued] * generate
        rows = len(read) - len(prompt) + 1
        forced = Reading(index, read, rows=rows, scored=True, alike=alike, angles=angles)
        if not generate or angles == continued.angles:
            return [replace(forced, kept=len(prompt) * generate)]
        return [forced, continued]  # with the answer behind it, the prompt is turned by other angles

    def _read(
        self,
        runner: Runner,
        readings: Sequence[Reading],
        encoded: Sequence[EncodedRequest],
        requests: Sequence[Request],
    ) -> tuple[list[Started], dict[int, AnswerScore]]:
        """Run readings together: the prompts that are to be continued, and the scores of answers."""
        readings = [readings[place] for place in visiting_order([reading.token_ids for reading in readings])]
        plan = plan_passes(readings, runner.limits(self.options.rows))
        waiting = Counter(plan.origins)
        held: dict[int | None, Kept] = {}
        started: list[Started] = []
        scores: dict[int, AnswerScore] = {}
        for step in plan.passes:
            group = [readings[member] for member in step.members]
            origins = [plan.origins[member] for member in step.members]
            runner.reading = tuple(reading.request for reading in group)
            logits, states = runner.read(
                [reading.token_ids for reading in group],
                [held.get(origin) for origin in origins],
                columns=step.columns,
                rows=max(reading.rows for reading in group),
                keep=runner.cached and any(readings[member].kept or waiting[member] for member in step.members),
            )
            waiting.subtract(origins)
            held = {origin: kept for origin, kept in held.items() if waiting[origin]}
            for row, (member, reading) in enumerate(zip(step.members, group, strict=True)):
                index, rows = reading.request, logits[row, -reading.rows :]
                if reading.scored:
                    scores[index] = score_answer(rows, encoded[index].answer)
                if waiting[member]:
                    held[member] = states[row]
                if reading.kept:
                    kept = states[row].first(reading.kept) if states else None
                    first, tokens = int(rows[0].argmax()), encoded[index]
                    started.append(Started(index, requests[index], tokens.prompt, first, kept, tokens.thinks))
        return started, scores

    def prepared(
        self, requests: Sequence[Request], *, generate: bool
    ) -> tuple[list[EncodedRequest], dict[int, Response]]:
        """Requests in tokens, and by number the responses to those that do not fit into the context."""
        encoded = encode_requests(self.tokenizer, requests)
        for index, tokens in enumerate(encoded):
            for token_ids, place in ((tokens.prompt, f"prompt {index}"), (tokens.answer, f"answer {index}")):
                check_vocabulary(token_ids, self.model, place)
        return encoded, too_long(requests, encoded, self.max_positions, generate=generate)

    def describe(self) -> dict[str, Any]:
        """Plain values for a record."""
        described = {"kind": "local", "model": self.model.describe(), "batch": self.options.batch}
        return {**described, **self.learnt(), **self.counts()}

    def learnt(self) -> dict[str, Any]:
        """The number of prompts run together, and the reason if answers were not scored."""
        return {"together": self.together, **({"no_scores_because": WITHIN_THOUGHTS} if self._unscored else {})}

    def counts(self) -> dict[str, float]:
        """Tokens run through the network, how many a plain run would have taken without any method, and answers that
        were scored as separate tokens although they would merge with the prompt's last ones.
        """
        return {"tokens_processed": self.processed, "tokens_plain": self._plain, "answers_apart": self._apart}

    def tried(self, prompt: TokenIds) -> Runner:
        """The runner of all prompts, made at the first; tokens on which the cache is tried do not count."""
        if self._runner is None:
            before = self._processed
            self._runner = trusted_runner(self.model, prompt)
            self._processed = before
        return self._runner


def as_responder(subject: Any) -> Responder:
    """The responder that puts requests to a subject.

    Args:
        subject: A responder, which is taken as it is; a loaded model; or what `load_model` takes: a hub id, a
            directory, a file.gguf, "demo", or a model of transformers.

    Raises:
        UsageError: a model that cannot be loaded, or one without a tokenizer, such as a model of transformers alone:
            `load_model(network, tokenizer)` gives it one.
    """
    if isinstance(subject, Responder):
        return subject
    return LocalResponder(as_model(subject))


def score_answer(logits: Float[Tensor, "token vocabulary"], answer: Int64[np.ndarray, "token"]) -> AnswerScore:
    """Log-probability and rank of each answer token, from the logits of the position before it.

    log p(a_t) = logit(a_t) - log sum exp(logits), in float32 at least; rank = 1 + tokens with a larger logit.
    """
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    answer_logits = logits.gather(1, torch.as_tensor(answer, device=logits.device)[:, None])
    logprobs = (answer_logits[:, 0] - logits.logsumexp(dim=-1)).tolist()
    ranks = (1 + (logits > answer_logits).sum(dim=-1)).tolist()
    return AnswerScore(tuple(min(0.0, value) for value in logprobs), tuple(int(rank) for rank in ranks))
