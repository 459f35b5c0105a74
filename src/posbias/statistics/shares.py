"""Right or wrong: shares and their paired differences; several tests at once; the smallest effect a test would find."""

import numpy as np
from jaxtyping import Float64

from posbias.errors import UsageError
from posbias.statistics.intervals import CONFIDENCE, Interval

POWER = 0.8
"""Chance of finding an effect of the size that is called detectable."""
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


def holm(p_values: Float64[np.ndarray, "n_tests"]) -> Float64[np.ndarray, "n_tests"]:
    """Holm's step-down correction: the chance of any false rejection stays at the level, whatever the dependence."""
    order = np.argsort(p_values)
    factors = np.arange(len(p_values), 0, -1)
    adjusted = np.empty(len(p_values))
    adjusted[order] = np.minimum(1.0, np.maximum.accumulate(p_values[order] * factors))
    return adjusted


def detectable(spread: float, n_samples: int, *, alpha: float = 1 - CONFIDENCE) -> float:
    """Smallest true mean of a paired quantity that a two-sided t-test finds with POWER; infinite below 2 units.

    (t[1 - alpha/2] + t[power]) spread / sqrt(n), quantiles of Student's t with n - 1 degrees of freedom; spread is the
    standard deviation over samples, alpha in (0, 1) is divided by the number of comparisons.
    """
    from scipy.special import stdtrit

    if not (0 < alpha < 1 and spread >= 0):
        raise UsageError(f"detectable needs alpha in (0, 1) and spread >= 0, got {alpha} and {spread}")
    if n_samples < 2:
        return float("inf")
    quantiles = stdtrit(n_samples - 1, 1 - alpha / 2) + stdtrit(n_samples - 1, POWER)
    return float(quantiles * spread / np.sqrt(n_samples))
