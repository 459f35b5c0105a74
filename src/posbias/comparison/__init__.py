"""Distances between profiles and their intervals, always beside the flat baseline."""

from posbias.comparison.metrics import METRICS, STATISTICS, finite, share_of_span
from posbias.comparison.sampling import (
    UNITS_FOR_CLAIM,
    Contrast,
    PromptComparison,
    Sample,
    SplitHalf,
    compare_with_prompts,
    contrast,
    split_half_noise,
    summarise,
)
from posbias.comparison.subject import (
    Comparison,
    Depth,
    KindComparison,
    MeasuredKind,
    Mixing,
    Subject,
    TheoryProfile,
    compare,
    compare_subject,
    contrast_subjects,
)

__all__ = [
    "METRICS",
    "STATISTICS",
    "UNITS_FOR_CLAIM",
    "Comparison",
    "Contrast",
    "Depth",
    "KindComparison",
    "MeasuredKind",
    "Mixing",
    "PromptComparison",
    "Sample",
    "SplitHalf",
    "Subject",
    "TheoryProfile",
    "compare",
    "compare_subject",
    "compare_with_prompts",
    "contrast",
    "contrast_subjects",
    "finite",
    "share_of_span",
    "split_half_noise",
    "summarise",
]
