"""Intervals and tests of everything that was measured on independent units: prompts, samples, seeds; never positions.

Smooth statistics: `intervals`. Statistics that jump: `resampling`. Right or wrong: `shares`. Several tests: `testing`.
Measured coverage: docs/intervals.md.
"""

from posbias.statistics.intervals import (
    CONFIDENCE,
    Estimate,
    Interval,
    estimate,
    jackknife,
    leave_one_out,
    mean_ends,
    mean_of,
)
from posbias.statistics.resampling import (
    DRAWS,
    blocks,
    draw_weights,
    expanded_tail,
    percentile_interval,
    resample_counts,
    resamples,
    weighted_median,
)
from posbias.statistics.shares import paired_shares, tango, wilson
from posbias.statistics.testing import POWER, detectable, holm

__all__ = [
    "CONFIDENCE",
    "DRAWS",
    "POWER",
    "Estimate",
    "Interval",
    "blocks",
    "detectable",
    "draw_weights",
    "estimate",
    "expanded_tail",
    "holm",
    "jackknife",
    "leave_one_out",
    "mean_ends",
    "mean_of",
    "paired_shares",
    "percentile_interval",
    "resample_counts",
    "resamples",
    "tango",
    "weighted_median",
    "wilson",
]
