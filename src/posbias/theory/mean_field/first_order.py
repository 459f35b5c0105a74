"""The attention branch in the infinite-width limit, to zeroth and first order in the variance of the logits.

Attention is A = C + fluctuation, C the content-free kernel. To first order the mean of A shifts, its fluctuation
carries energy forward and backward, and gradients also flow through keys and queries (docs/theory, section 4). Written
for general query, key and value Grams, so that norms on queries and keys, biases and missing pre-norms need no cases.
"""

from dataclasses import dataclass

import numpy as np
from jaxtyping import Float64

from posbias.theory.mean_field.bins import Bins, Kernel, from_mass, smooth
from posbias.theory.mean_field.mlp import preactivation
from posbias.theory.mean_field.operators import Operator, head_operators
from posbias.theory.mean_field.spec import AttentionSpec, HeadNormSpec

Matrix = Float64[np.ndarray, "bin bin"]


@dataclass(frozen=True, eq=False)
class Grams:
    """Covariances between positions of one feature of the queries, keys and values of a head."""

    query: Kernel
    """Times scale^2 head_dim: a logit's covariance is query_ii' key_jj'."""
    key: Kernel
    value: Kernel
    alike: bool
    """Whether key and value Grams are proportional."""

    @property
    def logit_variance(self) -> float:
        """Variance of a logit at the last position, mean over keys."""
        return float(self.query.same[-1] * self.key.same.mean())


@dataclass(frozen=True, eq=False)
class Means:
    """Attention averages that forward and backward share: m = C a, M = C a C' for keys (a) and values (v)."""

    operator: Operator
    key: Matrix
    value: Matrix
    key_key: Matrix
    value_value: Matrix


def attention_grams(attention: AttentionSpec, width: int, x: Kernel) -> Grams:
    """Query, key and value Grams from the kernel of the branch's normalised input."""
    query = preactivation(attention.query, width, x)
    key = preactivation(attention.key, width, x)
    query = query if attention.query_norm is None else attention.query_norm.norm.forward(query)
    alike = attention.key_norm is None and attention.key.bias == 0 and attention.value.bias == 0
    return Grams(
        query=query.scaled(attention.scale**2 * attention.head_dim),
        key=key if attention.key_norm is None else attention.key_norm.norm.forward(key),
        value=preactivation(attention.value, width, x),
        alike=alike and attention.key.variance > 0,
    )


def attention_forward(attention: AttentionSpec, width: int, x: Kernel, *, bins: Bins, first_order: bool) -> Kernel:
    """Kernel of the branch's output, before any post-norm, from the kernel of its normalised input."""
    grams = attention_grams(attention, width, x)
    total: Kernel | None = None
    for head in head_operators(attention, bins):
        if first_order:
            means = _means(head.operator, grams, bins)
            shifted = _shift(grams, means) @ means.value.T
            output = smooth(means.value_value + shifted + shifted.T)
            output = output + grams.query * smooth(_fluctuation(grams, means, bins))
        else:
            output = smooth(head.operator.average(grams.value.averaged(bins)))
        output = output.scaled(head.share)
        total = output if total is None else total + output
    assert total is not None
    features = attention.heads * attention.head_dim
    return total.scaled(attention.output.variance * features, offset=attention.output.bias)


def attention_backward(
    attention: AttentionSpec, width: int, x: Kernel, gradient: Kernel, *, bins: Bins, first_order: bool
) -> Kernel:
    """Gradient kernel at the branch's normalised input from that at its output (the branch alone, no residual)."""
    features = attention.heads * attention.head_dim
    arriving = gradient.scaled(attention.output.variance * width * features)
    if not first_order:
        mass = arriving.mass(bins)
        gathered = [head.operator.gather(mass) * head.share for head in head_operators(attention, bins)]
        return from_mass(sum(gathered[1:], gathered[0]), bins).scaled(attention.value.variance)
    grams = attention_grams(attention, width, x)
    total: Kernel | None = None
    for head in head_operators(attention, bins):
        paths = _paths(attention, width, x, arriving, grams, _means(head.operator, grams, bins), bins)
        paths = paths.scaled(head.share)
        total = paths if total is None else total + paths
    assert total is not None
    return total


def through_head_norm(norm: HeadNormSpec | None, gradient: Kernel, raw: Kernel) -> Kernel:
    """Gradient kernel before a query or key norm from that after it."""
    return gradient if norm is None else norm.norm.backward(gradient, raw)


def _paths(
    attention: AttentionSpec,
    width: int,
    x: Kernel,
    arriving: Kernel,
    grams: Grams,
    means: Means,
    bins: Bins,
) -> Kernel:
    """Value path with shifted and fluctuating attention, key path, query path, for heads that are alike."""
    weighted = (arriving * grams.query).mass(bins)
    mass = arriving.mass(bins)
    shifted = _shift(grams, means).T @ means.operator.pull(mass).T
    value_path = from_mass(means.operator.gather(mass) + shifted + shifted.T, bins)
    fluctuating = _spread(grams.key, means.key, means.key_key, weighted, means.operator, bins)
    if grams.alike:
        key_path = fluctuating.scaled(attention.value.variance / attention.key.variance)
    else:
        key_path = _spread(grams.value, means.value, means.value_value, weighted, means.operator, bins)
    query_path = arriving * smooth(_fluctuation(grams, means, bins))
    raw_key = preactivation(attention.key, width, x)
    raw_query = preactivation(attention.query, width, x)
    key_path = through_head_norm(attention.key_norm, key_path, raw_key)
    query_path = through_head_norm(attention.query_norm, query_path, raw_query)
    return (
        (value_path + fluctuating).scaled(attention.value.variance)
        + key_path.scaled(attention.key.variance)
        + query_path.scaled(attention.query.variance * attention.scale**2 * attention.head_dim)
    )


def _means(operator: Operator, grams: Grams, bins: Bins) -> Means:
    """m and M for keys and values."""
    key = operator.left(grams.key.averaged(bins))
    value = operator.left(grams.value.averaged(bins))
    return Means(operator, key, value, operator.left(key.T), operator.left(value.T))


def _shift(grams: Grams, means: Means) -> Matrix:
    """E A - C = C_ij query_ii [M_ii - m_ij + (key_jj - sum_k C_ik key_kk) / 2]."""
    diagonal = np.diagonal(means.key_key)[:, None] - means.key
    powers = grams.key.same[None, :] - means.operator.left(grams.key.same[:, None])
    return np.asarray(means.operator.matrix() * grams.query.same[:, None] * (diagonal + powers / 2))


def _fluctuation(grams: Grams, means: Means, bins: Bins) -> Matrix:
    """T = C (a o v) C' - (m_a o m_v) C' - C (m_a o m_v)' + M_a o M_v."""
    mixed = means.operator.left((means.key * means.value).T)
    both = means.operator.average((grams.key * grams.value).averaged(bins))
    return np.asarray(both - mixed - mixed.T + means.key_key * means.value_value)


def _spread(gram: Kernel, mean: Matrix, mean_mean: Matrix, weighted: Matrix, operator: Operator, bins: Bins) -> Kernel:
    """V = a o (C' W C) - B - B' + C' (W o M) C with B = C' (m o (W C)), W given as mass."""
    right = operator.pull(weighted).T
    crossed = operator.pull(mean * right)
    rest = operator.gather(weighted * mean_mean) - crossed - crossed.T
    return gram * from_mass(operator.pull(right), bins) + from_mass(rest, bins)
