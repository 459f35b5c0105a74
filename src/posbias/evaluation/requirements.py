"""Levels of a curve (mean, worst position, spread), each with an honest interval; and bounds that a pipeline requires.

A bound is judged at the end of the interval that is safe: `worst>=0.8` is met if the low end is at least 0.8.
"""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
from jaxtyping import Float64

from posbias.errors import UsageError
from posbias.evaluation.curve import (
    AGREEMENT,
    HIGHEST,
    SAMPLES_FOR_CLAIM,
    Independent,
    Scores,
    are_shares,
    complete_samples,
    is_binary,
)
from posbias.statistics import (
    CONFIDENCE,
    Interval,
    StoredInterval,
    StoredNumber,
    bounded_mean,
    estimate,
    mean_of,
)

ALPHA = 1 - CONFIDENCE
GRAMMAR = re.compile(
    r"\s*(?P<what>[a-z_]+)\s*(?P<sign>>=|<=)\s*(?P<number>[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?)\s*"
)
EFFECTIVE_LENGTH = "effective_length"
LEVELS = ("worst", "mean", "spread")
UNKNOWN = Interval(math.nan, -math.inf, math.inf)
BOUNDED = (*LEVELS, EFFECTIVE_LENGTH)
"""Numbers that may be required: the worst position, the mean over positions, best minus worst; and, of an evaluation at
several lengths, the longest at which accuracy is high enough."""

Gaps = Float64[np.ndarray, "n_samples pairs"]
PerPair = Float64[np.ndarray, "pairs"]


@dataclass(frozen=True)
class Levels:
    """One curve in three numbers, each with the choice of its positions accounted for."""

    mean: StoredInterval
    worst: StoredInterval
    spread: StoredInterval


@dataclass(frozen=True)
class Requirement:
    """A bound on one number of a result, such as `worst>=0.6`: for pipelines."""

    what: str
    """One of BOUNDED."""
    at_least: bool
    number: float
    by_estimate: bool = False
    """True judges the estimate; False the safe end of its interval."""

    @classmethod
    def parse(cls, text: str, *, by_estimate: bool = False) -> "Requirement":
        """Read a requirement from text: `worst>=0.6`, `mean>=.5`, `spread<=0.2` or `effective_length>=4096`."""
        match = GRAMMAR.fullmatch(text)
        if match is None or match["what"] not in BOUNDED:
            raise UsageError(f"requirement {text!r}: allowed: {', '.join(BOUNDED)}, >= or <=, and a number: worst>=0.6")
        return cls(match["what"], match["sign"] == ">=", float(match["number"]), by_estimate)

    def check_possible(self, *, generated: bool) -> None:
        """Refuse a bound that lies outside what it bounds: accuracies, or log-probabilities if nothing is generated."""
        least, most = (0.0, 1.0) if generated else (0.0, math.inf) if self.what == "spread" else (-math.inf, 0.0)
        if self.what == EFFECTIVE_LENGTH or least <= self.number <= most:
            return
        if generated:
            raise UsageError(f"require {self}: accuracies lie in 0 ... 1, and so must the bound")
        allowed = "at least 0" if self.what == "spread" else "at most 0"
        raise UsageError(f"require {self}: without generated answers it is about log-probabilities; allowed: {allowed}")

    def met(self, value: Interval) -> bool:
        """True if the safe end of the interval meets it, or the estimate if that is to judge."""
        judged = value.value if self.by_estimate else value.low if self.at_least else value.high
        return judged >= self.number if self.at_least else judged <= self.number

    def __str__(self) -> str:
        return f"{self.what}{'>=' if self.at_least else '<='}{self.number:g}"


@dataclass(frozen=True)
class RequirementCheck:
    """A requirement, and the number of a result that it bounds."""

    text: str
    """The requirement as it is spelled."""
    met: bool
    value: StoredNumber
    """The number; NaN if it is not known, as where answers decide nothing."""
    low: float | None
    """Ends of its interval; None: not known."""
    high: float | None
    measure: str
    by_estimate: bool = False
    arm: str = ""
    """The model, or the arm of a trial."""
    withheld: str = ""
    """Why answers decide nothing, so that it is not met; empty if they decide."""

    @classmethod
    def of(
        cls, require: Requirement, measure: str, value: Interval, *, arm: str = "", withheld: str = ""
    ) -> "RequirementCheck":
        """The check of a number; one that is withheld is not told."""
        told = UNKNOWN if withheld else value
        low, high = (end if np.isfinite(end) else None for end in (told.low, told.high))
        met = require.met(value) and not withheld
        return cls(str(require), met, told.value, low, high, measure, require.by_estimate, arm, withheld)

    @property
    def interval(self) -> Interval:
        """The number with the ends of its interval."""
        return Interval.of_record({"value": self.value, "low": self.low, "high": self.high})


