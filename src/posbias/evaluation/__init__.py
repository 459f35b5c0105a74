"""Accuracy by position: does a model use what stands at each position of its context?"""

from posbias.evaluation.comparison import EvaluationComparison, compare_evaluations
from posbias.evaluation.correlate import CorrelateOptions, InfluenceCorrelation, correlate
from posbias.evaluation.correlation import Pair, correlate_pairs
from posbias.evaluation.evaluation import Evaluation, load_evaluation, write_outputs
from posbias.evaluation.options import EvaluateOptions
from posbias.evaluation.placement import Placement, PlaceOptions, place
from posbias.evaluation.run import evaluate_responder, finish_evaluation
from posbias.evaluation.use import MeasuredUse, measured_use

__all__ = [
    "CorrelateOptions",
    "EvaluateOptions",
    "Evaluation",
    "EvaluationComparison",
    "InfluenceCorrelation",
    "MeasuredUse",
    "Pair",
    "PlaceOptions",
    "Placement",
    "compare_evaluations",
    "correlate",
    "correlate_pairs",
    "evaluate_responder",
    "finish_evaluation",
    "load_evaluation",
    "measured_use",
    "place",
    "write_outputs",
]
