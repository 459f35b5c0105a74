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
from posbias.theory.mean_field.spec import AttentionSpec

Matrix = Float64[np.ndarray, "bin bin"]


@dataclass(frozen=True, eq=False)
class Grams:
    """Covariances between positions of one feature of the queries, keys and values of a head."""

    query: Kernel
    """Times scale^2 head_dim: a logit's covariance is query_ii' key_jj'."""
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
    """Heads that are alike: their content-free attention and what it makes of the Grams."""

    operator: Operator
    query: Kernel
    key: Averages
    value: Averages


def attention_grams(attention: AttentionSpec, width: int, x: Kernel) -> Grams:
    """Query, key and value Grams from the kernel of the branch's normalised input."""
    query = preactivation(attention.query, width, x)
    key = preactivation(attention.key, width, x)
    query = query if attention.query_norm is None else attention.query_norm.norm.forward(query)
    return Grams(
        query=query.scaled(attention.scale**2 * attention.head_dim),
        key=key if attention.key_norm is None else attention.key_norm.norm.forward(key),
        value=preactivation(attention.value, width, x),
    )


@dataclass(frozen=True, eq=False)
class Expansion:
    """One attention branch, expanded in the variance of its logits."""

    attention: AttentionSpec
    width: int
    bins: Bins
    first_order: bool
    """Whether to go beyond C."""

    def forward(self, x: Kernel) -> Kernel:
        """Kernel of the branch's output, before any post-norm, from the kernel of its normalised input."""
        grams = attention_grams(self.attention, self.width, x)
        outputs = []
        for head in head_operators(self.attention, self.bins):
            if self.first_order:
                output = self._mixed(self._heads(head.operator, grams))
            else:
                output = smooth(head.operator.average(grams.value.averaged(self.bins)))
            outputs.append(output.scaled(head.share))
        features = self.attention.heads * self.attention.head_dim
        return _total(outputs).scaled(self.attention.output.variance * features, offset=self.attention.output.bias)

    def backward(self, x: Kernel, gradient: Kernel) -> Kernel:
        """Gradient kernel at the branch's normalised input from that at its output (the branch alone, no residual)."""
        features = self.attention.heads * self.attention.head_dim
        arriving = gradient.scaled(self.attention.output.variance * self.width * features)
        grams = attention_grams(self.attention, self.width, x)
        paths = []
        for head in head_operators(self.attention, self.bins):
            if self.first_order:
                path = self._paths(x, arriving, self._heads(head.operator, grams))
            else:
                gathered = from_mass(head.operator.gather(arriving.mass(self.bins)), self.bins)
                path = gathered.scaled(self.attention.value.variance)
            paths.append(path.scaled(head.share))
        return _total(paths)

    def _mixed(self, heads: Heads) -> Kernel:
        """E A V A': shifted mean attention on both sides, and the fluctuations' energy."""
        shifted = _shift(heads) @ heads.value.once.T
        return smooth(heads.value.twice + shifted + shifted.T) + heads.query * smooth(self._fluctuation(heads))

    def _paths(self, x: Kernel, arriving: Kernel, heads: Heads) -> Kernel:
        """Value path with shifted and fluctuating attention, key path and query path together."""
        attention = self.attention
        mass = arriving.mass(self.bins)
        shifted = _shift(heads).T @ heads.operator.pull(mass).T
        weighted = (arriving * heads.query).mass(self.bins)
        value_path = from_mass(heads.operator.gather(mass) + shifted + shifted.T, self.bins)
        value_path = value_path + self._spread(heads.operator, heads.key, weighted)
        key_path = self._spread(heads.operator, heads.value, weighted)
        query_path = arriving * smooth(self._fluctuation(heads))
        if attention.key_norm is not None:
            key_path = attention.key_norm.norm.backward(key_path, preactivation(attention.key, self.width, x))
        if attention.query_norm is not None:
            query_path = attention.query_norm.norm.backward(query_path, preactivation(attention.query, self.width, x))
        return (
            value_path.scaled(attention.value.variance)
            + key_path.scaled(attention.key.variance)
            + query_path.scaled(attention.query.variance * attention.scale**2 * attention.head_dim)
        )

    def _heads(self, operator: Operator, grams: Grams) -> Heads:
        def averages(gram: Kernel) -> Averages:
            once = operator.left(gram.averaged(self.bins))
            return Averages(gram, once, operator.left(once.T))

        return Heads(operator, grams.query, averages(grams.key), averages(grams.value))

    def _fluctuation(self, heads: Heads) -> Matrix:
        """T = C (a o v) C' - (m_a o m_v) C' - C (m_a o m_v)' + M_a o M_v, a the keys and v the values."""
        both = heads.operator.average((heads.key.gram * heads.value.gram).averaged(self.bins))
        mixed = heads.operator.left((heads.key.once * heads.value.once).T)
        return np.asarray(both - mixed - mixed.T + heads.key.twice * heads.value.twice)

    def _spread(self, operator: Operator, averages: Averages, weighted: Matrix) -> Kernel:
        """V = a o (C' W C) - B - B' + C' (W o M) C with B = C' (m o (W C)); W = G o query, given as mass."""
        right = operator.pull(weighted).T
        crossed = operator.pull(averages.once * right)
        rest = operator.gather(weighted * averages.twice) - crossed - crossed.T
        return averages.gram * from_mass(operator.pull(right), self.bins) + from_mass(rest, self.bins)


def _shift(heads: Heads) -> Matrix:
    """E A - C = C_ij query_ii [M_ii - m_ij + (key_jj - sum_k C_ik key_kk) / 2]; its products are the dense ones."""
    powers = heads.key.gram.same
    below = np.diagonal(heads.key.twice)[:, None] - heads.key.once
    own = powers[None, :] - heads.operator.left(powers[:, None])
    return np.asarray(heads.operator.matrix() * heads.query.same[:, None] * (below + own / 2))


def _total(kernels: list[Kernel]) -> Kernel:
    return sum(kernels[1:], kernels[0])
