"""The verdict on each method, from what was tested of it (docs/mitigate.md); `posbias.report.mitigate` words it.

`judge.py` tests; here stands the rule, `settle`. Verdicts, in the order in which they are decided:

- `do not apply`: harm is established of the mean, the worst position, ordinary text or a short form; or of the position
  that was best, unless that is the price of a gain with which the dependence on position is established to shrink.
- `evens out`: such a gain, with its price.
- `apply`: mean or worst position rises, so far that rare losses which no sample showed would not undo it
  (`evaluation/changes.py`), no harm is established, and the dependence on position shrinks. Harm, a reason to leave
  something alone, needs no such margin.
- `raises`: mean or worst position rises, no harm is established, and position matters more, or as before, or it is not
  decided whether it matters less.
- `established but negligible`: only changes below what matters.
- `no effect established`: otherwise, with the samples that would decide it.
- `no verdict by answers`: they ended in different ways, or too many were cut off.

The dependence on position is the spread, best minus worst position.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np

from posbias.evaluation.changes import FORMERLY_BEST, JUDGED, SPREAD, Change
from posbias.evaluation.curve import SAMPLES_FOR_CLAIM
from posbias.evaluation.reading import Withheld
from posbias.evaluation.requirements import ALPHA, Levels
from posbias.statistics import StoredInterval, holm

APPLY, EVENS, RAISES, HARM = "apply", "evens out", "raises", "do not apply"
SMALL, NOTHING, WITHHELD = "established but negligible", "no effect established", "no verdict by answers"
GAINS = (APPLY, EVENS, RAISES)
"""Verdicts of methods that may be recommended."""
SHRANK, GREW, STEADY, OPEN = "shrank", "grew", "as before", "not decided"
"""Fates of the dependence on position; none of them with a single position or too few samples."""
SAME_SPREAD = 0.5
"""Part of the former spread within which its change must lie, interval and all, for position to matter as before."""


@dataclass(frozen=True)
class Effect:
    """A side effect, tested."""

    value: StoredInterval
    """After minus before."""
    p: float
    """Two-sided, of no more harm than the tolerance; 1 if the change is below it."""
    n_units: int
    tolerance: float
    unit: str
    """Unit of the numbers, or the measure whose scores they are."""
    smallest: float = 0.0
    """Smallest change that matters, if it is one of scores."""
    of_scores: bool = False
    """It is a change of scores of the measure that decides, rather than of nats on ordinary text."""
    units_needed: int = SAMPLES_FOR_CLAIM
    """Units below which it is not tested."""


@dataclass(frozen=True)
class Verdict:
    """One method, judged."""

    name: str
    verdict: str
    """One of `GAINS`, HARM, SMALL, NOTHING or WITHHELD."""
    changes: Mapping[str, Change]
    """The change at every endpoint; empty if too few samples are complete."""
    effects: Mapping[str, Effect]
    before: Levels | None
    """Levels of the unchanged model on the same samples as `after`."""
    after: Levels | None
    means: tuple[StoredInterval, ...]
    """Mean with the method at each position."""
    gains: Mapping[str, float]
    """Holm-corrected p-value of a rise, by endpoint."""
    harms: Mapping[str, float]
    """Holm-corrected p-value of harm, by endpoint and side effect."""
    n_samples: int
    """Samples that are complete before and after."""
    lost: int
    """Samples that are complete without the method and not with it, such as prompts that became too long."""
    samples_needed: int = SAMPLES_FOR_CLAIM
    """Complete samples below which nothing is judged."""
    formerly_best: int | None = None
    """The position that was best without the method; None if too few samples are complete."""
    lowered: int = 0
    """Positions whose mean is lower with the method, by what matters or more; not tested."""
    spread_p: float = 1.0
    """Holm-corrected p-value of a change of the spread, over the methods alone."""
    unseen: Mapping[str, float] = field(default_factory=dict)
    """Holm-corrected p-value of rare losses that would undo a rise and are in no sample, by endpoint."""
    dependence: str = ""
    """The fate of the dependence on position: SHRANK, GREW, STEADY or OPEN; empty if it was not asked for."""
    withheld: Withheld = ""
    """Why answers decide nothing here; empty if they do."""

    def matters(self, name: str, smallest: float) -> bool:
        """True if the estimate of an established change, or side effect, is as large as what matters."""
        effect = self.effects.get(name)
        value, least = (self.changes[name].value, smallest) if effect is None else (effect.value, effect.smallest)
        return abs(value.value) >= least

    def established(self, smallest: float) -> "Established":
        """Everything that is established of the method after all corrections."""
        falls = [name for name, p in self.harms.items() if p < ALPHA]
        rises = [name for name, p in self.gains.items() if p < ALPHA]
        negligible = [name for name in (*falls, *rises) if not self.matters(name, smallest)]
        harms, gains = ([name for name in names if name not in negligible] for names in (falls, rises))
        unsure = [name for name in gains if self.unseen.get(name, 0.0) >= ALPHA]
        gains = [name for name in gains if name not in unsure]
        price = [name for name in harms if name == FORMERLY_BEST and gains and self.dependence == SHRANK]
        return Established([name for name in harms if name not in price], gains, price, negligible, unsure)


class Established(NamedTuple):
    """Established changes by their names."""

    harms: list[str]
    gains: list[str]
    price: list[str]
    """The fall of the position that was best, if that is what evening out costs."""
    negligible: list[str]
    """Changes in either direction below what matters."""
    unsure: list[str]
    """Rises that rare losses, which no sample showed, could undo."""


def corrected(families: Sequence[Mapping[str, float]]) -> list[dict[str, float]]:
    """Holm's correction over all p-values of all methods."""
    flat = [(number, name) for number, family in enumerate(families) for name in family]
    adjusted = holm(np.array([families[number][name] for number, name in flat], dtype=np.float64))
    by_method: list[dict[str, float]] = [{} for _ in families]
    for (number, name), p in zip(flat, adjusted, strict=True):
        by_method[number][name] = float(p)
    return by_method


