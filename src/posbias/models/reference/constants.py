"""What an architecture fixes in a reference transformer, as tensors: logit biases, rotary angles, residual scales.

Models of one shape differ in these as in their weights, so masks and encodings stack like any other data.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from posbias.architecture import HeadGroup, NoEncoding, Rope
from posbias.architecture.absolute import AbsoluteEncoding
from posbias.models.reference.config import ReferenceConfig, shape_of


def constants_of(config: ReferenceConfig, n_positions: int) -> dict[str, Float[Tensor, "..."]]:
    """The tensors that the architecture fixes at one context length.

    Args:
        config: The model.
        n_positions: Context length N (>= 1).

    Returns:
        `bias` [layer, head, query, key], added to the logits, -inf where the mask hides the key; `kept`, `added` and
        `mlp_kept` [layer], what multiplies the stream and the attention branch, and the stream beside the MLP;
        where heads are rotary, `cosine` and `sine` [layer, head, position, pair], 1 and 0 for heads that are not;
        where vectors are added to the input, `positions` [position, feature]. On the CPU, in the model's precision.

    Raises:
        UsageError: n_positions below 1, or beyond what the encodings have vectors for.
    """
    shape = shape_of(config, n_positions)
    depth, dtype = shape.depth, config.torch_dtype
    mixed = config.residual == "mixed"
    mixing = torch.from_numpy(np.asarray(config.architecture.layer_mixing, dtype=np.float64))
    scale = config.residual_scale if config.residual == "added" else float(mixed)
    constants = {
        "bias": torch.stack([logit_bias(config, layer, n_positions) for layer in range(depth)]),
        "kept": 1 - mixing if mixed else torch.full((depth,), scale, dtype=torch.float64),
        "added": mixing if mixed else torch.ones(depth, dtype=torch.float64),
        "mlp_kept": torch.full((depth,), scale, dtype=torch.float64),
    }
    if config.rotary:
        angles = torch.stack([rotary_angles(config, layer, n_positions) for layer in range(depth)])
        constants |= {"cosine": angles.cos(), "sine": angles.sin()}
    if config.input_encoding is not None:
        constants["positions"] = torch.from_numpy(config.input_encoding.vectors_at(np.arange(n_positions)))
    return {name: value.to(dtype) for name, value in constants.items()}


def logit_bias(config: ReferenceConfig, layer: int, n_positions: int) -> Float[Tensor, "head query key"]:
    """What one layer adds to its logits in float64, -inf where the mask hides the key."""
    bias = np.empty((config.architecture.heads, n_positions, n_positions))
    for group in config.architecture.head_groups[layer]:
        bias[group.heads] = shown(config, group).masked_logits(n_positions)
    return torch.from_numpy(bias)


def shown(config: ReferenceConfig, group: HeadGroup) -> HeadGroup:
    """The group as its logits show it.

    Rotary encodings turn q and k where there is content, and absolute ones may be added to the input; they add their
    constant-content bias where not.
    """
    turned = config.attention == "content" and isinstance(group.encoding, Rope)
    entered = config.absolute == "added" and isinstance(group.encoding, AbsoluteEncoding)
    return replace(group, encoding=NoEncoding()) if turned or entered else group


def rotary_angles(config: ReferenceConfig, layer: int, n_positions: int) -> Float[Tensor, "head position pair"]:
    """How far the feature pairs of each head are turned at each position, in float64; 0 where a head is not rotary."""
    half = config.head_dim // 2
    angles = torch.zeros((config.architecture.heads, n_positions, half), dtype=torch.float64)
    for group in config.architecture.head_groups[layer]:
        if isinstance(group.encoding, Rope):
            frequency = group.encoding.base ** (-torch.arange(half, dtype=torch.float64) / half)
            turn = torch.arange(n_positions, dtype=torch.float64)[:, None] * frequency
            angles[torch.from_numpy(group.heads)] = turn
    return angles


def stacked(members: Sequence[Mapping[str, Tensor]]) -> dict[str, Float[Tensor, "member ..."]]:
    """Parameters or constants of several models of one shape with a leading member axis."""
    return {name: torch.stack([member[name] for member in members]) for name in members[0]}
