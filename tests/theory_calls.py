"""Theories of trained models called in one line: `predict` with the theory's class and its parameters."""

import numpy as np

from posbias import predict
from posbias.models.model import Model
from posbias.prompts import Prompts
from posbias.theory import Prediction
from posbias.theory.power_rollout import PowerRollout, trace_model


def power_rollout(model: Model, prompts: Prompts, **parameters) -> Prediction:
    return predict(model, prompts.n_positions, theory=PowerRollout(**parameters), prompts=prompts)


def power_rollout_prompt(model: Model, token_ids: np.ndarray, theory: PowerRollout | None = None) -> np.ndarray:
    theory = theory or PowerRollout()
    return theory.profile_of(trace_model(model, token_ids, target=theory.target))
