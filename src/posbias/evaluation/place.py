"""`place`: the order of retrieved passages that a model with a measured curve is expected to use best.

A passage of relevance s in slot j is used with s c_j, c the curve; the sum is largest when passages and slots are
sorted alike (rearrangement inequality). The curve is shrunk towards flat by what the samples leave undecided; if
they do not show that positions differ at all, best-first is kept. What an order is worth is judged on samples that it
was not made from.

The gain of one order over another is the difference of sum_r s_r c_slots[r] / sum_r s_r, the r-th most relevant passage
standing in `slots[r]`, in units of the score: with relevances proportional to the chance of holding the answer, the
difference in expected accuracy.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from jaxtyping import Float64, Int64
from pydantic import InstanceOf

from posbias.checks import CELLS, checked
from posbias.errors import UsageError, check_most
from posbias.evaluation.curve import ALPHA, SAMPLES_FOR_CLAIM, Independent, Scores, complete_samples, independent
from posbias.evaluation.evaluation import Evaluation, load_evaluation
from posbias.evaluation.options import PlaceOptions
from posbias.results.figures import MEASURED, Curve
from posbias.results.records import Record, plain
from posbias.results.result import RESULTS, Result
from posbias.results.showing import Shown
from posbias.statistics import DRAWS, Interval, StoredInterval, halves, mean_of, percentile_interval, resample_counts
from posbias.tasks.language.base import AS_GIVEN, ORDERS, SHUFFLED

HALVINGS = 200
"""Random halvings behind the held-out estimate; its own scatter is then far below its interval."""
SAMPLES_TO_CONFIRM = 12
"""Samples below which halves are too small (6 each) for the held-out gain to support a claim."""

Relevance = Float64[np.ndarray, "n_slots"]
"""Shares of the relevance of all passages, the largest first."""
Usual = Float64[np.ndarray, "orders n_slots"]
"""The share of the relevance that stands in each slot, by usual order."""
Spread = Float64[np.ndarray, "n_positions n_slots"]
"""Weights of measured positions in each slot, as `slot_weights`."""
Counts = Float64[np.ndarray, "draws n_samples"]
"""How often each sample counts, one row per draw."""
Uses = Float64[np.ndarray, "draws n_slots"]
"""Expected use of each slot, one row per draw."""


REFERENCES: Mapping[str, Callable[[int], Sequence[int]]] = {
    "best_first": ORDERS[AS_GIVEN],
    "reversed": ORDERS["reversed"],
    "ends": ORDERS["ends"],
}
"""The usual orders, which need no curve, of passages the most relevant of which is the first given."""
REORDER, LEAVE, BEST_FIRST = "reorder", "leave the order", "best first"
"""Advice: the order is shown to be better than best first and than shuffled ones; if it is not, best first, which
leaves the order where the passages were given so."""


@dataclass(frozen=True)
class Gain:
    """The estimated order against a usual one."""

    over: str
    """The usual order: a key of `REFERENCES`, or SHUFFLED, the mean over all orders."""
    gain: StoredInterval
    """Gain of the estimated order; exactly 0, without an interval, if both orders are the same."""
    order: tuple[int, ...]
    """The usual order itself: indices of the passages, first slot to last; empty for shuffled ones."""
    raises: bool
    """True if samples that had no part in the choice show that the estimated order is better."""


@RESULTS.register("place")
@dataclass(frozen=True, eq=False, repr=False)
class Placement(Result):
    """The order chosen for some passages, and what it is expected to be worth."""

    drawn_by: ClassVar = "posbias.evaluation.finished_page:placement_report"
    record: InstanceOf[Record]
    order: tuple[int, ...] = ()
    """Indices of the passages as given, from the first slot of the context to the last: the estimated order if the
    advice is to reorder, else best first: with the advice to leave the order, the order given."""
    estimated: tuple[int, ...] = ()
    """The order that the curve alone would give, shown to be better or not; its gains are those below."""
    curve: tuple[float, ...] = ()
    """Expected use of each slot, shrunk towards flat; interpolated for slots that were not measured."""
    kept: float = 0.0
    """Share of the measured differences between positions that shrinking keeps, 0 (flat) ... 1; of 0 the order is
    best-first."""
    gains: tuple[Gain, ...] = ()
    """Gains of the estimated order over each of `REFERENCES`, and over shuffled orders. If the order rests on the curve
    they are judged by halves: it is made on one half of the samples, judged on the other, averaged over halvings; an
    order that rests on no curve is judged on all samples."""
    advice: str = LEAVE
    """REORDER, LEAVE or BEST_FIRST."""
    method: str = ""
    """Spelling of the method under which the run was made; empty: the unchanged model."""
    n_samples: int = 0
    """Complete samples behind the curve."""
    withheld: str = ""
    """Why accuracy, which comes first, was not the measure, as `Reading.withheld`; empty if it was, or was not had."""
    interpolated: bool = False
    """True if the slots differ from the positions that were measured."""
    measure: str = "accuracy"

    @property
    def decided(self) -> bool:
        """True if the samples show that positions differ, so that the order rests on the curve."""
        return self.kept > 0

    def shown(self) -> Shown:
        """The curve by which the passages were ordered."""
        title = f"order {' '.join(map(str, self.order))}, by {self.measure}"
        curve = Curve("expected use", np.arange(len(self.curve)), np.array(self.curve), MEASURED)
        return Shown(title, (curve,), "expected use", "slot")


@checked
def place(
    relevance: Sequence[float], run: Evaluation | str | Path, *, options: PlaceOptions | None = None
) -> Placement:
    """Order passages so that the relevant ones stand where this model uses them.

    Maximises sum_i s_i c_slot(i) / sum_i s_i: if the relevances are proportional to the chance that passage i holds
    the answer, this is the expected score of the model. Passages equally relevant keep their order.

    Args:
        relevance: One value per passage, finite, >= 0, not all zero.
        run: A finished evaluation, its directory, or that of an audit with behaviour. Best are your own questions with
            as many passages as are to be ordered, `evaluate(model, "documents(documents=20, file='passages.jsonl')")`.
            A gain is claimed only with at least 12 questions.
        options: Measure and seed.

    Raises:
        UsageError: no relevance, a negative or infinite one, a run that is no finished evaluation or lacks the measure,
            fewer than 6 complete samples, or a single position.
    """
    options = options or PlaceOptions()
    weights = np.array(relevance, dtype=np.float64)
    if not weights.any() or not ((weights >= 0) & (weights < np.inf)).all():
        raise UsageError(
            "relevance needs a finite number >= 0 for each passage (turn logits into probabilities first), one of them "
            f"above 0; got {[number for number in relevance if not 0 <= number < np.inf][:1] or list(relevance)[:4]}"
        )
    n_slots = len(weights)
    check_most("passages x resamples", n_slots * DRAWS, CELLS)
    evaluation = load_evaluation(run, "placing")
    measure, scores = _measured(evaluation, options.by)
    positions, n_items, complete = evaluation.positions, evaluation.n_items, complete_samples(scores)
    if len(positions) < 2 or len(complete) < SAMPLES_FOR_CLAIM:
        raise UsageError(
            f"placing needs 2 positions and {SAMPLES_FOR_CLAIM} complete samples, got {len(positions)} and "
            f"{len(complete)}"
        )
    spread = slot_weights(positions, n_items=n_items, n_slots=n_slots)
    scalars = {
        **_placed(weights, complete, spread, options.seed),
        "interpolated": positions != tuple(range(n_slots)) or n_items != n_slots,
        "measure": measure,
        "withheld": evaluation.withheld if options.by is None else "",
        "method": evaluation.responder.get("method") or "",
    }
    title = f"{evaluation.title}: order of {n_slots} passages"
    resolved = {"command": "", "relevance": weights.tolist(), "title": title, "run": evaluation.record.run_id}
    record = Record("place", {}, resolved, plain(scalars), seeds={"bootstrap": options.seed})
    return Placement.from_record(record)


def _placed(weights: Float64[np.ndarray, "n_slots"], scores: Scores, spread: Spread, seed: int) -> dict[str, Any]:
    """The order of passages with these relevances, and what it is worth, by the names in `Placement`."""
    curves, shares = shrink_to_flat(scores, np.ones((1, len(scores))))
    ranks, n_slots = np.argsort(-weights, kind="stable"), len(weights)
    slots, falling = order_by_curve(curves @ spread, shares)[0], weights[ranks] / weights.sum()
    orders = {name: ranks[order(n_slots)].tolist() for name, order in REFERENCES.items()}
    usual = np.stack([*(falling[order(n_slots)] for order in REFERENCES.values()), np.full(n_slots, 1 / n_slots)])
    estimated = ranks[np.argsort(slots)].tolist()
    if shares[0] > 0:
        judged = held_out_gains(scores, spread, falling, usual, seed=seed)
    else:
        judged = [mean_of(gains).interval() for gains in _gains(scores @ spread, slots, falling, usual)]
    gains = []
    for name, gain in zip([*orders, SHUFFLED], judged, strict=True):
        order = orders.get(name, [])
        gain = Interval(0.0, 0.0, 0.0) if order == estimated else gain
        raises = len(scores) >= SAMPLES_TO_CONFIRM and gain.known and gain.low > 0
        gains.append(Gain(name, gain, tuple(order), raises))
    advice = LEAVE if orders["best_first"] == sorted(ranks) else BEST_FIRST
    if {"best_first", SHUFFLED} <= {gain.over for gain in gains if gain.raises}:
        advice = REORDER
    return {
        "order": estimated if advice == REORDER else orders["best_first"],
        "estimated": estimated,
        "curve": (curves[0] @ spread).tolist(),
        "kept": float(shares[0]),
        "gains": [asdict(gain) for gain in gains],
        "advice": advice,
        "n_samples": len(scores),
    }


def _measured(evaluation: Evaluation, by: str | None) -> tuple[str, Independent]:
    """The measure by which to order, if None the first that there is, and its scores in 0 ... 1: probabilities."""
    measures = dict(evaluation.measures)
    if "logprob" in measures:
        measures["logprob"] = independent(np.exp(evaluation.tables["logprob"]), evaluation.tables)
    measure = by or next(iter(measures), None)
    if measure is None or measure not in measures:
        why = f" ({evaluation.withheld})" if evaluation.withheld else ""
        raise UsageError(f"the run has no {measure!r}; it has: {', '.join(measures) or 'nothing to place by'}{why}")
    return measure, measures[measure]


def _gains(
    uses: Uses, slots: Int64[np.ndarray, "..."], falling: Relevance, usual: Usual
) -> Float64[np.ndarray, "orders draws"]:
    """Gains of an order over usual ones, by expected uses of the slots."""
    worth = np.take_along_axis(uses, np.broadcast_to(slots, uses.shape), axis=1) @ falling
    return np.asarray(worth - usual @ uses.T)


def order_by_curve(
    curves: Float64[np.ndarray, "draws n_slots"], shares: Float64[np.ndarray, "draws"]
) -> Int64[np.ndarray, "draws n_slots"]:
    """For every curve the slots from the best to the worst, equal ones from the front; as they stand if a share is 0.

    Sum_r s_r c_slots[r] with s falling is then largest among all orders (rearrangement inequality; Hardy, Littlewood
    and Polya 1934, theorem 368).
    """
    slots = np.argsort(-curves, axis=1, kind="stable")
    return np.where(shares[:, None] > 0, slots, np.arange(slots.shape[1])[None]).astype(np.int64)


def slot_weights(positions: Sequence[int], *, n_items: int, n_slots: int) -> Spread:
    """Matrix that carries a curve over measured positions to slots, linearly between relative positions j / (n - 1).

    Slots before the first or after the last measured position take its value. Columns sum to 1; the identity if all
    positions of as many items were measured. One slot alone stands at relative position 0.
    """
    measured = np.array(positions, dtype=np.float64) / max(n_items - 1, 1)
    slots = np.arange(n_slots) / max(n_slots - 1, 1)
    return np.stack([np.interp(slots, measured, row) for row in np.eye(len(measured))])


def shrink_to_flat(
    scores: Scores, weights: Counts
) -> tuple[Float64[np.ndarray, "draws n_positions"], Float64[np.ndarray, "draws"]]:
    """Mean curves, their differences multiplied by 1 - 1/F; exactly flat unless F is significant at 5 %.

    With the curves comes the share of the differences that is kept, 0 if they do not stand out.

    F is that of a two-way layout without replication (samples times positions): spread between positions over what
    samples and positions leave unexplained. 1 - 1/F is the share of that spread that is not noise.

    `scores` without NaN, of at least 2 positions; `weights` say how often each sample counts in each resample, of which
    one with fewer than 2 samples is flat.

    Source: Morris 1983, "Parametric empirical Bayes inference", with the moment estimate of the signal; that a curve
    that is not significant is flat is our own, stricter rule.
    """
    from scipy.special import fdtrc

    n_positions = scores.shape[1]
    centred = scores - scores.mean(axis=1, keepdims=True)
    sizes = weights.sum(axis=1)
    safe = np.maximum(sizes, 1.0)
    means = weights @ scores / safe[:, None]
    deviations = weights @ centred / safe[:, None]
    between = safe * np.square(deviations).sum(axis=1) / (n_positions - 1)
    residual = (weights @ np.square(centred)).sum(axis=1) - safe * np.square(deviations).sum(axis=1)
    degrees = np.maximum(sizes - 1, 1) * (n_positions - 1)
    rounding = np.finfo(np.float64).eps * (1 + np.square(scores).sum())
    noise = np.where(residual > rounding, residual, 0.0) / degrees
    ratio = np.divide(between, noise, out=np.where(between > rounding, np.inf, 0.0), where=noise > 0)
    p_flat = np.where(sizes < 2, 1.0, fdtrc(n_positions - 1, degrees, ratio))
    shares = np.where(p_flat <= ALPHA, 1 - 1 / np.maximum(ratio, 1.0), 0.0)
    level = means.mean(axis=1, keepdims=True)
    return level + shares[:, None] * deviations, shares


def held_out_gains(
    scores: Scores,
    spread: Spread,
    falling: Relevance,
    usual: Usual,
    *,
    seed: int,
) -> list[Interval]:
    """Gains of the order made from one half of the samples on the other half, both ways, over random halvings.

    The whole procedure, shrinking and its retreat to best-first included, is repeated on resampled samples; copies of
    one sample stay in one half, so nothing is judged on what it was made from. By simulation its interval holds the
    gain of the order that all samples give, too (in 91 to 100 of 100 cases); the same samples' own estimate of that
    gain, optimistic by what the choice owes to luck, had coverages of .54 to .81 and is not given.

    `scores` are complete, `spread` is of `slot_weights`, the rest as for `_gains`.
    """
    generator, n_samples = np.random.default_rng(seed), len(scores)

    def gains(choosing: Counts, judging: Counts) -> Float64[np.ndarray, "orders draws"]:
        """Gains of the order made from the first counts on the samples of the second; NaN if none is left."""
        curves, shares = shrink_to_flat(scores, choosing)
        sizes = judging.sum(axis=1, keepdims=True)
        none = np.full((len(sizes), scores.shape[1]), np.nan)
        judged = np.divide(judging @ scores, sizes, out=none, where=sizes > 0)
        return _gains(judged @ spread, order_by_curve(curves @ spread, shares), falling, usual)

    def both_ways(draws: int, counts: Float64[np.ndarray, "_ n_samples"]) -> Float64[np.ndarray, "orders draws"]:
        first = halves(n_samples, generator=generator, draws=draws)
        parts = counts * first, counts * (1 - first)
        return np.asarray(np.mean([gains(*parts), gains(*parts[::-1])], axis=0))

    point = np.nanmean(both_ways(HALVINGS, np.ones((1, n_samples))), axis=1)
    counts = resample_counts(n_samples, generator=generator, draws=DRAWS)
    pairs = zip(point.tolist(), both_ways(DRAWS, counts), strict=True)
    return [percentile_interval(value, draws, n_samples) for value, draws in pairs]
