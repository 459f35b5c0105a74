"""`LocalResponder`: a model in this process, run on as few tokens as its prompts have distinct beginnings.

Prompts are run in lexicographic order of their tokens through one live cache (`running.py`), so that of prompts that
differ in the place of one item only what follows the first difference is run: the floor of `count_tokens`, reached
exactly. The answer to score runs in the same pass as the end of its prompt; generation goes on from the same keys and
values. Memory: the cache of one prompt, and those of the prompts that are decoded together (`LocalOptions`).
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int64
from torch import Tensor

from posbias.checks import check_size, check_whole, checked
from posbias.errors import UsageError
from posbias.evaluation.responders.base import SKIPPED, AnswerScore, Reply, Request, Responder, Response
from posbias.evaluation.responders.running import (
    Ending,
    Runner,
    Started,
    TokenIds,
    counting_tokens,
    decode,
    size_of,
    trusted_runner,
    visiting_order,
)
from posbias.evaluation.responders.thoughts import opens_thoughts
from posbias.limits import AT_ONCE
from posbias.models.loading import load_model
from posbias.models.model import Model
from posbias.progress import track
from posbias.prompts.control_tokens import spelled_in
from posbias.prompts.prompts import check_vocabulary, tokenise
from posbias.tasks.language import rendered

WITHIN_THOUGHTS = (
    "the prompts end where the model's thoughts begin, and an answer would be scored within them; "
    "--template-options 'enable_thinking=False' closes them in templates that know it"
)
CANNOT_READ = "so it cannot read a prompt; allowed: models with a tokenizer"


@dataclass(frozen=True)
class LocalOptions:
    """How a local model is run."""

    reuse: bool = True
    """True to run beginnings that prompts share once; False to run every prompt from its first token, the plain way."""
    batch: int = 8
    """Prompts of one length decoded together at most (>= 1)."""
    cache_bytes: int = 1 << 30
    """Memory that their keys and values may take together, both as kept and as one batch (bytes, >= 1)."""

    def __post_init__(self) -> None:
        check_size("local responder: batch", self.batch, AT_ONCE)
        check_whole("local responder: cache_bytes", self.cache_bytes, least=1)


@dataclass(frozen=True, eq=False)
class EncodedRequest:
    """One request in tokens."""

    prompt: TokenIds
    """The prompt with the special tokens that the tokenizer (text) or the chat template (messages) puts into it."""
    answer: TokenIds
    """Tokens to score; empty where the request has no answer."""
    thinks: bool = False
    """True if the prompt ends within thoughts, so that what follows it is no answer."""
    apart: bool = False
    """True if the answer was tokenised on its own, because in one text with the prompt it would form other tokens."""


def encode_requests(tokenizer: Any, requests: Sequence[Request]) -> list[EncodedRequest]:
    """Token ids of all requests.

    Texts are read as they are, conversations as the model's chat template renders them; what either spells of control
    tokens is ordinary text, unless the request says otherwise. Prompt and answer are tokenised
    as one text where that leaves the prompt's tokens as they are, and the answer on its own otherwise (its first
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


