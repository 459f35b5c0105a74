"""What requests will take of a local model, from short runs of the same work; refused before they begin where they
cannot fit.

One prompt after another runs through the live cache and is kept until a batch is full, which then goes on together:
the memory of that is a polynomial of the length, as in `posbias.measurement.cost`.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from jaxtyping import Int64

from posbias.errors import RunError
from posbias.evaluation.responders import LocalOptions, LocalResponder, Request, Responder
from posbias.evaluation.responders.local import score_answer
from posbias.evaluation.responders.running import (
    Ending,
    LiveCache,
    Started,
    WholePrompts,
    decode_together,
    trusted_runner,
)
from posbias.evaluation.samples import EvaluateOptions, Sample
from posbias.measurement.cost import calibrate, in_bfloat16, tell_cost, without_passes
from posbias.measurement.cost_estimate import CostEstimate, Remedy
from posbias.models.model import Model
from posbias.prompts.tokens import tokenise
from posbias.tasks.language import Example, LanguageTask

SHORTER = "prompts of at most {} tokens (fewer or shorter items)"
"""What would take less, for a message."""
PROBE = 64
"""Tokens on which a cache, its size and a step of decoding are tried."""


@dataclass(frozen=True)
class PromptWork:
    """The work on one prompt, given its token ids."""

    model: Model
    cached: bool
    """Whether the model's cache can be trusted; without, every prompt runs whole for every token of its answer."""
    answer: int
    """Tokens of the longest answer that is scored; 0 where none is."""
    generate: bool

    def run(self, token_ids: Int64[np.ndarray, "_"]) -> None:
        """The prompt with the answer that is scored, after one whose beginning it shares, and a step of decoding."""
        runner = LiveCache(self.model) if self.cached else WholePrompts(self.model)
        half = len(token_ids) // 2
        runner.run(np.concatenate([token_ids[:half], token_ids[half:][::-1]]), rows=1)
        before = runner.keep(len(token_ids))
        answer = np.zeros(self.answer, dtype=np.int64)
        logits = runner.run(np.concatenate([token_ids, answer[:-1]]), rows=max(1, self.answer))
        if self.answer:
            score_answer(logits, answer)
        if self.generate and isinstance(runner, LiveCache):
            started = Started(0, Request(prompt="-", max_tokens=2), token_ids, logits[0], runner.keep(len(token_ids)))
            decode_together(runner, [started], Ending(self.model.tokenizer, ()))
        del before  # alive until here, as the prompts are that wait for their batch

    def run_one(self, token_ids: Int64[np.ndarray, "_"]) -> None:
        """The prompt alone with the answer that is scored, from its first token."""
        answer = np.zeros(max(0, self.answer - 1), dtype=np.int64)
        WholePrompts(self.model).run(np.concatenate([token_ids, answer]), rows=1)

    def kept_bytes(self) -> float:
        """Keys and values of one position."""
        runner = LiveCache(self.model)
        runner.run(_probe(self.model), rows=1)
        return runner.keep(PROBE).bytes / PROBE

    def step_seconds(self, room: int) -> float:
        """Decoding one token of one prompt, so many together."""
        runner = LiveCache(self.model)
        logits = runner.run(_probe(self.model), rows=1)[0]
        started = Started(0, Request(prompt="-", max_tokens=2), _probe(self.model), logits, runner.keep(PROBE))
        begin = time.perf_counter()
        decode_together(runner, [started] * room, Ending(self.model.tokenizer, ()))
        return (time.perf_counter() - begin) / room


