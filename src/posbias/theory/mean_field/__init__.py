"""Mean-field theory of the Jacobian at initialisation: no free parameter, from a model's configuration alone."""

from posbias.theory.mean_field.prediction import mean_field, network_profiles, scatter_caveat
from posbias.theory.mean_field.recursion import FirstOrder, SampledHeads
from posbias.theory.mean_field.spec import spec_of
