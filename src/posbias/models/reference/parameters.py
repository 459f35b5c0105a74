"""The tensors of a reference transformer: weights, drawn from a generator, and what its architecture fixes.

Draws are float64 and in a fixed order, then rounded to the configured type, so that a seed means the same weights in
either precision. Models of one shape differ in their logit biases, rotary angles and residual scales as in their
weights, so masks and encodings stack like any other data.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from posbias.architecture import HeadGroup, NoEncoding, Recurrent, Rope
from posbias.architecture.absolute import AbsoluteEncoding
from posbias.models.reference.config import ReferenceConfig, shape_of

Draw = tuple[str, str, tuple[int, ...], int]
"""Name, sort (`table`, `weight`, `bias`, `orthogonal`, `gain`, `shift`), shape, and inputs of the map."""


def draw_parameters(config: ReferenceConfig, generator: torch.Generator | None) -> dict[str, Float[Tensor, "..."]]:
    """Weights at initialisation, drawn from the generator alone, not from the configuration's `seed`.

    Without a generator only shapes are made, on the meta device, which takes no memory.

    Returns:
        `embedding` [vocabulary, d], `blocks.L.query` [head, d, head_dim], `blocks.L.up` [d, hidden], ...,
        `unembedding` [output, d] or `readout.K.weight` [in, out]; contiguous, on the generator's device.
    """
    device = torch.device("meta") if generator is None else generator.device
    linear, normal = config.initialisation == "linear", config.initialisation == "normal"

    def drawn(sort: str, shape: tuple[int, ...], inputs: int) -> Tensor:
        if sort == "orthogonal":
            return torch.empty(shape, device=device) if generator is None else random_orthogonal(shape[0], generator)
        if sort == "gain":
            return torch.ones(shape, dtype=torch.float64, device=device)
        if sort == "shift" or (sort == "bias" and not linear):
            return torch.zeros(shape, dtype=torch.float64, device=device)
        if linear and sort != "table":
            values = torch.rand(shape, generator=generator, dtype=torch.float64, device=device)
            return (2 * values - 1) / math.sqrt(inputs)
        values = torch.randn(shape, generator=generator, dtype=torch.float64, device=device)
        if normal:
            return values * config.initial_deviation
        return values if sort == "table" else values / math.sqrt(inputs)

    return {name: drawn(sort, shape, inputs).to(config.torch_dtype) for name, sort, shape, inputs in _draws(config)}


def _draws(config: ReferenceConfig) -> Iterator[Draw]:
    """Everything there is to draw, in the order of the draws."""
    width, outputs = config.width, config.n_outputs
    if config.vocabulary_size is not None:
        yield "embedding", "table", (config.vocabulary_size, width), width
    if config.embedding_norm:
        yield from _norm(config, "embedding")
    for layer in range(config.architecture.depth):
        for name, sort, shape, inputs in _block(config, layer):
            yield f"blocks.{layer}.{name}", sort, shape, inputs
    if config.readout == "linear":
        yield "unembedding", "weight", (outputs, width), width
    else:
        hidden = width if config.readout_width is None else config.readout_width
        for layer, (inputs, into) in enumerate(pairwise([width, *[hidden] * config.readout_layers, outputs])):
            yield f"readout.{layer}.weight", "weight", (inputs, into), inputs
            yield f"readout.{layer}.bias", "bias", (into,), inputs
    if config.norm == "pre":
        yield from _norm(config, "final")
    if config.learned_positions is not None:
        yield "positions", "table", (config.learned_positions, width), width


def _block(config: ReferenceConfig, layer: int) -> Iterator[Draw]:
    heads, shared, biases = config.architecture.heads, config.n_key_value_heads, config.biases
    width, head_dim, hidden = config.width, config.head_dim, config.hidden_width
    if config.attention == "content":
        yield "query", "weight", (heads, width, head_dim), width
        yield "key", "weight", (shared, width, head_dim), width
        if biases:
            yield "query_bias", "bias", (heads, head_dim), width
            yield "key_bias", "bias", (shared, head_dim), width
    if config.values == "orthogonal":
        yield "value", "orthogonal", (width, width), width
    if config.values == "gaussian":
        yield "value", "weight", (shared, width, head_dim), width
        if biases:
            yield "value_bias", "bias", (shared, head_dim), width
        if config.output_map:
            yield "output", "weight", (heads, head_dim, width), heads * head_dim
            if biases:
                yield "output_bias", "bias", (width,), heads * head_dim
    if config.linear_layers[layer]:
        yield "step", "weight", (width, heads), width
        yield "step_bias", "shift", (heads,), width
        yield "rate", "shift", (heads,), 1
    if config.trained_key_bias is not None:
        yield "trained_key_bias", "shift", (heads, config.trained_key_bias), 1
    if config.norm != "none":
        yield from _norm(config, "attention")
    if config.mlp:
        if config.norm != "none":
            yield from _norm(config, "mlp")
        into = ("up", "gate") if config.gated_mlp else ("up",)
        yield from ((name, "weight", (width, hidden), width) for name in into)
        yield "down", "weight", (hidden, width), hidden
        if biases:
            yield from ((f"{name}_bias", "bias", (hidden,), width) for name in into)
            yield "down_bias", "bias", (width,), hidden
    if config.rotate_stream:
        yield "rotation", "orthogonal", (width, width), width


def _norm(config: ReferenceConfig, name: str) -> Iterator[Draw]:
    yield f"{name}_gain", "gain", (config.width,), 1
    if config.normalisation != "rms":
        yield f"{name}_shift", "shift", (config.width,), 1


def random_orthogonal(width: int, generator: torch.Generator) -> Float[Tensor, "width width"]:
    """A uniformly distributed orthogonal matrix (QR of a Gaussian one, signs fixed)."""
    gaussian = torch.randn((width, width), generator=generator, dtype=torch.float64, device=generator.device)
    orthogonal, triangular = torch.linalg.qr(gaussian)
    signed: Tensor = orthogonal * torch.sign(torch.diagonal(triangular))
    return signed


def constants_of(config: ReferenceConfig, n_positions: int) -> dict[str, Float[Tensor, "..."]]:
    """The tensors that the architecture fixes at one context length N (>= 1).

    Returns:
        `bias` [layer, head, query, key], added to the logits, -inf if the mask hides the key; `kept`, `added` and
        `mlp_kept` [layer], what multiplies the stream and the attention branch, and the stream beside the MLP;
        if heads are rotary, `cosine` and `sine` [layer, head, position, pair], 1 and 0 for heads that are not;
        if layers are linear, `slopes` [layer, head], 0 for those that are not;
        if vectors are added to the input, `positions` [position, feature]. On the CPU, in the model's precision.

    Raises:
        UsageError: n_positions below 1, or beyond what the encodings have vectors for.
    """
    shape = shape_of(config, n_positions)
    depth, dtype = shape.depth, config.torch_dtype
    mixed = config.residual == "mixed"
    mixing = torch.from_numpy(np.asarray(config.architecture.layer_mixing, dtype=np.float64))
    scale = config.residual_scale if config.residual == "added" else float(mixed)
    bias = np.empty((depth, shape.heads, n_positions, n_positions))
    for layer, groups in enumerate(config.architecture.head_groups):
        for group in groups:
            bias[layer, group.heads] = shown(config, group).masked_logits(n_positions)
    constants = {
        "bias": torch.from_numpy(bias),
        "kept": 1 - mixing if mixed else torch.full((depth,), scale, dtype=torch.float64),
        "added": mixing if mixed else torch.ones(depth, dtype=torch.float64),
        "mlp_kept": torch.full((depth,), scale, dtype=torch.float64),
    }
    if config.rotary:
        angles = torch.stack([rotary_angles(config, layer, n_positions) for layer in range(depth)])
        constants |= {"cosine": angles.cos(), "sine": angles.sin()}
    if any(config.linear_layers):
        slopes = np.zeros((depth, shape.heads))
        for layer, groups in enumerate(config.architecture.head_groups):
            for group in groups if config.linear_layers[layer] else ():
                slopes[layer, group.heads] = group.linear_slopes()
        constants["slopes"] = torch.from_numpy(slopes)
    if config.input_encoding is not None:
        constants["positions"] = torch.from_numpy(config.input_encoding.vectors_at(np.arange(n_positions)))
    return {name: value.to(dtype) for name, value in constants.items()}


def shown(config: ReferenceConfig, group: HeadGroup) -> HeadGroup:
    """The group as its logits show it.

    If there is content, rotary encodings turn q and k and recurrent ones are the decays of a state; absolute ones may
    be added to the input. They add their constant-content bias if not.
    """
    turned = config.attention == "content" and isinstance(group.encoding, Rope | Recurrent)
    entered = config.absolute == "added" and isinstance(group.encoding, AbsoluteEncoding)
    return replace(group, encoding=NoEncoding()) if turned or entered else group


def rotary_angles(config: ReferenceConfig, layer: int, n_positions: int) -> Float[Tensor, "head position pair"]:
    """Angles of the feature pairs of each head at each position, in float64; 0 for a head that is not rotary."""
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
