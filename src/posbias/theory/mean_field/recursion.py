"""Kernels through attention branches and through the whole network, forwards and backwards.

Attention is A = C + fluctuation, C the content-free kernel. The level `value` takes C alone. To first order in the
variance of the logits (`first`) the mean of A shifts, its fluctuation carries energy forward and backward, and
gradients also flow through keys and queries (docs/theory, section 4). Written for general query, key and value Grams,
so that norms on queries and keys, biases and missing pre-norms need no cases.

The level `sampled` is exact in the size of the logits, at the true head size: each sample draws queries and keys of one
head with the Grams of the infinite-width limit, applies the model's own query/key norm, rotation, bias, mask and
softmax, and averages A V A' forwards, A' G A plus the query and key paths backwards. Needed when logits have variance
of order 1: query/key norms, very wide models.

The input kernel says which positions start with equal vectors: different tokens have independent embeddings, equal
tokens the same one; learned positions add their variance at i = j.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

import numpy as np
import torch
from annotated_types import Interval
from jaxtyping import Float, Float64, Int
from torch import Tensor

from posbias.checks import CELLS
from posbias.errors import UsageError
from posbias.models.layout import turned_by
from posbias.registry import Registry, Spelled
from posbias.theory.mean_field.bins import (
    MOST_BINS,
    Bins,
    Kernel,
    Matrix,
    Operator,
    from_mass,
    head_operators,
    smooth,
    symmetric_root,
)
from posbias.theory.mean_field.spec import AttentionSpec, BranchSpec, MeanFieldSpec, NormSpec

LEVELS: Registry["Level"] = Registry("mean-field level")


@dataclass(frozen=True, eq=False)
class Setting:
    """Positions, width and source of randomness, which a level needs beside the branch."""

    bins: Bins
    width: int
    generator: np.random.Generator


class Level(Spelled, ABC):
    """A way in which content enters attention."""

    @abstractmethod
    def forward(self, attention: AttentionSpec, x: Kernel, setting: Setting) -> Kernel:
        """Kernel of the branch's output from that of its normalised input."""

    @abstractmethod
    def backward(self, attention: AttentionSpec, x: Kernel, gradient: Kernel, setting: Setting) -> Kernel:
        """Gradient kernel at the branch's normalised input from that at its output."""


@dataclass(frozen=True, eq=False)
class Grams:
    """Covariances between positions of one feature of the queries, keys and values of a head."""

    query: Kernel
    """Query Gram times scale^2 head_dim, so that a logit's covariance is query_ii' key_jj'."""
    key: Kernel
    value: Kernel

    @property
    def logit_variance(self) -> float:
        """Variance of a logit at the last position, mean over keys."""
        return float(self.query.same[-1] * self.key.same.mean())


@dataclass(frozen=True, eq=False)
class Averages:
    """A Gram a with its attention averages."""

    gram: Kernel
    once: Matrix
    """m = C a."""
    twice: Matrix
    """M = C a C'."""


@dataclass(frozen=True, eq=False)
class Heads:
    """Heads that are alike, with their content-free attention and its averages of the Grams."""

    operator: Operator
    bins: Bins
    query: Kernel
    key: Averages
    value: Averages

    @classmethod
    def of(cls, operator: Operator, grams: Grams, bins: Bins) -> "Heads":
        """The heads of a layer with these Grams."""
        averages = []
        for gram in (grams.key, grams.value):
            once = operator.left(gram.averaged(bins))
            averages.append(Averages(gram, once, operator.left(once.T)))
        return cls(operator, bins, grams.query, *averages)

    def shift(self) -> Matrix:
        """E A - C = C_ij query_ii [M_ii - m_ij + (key_jj - sum_k C_ik key_kk) / 2]; its products are the dense ones."""
        powers = self.key.gram.same
        mean_shift = np.diagonal(self.key.twice)[:, None] - self.key.once
        power_shift = powers[None, :] - self.operator.left(powers[:, None])
        return np.asarray(self.operator.matrix * self.query.same[:, None] * (mean_shift + power_shift / 2))

    def fluctuation(self) -> Matrix:
        """T = C (a o v) C' - (m_a o m_v) C' - C (m_a o m_v)' + M_a o M_v, a the keys and v the values."""
        joint = self.operator.average((self.key.gram * self.value.gram).averaged(self.bins))
        mixed = self.operator.left((self.key.once * self.value.once).T)
        return np.asarray(joint - mixed - mixed.T + self.key.twice * self.value.twice)

    def spread(self, averages: Averages, weighted: Matrix) -> Kernel:
        """V = a o (C' W C) - B - B' + C' (W o M) C with B = C' (m o (W C)); W = G o query, given as mass."""
        right = self.operator.pull(weighted).T
        crossed = self.operator.pull(averages.once * right)
        centring = self.operator.gather(weighted * averages.twice) - crossed - crossed.T
        return averages.gram * from_mass(self.operator.pull(right), self.bins) + from_mass(centring, self.bins)

    def mixed(self) -> Kernel:
        """E A V A': shifted mean attention on both sides, and the fluctuations' energy."""
        shifted = self.shift() @ self.value.once.T
        return smooth(self.value.twice + shifted + shifted.T) + self.query * smooth(self.fluctuation())


