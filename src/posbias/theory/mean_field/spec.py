"""`MeanFieldSpec`: what the mean-field theory needs to know of a model, as plain numbers.

Variances are mean squares of the initialised weights, norms are their mean squared gain and their epsilon; nothing is
fitted. Built by `extract.spec_of` from a model, or by hand.
"""

from dataclasses import dataclass

import numpy as np
from jaxtyping import Float64

from posbias.architecture import HeadGroup
from posbias.architecture.absolute import AbsoluteEncoding
from posbias.theory.mean_field.activations import Activation
from posbias.theory.mean_field.bins import Kernel


@dataclass(frozen=True)
class LinearSpec:
    """One linear map y = W x + b."""

    variance: float
    """Mean square of the weights."""
    bias: float = 0.0
    """Mean square of the bias."""


@dataclass(frozen=True)
class NormSpec:
    """A norm y = gain (x - mean?) / sqrt(power + epsilon) + bias; the mean is negligible at large width."""

    epsilon: float
    gain: float = 1.0
    """Mean square of the gain."""
    bias: float = 0.0
    """Mean square of the bias."""

    def scale(self, kernel: Kernel) -> Float64[np.ndarray, "bin"]:
        """What the features at each position are divided by: sqrt(K_ii + epsilon)."""
        return np.sqrt(kernel.same + self.epsilon)

    def forward(self, kernel: Kernel) -> Kernel:
        """Kernel of the normalised features."""
        return kernel.over(self.scale(kernel)).scaled(self.gain, offset=self.bias)

    def backward(self, gradient: Kernel, kernel: Kernel) -> Kernel:
        """Gradient kernel at the norm's input from that at its output; the projection is a 1/d effect."""
        return gradient.over(self.scale(kernel)).scaled(self.gain)


@dataclass(frozen=True)
class HeadNormSpec:
    """A norm on queries or keys."""

    norm: NormSpec
    per_head: bool
    """Over the features of one head (Qwen-3, Gemma-3), or over all heads together (OLMo-2)."""


@dataclass(frozen=True)
class ResidualSpec:
    """How a branch joins the stream: stream <- norm?(kept * stream + added * branch)."""

    kept: float = 1.0
    added: float = 1.0
    norm: NormSpec | None = None
    """Norm of the stream after the addition (the original post-norm transformer, OPT-350M)."""


PLAIN_RESIDUAL = ResidualSpec()


@dataclass(frozen=True, eq=False)
class AttentionSpec:
    """One attention branch."""

    heads: int
    head_dim: int
    scale: float
    """What q.k is multiplied by before the softmax."""
    query: LinearSpec
    key: LinearSpec
    value: LinearSpec
    output: LinearSpec
    groups: tuple[HeadGroup, ...]
    """Heads with their mask and the logits that do not depend on content."""
    rotation: Float64[np.ndarray, "heads pairs"] | None = None
    """Rotary frequencies of each head's feature pairs, radians per position; they act on sampled heads only."""
    query_norm: HeadNormSpec | None = None
    key_norm: HeadNormSpec | None = None
    softcap: float | None = None
    pre_norm: NormSpec | None = None
    post_norm: NormSpec | None = None
    """Norm of the branch before it is added."""
    residual: ResidualSpec = PLAIN_RESIDUAL


@dataclass(frozen=True, eq=False)
class MlpSpec:
    """One MLP branch: down(act(up x)), or down(act(gate x) * (up x))."""

    hidden: int
    activation: Activation
    up: LinearSpec
    down: LinearSpec
    gate: LinearSpec | None = None
    pre_norm: NormSpec | None = None
    post_norm: NormSpec | None = None
    residual: ResidualSpec = PLAIN_RESIDUAL


@dataclass(frozen=True, eq=False)
class LayerSpec:
    """One block; either branch may be absent."""

    attention: AttentionSpec | None
    mlp: MlpSpec | None
    parallel: bool = False
    """Both branches read the block's input; their residuals are then plain."""


@dataclass(frozen=True, eq=False)
class MeanFieldSpec:
    """A decoder at initialisation."""

    width: int
    """Features d of the residual stream."""
    layers: tuple[LayerSpec, ...]
    embedding: float
    """Mean square of the vectors that enter the first block, positions apart (Gemma, Granite: after their scaling)."""
    input_scale: float = 1.0
    """What the network itself multiplies its input by (Granite); `embedding` includes it, the Jacobian's input not."""
    positions: float = 0.0
    """Mean square of a learned position table added to the input; 0 without one."""
    sinusoidal: bool = False
    """Whether fixed sinusoids (sine and cosine of the usual frequencies) are added to the input."""
    added: AbsoluteEncoding | None = None
    """An absolute encoding whose vectors are added to the input (reference models)."""
    embedding_norm: NormSpec | None = None
    final_norm: NormSpec | None = None

    @property
    def input_power(self) -> float:
        """Mean square of the input features, positions included except `added`, before any norm."""
        return self.embedding + self.positions + (0.5 if self.sinusoidal else 0.0)
