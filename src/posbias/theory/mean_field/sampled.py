"""The attention branch from sampled heads: exact in the size of the logits, at the true head size.

Each sample draws the queries and keys of one head with the Grams of the infinite-width limit, applies the model's own
query/key norm, rotation, bias, mask and softmax, and averages A V A' forwards, A' G A plus the query and key paths
backwards. Needed when logits have variance of order 1: query/key norms, very wide models.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated

import numpy as np
from annotated_types import Interval
from jaxtyping import Float32, Float64

from posbias.checks import CELLS
from posbias.errors import UsageError
from posbias.theory.mean_field.bins import MOST_BINS, Kernel, smooth, symmetric_root
from posbias.theory.mean_field.recursion import LEVELS, Level, Setting
from posbias.theory.mean_field.spec import AttentionSpec, NormSpec

FORWARD_SHARE = 8
"""Forward kernels average over many rows and need that many times fewer draws than gradients of one position: with 200
heads both ways the forward pass contributed 0.2 % of noise, the backward pass 5 %."""

BATCH_NUMBERS = 2**20
"""Attention weights held at a time: 4 MB in single precision, several arrays of this size."""

Heads = Float32[np.ndarray, "head position feature"]
Weights = Float32[np.ndarray, "head query key"]
Turns = Float64[np.ndarray, "#head pairs"] | None


@dataclass(frozen=True, eq=False)
class Batch:
    """A few sampled heads."""

    query: Heads
    """Queries after norm, before rotation."""
    key: Heads
    query_root: Float32[np.ndarray, "head position 1"]
    """Divisor of the query norm; 1 without one."""
    key_root: Float32[np.ndarray, "head position 1"]
    attention: Weights
    slope: Weights | float
    """Derivative of the soft cap at the logits; 1 without one."""
    turns: Turns
    """Rotary frequencies of each head."""


@LEVELS.register("sampled")
@dataclass(frozen=True)
class SampledHeads(Level):
    """Any size of logits, by Monte Carlo over heads."""

    heads: Annotated[int, Interval(ge=1, le=CELLS)] = 2000
    """Heads drawn per layer going backwards (>= 1); the noise falls as 1/sqrt(heads), 1.5 % of a value by default."""

    def forward(self, attention: AttentionSpec, x: Kernel, setting: Setting) -> Kernel:
        """The kernel of the branch's output, by sampling."""
        count = _whole_rounds(attention, -(-self.heads // FORWARD_SHARE))
        value = attention.value.forward(setting.width, x).block.astype(np.float32)
        total = np.zeros_like(x.block)
        for batch in _batches(attention, x, count, setting):
            total += _outer(batch.attention @ value, batch.attention)
        factor = attention.output.variance * attention.heads * attention.value_dim / count
        return smooth(_symmetric(total)).scaled(factor, offset=attention.output.bias)

    def backward(self, attention: AttentionSpec, x: Kernel, gradient: Kernel, setting: Setting) -> Kernel:
        """The gradient kernel at the branch's input, by sampling."""
        count = _whole_rounds(attention, self.heads)
        arriving = gradient.block * (attention.output.variance * setting.width)
        half = symmetric_root(arriving).astype(np.float32)
        value = symmetric_root(attention.value.forward(setting.width, x).block).astype(np.float32)
        single = arriving.astype(np.float32)
        paths = [np.zeros_like(x.block) for _ in range(3)]
        for batch in _batches(attention, x, count, setting):
            weights = batch.attention.transpose(0, 2, 1)
            paths[0] += _outer(weights @ single, weights)
            queries, keys = _score_gradients(attention, batch, half, value, setting.generator)
            paths[1] += _outer(queries, queries)
            paths[2] += _outer(keys, keys)
        # The score paths carry their features explicitly.
        by_value, by_query, by_key = (smooth(_symmetric(path * (attention.heads / count))) for path in paths)
        total = by_value.scaled(attention.value_dim).scaled(attention.value.variance)
        return total + by_query.scaled(attention.query.variance) + by_key.scaled(attention.key.variance)


def _whole_rounds(attention: AttentionSpec, heads: int) -> int:
    """As many samples, or more: they take the model's heads in turn, or steep ALiBi heads would count more."""
    return -(-heads // attention.heads) * attention.heads


def _batches(spec: AttentionSpec, x: Kernel, count: int, setting: Setting) -> Iterator[Batch]:
    """`count` sampled heads of a layer, as many at a time as memory allows."""
    if not setting.bins.exact:
        raise UsageError(f"sampled heads take at most {MOST_BINS} positions, got {setting.bins.n_positions}")
    n_positions = len(x.same)
    raw_query, raw_key = (linear.forward(setting.width, x) for linear in (spec.query, spec.key))
    query_half, key_half = (symmetric_root(raw.block).astype(np.float32) for raw in (raw_query, raw_key))
    bias, rotation = _head_logits(spec, n_positions), spec.rotation
    alike = rotation is not None and bool(np.all(rotation == rotation[:1]))
    size = max(1, BATCH_NUMBERS // n_positions**2)
    for first in range(0, count, size):
        heads = np.arange(first, min(first + size, count))
        shape = (len(heads), n_positions, spec.head_dim)
        drawn_query = np.matmul(query_half, _normal(setting.generator, shape))
        query, query_root = _normed(drawn_query, raw_query, spec.query_norm)
        key, key_root = _normed(np.matmul(key_half, _normal(setting.generator, shape)), raw_key, spec.key_norm)
        turns = None if rotation is None else rotation[:1] if alike else rotation[heads % spec.heads]
        logits = np.matmul(_rotated(query, turns, 1), _rotated(key, turns, 1).transpose(0, 2, 1))
        logits *= np.float32(spec.scale)
        slope: Weights | float = 1.0
        if spec.softcap is not None:
            capped = np.tanh(logits / np.float32(spec.softcap))
            logits, slope = capped * np.float32(spec.softcap), 1 - capped**2
        logits += bias[heads % len(bias)]
        yield Batch(query, key, query_root, key_root, _softmax(logits), slope, turns)


def _score_gradients(
    spec: AttentionSpec,
    batch: Batch,
    half: Float32[np.ndarray, "p p"],
    value: Float32[np.ndarray, "p p"],
    generator: np.random.Generator,
) -> tuple[Heads, Heads]:
    """Gradients at the raw queries and keys of each head, for one drawn gradient and one drawn value each."""
    shape = (*batch.query.shape[:2], spec.value_dim)
    outgoing = np.matmul(half, _normal(generator, shape))
    values = np.matmul(value, _normal(generator, shape))
    pull = batch.attention * np.matmul(outgoing, values.transpose(0, 2, 1))
    pull -= batch.attention * pull.sum(axis=2, keepdims=True)
    pull *= np.float32(spec.scale)
    pull *= batch.slope
    queries = np.matmul(pull, _rotated(batch.key, batch.turns, 1))
    keys = np.matmul(pull.transpose(0, 2, 1), _rotated(batch.query, batch.turns, 1))
    return (
        _through_norm(_rotated(queries, batch.turns, -1), batch.query, batch.query_root, spec.query_norm),
        _through_norm(_rotated(keys, batch.turns, -1), batch.key, batch.key_root, spec.key_norm),
    )


def _normal(generator: np.random.Generator, shape: tuple[int, ...]) -> Heads:
    return generator.standard_normal(shape, dtype=np.float32)


def _normed(
    features: Heads, raw: Kernel, norm: NormSpec | None
) -> tuple[Heads, Float32[np.ndarray, "head position 1"]]:
    """Queries or keys after their norm, with its divisor (over its gain)."""
    if norm is None:
        return features, np.ones((*features.shape[:2], 1), dtype=np.float32)
    if norm.per_head:
        root = np.sqrt((features**2).mean(axis=2, keepdims=True) + np.float32(norm.epsilon))
    else:  # over all heads together: self-averaging
        root = np.broadcast_to(norm.scale(raw)[None, :, None], (*features.shape[:2], 1))
    root = (root / np.sqrt(norm.gain)).astype(np.float32)
    return features / root, root


def _through_norm(
    gradient: Heads, normed: Heads, root: Float32[np.ndarray, "head position 1"], norm: NormSpec | None
) -> Heads:
    """Gradient at the raw features: divided by the norm, without the direction of the features themselves."""
    if norm is None or not norm.per_head:
        return np.asarray(gradient / root)
    along = (gradient * normed).mean(axis=2, keepdims=True) / np.float32(norm.gain)
    return np.asarray((gradient - along * normed) / root)


def _rotated(features: Heads, turns: Turns, sign: int) -> Heads:
    """Queries or keys turned by their position (sign 1) or back (sign -1); features beyond the pairs stay."""
    if turns is None:
        return features
    half = turns.shape[1]
    angle = np.arange(features.shape[1])[None, :, None] * turns[:, None, :]
    cosine, sine = np.cos(angle).astype(np.float32), np.float32(sign) * np.sin(angle).astype(np.float32)
    first, second, unturned = features[..., :half], features[..., half : 2 * half], features[..., 2 * half :]
    return np.concatenate([first * cosine - second * sine, second * cosine + first * sine, unturned], axis=2)


def _head_logits(attention: AttentionSpec, n_positions: int) -> Weights:
    """Logits without content: one matrix if all heads are alike, else one for each head in order."""
    ordered = np.empty((attention.heads, n_positions, n_positions), dtype=np.float32)
    for group in attention.groups:
        ordered[group.heads] = group.masked_logits(n_positions)
    return ordered[:1] if np.all(ordered == ordered[:1]) else ordered


def _softmax(logits: Weights) -> Weights:
    """Row softmax in place."""
    logits -= logits.max(axis=2, keepdims=True)
    np.exp(logits, out=logits)
    logits /= logits.sum(axis=2, keepdims=True)
    return logits


def _outer(
    rows: Float32[np.ndarray, "head position any"], columns: Float32[np.ndarray, "head position any"]
) -> Float64[np.ndarray, "position position"]:
    """sum_h rows_h columns_h', as one matrix product."""
    n_positions = rows.shape[1]
    joined = [side.transpose(1, 0, 2).reshape(n_positions, -1) for side in (rows, columns)]
    return np.asarray(joined[0] @ joined[1].T, dtype=np.float64)


def _symmetric(matrix: Float64[np.ndarray, "p p"]) -> Float64[np.ndarray, "p p"]:
    return np.asarray((matrix + matrix.T) / 2)