def preflight_answers(
    samples: Sequence[Sample], task: LanguageTask, options: EvaluateOptions, responder: Responder
) -> dict[str, Any]:
    """Say what the requests of some samples will cost before they begin, and refuse what cannot fit.

    Args:
        samples: Those that are still to be requested.
        task: Of the samples.
        options: With the bytes that the process may hold.
        responder: A local model; of a server nothing is estimated.

    Returns:
        The estimate as plain values for a record; empty for a server, with nothing to request, or where short runs
        fail, which the run itself will report.

    Raises:
        UsageError: it does not fit; the message says what would.
    """
    if not isinstance(responder, LocalResponder):
        return {}
    generated = options.tokens_of(task)
    known = [example for sample in samples for example in sample.examples if example.n_tokens is not None]
    answers = [0] * len(known)
    if options.score:
        answers = [len(tokens) for tokens in tokenise([example.target for example in known], responder.tokenizer)]
    limit = responder.max_positions
    # What does not fit into the context with what follows it is skipped, and costs nothing.
    fitting = [
        (example, answer)
        for example, answer in zip(known, answers, strict=True)
        if limit is None or (example.n_tokens or 0) + max(answer, generated) <= limit
    ]
    if not fitting:
        return {}
    examples = [example for example, _ in fitting]
    answer = max(answer for _, answer in fitting)

    def estimated(local: LocalOptions) -> CostEstimate | None:
        return _estimate(examples, answer, generated, responder, local)

    longest = max(example.n_tokens or 0 for example in examples)
    estimate = estimated(responder.options) or without_passes(responder.model, longest)
    estimate = replace(estimate, shorter=SHORTER)
    remedies: dict[str, Remedy] = dict(in_bfloat16(responder.model, estimate))
    if responder.options.batch > 1:
        remedies = {"--batch 1": lambda: estimated(replace(responder.options, batch=1)), **remedies}
    cost = tell_cost(estimate, len(examples), max_memory=options.max_memory, remedies=remedies)
    return {**cost, "prompts": len(examples)} if cost else {}


def _estimate(
    examples: Sequence[Example], answer: int, generated: int, responder: LocalResponder, options: LocalOptions
) -> CostEstimate | None:
    """Of the longest prompt with its answer; seconds are the mean over prompts, shared beginnings run once."""
    model = responder.model
    # The work itself adds the scored answer to a prompt; what is generated beyond its length counts as prompt.
    longest = max(example.n_tokens or 0 for example in examples) + max(0, generated - answer)
    try:
        cached = isinstance(trusted_runner(model, _probe(model)), LiveCache)
        work = PromptWork(model, cached, answer, bool(generated))
        estimate = calibrate(model, longest, work.run, usual=work.run_one)
        if estimate is None:
            return None
        if generated and not cached:
            return replace(estimate, seconds=(1 + generated) * estimate.seconds)
        estimate = replace(estimate, seconds=_share_run(examples, responder) * estimate.seconds)
        return _with_batch(estimate, work, generated, options) if generated else estimate
    except RunError:
        return None


def _with_batch(estimate: CostEstimate, work: PromptWork, generated: int, options: LocalOptions) -> CostEstimate:
    """With the prompts that are kept and decoded together, as `LocalResponder` reckons their number."""
    kept = work.kept_bytes()
    room = max(1, min(options.batch, int(options.cache_bytes / (2 * kept * estimate.n_positions))))
    constant, slope, *others = (*estimate.coefficients, 0.0)
    # Each further prompt lies there twice, as kept and joined to one batch; one was kept in the short runs.
    return replace(
        estimate,
        coefficients=(constant, slope + max(2 * (room - 1) - 1, 0) * kept, *others),
        seconds=estimate.seconds + generated * work.step_seconds(room),
    )


def _share_run(examples: Sequence[Example], responder: LocalResponder) -> float:
    """Share of the prompts' tokens that are run: by the prompts of the first sample."""
    first = [example for example in examples if example.sample == examples[0].sample]
    count = responder.count_tokens([Request(prompt=example.prompt) for example in first])
    return count.floor / count.plain if responder.options.reuse else 1.0


def _probe(model: Model) -> Int64[np.ndarray, "_"]:
    return np.arange(PROBE, dtype=np.int64) % model.vocabulary_size
