"""Distances between profiles and their intervals, always beside the flat baseline."""

from posbias.comparison.metrics import METRICS, STATISTICS, finite
from posbias.comparison.pair import compare
from posbias.comparison.subject import (
    UNITS_FOR_CLAIM,
    Comparison,
    Contrast,
    Depth,
    KindComparison,
    MeasuredKind,
    Mixing,
    PromptComparison,
    Sample,
    SplitHalf,
    Subject,
    TheoryProfile,
    compare_subject,
    compare_with_prompts,
    contrast_subjects,
    decided,
    summarise,
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
    "decided",
    "finite",
    "summarise",
]
