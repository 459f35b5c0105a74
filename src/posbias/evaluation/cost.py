"""Expected cost of requests to a local model, from short runs of the same work; refused before they begin if they
cannot fit.

A pass of the longest prompts is the work that is measured; the keys and values of all others that are read and decoded
with it are added: the memory of that is a polynomial of the length, as in `posbias.measurement.work`.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
from jaxtyping import Int64

from posbias.errors import RunError
from posbias.evaluation.options import EvaluateOptions
from posbias.evaluation.responders import LocalOptions, LocalResponder, Request, Responder
from posbias.evaluation.responders.batching import Ending, Kept, Runner, Started, decode
from posbias.evaluation.responders.local import score_answer
from posbias.evaluation.responders.pass_plan import Reading, plan_passes, visiting_order
from posbias.evaluation.samples import Sample, requests_of
from posbias.measurement.cost_estimate import CostEstimate
from posbias.measurement.work import Work, calibrate
from posbias.models.model import Model
from posbias.tasks.language import LanguageTask

SHORTER = "prompts of at most {} tokens (fewer or shorter items)"
"""What would take less, for a message."""
PROBE = 64
"""Tokens on which a cache, its size and a step of decoding are tried."""


@dataclass(frozen=True)
class PromptWork:
    """The work on one prompt, given its token ids."""

    model: Model
    answer: int
    """Tokens of the longest answer that is scored; 0 if none is."""
    generated: int
    """Tokens that are generated at most; 0 if none are."""
    together: int
    """Prompts that are asked at a time at most."""
    runner: Runner
    """Keeps and pads as far as the model is trusted in that."""

    @property
    def probe(self) -> Int64[np.ndarray, "_"]:
        """Tokens for a trial."""
        return np.arange(PROBE, dtype=np.int64) % self.model.vocabulary_size

    def estimate(self, longest: int, options: LocalOptions, *, share: float = 1.0) -> CostEstimate | None:
        """Cost of the longest prompt (tokens) and its answer; seconds: mean over prompts. None: short runs fail.

        `share` is the share of the prompts' tokens that is run, as shared beginnings run once, 0 ... 1.
        """
        # The work itself adds the scored answer to a prompt; what is generated beyond its length counts as prompt.
        try:
            length = longest + max(0, self.generated - self.answer)
            rows = self._rows_of_pass(length, options)
            estimate = calibrate(self.model, length, partial(self.run, rows=rows), usual=self.run_one)
            if estimate is None:
                return None
            estimate = replace(estimate, pass_seconds=estimate.seconds)
            if self.generated and not self.runner.cached:
                return replace(estimate, seconds=(1 + self.generated) * estimate.seconds)
            estimate = replace(estimate, seconds=share * estimate.seconds)
            return self._with_batch(estimate, options, rows) if self.runner.cached else estimate
        except RunError:
            return None

    def _rows_at_once(self, length: int, options: LocalOptions) -> int:
        """Prompts of a length that are kept together."""
        slots = options.bytes_on(self.model.device) / max(self.runner.position_bytes, 1.0)
        return max(1, min(options.rows, self.together, int(slots / length)))

    def _rows_of_pass(self, length: int, options: LocalOptions) -> int:
        """Prompts of a length that run in one pass."""
        limits = self.runner.limits(options.rows)
        return max(1, min(limits.rows, self._rows_at_once(length, options), limits.tokens // length))

    def _with_batch(self, estimate: CostEstimate, options: LocalOptions, rows: int) -> CostEstimate:
        """Estimate with the prompts that are kept beside those of one pass, and decoded with them."""
        room = self._rows_at_once(estimate.n_positions, options)
        constant, slope, *higher = (*estimate.coefficients, 0.0)
        coefficients = (constant, slope + (room - rows) * self.runner.position_bytes, *higher)
        if not self.generated:
            return replace(estimate, coefficients=coefficients)
        probes = [self.probe] * room
        _, kept = self.runner.read(probes, [None] * room, columns=PROBE, rows=1, keep=True)
        begin = time.perf_counter()
        decode(self.runner, [self._started(self.probe, of_probe) for of_probe in kept], self._ending)
        step = (time.perf_counter() - begin) / room
        return replace(estimate, coefficients=coefficients, seconds=estimate.seconds + self.generated * step)

    def run(self, token_ids: Int64[np.ndarray, "_"], *, rows: int) -> None:
        """A pass of so many prompts with the answers that are scored, and a step of decoding."""
        runner, answer = self.runner, np.zeros(self.answer, dtype=np.int64)
        whole = np.concatenate([token_ids, answer[:-1]])
        several, keep = [whole] * rows, bool(self.generated) and runner.cached
        logits, kept = runner.read(several, [None] * rows, columns=len(whole), rows=max(1, self.answer), keep=keep)
        if self.answer:
            score_answer(logits[0], answer)
        del logits
        if keep:
            decode(runner, [self._started(token_ids, each.first(len(token_ids))) for each in kept], self._ending)

    @property
    def _ending(self) -> Ending:
        return Ending(self.model.tokenizer, ())

    def _started(self, token_ids: Int64[np.ndarray, "_"], kept: Kept) -> Started:
        return Started(0, Request(prompt="-", max_tokens=2), token_ids, 0, kept)

    def run_one(self, token_ids: Int64[np.ndarray, "_"]) -> None:
        """The prompt alone with the answer that is scored, from its first token."""
        answer = np.zeros(max(0, self.answer - 1), dtype=np.int64)
        self.runner.whole(np.concatenate([token_ids, answer]), rows=1)


def preflight_answers(
    samples: Sequence[Sample],
    task: LanguageTask,
    options: EvaluateOptions,
    responder: Responder,
    *,
    copies: int = 1,
    workers: int = 1,
) -> dict[str, Any]:
    """Say what the requests of samples will cost before they begin, and refuse what cannot fit.

    `copies`: how often every prompt stands in what is really asked; `workers`: processes that share the samples.

    Returns:
        The estimate as plain values for a record, `seconds_per_pass` of a prompt run once by itself; empty for a
        server, with nothing to request, or if short runs fail, which the run itself will report.
    """
    if not isinstance(responder, LocalResponder):
        return {}
    requests = requests_of(samples, task, options)
    encoded, skipped = responder.prepared(requests, generate=options.generate)
    most = responder.max_positions
    fitting = [
        index
        for index in range(len(requests))
        if index not in skipped and (most is None or copies * len(encoded[index].prompt) <= most)
    ]
    if not fitting:
        return {}
    work = PromptWork(
        responder.model,
        answer=max(len(encoded[index].answer) for index in fitting),
        generated=options.tokens_of(task),
        together=min(len(fitting), options.together * len(samples[0].examples)),
        runner=responder.tried(encoded[fitting[0]].prompt),
    )
    longest = copies * max(len(encoded[index].prompt) for index in fitting)
    first = [encoded[index].prompt for index in fitting if requests[index].group == requests[fitting[0]].group]
    readings = [Reading(0, first[index]) for index in visiting_order(first)]
    local = responder.options
    plan = plan_passes(readings, work.runner.limits(local.rows))
    share = plan.cost(0) / sum(map(len, first))

    def probe(**changes: Any) -> CostEstimate | None:
        return work.estimate(longest, replace(local, **changes), share=share)

    return Work(
        responder.model,
        longest,
        len(fitting),
        probe,
        remedies={"--batch 1": {"batch": 1}} if local.rows > 1 else {},
        shorter=SHORTER,
        workers=workers,
        max_memory=options.max_memory,
    ).announce()
