"""What asking a local model will take, from short runs of the same work; refused before it begins where it cannot fit.

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
from posbias.evaluation.asking import Asking, Content
from posbias.evaluation.responders import LocalOptions, LocalResponder, Request, Responder
from posbias.evaluation.responders.decoding import Ending, Started, decode_together
from posbias.evaluation.responders.local import score_answer
from posbias.evaluation.responders.running import LiveCache, WholePrompts, trusted_runner
from posbias.measurement.cost import calibrate, in_bfloat16, tell_cost, without_passes
from posbias.measurement.cost_estimate import CostEstimate, Remedy
from posbias.models.model import Model
from posbias.prompts.tokens import tokenise
from posbias.tasks.language import Example

SHORTER = "prompts of at most {} tokens (fewer or shorter items)"
"""What would take less, for a message."""
PROBE = 64
"""Tokens on which a cache, its size and a step of decoding are tried."""


@dataclass(frozen=True)
class AskingWork:
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
    contents: Sequence[Content], asking: Asking, responder: Responder, *, max_memory: int | None = None
) -> dict[str, Any]:
    """Say what asking will cost before it begins, and refuse what cannot fit.

    Args:
        contents: Those that are still to be asked.
        asking: How.
        responder: A local model; of a server nothing is estimated.
        max_memory: Bytes that the process may hold; None: what is free.

    Returns:
        The estimate as plain values for a record; empty for a server, with nothing to ask, or where short runs fail,
        which the run itself will report.

    Raises:
        UsageError: it does not fit; the message says what would.
    """
    if not isinstance(responder, LocalResponder):
        return {}
    examples = _asked([example for content in contents for example in content.examples], asking, responder)
    if not examples:
        return {}
    options, model = responder.options, responder.model
    longest = max(example.n_tokens or 0 for example in examples)
    estimate = _estimate(examples, asking, responder, options) or without_passes(model, longest)
    estimate = replace(estimate, shorter=SHORTER)
    remedies: dict[str, Remedy] = {}
    if options.batch > 1:
        remedies["--batch 1"] = lambda: _estimate(examples, asking, responder, replace(options, batch=1))
    told = tell_cost(estimate, len(examples), max_memory=max_memory, remedies=remedies | in_bfloat16(model, estimate))
    return {**told, "prompts": len(examples)} if told else {}


def _estimate(
    examples: Sequence[Example], asking: Asking, responder: LocalResponder, options: LocalOptions
) -> CostEstimate | None:
    """Of the longest prompt with its answer; seconds are the mean over prompts, shared beginnings run once."""
    model = responder.model
    answer = max(_answer_lengths(examples, asking, responder))
    # The work itself adds the scored answer to a prompt; what is generated beyond its length counts as prompt.
    generated = max(0, asking.max_tokens * asking.generate - answer)
    longest = max(example.n_tokens or 0 for example in examples) + generated
    try:
        cached = isinstance(trusted_runner(model, _probe(model)), LiveCache)
        work = AskingWork(model, cached, answer, asking.generate)
        estimate = calibrate(model, longest, work.run, usual=work.run_one)
        if estimate is None:
            return None
        if not asking.generate:
            return replace(estimate, seconds=_share_run(examples, responder) * estimate.seconds)
        if not cached:
            return replace(estimate, seconds=(1 + asking.max_tokens) * estimate.seconds)
        return _together(estimate, work, asking, _share_run(examples, responder), options)
    except RunError:
        return None


def _together(
    estimate: CostEstimate, work: AskingWork, asking: Asking, share: float, options: LocalOptions
) -> CostEstimate:
    """With the prompts that are kept and decoded together, as `LocalResponder` reckons their number."""
    kept = work.kept_bytes()
    room = max(1, min(options.batch, int(options.cache_bytes / (2 * kept * estimate.n_positions))))
    constant, slope, *others = (*estimate.coefficients, 0.0)
    # Each further prompt lies there twice, as kept and joined to one batch; one was kept in the short runs.
    return replace(
        estimate,
        coefficients=(constant, slope + max(2 * (room - 1) - 1, 0) * kept, *others),
        seconds=share * estimate.seconds + asking.max_tokens * work.step_seconds(room),
    )


def _asked(examples: Sequence[Example], asking: Asking, responder: LocalResponder) -> list[Example]:
    """Those of known length that fit into the context with what follows them: others are skipped, and cost nothing."""
    known = [example for example in examples if example.n_tokens is not None]
    limit = responder.max_positions
    if limit is None:
        return known
    following = [max(n, asking.max_tokens * asking.generate) for n in _answer_lengths(known, asking, responder)]
    return [example for example, n in zip(known, following, strict=True) if (example.n_tokens or 0) + n <= limit]


def _answer_lengths(examples: Sequence[Example], asking: Asking, responder: LocalResponder) -> list[int]:
    """Tokens of each example's answer that is scored; 0 where none is."""
    if not asking.score:
        return [0] * len(examples)
    return [len(tokens) for tokens in tokenise([example.target for example in examples], responder.tokenizer)]


def _share_run(examples: Sequence[Example], responder: LocalResponder) -> float:
    """Share of the prompts' tokens that are run: by the prompts of the first content."""
    first = [example for example in examples if example.content == examples[0].content]
    count = responder.count_tokens([Request(prompt=example.prompt) for example in first])
    return count.floor / count.plain if responder.options.reuse else 1.0


def _probe(model: Model) -> Int64[np.ndarray, "_"]:
    return np.arange(PROBE, dtype=np.int64) % model.vocabulary_size
