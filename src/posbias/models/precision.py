"""A model again in higher precision: the same weights, converted, so that what rounding costs can be measured."""

import copy
from typing import TypeVar

import torch
from torch import nn

from posbias.models.model import Model
from posbias.models.weights import dispatched, quantised

AnyModel = TypeVar("AnyModel", bound=Model)
REDUCED = (torch.float16, torch.bfloat16)
"""Types whose loss of precision is checked."""


def not_convertible(model: Model) -> str | None:
    """Why there is no copy of the model in another precision; None where there is one."""
    if quantised(model.network):
        return "the weights are quantised"
    return "the weights are spread over devices" if dispatched(model.network) else None


def cast_weights(network: nn.Module, dtype: torch.dtype) -> nn.Module:
    """The network with its floating weights in `dtype`, in place.

    Its buffers (RoPE frequencies, tables of sines) are never rounded, as `from_pretrained(dtype=...)` keeps them in
    float32 too: angles grow with the position, and with them what a rounded frequency costs.
    """
    wide = torch.finfo(dtype).bits

    def changed(module: nn.Module) -> None:
        for weight in module.parameters(recurse=False):
            if weight.is_floating_point():
                weight.data = weight.data.to(dtype)
        for name, buffer in module.named_buffers(recurse=False):
            if buffer.is_floating_point() and torch.finfo(buffer.dtype).bits < wide:
                setattr(module, name, buffer.to(dtype))

    return network.apply(changed)


def converted(model: AnyModel, dtype: torch.dtype) -> AnyModel:
    """A copy of the model, on its device, with all weights in a wider `dtype`; it lives as long as it is referred to.

    Takes the memory of one more model, at the width of `dtype`.
    """
    view = copy.copy(model)
    view.network = cast_weights(copy.deepcopy(model.network), dtype)
    view.dtype = dtype
    return view
