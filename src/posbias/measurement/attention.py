"""What a model's attention looks like, without keeping it: one forward pass per prompt, reduced in blocks of queries.

Kept are sums by layer and head and counts by position, never an array of layers x heads x positions x positions; only
prefix-monotonicity needs one positions x positions array per layer, the mean kernel (docs/theory, section 6).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float, Float64, Int64
from torch import Tensor

from posbias.errors import RunError, UsageError
from posbias.intervals import bootstrap_mean
from posbias.measurement.layer_attention import reduce_layer
from posbias.measurement.prompt import check_prompts
from posbias.models.attention import BLOCK_QUERIES, AttentionInput, AttentionLayer, describe_attention, watch_attention
from posbias.models.model import Model
from posbias.progress import track
from posbias.prompts.prompts import Prompts

KERNEL_POSITIONS = 2048
"""Longest prompts whose mean kernels are kept unless asked for: 16 MB per layer in float32."""
ROUND_OFF = 1e-6
"""Prefix masses are sums of softmaxes computed in float32; a rise below this is not a violation."""


@dataclass(frozen=True, eq=False)
class HeadStatistic:
    """One number per prompt, layer and head."""

    per_prompt: Float64[np.ndarray, "count layers heads"]
    low: Float64[np.ndarray, "layers"]
    """Ends of the 95 % bootstrap interval over prompts of `by_layer`; infinite with a single prompt."""
    high: Float64[np.ndarray, "layers"]

    @property
    def by_head(self) -> Float64[np.ndarray, "layers heads"]:
        """Mean over prompts."""
        return np.asarray(self.per_prompt.mean(axis=0))

    @property
    def by_layer(self) -> Float64[np.ndarray, "layers"]:
        """Mean over prompts and heads."""
        return np.asarray(self.per_prompt.mean(axis=(0, 2)))


@dataclass(frozen=True, eq=False)
class PrefixMonotonicity:
    """How far each layer's mean kernel is from stochastically monotone: F_i+1(k) <= F_i(k), F the mass of keys 0..k."""

    violated: Float64[np.ndarray, "layers"]
    """Share of the triples (i, i+1, k), k < i, whose prefix mass rises, in [0, 1]."""
    gap: Float64[np.ndarray, "layers"]
    """Mean rise F_i+1(k) - F_i(k) over the violated triples, in (0, 1]; 0 where there are none."""


@dataclass(frozen=True, eq=False)
class AttentionStatistics:
    """A model's attention over a set of prompts."""

    distance: HeadStatistic
    """sum_j A_ij (i - j) in positions, >= 0, mean over queries."""
    entropy: HeadStatistic
    """-sum_j A_ij log A_ij / log(visible keys), in [0, 1], mean over the queries that see at least 2 keys."""
    content: HeadStatistic
    """Mean of the content logits at j = i less that at visible j < i; see `attention_statistics`."""
    sink_thresholds: tuple[float, ...]
    sinks_by_layer: Float64[np.ndarray, "thresholds layers n_positions"]
    """Share of the queries that may see j with A_ij > threshold, in [0, 1], mean over heads and prompts."""
    monotonicity: PrefixMonotonicity | None
    """Of the mean attention over heads and prompts; None if left out."""
    row_error: float
    """Largest |sum_j A_ij - 1| met."""
    left_out: tuple[str, ...]
    """What was not computed, and why."""

    @property
    def sinks(self) -> Float64[np.ndarray, "thresholds n_positions"]:
        """Sink score of every position: the mean over layers. Of the last positions few queries speak."""
        return np.asarray(self.sinks_by_layer.mean(axis=1))


def attention_statistics(
    model: Model,
    prompts: Prompts,
    *,
    sink_thresholds: Sequence[float] = (0.2, 0.3),
    block: int = BLOCK_QUERIES,
    monotonicity: bool | None = None,
) -> AttentionStatistics:
    """Distance, entropy, sinks, content logits and prefix-monotonicity of a model's attention.

    Attention is recomputed from what each attention module reads while the model runs, whatever implementation it
    runs, in float32 (float64 for float64 models): in half precision it is that of the same inputs without further
    rounding. Content logits are scale * q.k with the model's own scale and everything but the encoding: after
    projection, bias and q/k norm; for layers with RoPE before the rotation. Pairs a window hides do not count.

    Cost beyond the forward pass: 2 N^2 d flops per layer and prompt and some passes over the N^2 / 2 weights of every
    head. Memory: a block of weights (heads x queries x N) and, for monotonicity, layers x N x N numbers.

    Args:
        model: A model of a family in `posbias.models.attention.RECOMPUTABLE`.
        prompts: Equally long prompts of at least 3 tokens.
        sink_thresholds: In (0, 1), at least one; 0.2 in Wu et al. (arXiv 2502.01951), 0.3 in Gu et al.
        block: Most queries at a time, >= 1; long prompts take fewer.
        monotonicity: Whether to keep mean kernels; by default for prompts up to KERNEL_POSITIONS tokens.

    Returns:
        Means with bootstrap intervals over prompts, and per prompt, layer and head.

    Raises:
        UsageError: another family, or an argument outside its range.
        RunError: attention that is not finite.
    """
    thresholds = _check_thresholds(sink_thresholds)
    if isinstance(block, bool) or not isinstance(block, int) or block < 1:
        raise UsageError(f"block must be a whole number >= 1, got {block!r}")
    if prompts.n_positions < 3:
        raise UsageError(f"attention statistics need prompts of at least 3 positions, got {prompts.n_positions}")
    check_prompts(model, prompts)
    layers = describe_attention(model, n_positions=prompts.n_positions)
    if any(layer.reach == 1 for layer in layers):
        raise UsageError("a window of 1 position leaves attention nothing to choose from; at least 2 is allowed")
    keep = prompts.n_positions <= KERNEL_POSITIONS if monotonicity is None else monotonicity
    accumulators = _Accumulators.empty(model, prompts, layers, thresholds=thresholds, keep_kernels=keep)
    for index, token_ids in enumerate(track(prompts.token_ids, "attention statistics")):
        _add_prompt(accumulators, model, token_ids, block=block, prompt=index)
    return _finish(accumulators)