def attention_grams(attention: AttentionSpec, width: int, x: Kernel) -> Grams:
    """Query, key and value Grams from the kernel of the branch's normalised input."""
    query = attention.query.forward(width, x)
    key = attention.key.forward(width, x)
    query = query if attention.query_norm is None else attention.query_norm.forward(query)
    return Grams(
        query=query.scaled(attention.scale**2 * attention.head_dim),
        key=key if attention.key_norm is None else attention.key_norm.forward(key),
        value=attention.value.forward(width, x),
    )


@dataclass(frozen=True)
class _Expansion(Level):
    """Content-free attention, with or without first-order corrections."""

    first_order: ClassVar[bool] = False

    def forward(self, attention: AttentionSpec, x: Kernel, setting: Setting) -> Kernel:
        grams, outputs = attention_grams(attention, setting.width, x), []
        for share, operator in head_operators(attention.mask, attention.encoding, attention.heads, setting.bins):
            if self.first_order:
                output = Heads.of(operator, grams, setting.bins).mixed()
            else:
                output = smooth(operator.average(grams.value.averaged(setting.bins)))
            outputs.append(output.scaled(share))
        total = sum(outputs[1:], outputs[0])
        return attention.output.forward(attention.heads * attention.value_dim, total)

    def backward(self, attention: AttentionSpec, x: Kernel, gradient: Kernel, setting: Setting) -> Kernel:
        bins, features = setting.bins, attention.heads * attention.value_dim
        arriving = gradient.scaled(attention.output.variance * setting.width * features)
        grams, paths = attention_grams(attention, setting.width, x), []
        for share, operator in head_operators(attention.mask, attention.encoding, attention.heads, bins):
            if self.first_order:
                path = _paths(attention, x, arriving, Heads.of(operator, grams, bins), setting.width)
            else:
                gathered = from_mass(operator.gather(arriving.mass(bins)), bins)
                path = gathered.scaled(attention.value.variance)
            paths.append(path.scaled(share))
        return sum(paths[1:], paths[0])


def _paths(attention: AttentionSpec, x: Kernel, arriving: Kernel, heads: Heads, width: int) -> Kernel:
    """Value path with shifted and fluctuating attention, together with the key path and the query path."""
    mass, weighted = arriving.mass(heads.bins), (arriving * heads.query).mass(heads.bins)
    shifted = heads.shift().T @ heads.operator.pull(mass).T
    value_path = from_mass(heads.operator.gather(mass) + shifted + shifted.T, heads.bins)
    value_path = value_path + heads.spread(heads.key, weighted)
    key_path = heads.spread(heads.value, weighted)
    query_path = arriving * smooth(heads.fluctuation())
    if attention.key_norm is not None:
        key_path = attention.key_norm.backward(key_path, attention.key.forward(width, x))
    if attention.query_norm is not None:
        query_path = attention.query_norm.backward(query_path, attention.query.forward(width, x))
    return (
        value_path.scaled(attention.value.variance)
        + key_path.scaled(attention.key.variance)
        + query_path.scaled(attention.query.variance * attention.scale**2 * attention.head_dim)
    )


@LEVELS.register("value")
@dataclass(frozen=True)
class ValueOnly(_Expansion):
    """Attention as if all logits were equal."""


@LEVELS.register("first")
@dataclass(frozen=True)
class FirstOrder(_Expansion):
    """First order in the variance of the logits; good below 0.3."""

    first_order: ClassVar[bool] = True


def input_kernel(spec: MeanFieldSpec, bins: Bins, *, token_ids: Int[np.ndarray, "n_positions"] | None = None) -> Kernel:
    """Kernel of the vectors entering the first block (before the embedding norm, if any); no ids: all tokens differ."""
    equal = np.zeros((bins.count, bins.count)) if token_ids is None else _equal_tokens(token_ids, bins)
    block = spec.embedding * equal
    powers = np.full(bins.count, spec.embedding + spec.positions)
    if bins.exact:
        np.fill_diagonal(block, powers)
    return Kernel(block, powers)


