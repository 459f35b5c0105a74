"""Our own small transformer, built from an `Architecture`: the exact model that theory describes, to measure and train.

Its attention matrices come densely from the architecture's head groups and share no code with the kernels in `theory`.
With the default configuration a layer is x <- (1 - m) x + m mean_h A_h x in float64, so the Jacobian norms of the last
position are the rollout; content attention, norms, values and MLPs are switched on one by one.
"""

from posbias.models.reference.config import ReferenceConfig, ReferenceShape, shape_of
from posbias.models.reference.forward import attention_maps, forward
from posbias.models.reference.network import (
    ITEMS,
    ReferenceBlock,
    ReferenceNetwork,
    ReferenceTransformer,
    config_from,
    is_reference,
    load_parameters,
    load_reference,
    save_reference,
)
from posbias.models.reference.parameters import constants_of, draw_parameters, stacked

__all__ = [
    "ITEMS",
    "ReferenceBlock",
    "ReferenceConfig",
    "ReferenceNetwork",
    "ReferenceShape",
    "ReferenceTransformer",
    "attention_maps",
    "config_from",
    "constants_of",
    "draw_parameters",
    "forward",
    "is_reference",
    "load_parameters",
    "load_reference",
    "save_reference",
    "shape_of",
    "stacked",
]
