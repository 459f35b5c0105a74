"""`MeanFieldSpec`: a model in the plain numbers that the mean-field theory needs, read off the model itself.

Variances are mean squares of the initialised weights, norms are their mean squared gain and their epsilon; nothing is
fitted. The initialiser itself need not be known: depth-scaled output projections or a custom scheme show in the
weights. Norms, linear maps and MLPs carry their maps of kernels, forwards and
backwards (docs/theory, section 4).
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Float64
from torch import Tensor

from posbias.architecture import Encoding, Mask
from posbias.errors import UsageError
from posbias.models.devices import float64_device, in_float64
from posbias.models.hugging_face import HuggingFaceModel
from posbias.models.layout import Block, Linear, Norm
from posbias.models.model import Model
from posbias.theory.mean_field.bins import Activation, Kernel, needs_every_position, recognise

EMBEDDING_ROWS = 4096
"""Rows of the embedding whose mean square is taken: its relative error is then below 0.2 % at width 256."""


@dataclass(frozen=True)
class LinearSpec:
    """One linear map y = W x + b."""

    variance: float
    """Mean square of the weights."""
    bias: float = 0.0
    """Mean square of the bias."""

    def forward(self, width: int, x: Kernel) -> Kernel:
        """Kernel of W x + b for x of `width` features."""
        return x.scaled(self.variance * width, offset=self.bias)


@dataclass(frozen=True)
class NormSpec:
    """A norm y = gain (x - mean?) / sqrt(power + epsilon) + bias; the mean is negligible at large width."""

    epsilon: float
    gain: float = 1.0
    """Mean square of the gain."""
    bias: float = 0.0
    """Mean square of the bias."""
    per_head: bool = False
    """For queries or keys: over the features of one head (Qwen-3, Gemma-3), not over all heads together (OLMo-2)."""

    def scale(self, kernel: Kernel) -> Float64[np.ndarray, "bin"]:
        """Divisor of the features at each position: sqrt(K_ii + epsilon)."""
        return np.sqrt(kernel.same + self.epsilon)

    def forward(self, kernel: Kernel) -> Kernel:
        """Kernel of the normalised features."""
        return kernel.over(self.scale(kernel)).scaled(self.gain, offset=self.bias)

    def backward(self, gradient: Kernel, kernel: Kernel) -> Kernel:
        """Gradient kernel at the norm's input from that at its output; the projection is a 1/d effect."""
        return gradient.over(self.scale(kernel)).scaled(self.gain)


@dataclass(frozen=True, eq=False)
class AttentionSpec:
    """One attention branch."""

    heads: int
    head_dim: int
    """Features of a query or key."""
    value_dim: int
    scale: float
    """Factor of q.k before the softmax."""
    query: LinearSpec
    key: LinearSpec
    value: LinearSpec
    output: LinearSpec
    mask: Mask
    encoding: Encoding
    """The logits that do not depend on content."""
    rotation: Float64[np.ndarray, "pairs"] | None = None
    """Rotary frequencies of the feature pairs, radians per position; they act on sampled heads only."""
    query_norm: NormSpec | None = None
    key_norm: NormSpec | None = None
    softcap: float | None = None
    pre_norm: NormSpec | None = None
    post_norm: NormSpec | None = None
    """Norm of the branch before it is added."""


@dataclass(frozen=True, eq=False)
class MlpSpec:
    """One MLP branch: down(act(up x)), or down(act(gate x) * (up x)).

    Forward: Y = v_down d_ff F(pre) with pre = v_up d x + b; gated: Y = v_down d_ff F_gate(pre_gate) pre_up. Backward:
    the derivative of the same products, one factor at a time.
    """

    hidden: int
    activation: Activation
    up: LinearSpec
    down: LinearSpec
    gate: LinearSpec | None = None
    pre_norm: NormSpec | None = None
    post_norm: NormSpec | None = None

    def forward(self, width: int, x: Kernel) -> Kernel:
        """Kernel of the branch's output, before any post-norm, from the kernel of its normalised input."""
        if self.gate is None:
            hidden, _ = self.activation.kernels(self.up.forward(width, x))
        else:
            gated, _ = self.activation.kernels(self.gate.forward(width, x))
            hidden = gated * self.up.forward(width, x)
        return self.down.forward(self.hidden, hidden)

    def backward(self, width: int, x: Kernel, gradient: Kernel) -> Kernel:
        """Gradient kernel at the branch's normalised input from that at its output (the branch alone, no residual)."""
        factor = self.down.variance * width * self.hidden
        if self.gate is None:
            _, slope = self.activation.kernels(self.up.forward(width, x))
            return gradient * slope.scaled(factor * self.up.variance)
        value, slope = self.activation.kernels(self.gate.forward(width, x))
        through_up = value.scaled(factor * self.up.variance)
        through_gate = (slope * self.up.forward(width, x)).scaled(factor * self.gate.variance)
        return gradient * (through_up + through_gate)


BranchSpec = AttentionSpec | MlpSpec