@dataclass(eq=False)
class _Accumulators:
    """All that is kept while prompts stream by."""

    layers: Sequence[AttentionLayer]
    thresholds: tuple[float, ...]
    heads: Float64[np.ndarray, "statistics count layers heads"]
    """distance, entropy, content."""
    sinks: Float64[np.ndarray, "thresholds layers n_positions"]
    """Summed over prompts."""
    kernels: Float[Tensor, "layers n_positions n_positions"] | None
    """Head means, summed over prompts."""
    row_error: float = 0.0

    @classmethod
    def empty(
        cls,
        model: Model,
        prompts: Prompts,
        layers: Sequence[AttentionLayer],
        *,
        thresholds: tuple[float, ...],
        keep_kernels: bool,
    ) -> "_Accumulators":
        depth, n_positions = len(layers), prompts.n_positions
        kernels = None
        if keep_kernels:
            kernels = torch.zeros(depth, n_positions, n_positions, dtype=_precision(model), device=model.device)
        return cls(
            layers=layers,
            thresholds=thresholds,
            heads=np.zeros((3, prompts.count, depth, layers[0].parts.heads)),
            sinks=np.zeros((len(thresholds), depth, n_positions)),
            kernels=kernels,
        )


@torch.no_grad()
def _add_prompt(
    into: _Accumulators, model: Model, token_ids: Int64[np.ndarray, "n_positions"], *, block: int, prompt: int
) -> None:
    """One forward pass; every layer is reduced where the pass reaches it."""

    def receive(layer: AttentionLayer, given: AttentionInput) -> None:
        index = layer.index
        kernel = None if into.kernels is None else into.kernels[index]
        result = reduce_layer(layer, given, thresholds=into.thresholds, block=block, kernel=kernel)
        numbers = np.stack([result.distance, result.entropy, result.content])
        if not np.all(np.isfinite(numbers)):
            raise RunError(f"attention on prompt {prompt} is not finite, first in layer {index}")
        into.heads[:, prompt, index] = numbers
        into.sinks[:, index] += result.sinks
        into.row_error = max(into.row_error, result.row_error)

    with watch_attention(into.layers, receive, dtype=_precision(model)):
        model.last(model.embed(model.token_tensor([token_ids.tolist()])))


def _finish(kept: _Accumulators) -> AttentionStatistics:
    """Means over prompts, with intervals."""
    count = kept.heads.shape[1]
    distance, entropy, content = (_with_interval(values) for values in kept.heads)
    kernels = kept.kernels
    left_out: tuple[str, ...] = ()
    if kernels is None:
        left_out = (
            f"monotonicity: mean kernels are kept up to {KERNEL_POSITIONS} positions, or with monotonicity=True",
        )
    return AttentionStatistics(
        distance=distance,
        entropy=entropy,
        content=content,
        sink_thresholds=kept.thresholds,
        sinks_by_layer=kept.sinks / count,
        monotonicity=None if kernels is None else prefix_monotonicity(kernels),
        row_error=kept.row_error,
        left_out=left_out,
    )


def prefix_monotonicity(kernels: Float[Tensor, "layers n_positions n_positions"]) -> PrefixMonotonicity:
    """Violations of F_i+1(k) <= F_i(k), F_i(k) = sum_{j <= k} A_ij, over all k < i.

    k = i is left out: there F_i = 1, which no prefix mass can exceed.

    Args:
        kernels: Lower triangular, at least 3 positions, rows up to a factor: a row is divided by its sum in float64,
            which takes out both the number of prompts summed and the softmax's own round-off.
    """
    violated, gap = [], []
    for kernel in kernels:
        mass = kernel.double().cumsum(1)
        mass = mass / mass[:, -1:]
        rise = (mass[1:] - mass[:-1]).tril(-1)  # row i has the triples (i, i+1, k), k < i
        broken = rise > ROUND_OFF
        triples = (len(rise) * (len(rise) - 1)) // 2
        violated.append(float(broken.sum()) / triples)
        gap.append(float(rise[broken].mean()) if bool(broken.any()) else 0.0)
    return PrefixMonotonicity(np.array(violated), np.array(gap))


def _with_interval(per_prompt: Float64[np.ndarray, "count layers heads"]) -> HeadStatistic:
    low, high = bootstrap_mean(per_prompt.mean(axis=2), generator=np.random.default_rng(0))
    return HeadStatistic(per_prompt, low, high)


def _precision(model: Model) -> torch.dtype:
    return torch.float64 if model.dtype == torch.float64 else torch.float32


def _check_thresholds(thresholds: Sequence[float]) -> tuple[float, ...]:
    checked = tuple(float(threshold) for threshold in thresholds)
    if not checked or not all(0 < threshold < 1 for threshold in checked):
        raise UsageError(f"sink_thresholds must be numbers in (0, 1), at least one; got {list(thresholds)}")
    return checked
