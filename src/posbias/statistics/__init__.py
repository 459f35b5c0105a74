"""Intervals and tests of everything that was measured on independent units: prompts, contents, seeds; never positions.

Smooth statistics: `estimates`. Statistics that jump: `resampling`. Right or wrong: `proportions`. Measured coverage:
docs/intervals.md.
"""

from posbias.statistics.estimates import Estimate, estimate, jackknife, leave_one_out, mean_ends, mean_of
from posbias.statistics.intervals import CONFIDENCE, Interval
from posbias.statistics.proportions import paired_shares, tango, wilson
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
