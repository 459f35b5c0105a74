"""Interventions on a loaded model: one ingredient of its position bias replaced while a context is open."""

from posbias.interventions import branches, encodings, keys, visibility
from posbias.interventions.base import INTERVENTIONS, Intervention, check_model, intervened, resolve_interventions

__all__ = [
    "INTERVENTIONS",
    "Intervention",
    "branches",
    "check_model",
    "encodings",
    "intervened",
    "keys",
    "resolve_interventions",
    "visibility",
]
