"""What a model's attention looks like, without keeping it (docs/theory, section 6)."""

from posbias.measurement.attention.layer import prefix_monotonicity
from posbias.measurement.attention.statistics import (
    AttentionOptions,
    AttentionStatistics,
    HeadStatistic,
    MeanKernels,
    PrefixMonotonicity,
    PromptMean,
)
from posbias.measurement.attention.streaming import attention_statistics

__all__ = [
    "AttentionOptions",
    "AttentionStatistics",
    "HeadStatistic",
    "MeanKernels",
    "PrefixMonotonicity",
    "PromptMean",
    "attention_statistics",
    "prefix_monotonicity",
]