def _equal_tokens(token_ids: Int[np.ndarray, "n_positions"], bins: Bins) -> Float64[np.ndarray, "bin bin"]:
    """Share of pairs of different positions from two bins that hold the same token."""
    from scipy.sparse import csr_array

    _, token = np.unique(token_ids, return_inverse=True)
    bin_of = np.repeat(np.arange(bins.count), bins.sizes)
    counts = csr_array((np.ones(len(token)), (bin_of, token)), shape=(bins.count, int(token.max()) + 1))
    counts.sum_duplicates()
    pairs: Any = (counts @ counts.T).toarray()
    possible = bins.sizes[:, None] * bins.sizes[None, :].astype(np.float64)
    inner = np.diagonal(pairs) - bins.sizes
    np.fill_diagonal(pairs, inner)
    np.fill_diagonal(possible, np.maximum(np.diagonal(possible) - bins.sizes, 1))
    return np.asarray(pairs / possible)


@dataclass(frozen=True, eq=False)
class Branch:
    """One branch as it was run, with its input and its output."""

    spec: BranchSpec
    stream: Kernel
    """Residual stream that the branch read."""
    x: Kernel
    """The branch's input: that stream after the pre-norm."""
    output: Kernel
    """Before any post-norm."""


@dataclass(frozen=True, eq=False)
class Forward:
    """All kernels of a forward pass."""

    entry: Kernel
    """Input vectors, before an embedding norm."""
    steps: tuple[tuple[Branch, ...], ...]
    """Branches that read the same stream together: two with a parallel residual."""
    final: Kernel
    """Residual stream after the last block."""


def run_forward(spec: MeanFieldSpec, entry: Kernel, level: Level, setting: Setting) -> Forward:
    """Push the input kernel through all blocks."""
    stream, steps = _normed(spec.embedding_norm, entry), []
    for layer in spec.layers:
        for members in layer.steps:
            branches, joined = [], stream
            for part in members:
                x = _normed(part.pre_norm, stream)
                if isinstance(part, AttentionSpec):
                    output = level.forward(part, x, setting)
                else:
                    output = part.forward(setting.width, x)
                branches.append(Branch(part, stream, x, output))
                joined = joined + _normed(part.post_norm, output)
            steps.append(tuple(branches))
            stream = joined
    return Forward(entry, tuple(steps), stream)


def run_backward(spec: MeanFieldSpec, forward: Forward, level: Level, setting: Setting) -> Kernel:
    """Gradient kernel at the input, of a random unit-variance functional of the last position's output."""
    count = setting.bins.count
    start = np.zeros((count, count))
    start[-1, -1] = 1.0
    gradient = _pulled(spec.final_norm, Kernel(start, np.diagonal(start).copy()), forward.final)
    for step in reversed(forward.steps):
        above = gradient
        for branch in step:
            part = branch.spec
            pulled = _pulled(part.post_norm, above, branch.output)
            if isinstance(part, AttentionSpec):
                pulled = level.backward(part, branch.x, pulled, setting)
            else:
                pulled = part.backward(setting.width, branch.x, pulled)
            gradient = gradient + _pulled(part.pre_norm, pulled, branch.stream)
    return _pulled(spec.embedding_norm, gradient, forward.entry).scaled(spec.input_scale**2)


def _normed(norm: NormSpec | None, kernel: Kernel) -> Kernel:
    return kernel if norm is None else norm.forward(kernel)


def _pulled(norm: NormSpec | None, gradient: Kernel, kernel: Kernel) -> Kernel:
    return gradient if norm is None else norm.backward(gradient, kernel)


FORWARD_SHARE = 8
"""Forward kernels average over many rows and need that many times fewer draws than gradients of one position: with 200
heads both ways the forward pass contributed 0.2 % of noise, the backward pass 5 %."""

BATCH_NUMBERS = 2**20
"""Attention weights held at a time: 4 MB in single precision, several arrays of this size."""

HeadFeatures = Float[Tensor, "head position feature"]
Weights = Float[Tensor, "head query key"]


