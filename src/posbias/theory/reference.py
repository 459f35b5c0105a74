"""A reference transformer in the terms that describe families: the maps and norms of its blocks as numbers."""

import torch
from torch import Tensor

from posbias.errors import UsageError
from posbias.models.layout import AttentionParts, MlpParts, Norm
from posbias.models.reference.config import NORM_EPSILON
from posbias.models.reference.forward import ACTIVATIONS
from posbias.models.reference.network import ReferenceBlock, ReferenceNetwork


def attention_parts(block: ReferenceBlock) -> AttentionParts:
    """The maps of a block's attention.

    Raises:
        UsageError: the block has a linear layer in attention's place, or heads that carry the stream itself.
    """
    if block.linear:
        raise UsageError(
            "a linear layer (recurrent) of this reference model has no attention; theories that take every layer for "
            "attention, and power_rollout, are refused; rollout is allowed"
        )
    config, weights = block.config, {name: value.detach() for name, value in block.named_parameters()}
    if config.values != "gaussian":
        raise UsageError(
            f"this theory needs values drawn for every head (gaussian), got {config.values!r}; rollout is allowed"
        )
    heads, width, features = config.architecture.heads, config.width, config.head_dim

    def rows(name: str) -> Tensor:
        """The map of all heads, [head * feature, width]; zero if there is none."""
        if name not in weights:
            return weights["value"].new_zeros(heads * features, width)
        return weights[name].transpose(1, 2).flatten(0, 1)

    def bias(name: str) -> Tensor | None:
        vector = weights.get(f"{name}_bias")
        return None if vector is None else vector.flatten()

    return AttentionParts(
        query=rows("query"),
        key=rows("key"),
        value=rows("value"),
        output=weights["output"].flatten(0, 1).T if config.output_map else torch.eye(width).to(weights["value"]),
        heads=heads,
        key_heads=heads,
        head_dim=features,
        scale=config.head_dim**-0.5 if config.attention == "content" else 0.0,
        query_bias=bias("query"),
        key_bias=bias("key"),
        value_bias=bias("value"),
        output_bias=weights.get("output_bias"),
    )


def mlp_parts(block: ReferenceBlock) -> MlpParts | None:
    """The maps of a block's MLP; None if it has none."""
    if not block.config.mlp:
        return None
    weights = {name: value.detach() for name, value in block.named_parameters()}
    return MlpParts(
        up=weights["up"].T,
        down=weights["down"].T,
        gate=weights["gate"].T if block.config.gated_mlp else None,
        activation=ACTIVATIONS[block.config.activation],
        up_bias=weights.get("up_bias"),
        down_bias=weights.get("down_bias"),
        gate_bias=weights.get("gate_bias"),
    )


def norm_of(module: ReferenceBlock | ReferenceNetwork, name: str) -> Norm | None:
    """The norm called `name`; None if the configuration has none."""
    config, weights = module.config, dict(module.named_parameters(recurse=False))
    if f"{name}_gain" not in weights:
        return None
    return Norm(
        kind="rms" if config.normalisation == "rms" else "layer",
        gain=weights[f"{name}_gain"].detach(),
        bias=weights[f"{name}_shift"].detach() if f"{name}_shift" in weights else None,
        epsilon=NORM_EPSILON,
    )
