"""Interventions on a loaded model: one ingredient of its position bias replaced while a context is open."""

from posbias.interventions import ingredients, keys
from posbias.interventions.base import INTERVENTIONS, Intervention, intervened, resolve_interventions
