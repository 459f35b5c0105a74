"""Several tests at once, and the smallest effect that a test would find."""

import numpy as np
from jaxtyping import Float64

from posbias.errors import UsageError
from posbias.statistics.intervals import CONFIDENCE

POWER = 0.8
"""Chance of finding an effect of the size that is called detectable."""


def holm(p_values: Float64[np.ndarray, "n_tests"]) -> Float64[np.ndarray, "n_tests"]:
    """Holm's step-down correction: the chance of any false rejection stays at the level, whatever the dependence."""
    order = np.argsort(p_values)
    factors = np.arange(len(p_values), 0, -1)
    adjusted = np.empty(len(p_values))
    adjusted[order] = np.minimum(1.0, np.maximum.accumulate(p_values[order] * factors))
    return adjusted


def detectable(spread: float, n_samples: int, *, alpha: float = 1 - CONFIDENCE, power: float = POWER) -> float:
    """Smallest true mean of a paired quantity that a two-sided t-test finds with the power; infinite below 2 units.

    (t[1 - alpha/2] + t[power]) spread / sqrt(n), quantiles of Student's t with n - 1 degrees of freedom; spread is the
    standard deviation over samples, alpha in (0, 1) is divided by the number of comparisons, power lies in [0.5, 1).
    """
    from scipy.special import stdtrit

    if not (0 < alpha < 1 and 0.5 <= power < 1 and spread >= 0):
        raise UsageError(
            f"detectable needs alpha in (0, 1), power in [0.5, 1) and spread >= 0, got {alpha}, {power} and {spread}"
        )
    if n_samples < 2:
        return float("inf")
    quantiles = stdtrit(n_samples - 1, 1 - alpha / 2) + stdtrit(n_samples - 1, power)
    return float(quantiles * spread / np.sqrt(n_samples))
