"""Predictions of position bias from the architecture."""

from posbias.theory.closed_form import closed_form, continuous_profile
from posbias.theory.predict import (
    THEORIES,
    ArchitectureTheory,
    Prediction,
    Theory,
    parse_theory,
    predict,
    predictions_record,
)
from posbias.theory.rollout import Rollout, rollout_profile
