"""Samples that are added, look by look, until they decide: the bound that is required, or a length's accuracy.

At most four looks, each with twice as many samples as the one before. The 5 % that an interval may miss are spent over
them (an eighth, an eighth, a quarter, a half), and a look's intervals cover 1 - its share. So all of them hold at once
with 95 %, whichever look ends the run (`docs/intervals.md` has the rates). Against intervals that hold after every
sample (a confidence sequence) this decides more often with as many samples.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float64

from posbias.evaluation.curve import HIGHEST, SAMPLES_FOR_CLAIM, Independent, complete_samples
from posbias.evaluation.requirements import ALPHA, Requirement, levels_of
from posbias.statistics import StoredNumber

SPENT = (1 / 8, 1 / 8, 1 / 4, 1 / 2)
"""Shares of the error that the looks spend; the last look, at all samples, has half of it."""

Table = Float64[np.ndarray, "n_samples n_positions"]


@dataclass(frozen=True)
class Look:
    """A moment at which the samples so far are judged."""

    count: int
    """Samples until then."""
    alpha: float
    """Error that its intervals may have."""


@dataclass(frozen=True)
class Sequential:
    """How samples were added, and what that saved against asking all of them at once."""

    goal: str
    """Bound that was to be decided."""
    decided: bool
    most: int
    """Samples of the fixed design."""
    looks: tuple[int, ...]
    """Samples at every look."""
    alpha: float
    """Error that the intervals of the last look may have."""
    prompts: int
    """Prompts that were asked."""
    fixed_prompts: int
    """Prompts of the fixed design."""
    tokens: StoredNumber
    """Tokens of the prompts that were asked; NaN if they were not counted."""
    fixed_tokens: StoredNumber
    """Tokens of the fixed design's prompts: exact as far as they were asked, else the mean of those or the length."""


def looks_of(count: int, *, sequential: bool) -> tuple[Look, ...]:
    """The looks at a run of at most so many samples: all at once, or several."""
    if not sequential:
        return (Look(count, ALPHA),)
    counts = [math.ceil(count / 2**left) for left in reversed(range(len(SPENT)))]
    looks = [Look(reached, ALPHA * share) for reached, share in zip(counts, SPENT, strict=True)]
    return (*(look for look in looks[:-1] if SAMPLES_FOR_CLAIM <= look.count < count), looks[-1])


def decides(goal: Requirement, measures: Mapping[str, Independent], withheld: str, alpha: float) -> bool:
    """True if samples so far decide a bound, either way, by intervals that cover 1 - alpha (not `Reading.withheld`)."""
    measure = "accuracy" if "accuracy" in measures else "logprob"
    scores = measures.get(measure)
    if scores is None or len(complete_samples(scores)) < SAMPLES_FOR_CLAIM or (withheld and measure == "accuracy"):
        return False
    value = getattr(levels_of(scores, alpha=alpha, highest=HIGHEST.get(measure, np.inf)), goal.what)
    return goal.met(value) or goal.excluded(value)


def savings(goal: Requirement, looks: Sequence[Look], last: Look, tokens: Table, *, decided: bool) -> Sequential:
    """Tokens saved by stopping at the look `last`, from those of the prompts that were asked (NaN: not counted)."""
    per_sample = float(np.nanmean(tokens)) * tokens.shape[1] if not np.isnan(tokens).all() else math.nan
    total = float(np.nansum(tokens)) if not math.isnan(per_sample) else math.nan
    most = looks[-1].count
    return Sequential(
        goal=str(goal),
        decided=decided,
        most=most,
        looks=tuple(look.count for look in looks),
        alpha=last.alpha,
        prompts=tokens.size,
        fixed_prompts=most * tokens.shape[1],
        tokens=total,
        fixed_tokens=total + (most - len(tokens)) * per_sample,
    )
