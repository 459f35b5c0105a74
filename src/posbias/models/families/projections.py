"""The linear projections of a network by role: queries, keys, values, the outputs of heads, and the maps of the MLP.

Some modules hold several: one map of queries, keys and values, or gate and up together. Their rows say which is which.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor, nn

from posbias.errors import UsageError
from posbias.models.families.layout import Layout
from posbias.models.families.parts import split_fused, weight_of

ROLES = ("q", "k", "v", "o", "gate", "up", "down")


@dataclass(frozen=True, eq=False)
class Projection:
    """One module, y = W x + b, and the rows of W by role."""

    path: str
    """Dotted path within the network."""
    layer: int
    module: nn.Module
    rows: Mapping[str, Int[Tensor, "row"]]

    @property
    def shape(self) -> tuple[int, int]:
        """Features made, and features read."""
        made, read = weight_of(self.module).shape
        return made, read


BY_NAME = {f"{role}_proj": role for role in ROLES}


def named_projections(network: nn.Module) -> Iterator[Projection]:
    """The projections of a network without a layout, by the names that most families give them, experts left out."""
    for path, module in network.named_modules():
        *above, name = path.split(".")
        numbers = [int(step) for step in above if step.isdigit()]
        if name in BY_NAME and len(numbers) == 1 and isinstance(module, nn.Linear):
            made = torch.arange(weight_of(module).shape[0])
            yield Projection(path, numbers[0], module, {BY_NAME[name]: made})


def linear_projections(network: nn.Module, family: Layout, config: Any) -> Iterator[Projection]:
    """All projections of attention and of MLPs, layer by layer; experts of a mixture are left out, and what makes
    queries, keys and values if it makes more than these.

    Raises:
        UsageError: one is no linear map, or its weights are packed.
    """
    paths = {id(module): path for path, module in network.named_modules()}
    for layer, block in enumerate(family.blocks(network)):
        by_role: list[tuple[nn.Module, tuple[str, ...]]] = []
        if block.softmax is not None:
            if not family.gated_queries:
                queries = [block.attention.get_submodule(name) for name in family.query_key_value]
                by_role = [(queries[0], ("q", "k", "v"))]
                if len(queries) > 1:
                    by_role = [(module, (role,)) for module, role in zip(queries, "qkv", strict=True)]
            by_role.append((block.attention_output, ("o",)))
        if not family.is_mixture(block):
            within = family.mlp_module(block)
            up, down = (within.get_submodule(name) for name in family.up_and_down)
            gate = getattr(within, family.gate, None)
            by_role += [] if gate is None else [(gate, ("gate",))]
            by_role += [(up, ("gate", "up") if family.gate_in_up else ("up",)), (down, ("down",))]
        for module, roles in by_role:
            path = paths[id(module)]
            _check_linear(module, path, family)
            made = torch.arange(weight_of(module).shape[0])
            parts: Any = (made,)
            if roles == ("q", "k", "v"):
                parts = split_fused(made, (family.heads(config), family.key_heads(config)), family.fusion)
            elif len(roles) > 1:
                parts = made.chunk(len(roles))
            yield Projection(path, layer, module, dict(zip(roles, parts, strict=True)))


def _check_linear(module: nn.Module, path: str, family: Layout) -> None:
    weight = getattr(module, "weight", None)
    linear = isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D"
    if not linear or not isinstance(weight, Tensor) or not weight.is_floating_point() or weight.ndim != 2:
        raise UsageError(
            f"{family.name}: {path} is {type(module).__name__}, no linear projection with plain weights; allowed are "
            "Linear and Conv1D, unquantised"
        )
