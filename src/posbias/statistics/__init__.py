"""Intervals and tests of everything that was measured on independent units: prompts, samples, seeds; never positions.

Smooth statistics: `intervals`. Statistics that jump: `resampling`. Right or wrong, and several tests: `shares`.
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
    halves,
    percentile_interval,
    resample_counts,
    weighted_median,
)
from posbias.statistics.shares import detectable, holm, paired_shares, wilson

__all__ = [
    "CONFIDENCE",
    "DRAWS",
    "Estimate",
    "Interval",
    "blocks",
    "detectable",
    "draw_weights",
    "estimate",
    "halves",
    "holm",
    "jackknife",
    "leave_one_out",
    "mean_ends",
    "mean_of",
    "paired_shares",
    "percentile_interval",
    "resample_counts",
    "weighted_median",
    "wilson",
]
