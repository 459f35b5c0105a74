"""From raw norms per prompt to one profile with an interval over prompts.

`profiles` normalises every prompt and then averages, so that prompts count equally; `norms` averages the raw norms
and normalises once (arXiv 2602.16837's code), so that prompts with large gradients dominate.
"""

import numpy as np
from jaxtyping import Float64

from posbias.profiles import Profile
from posbias.statistics import estimate

AVERAGINGS = ("profiles", "norms")


def average_profile(norms: Float64[np.ndarray, "count n_positions"], *, averaging: str) -> Profile:
    """The profile of several prompts.

    Args:
        norms: Raw norms per prompt, finite, >= 0, no prompt all zero.
        averaging: "profiles" or "norms", see above.
    """
    return Profile.normalised(_units(norms, averaging).mean(axis=0))


def profile_with_interval(
    norms: Float64[np.ndarray, "count n_positions"], *, averaging: str, confidence: float
) -> Profile:
    """`average_profile` with its pointwise interval, from the same statistic with each prompt left out.

    With a single prompt the interval is (-inf, inf).
    """
    units = _units(norms, averaging)
    count, total = len(units), units.sum(axis=0)
    profile = Profile.normalised(total)
    left_out = total - units if count > 1 else np.ones_like(units)
    influences = (1 - count) * left_out / left_out.sum(axis=1, keepdims=True)
    low, high = estimate(profile.influence, influences).ends(confidence, least=0.0, most=1.0)
    return Profile(profile.influence, low, high)


def _units(norms: Float64[np.ndarray, "count n_positions"], averaging: str) -> Float64[np.ndarray, "count n"]:
    """What is averaged over prompts."""
    return norms / norms.sum(axis=1, keepdims=True) if averaging == "profiles" else norms
