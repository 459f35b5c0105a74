"""Mean-field theory of the Jacobian at initialisation: no free parameter, from a model's configuration alone."""

from posbias.theory.mean_field.levels import LEVELS, FirstOrder, Level, ValueOnly
from posbias.theory.mean_field.prediction import (
    MeanField,
    MeanFieldTheory,
    mean_field,
    network_profiles,
    scatter_caveat,
)
from posbias.theory.mean_field.sampled import SampledHeads
from posbias.theory.mean_field.spec import MeanFieldSpec, spec_of

__all__ = [
    "LEVELS",
    "FirstOrder",
    "Level",
    "MeanField",
    "MeanFieldSpec",
    "MeanFieldTheory",
    "SampledHeads",
    "ValueOnly",
    "mean_field",
    "network_profiles",
    "scatter_caveat",
    "spec_of",
]
