"""Mean-field theory of the Jacobian at initialisation: no free parameter, from a model's configuration alone."""

from posbias.theory.mean_field.extract import spec_of
from posbias.theory.mean_field.levels import LEVELS, FirstOrder, Level, SampledHeads, ValueOnly
from posbias.theory.mean_field.networks import network_profiles, scatter_caveat
from posbias.theory.mean_field.prediction import MeanField, mean_field
from posbias.theory.mean_field.spec import MeanFieldSpec

__all__ = [
    "LEVELS",
    "FirstOrder",
    "Level",
    "MeanField",
    "MeanFieldSpec",
    "SampledHeads",
    "ValueOnly",
    "mean_field",
    "network_profiles",
    "scatter_caveat",
    "spec_of",
]
