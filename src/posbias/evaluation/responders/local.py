"""`LocalResponder`: a model in this process, which reads and answers as many prompts together as its memory takes.

A prompt goes on from what it shares with the one before it in lexicographic order; those that share next to nothing go
together with others of about their length, so that nearly nothing is read for padding. Then all of them are decoded as
one batch, whatever the lengths (parts timed: benchmarks/README.md). A model whose logits are others with a cache
or with padding, tried on first use (`passes.py`), reads whole prompts one at a time.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int64
from torch import Tensor, nn

from posbias.checks import Natural, checked, checked_value
from posbias.errors import RunError, UsageError
from posbias.evaluation.options import LocalOptions
from posbias.evaluation.responders.base import SKIPPED, AnswerScore, Reply, Request, Responder, Response
from posbias.evaluation.responders.encoding import (
    CANNOT_READ,
    WITHIN_THOUGHTS,
    EncodedRequest,
    Ending,
    TokenIds,
    encode_requests,
)
from posbias.evaluation.responders.passes import (
    NOT_FINITE,
    Kept,
    Reading,
    Runner,
    Trust,
    cut,
    first,
    joined,
    passes_of,
)
from posbias.models.devices import free_bytes
from posbias.models.hugging_face import HuggingFaceModel
from posbias.models.layout import AngleLengths
from posbias.models.loading import as_model
from posbias.models.model import Model
from posbias.progress import track
from posbias.prompts.prompts import check_vocabulary

MOST_ROWS, CACHE_BYTES = 256, 1 << 30
"""Most prompts at a time, and bytes of their keys and values on a processor, which so many prompts keep busy."""
SPARE_ROWS = 0.75
"""Share of a batch's rows that have not ended below which the others are dropped: that copies all keys and values."""


