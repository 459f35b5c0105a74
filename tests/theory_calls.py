"""Theories of trained models called in one line: `predict` with the theory's class and its parameters."""

from posbias import predict
from posbias.models.model import Model
from posbias.prompts import Prompts
from posbias.theory import Prediction, Theory
from posbias.theory.power_rollout import PowerRollout


def of_prompts(theory: Theory, model: Model, prompts: Prompts, seed: int = 0) -> Prediction:
    return predict(model, prompts.n_positions, theory=theory, prompts=prompts, seed=seed)


def power_rollout(model: Model, prompts: Prompts, **parameters) -> Prediction:
    return of_prompts(PowerRollout(**parameters), model, prompts)
