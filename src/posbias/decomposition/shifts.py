"""From profiles per prompt to shifts of the first, middle and last mass, each with a paired interval over prompts.

Masses are linear in a profile, so a shift is the mean over prompts of the shift of each: a prompt's profile with and
without the ingredient is one unit, and so is its theory's.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Float64

from posbias.comparison import STATISTICS
from posbias.comparison.sampling import decided
from posbias.decomposition.sources import MEASURED, Profiles, Series
from posbias.statistics import Interval, jackknife, leave_one_out, mean_of

MASSES = ("first_tenth", "middle_tenth", "last_tenth")
"""Shares of the first tenth, of the tenth around the centre and of the last tenth; a flat line has .1 in each."""


@dataclass(frozen=True)
class Shift:
    """What one intervention does to one mass, according to one source."""

    intervention: str
    source: str
    """"measured", or a theory's name."""
    kind: str
    mass: str
    before: Interval
    after: Interval
    shift: Interval
    """With it less without it, prompt by prompt."""
    gap: Interval | None
    """A theory's shift less the measured one, prompt by prompt; None for the measurement, or where there is none."""

    def as_record(self) -> dict[str, Any]:
        """Plain values."""
        return {name: held.as_record() if isinstance(held, Interval) else held for name, held in vars(self).items()}


@dataclass(frozen=True)
class Score:
    """How far a theory's shifts are from the measured ones, beside a theory that says nothing changes."""

    source: str
    kind: str
    error: Interval
    """Mean over interventions and masses of |theory's shift - measured shift|."""
    no_shift: Interval
    """The same for shifts of zero, over the same interventions: the flat line of this comparison."""
    difference: Interval
    """`error` less `no_shift` on the same draws: below zero, the theory is closer."""
    interventions: tuple[str, ...]
    """Which interventions both speak of."""
    n_units: int

    @property
    def decides(self) -> int:
        """-1: closer than "nothing changes"; 1: farther; 0: the data do not decide."""
        return decided(self.difference, self.n_units)

    def as_record(self) -> dict[str, Any]:
        """Plain values."""
        numbers = {name: getattr(self, name).as_record() for name in ("error", "no_shift", "difference")}
        return {**vars(self), **numbers, "interventions": list(self.interventions), "decides": self.decides}


def masses(profiles: Profiles) -> Float64[np.ndarray, "count 3"]:
    """First, middle and last mass of every prompt's profile."""
    return np.stack([np.asarray(STATISTICS[name](profiles)) for name in MASSES], axis=-1)


def shifts_of(intervention: str, before: Mapping[Series, Profiles], after: Mapping[Series, Profiles]) -> list[Shift]:
    """Every mass of every source under one intervention; sources that it does not apply to are missing in `after`."""
    shifts = []
    for series in after:
        source, kind = series
        without, own = masses(before[series]), masses(after[series])
        gaps: list[Interval] | None = None
        if source != MEASURED and (MEASURED, kind) in after:
            truth = masses(after[MEASURED, kind]) - masses(before[MEASURED, kind])
            gaps = mean_intervals(own - without - truth, least=-2.0)
        sides = (mean_intervals(values, least=0.0) for values in (without, own))
        parts = zip(*sides, mean_intervals(own - without), strict=True)
        for index, (mass, (start, end, shift)) in enumerate(zip(MASSES, parts, strict=True)):
            gap = None if gaps is None else gaps[index]
            shifts.append(Shift(intervention, source, kind, mass, before=start, after=end, shift=shift, gap=gap))
    return shifts


def mean_intervals(units: Float64[np.ndarray, "count values"], *, least: float = -1.0) -> list[Interval]:
    """Mean over prompts of every value with its 95 % interval, in [least, 1]; infinite with a single prompt."""
    return [mean_of(values).interval(least=least, most=1.0) for values in units.T]


def scores_of(before: Mapping[Series, Profiles], after: Mapping[str, Mapping[Series, Profiles]]) -> list[Score]:
    """One score per theory and kind, over all interventions (keys of `after`) that both it and the measurement have."""
    scores = []
    for source, kind in before:
        shared = tuple(name for name, found in after.items() if {(source, kind), (MEASURED, kind)} <= set(found))
        if source == MEASURED or not shared:
            continue
        truth = _stacked(before, (after[name] for name in shared), (MEASURED, kind))
        theory = _stacked(before, (after[name] for name in shared), (source, kind))
        scores.append(_score(source, kind, theory, truth, shared=shared))
    return scores


def _stacked(
    before: Mapping[Series, Profiles], after: Iterable[Mapping[Series, Profiles]], series: Series
) -> Float64[np.ndarray, "count cells"]:
    """Shifts of every prompt, all interventions and masses side by side."""
    start = masses(before[series])
    return np.concatenate([masses(found[series]) - start for found in after], axis=1)


def _score(
    source: str,
    kind: str,
    theory: Float64[np.ndarray, "count cells"],
    truth: Float64[np.ndarray, "count cells"],
    *,
    shared: tuple[str, ...],
) -> Score:
    count = len(truth)
    weights = leave_one_out(count)
    error = np.abs(weights @ (theory - truth)).mean(axis=1)
    nothing = np.abs(weights @ truth).mean(axis=1)
    return Score(
        source=source,
        kind=kind,
        error=jackknife(error).interval(least=0.0),
        no_shift=jackknife(nothing).interval(least=0.0),
        difference=jackknife(error - nothing).interval(),
        interventions=shared,
        n_units=count,
    )
