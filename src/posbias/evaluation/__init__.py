"""Accuracy by position: does a model use what stands at each position of its context?"""

from posbias.evaluation.comparison import EvaluationComparison, compare_evaluations
from posbias.evaluation.evaluation import Evaluation, load_evaluation, write_outputs
from posbias.evaluation.run import evaluate_responder, finish_evaluation
from posbias.evaluation.samples import EvaluateOptions
