"""Accuracy by position: does a model use what stands at each place of its context?"""

from posbias.evaluation.evaluation import EvaluateOptions, Evaluation, evaluate
from posbias.evaluation.placement import MeasuredUse, Placement, place
from posbias.evaluation.record import evaluation_record, finished_evaluation, measured_use, write_outputs
from posbias.evaluation.tie_record import tie_runs
from posbias.evaluation.ties import Pair, Tie, tie

__all__ = [
    "EvaluateOptions",
    "Evaluation",
    "MeasuredUse",
    "Pair",
    "Placement",
    "Tie",
    "evaluate",
    "evaluation_record",
    "finished_evaluation",
    "measured_use",
    "place",
    "tie",
    "tie_runs",
    "write_outputs",
]
