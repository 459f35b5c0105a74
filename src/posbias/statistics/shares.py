"""Right or wrong: intervals of shares and of their paired differences."""

import numpy as np
from jaxtyping import Float64

from posbias.statistics.intervals import CONFIDENCE, Interval

NUDGE = 1e-9
"""Share of the way to the limit at which the search for an end begins."""

Binary = Float64[np.ndarray, "n_units"]
"""0 or 1 per unit."""


def wilson(values: Float64[np.ndarray, "n"], confidence: float = CONFIDENCE) -> Interval:
    """Wilson's score interval of a proportion; infinite where there are no values.

    Source: Wilson 1927; it inverts the score test and has length above 0 at 0 % and 100 % too.
    """
    from scipy.stats import binomtest

    if not len(values):
        return Interval(np.nan, -np.inf, np.inf)
    share = float(values.mean())
    ends = binomtest(round(values.sum()), len(values)).proportion_ci(confidence, method="wilson")
    return Interval(share, min(share, float(ends.low)), max(share, float(ends.high)))


def paired_shares(first: Binary, second: Binary, confidence: float = CONFIDENCE) -> tuple[Interval, float]:
    """Mean of `first` less mean of `second` on the same units, and the two-sided p-value of their being equal.

    Tango's interval, extended to 0 where the exact test does not reject; hence it leaves out 0 exactly where p is below
    1 - confidence.
    """
    from scipy.special import bdtr

    gained, lost = round((first * (1 - second)).sum()), round(((1 - first) * second).sum())
    p = min(1.0, 2 * float(bdtr(min(gained, lost), gained + lost, 0.5)))  # McNemar's exact test
    found = tango(first, second, confidence)
    if found.excludes(0.0) and p < 1 - confidence:
        return found, p
    return found.including(0.0), max(p, 1 - confidence)


def tango(first: Binary, second: Binary, confidence: float = CONFIDENCE) -> Interval:
    """Score interval of the difference of two paired proportions; it excludes 0 when McNemar's score test rejects.

    It is never of length 0, also without any discordant unit.

    Source: Tango 1998, "Equivalence test and confidence interval for the difference in proportions", eq. 9.
    """
    from scipy.optimize import brentq
    from scipy.special import ndtri

    count = len(first)
    gained, lost = float((first * (1 - second)).sum()), float(((1 - first) * second).sum())
    critical = float(ndtri((1 + confidence) / 2))

    def score(difference: float, level: float) -> float:
        """How far the score lies above the level, times its standard error."""
        linear = (2 * count - gained + lost) * difference - gained - lost
        product = -lost * difference * (1 - difference)
        other = (np.sqrt(max(linear**2 - 8 * count * product, 0.0)) - linear) / (4 * count)
        variance = max(count * (2 * other + difference * (1 - difference)), 0.0)
        return float(gained - lost - count * difference - level * np.sqrt(variance))

    def end(level: float, limit: float) -> float:
        inside = value + NUDGE * (limit - value)  # at the value itself the variance, and with it the score, may be 0
        if score(inside, level) * score(limit, level) >= 0:
            return limit
        return float(brentq(score, inside, limit, args=(level,), xtol=1e-14))

    value = (gained - lost) / count
    return Interval(value, end(critical, -1.0), end(-critical, 1.0))
