"""Normalisation layers as numbers: LayerNorm, and every RMS norm of the families described here.

y = gain * (x - mean?) / sqrt(power + epsilon) + bias, where power is the mean square (of the centred x for LayerNorm).
Gemma and Nemotron store their gain less one; everyone else stores the gain itself, OLMo 1 has none.
"""

from typing import Any

import torch
from torch import Tensor, nn

from posbias.errors import UsageError
from posbias.models.families.base import Norm

OLMO_EPSILON = 1e-5
"""A literal of transformers' `OlmoLayerNorm`."""

COHERE_NORMS = ("CohereLayerNorm", "Cohere2LayerNorm")
"""LayerNorms without a bias, written out."""


def read_norm(module: nn.Module) -> Norm:
    """A LayerNorm or RMS norm as numbers.

    Raises:
        UsageError: the module is neither.
    """
    kind = type(module).__name__
    if isinstance(module, nn.LayerNorm):
        plain: Tensor | None = module.weight
        ones = torch.ones(module.normalized_shape) if plain is None else plain
        gain = 1 + ones if kind == "NemotronLayerNorm1P" else ones
        return Norm(kind="layer", gain=gain, bias=module.bias, epsilon=module.eps)
    if kind == "OlmoLayerNorm":
        shape: Any = module.normalized_shape
        return Norm(kind="layer", gain=torch.ones(shape), bias=None, epsilon=OLMO_EPSILON)
    if not kind.endswith("RMSNorm") and kind not in COHERE_NORMS:
        raise UsageError(f"{kind} is not a norm posbias can read; known: LayerNorm and RMS norms")
    weight: Tensor = module.get_parameter("weight")
    epsilon: Any = getattr(module, "variance_epsilon", None)
    if epsilon is None:
        epsilon = module.eps
    # Gemma 1, 2 and 3 multiply by 1 + weight, so that a weight of zero is the identity.
    gain = 1 + weight if kind.startswith("Gemma") else weight
    return Norm(kind="rms" if kind.endswith("RMSNorm") else "layer", gain=gain, bias=None, epsilon=float(epsilon))
