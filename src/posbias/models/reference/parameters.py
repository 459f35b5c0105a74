"""Weights of a reference transformer, drawn from a generator: one flat dictionary, the state of its network.

Draws are float64 and in a fixed order, then rounded to the configured type, so that a seed means the same weights in
either precision.
"""

import math
from itertools import pairwise

import torch
from jaxtyping import Float
from torch import Tensor

from posbias.models.reference.config import ReferenceConfig


def draw_parameters(config: ReferenceConfig, generator: torch.Generator | None) -> dict[str, Float[Tensor, "..."]]:
    """Weights at initialisation.

    Args:
        config: The model; its own `seed` plays no part here.
        generator: The only source of randomness; None: shapes alone, on the meta device, which takes no memory.

    Returns:
        `embedding` [vocabulary, d], `blocks.L.query` [head, d, head_dim], `blocks.L.up` [d, hidden], ...,
        `unembedding` [output, d] or `readout.K.weight` [in, out]; contiguous, on the generator's device.
    """
    draw = _Draw(config, generator)
    drawn: dict[str, Tensor] = {}
    if config.vocabulary_size is not None:
        drawn["embedding"] = draw.table(config.vocabulary_size)
    if config.embedding_norm:
        drawn |= draw.norm("embedding")
    for layer in range(config.architecture.depth):
        block = _block(config, draw)
        drawn |= {f"blocks.{layer}.{name}": value for name, value in block.items()}
    drawn |= _readout(config, draw)
    if config.norm == "pre":
        drawn |= draw.norm("final")
    if config.learned_positions is not None:
        drawn["positions"] = draw.table(config.learned_positions)
    return {name: value.to(config.torch_dtype) for name, value in drawn.items()}


class _Draw:
    """The configured initialisation."""

    def __init__(self, config: ReferenceConfig, generator: torch.Generator | None) -> None:
        self.config, self.generator = config, generator
        self.device = torch.device("meta") if generator is None else generator.device

    def normal(self, *shape: int, deviation: float = 1.0) -> Tensor:
        values = torch.randn(shape, generator=self.generator, dtype=torch.float64, device=self.device)
        return values * deviation

    def table(self, rows: int) -> Tensor:
        """Embeddings: standard normal, unless another deviation is configured."""
        normal = self.config.initialisation == "normal"
        return self.normal(rows, self.config.width, deviation=self.config.initial_deviation if normal else 1.0)

    def weight(self, *shape: int, inputs: int) -> Tensor:
        if self.config.initialisation == "normal":
            return self.normal(*shape, deviation=self.config.initial_deviation)
        if self.config.initialisation == "linear":
            return self.uniform(*shape, inputs=inputs)
        return self.normal(*shape) / math.sqrt(inputs)

    def uniform(self, *shape: int, inputs: int) -> Tensor:
        values = torch.rand(shape, generator=self.generator, dtype=torch.float64, device=self.device)
        return (2 * values - 1) / math.sqrt(inputs)

    def bias(self, *shape: int, inputs: int) -> Tensor:
        if self.config.initialisation == "linear":
            return self.uniform(*shape, inputs=inputs)
        return torch.zeros(shape, dtype=torch.float64, device=self.device)

    def orthogonal(self) -> Tensor:
        width = self.config.width
        if self.generator is None:
            return torch.empty((width, width), device=self.device)
        return random_orthogonal(width, self.generator)

    def norm(self, name: str) -> dict[str, Tensor]:
        """Gain 1, and shift 0 where there is one."""
        width, device = self.config.width, self.device
        gain = {f"{name}_gain": torch.ones(width, dtype=torch.float64, device=device)}
        if self.config.normalisation == "rms":
            return gain
        return gain | {f"{name}_shift": torch.zeros(width, dtype=torch.float64, device=device)}


def _block(config: ReferenceConfig, draw: _Draw) -> dict[str, Tensor]:
    drawn = _attention(config, draw)
    if config.norm != "none":
        drawn |= draw.norm("attention")
    if config.mlp:
        if config.norm != "none":
            drawn |= draw.norm("mlp")
        drawn |= _mlp(config, draw)
    if config.rotate_stream:
        drawn["rotation"] = draw.orthogonal()
    return drawn


def _attention(config: ReferenceConfig, draw: _Draw) -> dict[str, Tensor]:
    heads, shared, width, head_dim = (
        config.architecture.heads,
        config.n_key_value_heads,
        config.width,
        config.head_dim,
    )
    drawn: dict[str, Tensor] = {}
    if config.attention == "content":
        drawn["query"] = draw.weight(heads, width, head_dim, inputs=width)
        drawn["key"] = draw.weight(shared, width, head_dim, inputs=width)
        if config.biases:
            drawn["query_bias"] = draw.bias(heads, head_dim, inputs=width)
            drawn["key_bias"] = draw.bias(shared, head_dim, inputs=width)
    if config.values == "orthogonal":
        drawn["value"] = draw.orthogonal()
    if config.values == "gaussian":
        drawn["value"] = draw.weight(shared, width, head_dim, inputs=width)
        if config.biases:
            drawn["value_bias"] = draw.bias(shared, head_dim, inputs=width)
        if config.output_map:
            drawn["output"] = draw.weight(heads, head_dim, width, inputs=heads * head_dim)
            if config.biases:
                drawn["output_bias"] = draw.bias(width, inputs=heads * head_dim)
    return drawn


def _mlp(config: ReferenceConfig, draw: _Draw) -> dict[str, Tensor]:
    width, hidden = config.width, config.hidden_width
    drawn = {"up": draw.weight(width, hidden, inputs=width)}
    if config.gated_mlp:
        drawn["gate"] = draw.weight(width, hidden, inputs=width)
    drawn["down"] = draw.weight(hidden, width, inputs=hidden)
    if config.biases:
        drawn["up_bias"] = draw.bias(hidden, inputs=width)
        if config.gated_mlp:
            drawn["gate_bias"] = draw.bias(hidden, inputs=width)
        drawn["down_bias"] = draw.bias(width, inputs=hidden)
    return drawn


def _readout(config: ReferenceConfig, draw: _Draw) -> dict[str, Tensor]:
    if config.readout == "linear":
        return {"unembedding": draw.weight(config.n_outputs, config.width, inputs=config.width)}
    hidden = config.width if config.readout_width is None else config.readout_width
    sizes = [config.width, *[hidden] * config.readout_layers, config.n_outputs]
    drawn = {}
    for layer, (inputs, outputs) in enumerate(pairwise(sizes)):
        drawn[f"readout.{layer}.weight"] = draw.weight(inputs, outputs, inputs=inputs)
        drawn[f"readout.{layer}.bias"] = draw.bias(outputs, inputs=inputs)
    return drawn


def random_orthogonal(width: int, generator: torch.Generator) -> Float[Tensor, "width width"]:
    """A uniformly distributed orthogonal matrix (QR of a Gaussian one, signs fixed)."""
    gaussian = torch.randn((width, width), generator=generator, dtype=torch.float64, device=generator.device)
    orthogonal, triangular = torch.linalg.qr(gaussian)
    signed: Tensor = orthogonal * torch.sign(torch.diagonal(triangular))
    return signed
