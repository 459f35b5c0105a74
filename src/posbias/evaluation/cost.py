"""Expected cost of requests to a local model, from short runs of the same work; refused before they begin if they
cannot fit.

One prompt after another runs through the live cache and is kept until a batch is full, which then goes on together:
the memory of that is a polynomial of the length, as in `posbias.measurement.cost`.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
from jaxtyping import Int64

from posbias.errors import RunError
from posbias.evaluation.options import EvaluateOptions
from posbias.evaluation.responders import LocalOptions, LocalResponder, Request, Responder
from posbias.evaluation.responders.local import score_answer
from posbias.evaluation.responders.running import Ending, Runner, Started, count_tokens, decode, size_of, trusted_runner
from posbias.evaluation.samples import Sample, requests_of
from posbias.measurement.cost import calibrate, report_cost, without_passes
from posbias.measurement.cost_estimate import CostEstimate, Remedy
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
    share: float
    """Share of the prompts' tokens that is run, as shared beginnings run once, 0 ... 1."""

    @property
    def probe(self) -> Int64[np.ndarray, "_"]:
        """Tokens for a trial."""
        return np.arange(PROBE, dtype=np.int64) % self.model.vocabulary_size

    @cached_property
    def cached(self) -> bool:
        """True if the model's cache can be trusted; else every prompt runs whole for every token of its answer."""
        return trusted_runner(self.model, self.probe).cached

    def estimate(self, longest: int, options: LocalOptions) -> CostEstimate | None:
        """Cost of the longest prompt (tokens) and its answer; seconds: mean over prompts. None: short runs fail."""
        # The work itself adds the scored answer to a prompt; what is generated beyond its length counts as prompt.
        try:
            cached = self.cached  # tried before anything is measured
            length = longest + max(0, self.generated - self.answer)
            estimate = calibrate(self.model, length, self.run, usual=self.run_one)
            if estimate is None:
                return None
            estimate = replace(estimate, pass_seconds=estimate.seconds)
            if self.generated and not cached:
                return replace(estimate, seconds=(1 + self.generated) * estimate.seconds)
            estimate = replace(estimate, seconds=self.share * estimate.seconds)
            return self._with_batch(estimate, options) if self.generated else estimate
        except RunError:
            return None

    def _with_batch(self, estimate: CostEstimate, options: LocalOptions) -> CostEstimate:
        """Estimate with the prompts that are kept and decoded together, as `LocalResponder` reckons their number."""
        runner, probe = Runner(self.model, cached=True), self.probe
        logits, cache = runner.run(probe, rows=1)[0], runner.keep(PROBE)
        per_position = size_of(cache) / PROBE
        room = max(1, min(options.batch, int(options.cache_bytes / (2 * per_position * estimate.n_positions))))
        started = Started(0, Request(prompt="-", max_tokens=2), probe, logits, cache)
        begin = time.perf_counter()
        decode(runner, [started] * room, Ending(self.model.tokenizer, ()))
        step = (time.perf_counter() - begin) / room
        constant, slope, *higher = (*estimate.coefficients, 0.0)
        # Each further prompt lies there twice, as kept and joined to one batch; one was kept in the short runs.
        return replace(
            estimate,
            coefficients=(constant, slope + max(2 * (room - 1) - 1, 0) * per_position, *higher),
            seconds=estimate.seconds + self.generated * step,
        )

    def run(self, token_ids: Int64[np.ndarray, "_"]) -> None:
        """The prompt with the answer that is scored, after one whose beginning it shares, and a step of decoding."""
        runner = Runner(self.model, cached=self.cached)
        half = len(token_ids) // 2
        runner.run(np.concatenate([token_ids[:half], token_ids[half:][::-1]]), rows=1)
        before = runner.keep(len(token_ids))
        answer = np.zeros(self.answer, dtype=np.int64)
        logits = runner.run(np.concatenate([token_ids, answer[:-1]]), rows=max(1, self.answer))
        if self.answer:
            score_answer(logits, answer)
        if self.generated and self.cached:
            started = Started(0, Request(prompt="-", max_tokens=2), token_ids, logits[0], runner.keep(len(token_ids)))
            decode(runner, [started], Ending(self.model.tokenizer, ()))
        del before  # alive until here, as the prompts are that wait for their batch

    def run_one(self, token_ids: Int64[np.ndarray, "_"]) -> None:
        """The prompt alone with the answer that is scored, from its first token."""
        answer = np.zeros(max(0, self.answer - 1), dtype=np.int64)
        Runner(self.model, cached=False).run(np.concatenate([token_ids, answer]), rows=1)


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
    first = [encoded[index].prompt for index in fitting if requests[index].group == requests[fitting[0]].group]
    plain, floor = count_tokens(first)
    work = PromptWork(
        responder.model,
        answer=max(len(encoded[index].answer) for index in fitting),
        generated=options.tokens_of(task),
        share=floor / plain if responder.options.reuse else 1.0,
    )
    longest = copies * max(len(encoded[index].prompt) for index in fitting)
    estimate = work.estimate(longest, responder.options) or without_passes(responder.model, longest)
    estimate = replace(estimate, shorter=SHORTER)
    remedies: dict[str, Remedy] = {}
    if responder.options.batch > 1:
        remedies["--batch 1"] = lambda: work.estimate(longest, replace(responder.options, batch=1))
    cost = report_cost(
        responder.model, estimate, len(fitting), workers=workers, max_memory=options.max_memory, remedies=remedies
    )
    return {**cost, "prompts": len(fitting), "seconds_per_pass": estimate.pass_seconds} if cost else {}
