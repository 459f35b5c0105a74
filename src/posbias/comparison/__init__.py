"""Distances between profiles and their intervals, always beside the flat baseline."""

from posbias.comparison.metrics import METRICS, STATISTICS, finite
from posbias.comparison.sampling import (
    UNITS_FOR_CLAIM,
    Contrast,
    PromptComparison,
    Sample,
    SplitHalf,
    compare_with_prompts,
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
    "contrast_subjects",
    "finite",
    "summarise",
]