@dataclass(frozen=True, eq=False)
class LayerSpec:
    """One block."""

    attention: AttentionSpec
    mlp: MlpSpec | None
    """None: there is none."""
    parallel: bool = False
    """All branches read the block's input."""

    @property
    def steps(self) -> list[list[BranchSpec]]:
        """The branches that are there, in order, those together that read the same stream."""
        mlp: list[BranchSpec] = [] if self.mlp is None else [self.mlp]
        steps: list[list[BranchSpec]] = [[self.attention, *mlp]] if self.parallel else [[self.attention], mlp]
        return [step for step in steps if step]


@dataclass(frozen=True, eq=False)
class MeanFieldSpec:
    """A decoder at initialisation."""

    width: int
    """Features d of the residual stream."""
    layers: tuple[LayerSpec, ...]
    embedding: float
    """Mean square of the vectors that enter the first block, positions apart (Gemma, Granite: after their scaling)."""
    input_scale: float = 1.0
    """Factor of the network on its own input (Granite); `embedding` includes it, the Jacobian's input does not."""
    positions: float = 0.0
    """Mean square of a learned position table added to the input; 0 without one."""
    embedding_norm: NormSpec | None = None
    final_norm: NormSpec | None = None

    @property
    def single_positions(self) -> bool:
        """True if some logits jump from one position to the next."""
        return any(needs_every_position(layer.attention.encoding, layer.attention.heads) for layer in self.layers)

    def windows(self, n_positions: int) -> set[int]:
        """Keys that layers see, of those that do not see a whole context."""
        return {layer.attention.mask.reach(n_positions) for layer in self.layers} - {n_positions}


def spec_of(model: Model) -> MeanFieldSpec:
    """The mean-field description of a model of transformers.

    Raises:
        UsageError: the model's family is not described, or something in it has no mean-field theory.
    """
    if not isinstance(model, HuggingFaceModel):
        raise UsageError(
            f"mean field reads models of transformers, got {type(model).__name__}; the rollout is allowed for it"
        )
    family, network = model.family, model.network
    blocks, embedding_norm, positions = family.blocks(network), family.embedding_norm, 0.0
    layers = tuple(_layer_spec(model, block, layer) for layer, block in enumerate(blocks))
    if family.position_table is not None:
        table = network.get_submodule(family.position_table)
        positions = _power(table.get_parameter("weight")[getattr(table, "offset", 0) :])  # OPT's position 0 is row 2
    input_scale = family.input_scale(network)
    rows = np.unique(np.linspace(0, model.vocabulary_size - 1, EMBEDDING_ROWS).astype(np.int64))
    with torch.no_grad():
        power = in_float64(model.embed(model.token_tensor([rows.tolist()]))).square().mean(dim=-1)
    embedding = None if embedding_norm is None else family.norm(network.get_submodule(embedding_norm))
    return MeanFieldSpec(
        width=model.width,
        layers=layers,
        embedding=float(power[power > 0].mean()) * input_scale**2,  # a padding token's row is zero
        input_scale=input_scale,
        positions=positions,
        embedding_norm=_norm(embedding),
        final_norm=_norm(family.norm(network.get_submodule(family.final_norm))),
    )


def _layer_spec(model: HuggingFaceModel, block: Block, layer: int) -> LayerSpec:
    family, config = model.family, model.config

    def norms(branch: str) -> dict[str, Any]:
        """The norms of one branch, before it and after it."""
        before, after = (getattr(block, f"{branch}_{name}") for name in ("norm", "post_norm"))
        return {"pre_norm": _norm(before and family.norm(before)), "post_norm": _norm(after and family.norm(after))}

    parts, mlp = family.attention_parts(block, config), family.mlp_parts(block, config)
    attention = AttentionSpec(
        heads=parts.heads,
        head_dim=parts.head_dim,
        value_dim=parts.value_dim,
        scale=parts.scale,
        query=_linear(parts.query),
        key=_linear(parts.key),
        value=_linear(parts.value),
        output=_linear(parts.output),
        mask=family.mask(config, layer),
        encoding=family.encoding(config, layer),
        rotation=family.rotary_frequencies(model.network, block, config=config, layer=layer),
        query_norm=_norm(parts.query_norm, parts.head_dim),
        key_norm=_norm(parts.key_norm, parts.head_dim),
        softcap=parts.softcap,
        **norms("attention"),
    )
    with torch.no_grad():
        activation = recognise(lambda x: mlp.activation(torch.from_numpy(x).float()).double().numpy())
    perceptron = MlpSpec(
        hidden=len(mlp.up.weight),
        activation=activation,
        up=_linear(mlp.up),
        down=_linear(mlp.down),
        gate=None if mlp.gate is None else _linear(mlp.gate),
        **norms("mlp"),
    )
    return LayerSpec(attention, perceptron, parallel=family.parallel(config))


def _linear(of: Linear) -> LinearSpec:
    return LinearSpec(variance=_power(of.weight), bias=0.0 if of.bias is None else _power(of.bias))


def _power(values: Tensor) -> float:
    """Mean square."""
    return (
        float(torch.linalg.vector_norm(values.detach().to(float64_device(values.device)), dtype=torch.float64)) ** 2
        / values.numel()
    )


def _norm(norm: Norm | None, head_dim: int = 0) -> NormSpec | None:
    if norm is None:
        return None
    bias = 0.0 if norm.bias is None else _power(norm.bias)
    return NormSpec(norm.epsilon, gain=_power(norm.gain), bias=bias, per_head=norm.gain.shape[-1] == head_dim)
