"""Controlled experiments: many small transformers trained at once as stacked programs, and studies of them."""

from posbias.training.members import (
    OPTIMISERS,
    STOPPING,
    Adam,
    AdamW,
    Below,
    Member,
    TrainedMember,
    TrainingSchedule,
    TrainOptions,
)
from posbias.training.running import ENDED_WELL, StudyRun, train
from posbias.training.study import Study, load_study, study_of
from posbias.training.trainer import Trained, train_members
