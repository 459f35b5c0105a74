"""What makes a model's profile: ingredients replaced one at a time, measured and in theory."""

from posbias.decomposition.decomposition import (
    DEFAULT_INTERVENTIONS,
    DEFAULT_KINDS,
    MASSES,
    Counterfactual,
    Decomposition,
    DecompositionOptions,
    counterfactuals,
    finished_decomposition,
)
from posbias.decomposition.sources import SOURCES

__all__ = [
    "DEFAULT_INTERVENTIONS",
    "DEFAULT_KINDS",
    "MASSES",
    "SOURCES",
    "Counterfactual",
    "Decomposition",
    "DecompositionOptions",
    "counterfactuals",
    "finished_decomposition",
]
