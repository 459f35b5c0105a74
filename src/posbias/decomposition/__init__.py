"""Ingredients of a model's profile, replaced one at a time, measured and in theory."""

from posbias.decomposition.decomposition import (
    DEFAULT_INTERVENTIONS,
    DEFAULT_KINDS,
    MASSES,
    SOURCES,
    Counterfactual,
    DecomposeOptions,
    Decomposition,
    Score,
    Shift,
    decompose,
    store_decomposition,
)
