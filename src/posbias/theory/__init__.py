"""Predictions of position bias from the architecture."""

from posbias.theory import model_theories as model_theories
from posbias.theory.closed_form import closed_form, continuous_density, continuous_profile
from posbias.theory.gradients import ProfileGradient, profile_gradient
from posbias.theory.predict import THEORIES, Forecast, ModelTheory, Prediction, parse_theory, predict
from posbias.theory.rollout import (
    Rollout,
    rollout_by_depth,
    rollout_columns,
    rollout_down,
    rollout_mean_row,
    rollout_profile,
    rollout_rows,
)

__all__ = [
    "THEORIES",
    "Forecast",
    "ModelTheory",
    "Prediction",
    "ProfileGradient",
    "Rollout",
    "closed_form",
    "continuous_density",
    "continuous_profile",
    "parse_theory",
    "predict",
    "profile_gradient",
    "rollout_by_depth",
    "rollout_columns",
    "rollout_down",
    "rollout_mean_row",
    "rollout_profile",
    "rollout_rows",
]
