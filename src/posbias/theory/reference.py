"""A reference transformer in the terms that describe families: the maps and norms of its blocks as numbers."""

import torch
from torch.nn.functional import gelu

from posbias.errors import UsageError
from posbias.models.layout import AttentionParts, Linear, MlpParts, Norm
from posbias.models.reference.config import NORM_EPSILON
from posbias.models.reference.network import ReferenceBlock, ReferenceNetwork


def attention_parts(block: ReferenceBlock) -> AttentionParts:
    """The maps of a block's attention.

    Raises:
        UsageError: the block has heads that carry the stream itself.
    """
    config, weights = block.config, {name: value.detach() for name, value in block.named_parameters()}
    if config.values != "gaussian":
        raise UsageError(
            f"this theory needs values drawn for every head (gaussian), got {config.values!r}; rollout is allowed"
        )
    heads, width, features = config.architecture.heads, config.width, config.head_dim

    def rows(name: str) -> Linear:
        """The map of all heads, [head * feature, width]; zero if there is none."""
        if name not in weights:
            return Linear(weights["value"].new_zeros(heads * features, width))
        return Linear(weights[name].transpose(1, 2).flatten(0, 1))

    return AttentionParts(
        query=rows("query"),
        key=rows("key"),
        value=rows("value"),
        output=Linear(
            weights["output"].flatten(0, 1).T if config.output_map else torch.eye(width).to(weights["value"])
        ),
        heads=heads,
        key_heads=heads,
        head_dim=features,
        scale=config.head_dim**-0.5 if config.attention == "content" else 0.0,
    )


def mlp_parts(block: ReferenceBlock) -> MlpParts | None:
    """The maps of a block's MLP; None if it has none."""
    if not block.config.mlp:
        return None
    weights = {name: value.detach() for name, value in block.named_parameters()}
    return MlpParts(Linear(weights["up"].T), Linear(weights["down"].T), gate=None, activation=gelu)


def norm_of(module: ReferenceBlock | ReferenceNetwork, name: str) -> Norm | None:
    """The norm called `name`; None if the configuration has none."""
    gain = dict(module.named_parameters(recurse=False)).get(f"{name}_gain")
    return None if gain is None else Norm(kind="rms", gain=gain.detach(), bias=None, epsilon=NORM_EPSILON)
