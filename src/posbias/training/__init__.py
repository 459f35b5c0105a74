"""Controlled experiments: many small transformers trained at once as stacked programs, and studies of them."""

from posbias.training.members import Member, TrainedMember
from posbias.training.optimisers import OPTIMISERS, Adam, AdamW
from posbias.training.options import STOPPING, Below, Never, StoppingRule, TrainingSchedule, TrainOptions
from posbias.training.result import ENDED_WELL, StudyRun
from posbias.training.running import train
from posbias.training.study import Study, load_study, study_of
from posbias.training.trainer import Trained, train_members
