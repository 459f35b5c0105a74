"""The smallest detectable rise: rises are planted in the scores that were seen, and judged by the same tests.

Samples are drawn again with replacement, and the scores with the method are moved until the curve is the one asked
about: right or wrong answers turn, chosen by chance; scores with a limit go a part of the way to it; others are
shifted. So the spread is that of the effect, and scores stay in their range. What remains of the method's own scores is
how they scatter around the unchanged model's.

- The rise of the mean takes the same share of what is missing at every position.
- The rise of the worst position is found whatever becomes of the other positions: all end up no better than the new
  worst one, which is the hardest to tell. Where others stay better, less is needed.

A rise is found if it is established after all corrections, were it the only one, and is not smaller than what
matters. The smallest one that is found in 80 % of draws is given, the error of the draws on the safe side; infinite
if none is, as with very few samples.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from jaxtyping import Bool, Float64, Int64

from posbias.evaluation.changes import MEAN, WORST, samples_needed
from posbias.evaluation.curve import AGREEMENT, Scores, is_binary
from posbias.evaluation.requirements import ALPHA
from posbias.limits import CELLS
from posbias.statistics import POWER, UNITS_FOR_SKEWNESS, Estimate, detectable

PRECISION = 0.01
"""Part of a rise to which it is searched, upwards; the scatter over runs is larger."""
DOUBLINGS = 60
"""Doublings of the first guess, if scores have no upper limit."""
VALUES_AT_ONCE = 1_000_000
"""Scores of all draws that are judged at a time: what that takes beside the draws themselves is bounded."""
TABLED = 500
"""Samples below which p-values are tabled by counts."""
CANCELLED = 1e-13
"""Part of a sum of squares below which a difference of such sums is rounding."""

Drawn = Float64[np.ndarray, "n_samples draws n_positions"]
Curve = Float64[np.ndarray, "n_positions"]
PerDraw = Float64[np.ndarray, "draws"]
Numbers = Float64[np.ndarray, "*values"]
Counts = Int64[np.ndarray, "*values"]
Square = Float64[np.ndarray, "n_positions n_positions"]
Pairs = Float64[np.ndarray, "draws n_positions n_positions"]


@dataclass(frozen=True)
class DetectableRise:
    """The rises that count as detected, and how the smallest one is searched."""

    tests: int
    """Number of tests in the family of rises, over all methods and endpoints, >= 1; corrected by Holm."""
    smallest: float
    """Change that matters, in units of the scores, >= 0."""
    limits: tuple[float, float]
    """Least and largest possible score; infinite if there is no limit."""
    draws: int
    """Draws of all samples, >= 1: with 300 a rise is known to 2 or 3 %."""
    seed: int

    @property
    def needed(self) -> float:
        """Share of draws in which a rise must be found: the power, and two standard errors of the draws."""
        return POWER + 2 * float(np.sqrt(POWER * (1 - POWER) / self.draws))


def detectable_rises(before: Scores, after: Scores, rule: DetectableRise) -> dict[str, float]:
    """The smallest rise of the mean and of the worst position that would have been found with 80 % power.

    Args:
        before: score[sample, position] of the unchanged model, no NaN, at least 2 samples.
        after: The same with the method; the change that was seen does not count, only the scatter.
        rule: What counts as found.

    Returns:
        By endpoint, > 0; infinite if not even the best scores would have been found.
    """
    CELLS.check("samples x positions x draws of the smallest detectable rise", before.size * rule.draws)
    generator = np.random.default_rng(rule.seed)
    rows = generator.integers(len(before), size=(len(before), rule.draws))
    binary = is_binary(before) and is_binary(after)
    luck = generator.random((*rows.shape, before.shape[1])) if binary else None
    old, most = before.mean(axis=0), rule.limits[1]
    new = after.mean(axis=0)
    parts = np.array_split(np.arange(rule.draws), -(-rows.size * before.shape[1] // VALUES_AT_ONCE))
    draws = [
        _Draws(before[rows[:, part]], after[rows[:, part]], None if luck is None else luck[:, part], old, new, rule)
        for part in parts
        if len(part)
    ]

    def power(target: Curve, endpoint: str) -> float:
        return float(np.concatenate([part.detected(target, endpoint) for part in draws]).mean())

    missing = most - old if np.isfinite(most) else np.ones_like(old)

    def mean(rise: float) -> float:
        return power(old + rise * missing / missing.mean(), MEAN)

    def worst(rise: float) -> float:
        return power(np.full_like(old, old.min() + rise), WORST)

    differ = np.abs(after - before)
    guess = float(differ.mean() + differ.std()) + rule.smallest
    ranges = {MEAN: (mean, float(most - old.mean())), WORST: (worst, float(most - old.min()))}
    return {name: _smallest(power_of, room, rule.needed, guess) for name, (power_of, room) in ranges.items()}


def _smallest(power: Callable[[float], float], room: float, needed: float, guess: float) -> float:
    """The smallest rise with the power; infinite if none in the room has it."""
    if not room > 0:
        return np.inf
    low, high = 0.0, guess if np.isinf(room) else room
    for _ in range(DOUBLINGS if np.isinf(room) else 0):
        if power(high) >= needed:
            break
        low, high = high, 2 * high
    if power(high) < needed:
        return np.inf
    while high - low > PRECISION * high:
        middle = (low + high) / 2
        low, high = (low, middle) if power(middle) >= needed else (middle, high)
    return high


def samples_for(before: Scores, after: Scores, rise: float, rule: DetectableRise) -> tuple[float, int] | None:
    """A rise of the mean, and about how many samples find it with 80 % power, by the t-test.

    The rise is planted as for `detectable_rises`, so that answers turn as often as it takes.

    Args:
        before, after: score[sample, position] without and with the method, no NaN, at least 2 samples.
        rise: > 0, in units of the scores; if the scores have less room to their limit, that room.
        rule: What counts as found.

    Returns:
        The rise, and samples, as many at least as a verdict takes; None if there is no room.
    """
    old, most = before.mean(axis=0), rule.limits[1]
    missing = most - old if np.isfinite(most) else np.ones_like(old)
    rise = min(rise, float(most - old.mean()))
    if not rise > 0:
        return None
    generator = np.random.default_rng(rule.seed)
    draws = min(rule.draws, max(1, VALUES_AT_ONCE // before.size))
    rows = generator.integers(len(before), size=(len(before), draws))
    binary = is_binary(before) and is_binary(after)
    luck = generator.random((*rows.shape, before.shape[1])) if binary else None
    parts = _Draws(before[rows], after[rows], luck, old, after.mean(axis=0), rule)
    values = (parts.moved(old + rise * missing / missing.mean()) - parts.before).mean(axis=2)
    spread, alpha = float(values.std()), ALPHA / rule.tests
    high = samples_needed(np.hstack([before, after]))
    low = high - 1
    while detectable(spread, high, alpha=alpha) > rise:
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if detectable(spread, middle, alpha=alpha) <= rise else (middle, high)
    return rise, high


@dataclass(frozen=True, eq=False)
class _Draws:
    """The samples, drawn again, or some of these draws."""

    before: Drawn
    after: Drawn
    luck: Drawn | None
    """Decides which answers turn; None if scores are not 0 and 1."""
    old: Curve
    """Curve of the unchanged model on the samples themselves."""
    after_curve: Curve
    """Curve with the method."""
    rule: DetectableRise

    def detected(self, target: Curve, endpoint: str) -> Bool[np.ndarray, "draws"]:
        """True for each draw in which the endpoint's rise is found, if the target is the method's curve."""
        after, binary, tests = self.moved(target), self.luck is not None, self.rule.tests
        aim = target[:, None] - self.old
        rise, p = _RISES[endpoint](after, self.before, aim, binary)
        detected = np.asarray(p * tests < ALPHA)
        second = ~detected & (p * max(1, tests - 1) < ALPHA)
        if second.any():  # Holm's second step: established if the other endpoint is
            rise_there = _RISES[WORST if endpoint == MEAN else MEAN]
            detected[second] = rise_there(after[:, second], self.before[:, second], aim, binary)[1] * tests < ALPHA
        return np.asarray(detected & (rise >= self.rule.smallest))

    def moved(self, target: Curve) -> Drawn:
        """Scores with the method, moved until their means over the samples are the target."""
        least, most = self.rule.limits
        limit = np.where(target >= self.after_curve, most, least)
        distance = limit - self.after_curve
        bounded = np.isfinite(limit) & (distance != 0)
        share = np.divide(target - self.after_curve, distance, out=np.zeros_like(target), where=bounded)
        if self.luck is not None:
            return np.where(self.luck < share, limit, self.after)
        towards = share * (np.where(bounded, limit, 0.0) - self.after)
        return np.asarray(self.after + np.where(bounded, towards, target - self.after_curve))


def _rise_of_mean(after: Drawn, before: Drawn, aim: Square, binary: bool) -> tuple[PerDraw, PerDraw]:
    """The change of the mean in every draw, and the p-value that `changes_of` has; 1 if the mean falls.

    `aim` are the true differences, of every position after to every one before.
    """
    count, _, n_positions = after.shape
    if binary and n_positions == 1:
        rise, p = after.mean(axis=(0, 2)) - before.mean(axis=(0, 2)), _p_of_shares(after, before, ALPHA)[:, 0, 0]
    else:
        values = _widened(after.mean(axis=2) - before.mean(axis=2), float(aim.mean()), count)
        rise = values.mean(axis=0)
        centred = values - rise
        least = 1 / (n_positions * count) if binary else 0.0
        p = _p_of_means(rise, (centred**2).sum(axis=0), (centred**3).sum(axis=0), count=count, least=least)
    return rise, np.where(rise > 0, p, 1.0)


def _rise_of_worst(after: Drawn, before: Drawn, aim: Square, binary: bool) -> tuple[PerDraw, PerDraw]:
    """The rise of the worst position, and its p-value: every position must lie above one that was there before."""
    count, _, n_positions = after.shape
    high, low = after.mean(axis=0), before.mean(axis=0)
    gaps = high[:, :, None] - low[:, None]
    if binary:
        p = _p_of_shares(after, before, ALPHA / n_positions)
    else:
        gaps = _widened(gaps, aim, count)
        second, third = _powers_of_gaps(_widened(after - high, 0.0, count), _widened(before - low, 0.0, count))
        p = _p_of_means(gaps, second, third, count=count, least=0.0)
    established = np.where(gaps > 0, p, 1.0).min(axis=2).max(axis=1)
    return gaps.max(axis=2).min(axis=1), np.minimum(1.0, n_positions * established)


def _widened(values: Numbers, centre: Square | float, count: int) -> Numbers:
    """Values drawn from so many samples, as far apart as those of other samples: these lie around their own mean."""
    return np.asarray(centre + np.sqrt(count / (count - 1)) * (values - centre))


_RISES = {MEAN: _rise_of_mean, WORST: _rise_of_worst}


def _powers_of_gaps(after: Drawn, before: Drawn) -> tuple[Pairs, Pairs]:
    """Sums over samples of the squares and cubes of after - before, for all pairs of positions; both centred."""

    def sums(first: Drawn, second: Drawn) -> Pairs:
        return np.asarray(first.transpose(1, 2, 0) @ second.transpose(1, 0, 2))

    after2, before2 = after**2, before**2
    of_after, of_before = after2.sum(axis=0)[:, :, None], before2.sum(axis=0)[:, None]
    second = of_after - 2 * sums(after, before) + of_before
    third = (after2 * after).sum(axis=0)[:, :, None] - (before2 * before).sum(axis=0)[:, None]
    third = third - 3 * sums(after2, before) + 3 * sums(after, before2)
    return np.where(second > CANCELLED * (of_after + of_before), second, 0.0), third


def _p_of_means(value: Numbers, second: Numbers, third: Numbers, *, count: int, least: float) -> Numbers:
    """The p-values that `changes_of` has for means over samples, from sums of their centred squares and cubes.

    `least` is the least error that so many samples can have; 0 if scores are not 0 and 1.
    """
    varying = second > count * (AGREEMENT * value) ** 2
    error = np.where(varying, np.sqrt(second / (count * (count - 1))), np.abs(value) / count)
    skewed = varying & (error >= least) & (count >= UNITS_FOR_SKEWNESS)
    skewness = np.divide(third, second**1.5, out=np.zeros_like(value), where=skewed)
    freedom = np.full(value.shape, count - 1.0)
    p = Estimate(value, np.maximum(error, least), skewness, freedom, cautious=not least).p()
    return np.asarray(np.maximum(p, np.where(varying, 0.0, 2.0 ** (1 - count))))


def _p_of_shares(after: Drawn, before: Drawn, alpha: float) -> Pairs:
    """The p-values of `paired_shares`, for every position after against every one before."""
    right_twice = np.rint(after.transpose(1, 2, 0) @ before.transpose(1, 0, 2)).astype(np.int64)
    right = [np.rint(answers.sum(axis=0)).astype(np.int64) for answers in (after, before)]
    gained, lost = right[0][:, :, None] - right_twice, right[1][:, None] - right_twice
    return _p_by_counts(len(after), alpha)[gained, lost] if len(after) < TABLED else _p_of_counts(gained, lost, alpha)


@lru_cache(maxsize=16)
def _p_by_counts(count: int, alpha: float) -> Float64[np.ndarray, "gained lost"]:
    """`_p_of_counts` of all that so many samples can have, since draws have the same ones again and again."""
    return _p_of_counts(*np.meshgrid(np.arange(count + 1), np.arange(count + 1), indexing="ij"), alpha)


def _p_of_counts(gained: Counts, lost: Counts, alpha: float) -> Numbers:
    """McNemar's exact test by samples gained and lost, at least alpha if Tango's interval holds 0."""
    from scipy.special import bdtr, ndtri

    p = np.minimum(1.0, 2 * bdtr(np.minimum(gained, lost), gained + lost, 0.5))
    rejects = np.abs(gained - lost) > -ndtri(alpha / 2) * np.sqrt(gained + lost)
    return np.asarray(np.where(rejects, p, np.maximum(p, alpha)))
