"""Distances between profiles and their intervals, always beside the flat baseline."""

from posbias.comparison.compare import CompareOptions, ComparisonRun, compare
from posbias.comparison.contrasts import Contrast, summarise
from posbias.comparison.distance_intervals import (
    UNITS_FOR_CLAIM,
    PromptComparison,
    Sample,
    SplitHalf,
    compare_with_prompts,
    decided,
)
from posbias.comparison.metrics import METRICS, STATISTICS, finite
from posbias.comparison.model_profiles import (
    Depth,
    KindComparison,
    MeasuredKind,
    Mixing,
    Subject,
    TheoryProfile,
    compare_subject,
    contrast_subjects,
)
