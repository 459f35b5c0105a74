"""Predictions of position bias from the architecture."""

from posbias.theory.base import THEORIES, ModelTheory, Prediction, Theory, predictions_record
from posbias.theory.closed_form import closed_form, continuous_profile
from posbias.theory.gradients import ProfileGradient, profile_gradient
from posbias.theory.predict import known_theories, parse_theory, predict
from posbias.theory.rollout import (
    Rollout,
    rollout_profile,
    rollout_rows,
)
