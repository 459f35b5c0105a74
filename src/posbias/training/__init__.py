"""Controlled experiments: many small transformers trained at once as stacked programs, and studies of them."""

from posbias.training.members import Member, TrainedMember
from posbias.training.optimisers import OPTIMISERS, SGD, Adam, AdamW, Optimiser
from posbias.training.options import STOPPING, Below, Never, Plateau, StoppingRule, TrainingOptions, TrainingRun
from posbias.training.running import StudyRun, run_study, training_record
from posbias.training.study import Study, load_study, study_of
from posbias.training.trainer import Trained, train

__all__ = [
    "OPTIMISERS",
    "SGD",
    "STOPPING",
    "Adam",
    "AdamW",
    "Below",
    "Member",
    "Never",
    "Optimiser",
    "Plateau",
    "StoppingRule",
    "Study",
    "StudyRun",
    "Trained",
    "TrainedMember",
    "TrainingOptions",
    "TrainingRun",
    "load_study",
    "run_study",
    "study_of",
    "train",
    "training_record",
]