@checked
class LocalResponder(Responder):
    """A loaded model with a tokenizer, and with a chat template if requests are conversations."""

    renders = True

    def __init__(self, model: Model | str | Path | nn.Module, options: LocalOptions | None = None) -> None:
        model = as_model(model)
        if model.tokenizer is None or not isinstance(model, HuggingFaceModel):
            raise UsageError(f"{model.no_tokenizer}, {CANNOT_READ}")
        self.model = model
        self.options = options or LocalOptions()
        self.tokenizer = model.tokenizer
        self.max_positions = model.max_positions
        self.runner = Runner(model)
        self._trust: Trust | None = None
        self._apart = 0
        self._unscored = False
        """True once an answer was to be scored although the prompt ends within thoughts."""
        ends: list[Any] = []
        for settings in (getattr(model.network, "generation_config", None), model.tokenizer):
            named = getattr(settings, "eos_token_id", None)  # one, several or none
            ends += [] if named is None else named if isinstance(named, list | tuple) else [named]
        for token in ends:
            checked_value("eos_token_id of the model", token, Natural)
        self._ending = Ending(model.tokenizer, frozenset(ends))
        self._lengths = AngleLengths.of(model.network)

    def __repr__(self) -> str:
        return f"LocalResponder({self.model!r})"

    @property
    def together(self) -> str | None:
        """Prompts that go together, "all lengths" or "nothing"; None before the first request, which tries it."""
        return None if self._trust is None else "all lengths" if self._trust.together else "nothing"

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
        encoded = encode_requests(self.tokenizer, requests)
        replies: list[Reply] = []
        readings: list[Reading] = []
        for index, (request, tokens) in enumerate(zip(requests, encoded, strict=True)):
            check_vocabulary(tokens.prompt, self.model, f"prompt {index}")
            check_vocabulary(tokens.answer, self.model, f"answer {index}")
            replies.append(Reply(self._too_long(request, tokens, generate=generate), None))
            given = score and len(tokens.answer) > 0
            scored = given and not tokens.thinks
            self._unscored |= given and tokens.thinks
            if replies[index].response is None and (scored or generate):
                length = len(tokens.prompt)
                reading = Reading(index, request, tokens, scored, length if alike is None else alike[index])
                angles = self._lengths.angles(length)
                steady = angles == self._lengths.angles(reading.room)
                readings.append(replace(reading, angles=angles if steady else ()))
                self._apart += scored and tokens.apart
        try:
            for portion in track(self._portions(readings), "answers"):
                for index, reply in self._replies(portion, generate=generate).items():
                    replies[index] = reply
        finally:
            self.runner.reading = ()
        return replies

    def _too_long(self, request: Request, encoded: EncodedRequest, *, generate: bool) -> Response | None:
        """The response to a request that does not fit into the context."""
        length, following = len(encoded.prompt), max(request.max_tokens * generate, len(encoded.answer))
        if self.max_positions is None or length + following <= self.max_positions:
            return None
        reason = f"{length} tokens and {following} of the answer; the model takes {self.max_positions}"
        return Response("", SKIPPED, prompt_tokens=length, tokens=0, skipped=reason)

    def _portions(self, readings: Sequence[Reading]) -> list[list[Reading]]:
        """Readings in lexicographic order, at a time as many as memory has room for their keys and values."""
        if not readings:
            return []
        trust = self.tried(max((reading.encoded.prompt for reading in readings), key=len))
        free = None if self.model.device.type == "cpu" else free_bytes(self.model.device)
        slots = (CACHE_BYTES if free is None else free // 2) / max(trust.position_bytes, 1.0)
        portions: list[list[Reading]] = [[]]
        largest = 0
        for reading in sorted(readings, key=lambda reading: reading.order):
            largest, rows = max(largest, reading.room), len(portions[-1])
            full = rows >= (self.options.batch or MOST_ROWS) or (rows + 1) * largest > slots
            if rows and (full or reading.angles != portions[-1][0].angles):
                portions.append([])
                largest = reading.room
            portions[-1].append(reading)
        return portions

    def _replies(self, portion: Sequence[Reading], *, generate: bool) -> dict[int, Reply]:
        """Replies by number; what does not fit into memory is halved, and where padding overflows, no prompt is padded.

        Raises:
            RunError: a prompt alone does not fit, or gives no finite logits.
        """
        try:
            return self._replies_at_once(portion, generate=generate)
        except torch.OutOfMemoryError:
            if len(portion) == 1:
                raise RunError(
                    "the memory of the device does not hold one prompt; try fewer tokens, --dtype bfloat16, or another "
                    "--device"
                ) from None
        except RunError:
            if self._trust is None or not self._trust.together:
                raise
            self._trust = replace(self._trust, together=False)
            return self._replies(portion, generate=generate)
        middle = len(portion) // 2
        return {
            index: reply
            for half in (portion[:middle], portion[middle:])
            for index, reply in self._replies(half, generate=generate).items()
        }

    def _replies_at_once(self, portion: Sequence[Reading], *, generate: bool) -> dict[int, Reply]:
        trust = self.tried(portion[0].encoded.prompt)
        if not trust.cached or not portion[0].angles:
            return {reading.index: self._whole(reading, generate=generate) for reading in portion}
        scores: dict[int, AnswerScore] = {}
        generated: dict[int, list[int]] = {}
        kept: dict[int, Kept] = {}
        states: list[Kept] = []
        for group, shared in passes_of(portion, together=trust.together, accelerated=self.model.device.type != "cpu"):
            self.runner.reading = tuple(reading.index for reading in group)
            logits, states = self.runner.read(
                [reading.token_ids for reading in group],
                first(states[0], shared) if shared else None,
                rows=max(reading.rows for reading in group),
                keep=generate or len(group) == 1,
            )
            for row, reading in enumerate(group):
                wanted = logits[row, -reading.rows :]
                if reading.scored:
                    scores[reading.index] = score_answer(wanted, reading.encoded.answer)
                if generate:
                    generated[reading.index] = [int(wanted[0].argmax())]
                    kept[reading.index] = first(states[row], len(reading.encoded.prompt))
        if generate:
            states = []
            for batch in [portion] if trust.together else [[reading] for reading in portion]:
                self._decode_batch(batch, kept, generated)
        return {each.index: self._reply(each, generated.get(each.index), scores.get(each.index)) for each in portion}

    def _whole(self, reading: Reading, *, generate: bool) -> Reply:
        """The reply to a prompt that is read whole, without a cache, for its score and for every token."""
        self.runner.reading = (reading.index,)
        score, tokens = None, list[int]()
        if reading.scored:
            [logits], _ = self.runner.read([reading.token_ids], rows=reading.rows)
            score = score_answer(logits, reading.encoded.answer)
        while generate and not (tokens and self._ending.reached(tokens, reading.request, reading.encoded)):
            logits, _ = self.runner.read([np.array([*reading.encoded.prompt, *tokens])])
            tokens.append(int(logits[0, -1].argmax()))
        return self._reply(reading, tokens or None, score)

    def _reply(self, reading: Reading, generated: list[int] | None, score: AnswerScore | None) -> Reply:
        response = None
        if generated is not None:
            response = self._ending.response(generated, reading.request, reading.encoded)
        return Reply(response, score)

    def _decode_batch(self, rows: Sequence[Reading], kept: dict[int, Kept], generated: dict[int, list[int]]) -> None:
        """Continue prompts together, greedily, from the keys and values that were kept of them and are given up."""
        cache, padding = None, list[int]()
        active = {reading.index: reading for reading in rows}
        while True:
            for index, reading in list(active.items()):
                if self._ending.reached(generated[index], reading.request, reading.encoded):
                    del active[index]
            if not active:
                return
            if cache is None or len(active) < SPARE_ROWS * len(rows):
                parts = [
                    kept.pop(reading.index) if cache is None else cut(cache, row, padding[row])
                    for row, reading in enumerate(rows)
                    if reading.index in active
                ]
                room = max(reading.request.max_tokens - len(generated[index]) for index, reading in active.items())
                cache, padding = joined(parts, room=room)
                rows = list(active.values())
            self.runner.reading = tuple(reading.index for reading in rows)
            last = [generated[reading.index][-1] for reading in rows]
            best = self.runner.step(last, cache, padding, wanted=len(active)).max(dim=-1)
            # Both in one transfer: an accelerator waits for each.
            choices, finite = torch.stack([best.indices, best.values.isfinite().long()]).tolist()
            if not all(finite):
                raise RunError(NOT_FINITE.format(1))
            for reading, choice in zip(rows, choices, strict=True):
                if reading.index in active:
                    generated[reading.index].append(choice)

    def describe(self) -> dict[str, Any]:
        """Plain values for a record."""
        described = {"kind": "local", "model": self.model.describe(), "batch": self.options.batch}
        return {**described, **self.learnt(), **self.counts()}

    def learnt(self) -> dict[str, Any]:
        """The number of prompts run together, and the reason if answers were not scored."""
        return {"together": self.together, **({"no_scores_because": WITHIN_THOUGHTS} if self._unscored else {})}

    def counts(self) -> dict[str, float]:
        """Answers that were scored as separate tokens although they would merge with the prompt's last ones."""
        return {"answers_apart": self._apart}

    def tried(self, prompt: TokenIds) -> Trust:
        """What the model is trusted with, found out on the first prompt."""
        if self._trust is None:
            before = self.runner.processed
            self._trust, self.runner.processed = self.runner.trusted(prompt), before
        return self._trust


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
