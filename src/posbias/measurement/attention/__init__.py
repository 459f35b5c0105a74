"""What a model's attention looks like, without keeping it (docs/theory, section 6)."""

from posbias.measurement.attention.layer import prefix_monotonicity
from posbias.measurement.attention.statistics import (
    AttentionOptions,
    AttentionStatistics,
    ContentLogits,
    HeadStatistic,
    MeanKernels,
    MixingStatistics,
    Monotonicity,
    PrefixMonotonicity,
    PromptMean,
    Similarity,
)
from posbias.measurement.attention.streaming import attention_statistics

__all__ = [
    "AttentionOptions",
    "AttentionStatistics",
    "ContentLogits",
    "HeadStatistic",
    "MeanKernels",
    "MixingStatistics",
    "Monotonicity",
    "PrefixMonotonicity",
    "PromptMean",
    "Similarity",
    "attention_statistics",
    "prefix_monotonicity",
]