@LEVELS.register("sampled")
@dataclass(frozen=True)
class SampledHeads(Level):
    """Any size of logits, by Monte Carlo over heads."""

    heads: Annotated[int, Interval(ge=1, le=CELLS)] = 2000
    """Heads drawn per layer going backwards (>= 1); the noise falls as 1/sqrt(heads), 1.5 % of a value by default."""

    @torch.no_grad()
    def forward(self, attention: AttentionSpec, x: Kernel, setting: Setting) -> Kernel:
        """The kernel of the branch's output, by sampling."""
        count = _whole_rounds(attention, -(-self.heads // FORWARD_SHARE))
        value = _single(attention.value.forward(setting.width, x).block)
        total = np.zeros_like(x.block)
        for _, _, weights in _batches(attention, x, count, setting):
            total += _outer(weights @ value, weights)
        factor = attention.output.variance * attention.heads * attention.value_dim / count
        return smooth((total + total.T) / 2).scaled(factor, offset=attention.output.bias)

    def backward(self, attention: AttentionSpec, x: Kernel, gradient: Kernel, setting: Setting) -> Kernel:
        """The gradient kernel at the branch's input, by sampling; queries and keys by automatic differentiation."""
        count = _whole_rounds(attention, self.heads)
        arriving = gradient.block * (attention.output.variance * setting.width)
        half, single = _single(symmetric_root(arriving)), _single(arriving)
        value_half = _single(symmetric_root(attention.value.forward(setting.width, x).block))
        paths = [np.zeros_like(x.block) for _ in range(3)]
        for query, key, weights in _batches(attention, x, count, setting):
            pulled = weights.detach().transpose(1, 2)
            paths[0] += _outer(pulled @ single, pulled)
            shape = (*query.shape[:2], attention.value_dim)
            outgoing, values = (root @ _normal(setting.generator, shape) for root in (half, value_half))
            reached = torch.autograd.grad((weights * (outgoing @ values.transpose(1, 2))).sum(), (query, key))
            for path, features in zip(paths[1:], reached, strict=True):
                path += _outer(features, features)
        # The score paths carry their features explicitly.
        by_value, by_query, by_key = (smooth((path + path.T) * (attention.heads / count / 2)) for path in paths)
        total = by_value.scaled(attention.value_dim).scaled(attention.value.variance)
        return total + by_query.scaled(attention.query.variance) + by_key.scaled(attention.key.variance)


def _whole_rounds(attention: AttentionSpec, heads: int) -> int:
    """As many samples, or more: they take the model's heads in turn, or steep ALiBi heads would count more."""
    return -(-heads // attention.heads) * attention.heads


def _batches(
    spec: AttentionSpec, x: Kernel, count: int, setting: Setting
) -> Iterator[tuple[HeadFeatures, HeadFeatures, Weights]]:
    """`count` sampled heads of a layer, as many at a time as memory allows: raw queries and keys, and attention."""
    if not setting.bins.exact:
        raise UsageError(f"sampled heads take at most {MOST_BINS} positions, got {setting.bins.n_positions}")
    n_positions = len(x.same)
    raw = [linear.forward(setting.width, x) for linear in (spec.query, spec.key)]
    halves = [_single(symmetric_root(kernel.block)) for kernel in raw]
    position = np.arange(n_positions)
    logits = spec.encoding.pair_logits(position, position, spec.heads)
    bias = _single(np.where(spec.mask.visible(n_positions), logits, -np.inf))  # without content, by head in order
    bias = bias[:1] if bool((bias == bias[:1]).all()) else bias
    size = max(1, BATCH_NUMBERS // n_positions**2)
    for first in range(0, count, size):
        heads = np.arange(first, min(first + size, count))
        shape = (len(heads), n_positions, spec.head_dim)
        query, key = ((half @ _normal(setting.generator, shape)).requires_grad_() for half in halves)
        norms = zip((query, key), raw, (spec.query_norm, spec.key_norm), strict=True)
        turned = [_normed_heads(*parts) for parts in norms]
        if spec.rotation is not None:
            angle = torch.from_numpy(position[:, None] * spec.rotation)
            turned = [turned_by(features, angle.cos(), angle.sin()) for features in turned]
        scores = (turned[0] * spec.scale) @ turned[1].transpose(1, 2)
        if spec.softcap is not None:
            scores = torch.tanh(scores / spec.softcap) * spec.softcap
        yield query, key, torch.softmax(scores + bias[heads % len(bias)], dim=-1)


def _single(values: Float64[np.ndarray, "..."]) -> Float[Tensor, "..."]:
    return torch.from_numpy(values.astype(np.float32))


def _normal(generator: np.random.Generator, shape: tuple[int, ...]) -> HeadFeatures:
    return torch.from_numpy(generator.standard_normal(shape, dtype=np.float32))


def _normed_heads(features: HeadFeatures, raw: Kernel, norm: NormSpec | None) -> HeadFeatures:
    """Queries or keys after their norm; over all heads together its divisor is that of the kernel."""
    if norm is None:
        return features
    if not norm.per_head:
        return features * _single(np.sqrt(norm.gain) / norm.scale(raw))[:, None]
    size = features.square().mean(-1, keepdim=True) + norm.epsilon
    return features * float(np.sqrt(norm.gain)) * size.rsqrt()


def _outer(
    rows: Float[Tensor, "head position any"], columns: Float[Tensor, "head position any"]
) -> Float64[np.ndarray, "position position"]:
    """sum_h rows_h columns_h', as one matrix product."""
    joined = [side.transpose(0, 1).flatten(1) for side in (rows, columns)]
    return np.asarray((joined[0] @ joined[1].T).double().numpy())
