"""Accuracy by position: does a model use what stands at each position of its context?"""

from posbias.evaluation.correlation import Pair, correlate
from posbias.evaluation.evaluation import (
    Evaluation,
    evaluate,
    evaluate_responder,
    evaluation_record,
    finished_evaluation,
    measured_use,
    write_outputs,
)
from posbias.evaluation.placement import MeasuredUse, place
from posbias.evaluation.pooling import correlate_runs
from posbias.evaluation.samples import EvaluateOptions

__all__ = [
    "EvaluateOptions",
    "Evaluation",
    "MeasuredUse",
    "Pair",
    "correlate",
    "correlate_runs",
    "evaluate",
    "evaluate_responder",
    "evaluation_record",
    "finished_evaluation",
    "measured_use",
    "place",
    "write_outputs",
]