@checked
class LocalResponder(Responder):
    """A loaded model. It has a tokenizer, and a chat template where requests are conversations."""

    def __init__(self, model: Model, options: LocalOptions | None = None) -> None:
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
        # The model's generation settings have not been checked by anything else.
        settings = getattr(model.network, "generation_config", None)
        ends = [getattr(settings, "eos_token_id", None), model.tokenizer.eos_token_id]
        end_tokens: list[Any] = []
        for end in ends:
            end_tokens += [] if end is None else end if isinstance(end, list | tuple) else [end]
        for token in end_tokens:
            check_whole("eos_token_id of the model", token, least=0, below=2**63)
        self._ending = Ending(model.tokenizer, frozenset(end_tokens))

    @property
    def reuses(self) -> bool | None:
        """True if beginnings are reused; None before the first request, on which the model's cache is tried."""
        return None if self._runner is None else self.options.reuse and self._runner.cached

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

        def count(tokens: int) -> None:
            self._processed += tokens

        self._counting = True
        try:
            with counting_tokens(self.model, count):
                yield
        finally:
            self._counting = False

    def respond(self, requests: Sequence[Request], *, generate: bool = True, score: bool = False) -> list[Reply]:
        """Answer requests (`Responder.respond`); one that does not fit into the context is skipped, never truncated."""
        with self.counting():
            return self._replies(requests, generate=generate, score=score)

    def _replies(self, requests: Sequence[Request], *, generate: bool, score: bool) -> list[Reply]:
        encoded, responses = self.prepared(requests, generate=generate)
        scores: dict[int, AnswerScore] = {}
        waiting: list[Started] = []
        order = [index for index in visiting_order([tokens.prompt for tokens in encoded]) if index not in responses]
        if not order:
            return [Reply(responses.get(index), None) for index in range(len(requests))]
        runner = self.tried(encoded[order[0]].prompt)
        for index in track(order, "answers"):
            prompt, answer = encoded[index].prompt, encoded[index].answer
            thinks = encoded[index].thinks
            self._unscored |= score and thinks and len(answer) > 0
            if not score or thinks:
                answer = answer[:0]
            if not self.options.reuse:
                runner.forget()
            logits = runner.run(np.concatenate([prompt, answer[:-1]]), rows=max(1, len(answer)))
            self._plain += len(prompt) + max(0, len(answer) - 1)
            if len(answer):
                scores[index] = score_answer(logits, answer)
                self._apart += encoded[index].apart
            if generate:
                if runner.lengths.angles(len(prompt)) != runner.lengths.angles(len(prompt) + max(0, len(answer) - 1)):
                    logits = runner.run(prompt, rows=1)  # with the answer behind it, it was turned by other angles
                waiting.append(Started(index, requests[index], prompt, logits[0], runner.keep(len(prompt)), thinks))
                if len(waiting) >= self._room(waiting[0]):
                    responses.update(self._continue(runner, waiting))
                    waiting.clear()
        responses.update(self._continue(runner, waiting))
        return [Reply(responses.get(i), scores.get(i)) for i in range(len(requests))]

    def forget(self) -> None:
        """Run the next prompt from its first token."""
        if self._runner is not None:
            self._runner.forget()

    def prepared(
        self, requests: Sequence[Request], *, generate: bool
    ) -> tuple[list[EncodedRequest], dict[int, Response]]:
        """Requests in tokens, and by number the responses to those that do not fit into the context."""
        encoded = encode_requests(self.tokenizer, requests)
        skipped = {}
        for index, (request, tokens) in enumerate(zip(requests, encoded, strict=True)):
            for token_ids, place in ((tokens.prompt, f"prompt {index}"), (tokens.answer, f"answer {index}")):
                check_vocabulary(token_ids, self.model, place)
            length, following = len(tokens.prompt), max(request.max_tokens if generate else 0, len(tokens.answer))
            if self.max_positions is not None and length + following > self.max_positions:
                reason = f"{length} tokens and {following} of the answer; the model takes {self.max_positions}"
                skipped[index] = Response("", SKIPPED, prompt_tokens=length, tokens=0, skipped=reason)
        return encoded, skipped

    def describe(self) -> dict[str, Any]:
        """Plain values for a record."""
        described = {"kind": "local", "model": self.model.describe(), "batch": self.options.batch}
        return {**described, **self.learnt(), **self.counts()}

    def learnt(self) -> dict[str, Any]:
        """Reuse of beginnings, and the reason if answers were not scored."""
        return {"reuse": self.reuses, **({"no_scores_because": WITHIN_THOUGHTS} if self._unscored else {})}

    def counts(self) -> dict[str, float]:
        """Tokens run through the network, how many a plain run would have taken without any method, and answers that
        were scored as tokens of their own, though with the prompt they would form others.
        """
        return {"tokens_processed": self.processed, "tokens_plain": self._plain, "answers_apart": self._apart}

    def tried(self, prompt: TokenIds) -> Runner:
        """The runner of all prompts, made at the first; tokens on which the cache is tried do not count."""
        if self._runner is None:
            before = self._processed
            self._runner = trusted_runner(self.model, prompt)
            self._processed = before
        return self._runner

    def _room(self, started: Started) -> int:
        """Number of prompts that are decoded together."""
        bytes_per_prompt = 2 * size_of(started.kept)  # as kept, and joined to one batch
        return max(1, min(self.options.batch, self.options.cache_bytes // bytes_per_prompt)) if bytes_per_prompt else 1

    def _continue(self, runner: Runner, waiting: Sequence[Started]) -> dict[int, Response]:
        """The responses to prompts that have been run, those of one length together."""
        by_length: dict[int, list[Started]] = {}
        for started in waiting:
            by_length.setdefault(len(started.prompt), []).append(started)
        return {
            started.index: self._ending.response(generated, started)
            for batch in by_length.values()
            for started, generated in zip(batch, decode(runner, batch, self._ending), strict=True)
        }


def as_responder(subject: Any, *, max_memory: int | None = None) -> Responder:
    """The responder that puts requests to a subject.

    Args:
        subject: A responder, which is taken as it is; a loaded model; or what `load_model` takes: a hub id, a
            directory, a file.gguf, "demo", or a model of transformers.
        max_memory: Bytes that the process may hold while it loads a model that is only named, as of `load_model`.

    Raises:
        UsageError: a model that cannot be loaded, or one without a tokenizer, such as a model of transformers alone:
            `load_model(network, tokenizer)` gives it one.
    """
    if isinstance(subject, Responder):
        return subject
    return LocalResponder(subject if isinstance(subject, Model) else load_model(subject, max_memory=max_memory))


def score_answer(logits: Float[Tensor, "token vocabulary"], answer: Int64[np.ndarray, "token"]) -> AnswerScore:
    """Log-probability and rank of each answer token, from the logits of the position before it.

    log p(a_t) = logit(a_t) - log sum exp(logits), in float32 at least; rank = 1 + tokens with a larger logit.
    """
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    answer_logits = logits.gather(1, torch.as_tensor(answer, device=logits.device)[:, None])
    logprobs = (answer_logits[:, 0] - logits.logsumexp(dim=-1)).tolist()
    ranks = (1 + (logits > answer_logits).sum(dim=-1)).tolist()
    return AnswerScore(tuple(min(0.0, value) for value in logprobs), tuple(int(rank) for rank in ranks))