def corrected_together(verdicts: Sequence[Verdict]) -> list[Verdict]:
    """Verdicts with p-values corrected over all methods: rises are one family, harms another, spreads a third.

    If a method's answers decide nothing, only side effects that no answer tells are tested.
    """
    judged = [{} if verdict.withheld else verdict.changes for verdict in verdicts]
    several = [len(verdict.means) > 1 for verdict in verdicts]
    falls = [(*JUDGED, FORMERLY_BEST) if many else JUDGED for many in several]
    gains = corrected([{name: of[name].towards(1) for name in JUDGED if name in of} for of in judged])
    unseen = corrected(
        [{name: of[name].unseen if of[name].value.value > 0 else 1.0 for name in JUDGED if name in of} for of in judged]
    )
    harms = corrected(
        [
            {
                **{name: of[name].towards(-1) for name in names if name in of},
                **{
                    name: effect.p
                    for name, effect in verdict.effects.items()
                    if effect.n_units >= effect.units_needed and not (verdict.withheld and effect.of_scores)
                },
            }
            for verdict, of, names in zip(verdicts, judged, falls, strict=True)
        ]
    )
    spreads = corrected(
        [{SPREAD: of[SPREAD].p} if many and of else {} for of, many in zip(judged, several, strict=True)]
    )
    return [
        replace(verdict, gains=up, harms=down, spread_p=spread.get(SPREAD, 1.0), unseen=rare)
        for verdict, up, down, spread, rare in zip(verdicts, gains, harms, spreads, unseen, strict=True)
    ]


def settle(verdicts: Sequence[Verdict], smallest: float) -> tuple[tuple[Verdict, ...], str | None]:
    """All methods decided, from `corrected_together`, and the name of the recommended one.

    Recommended is the method whose worst position is best among those that gain; None: leave the model as it is.

    Args:
        verdicts: Methods with their corrected p-values.
        smallest: Change of scores that matters, >= 0.
    """
    decided = tuple(_decided(verdict, smallest) for verdict in verdicts)
    best = max(
        (verdict for verdict in decided if verdict.verdict in GAINS and verdict.after is not None),
        key=lambda verdict: (verdict.after.worst.value, verdict.after.mean.value),  # type: ignore[union-attr]
        default=None,
    )
    return decided, None if best is None else best.name


def _decided(verdict: Verdict, smallest: float) -> Verdict:
    """The verdict by the rule at the top of this module."""
    verdict = replace(verdict, dependence=_dependence(verdict, smallest))
    established = verdict.established(smallest)
    raised = EVENS if established.price else APPLY if verdict.dependence in (SHRANK, "") else RAISES
    if established.harms:
        code = HARM
    elif verdict.withheld:
        code = WITHHELD
    elif established.gains:
        code = raised
    else:
        code = SMALL if established.negligible else NOTHING
    return replace(verdict, verdict=code)


def _dependence(verdict: Verdict, smallest: float) -> str:
    """The fate of the spread."""
    change = verdict.changes.get(SPREAD)
    if change is None or len(verdict.means) < 2:
        return ""
    established = verdict.spread_p < ALPHA
    if established and abs(change.value.value) >= smallest:
        return SHRANK if change.value.value < 0 else GREW
    steady = 0.0 if verdict.before is None else SAME_SPREAD * verdict.before.spread.value
    return STEADY if established or max(-change.value.low, change.value.high) <= steady else OPEN