def check_requirement(
    require: Requirement, measures: Mapping[str, Independent], withheld: str, *, arm: str = ""
) -> RequirementCheck:
    """The check of a bound on accuracy, or on log-probability if no answer was judged.

    It is not met with too few complete samples, nor by answers that decide nothing (`withheld`, `Reading.withheld`).
    """
    measure = "accuracy" if "accuracy" in measures else "logprob"
    scores, value = measures.get(measure), UNKNOWN
    if scores is not None and len(complete_samples(scores)) >= SAMPLES_FOR_CLAIM:
        value = getattr(levels_of(scores, highest=HIGHEST.get(measure, np.inf)), require.what)
    return RequirementCheck.of(require, measure, value, arm=arm, withheld=withheld if measure == "accuracy" else "")


def levels_of(scores: Scores, *, curves: int = 1, highest: float = np.inf) -> Levels:
    """Mean, worst position and spread of one curve of `curves` that are judged together.

    No mean can lie above the `highest` possible score, nor outside 0 ... 1 if the scores are shares.

    The low end of the worst position needs no correction: it is the lowest of all low ends, and so not above the low
    end of the position that is truly worst. The high end is the lowest of high ends that hold at once. Shares have
    `bounded_mean`: samples that fail at all positions at once are few, and other intervals would claim too much.
    """
    complete = complete_samples(scores, "a level", n_positions=1)
    comparisons = complete.shape[1] * curves
    means = complete.mean(axis=0)
    shares = are_shares(complete)

    def of(column: Float64[np.ndarray, "n_samples"], confidence: float) -> Interval:
        if shares:
            return bounded_mean(column, confidence)
        return mean_of(column).interval(confidence, most=highest)

    low = min(of(column, CONFIDENCE).low for column in complete.T)
    high = min(of(column, 1 - ALPHA / comparisons).high for column in complete.T)
    mean, worst = of(complete.mean(axis=1), CONFIDENCE), Interval(float(means.min()), low, high)
    return Levels(mean, worst, _spread_level(complete))


def _spread_level(scores: Scores) -> Interval:
    """Best minus worst, within what holds for all pairs at once (low end) and for each alone (high end)."""
    gaps = gaps_of(scores)
    if not gaps.shape[1]:
        return Interval(0.0, 0.0, 0.0)
    low, _, _ = bounds_of(gaps, scores, ALPHA / gaps.shape[1])
    _, high, _ = bounds_of(gaps, scores, ALPHA)
    most = 1.0 if are_shares(scores) else np.inf
    return Interval(float(gaps.mean(axis=0).max()), max(0.0, float(low.max())), min(most, float(high.max())))


def gaps_of(scores: Scores) -> Gaps:
    """First minus second of all ordered pairs of positions."""
    first, second = np.nonzero(~np.eye(scores.shape[1], dtype=bool))
    return np.asarray(scores[:, first] - scores[:, second])


def bounds_of(
    values: Gaps, scores: Scores, alpha: float, *, limit: float = math.inf, reference: float = 0.0
) -> tuple[PerPair, PerPair, PerPair]:
    """Ends at 1 - alpha of the means of columns, and their two-sided p-values of being `reference`.

    Args:
        values: value[sample, column], sums and differences of scores.
        scores: These scores. If they are 0 and 1, the error is at least that of one sample which differs, as in
            every contrast of such scores; if they are others, the estimate is cautious about skewness.
        alpha: In (0, 1); an interval leaves the reference out exactly if its p-value is below it.
        limit: Largest size of a mean.
        reference: Mean that is tested.
    """
    count, agreed = len(values), np.zeros(values.shape[1], dtype=bool)
    estimated = estimate(values.mean(axis=0), values, scale=2 * float(np.abs(scores).max(initial=0.0)))
    if is_binary(scores):
        small = estimated.error < 1 / count
        error, skewness = np.where(small, 1 / count, estimated.error), np.where(small, 0.0, estimated.skewness)
        estimated = replace(estimated, error=error, skewness=skewness)
    else:
        estimated = replace(estimated, cautious=True)
        agreed = np.ptp(values, axis=0) <= AGREEMENT * np.abs(values).max(axis=0)
    p = np.maximum(estimated.p(reference), np.where(agreed, 2.0 ** (1 - count), 0.0))  # what so many could show at most
    low, high = estimated.ends(1 - alpha, least=-limit, most=limit)
    includes = p >= alpha
    return np.where(includes, np.minimum(low, reference), low), np.where(includes, np.maximum(high, reference), high), p
