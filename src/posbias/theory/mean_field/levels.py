"""The levels of the theory, as variants: how an attention branch maps kernels forwards and backwards.

Attention is A = C + fluctuation, C the content-free kernel. `value` takes C alone. To first order in the variance of
the logits (`first`) the mean of A shifts, its fluctuation carries energy forward and backward, and gradients also flow
through keys and queries (docs/theory, section 4). Written for general query, key and value Grams, so that norms on
queries and keys, biases and missing pre-norms need no cases. The third level is in sampled.py.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass

import numpy as np

from posbias.registry import Registry
from posbias.theory.mean_field.bins import Bins, Kernel, Matrix, Operator, from_mass, head_operators, smooth
from posbias.theory.mean_field.spec import AttentionSpec

LEVELS: Registry["Level"] = Registry("mean-field level")


@dataclass(frozen=True, eq=False)
class Setting:
    """What a level needs beside the branch: the positions, the width, and a source of randomness."""

    bins: Bins
    width: int
    generator: np.random.Generator


class Level(ABC):
    """How content enters attention."""

    name: str

    @abstractmethod
    def forward(self, attention: AttentionSpec, x: Kernel, setting: Setting) -> Kernel:
        """Kernel of the branch's output from that of its normalised input."""

    @abstractmethod
    def backward(self, attention: AttentionSpec, x: Kernel, gradient: Kernel, setting: Setting) -> Kernel:
        """Gradient kernel at the branch's normalised input from that at its output."""

    def __str__(self) -> str:
        return LEVELS.spell(self)


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
    bins: Bins
    query: Kernel
    key: Averages
    value: Averages

    @classmethod
    def of(cls, operator: Operator, grams: Grams, bins: Bins) -> "Heads":
        """From a layer's Grams."""

        def averages(gram: Kernel) -> Averages:
            once = operator.left(gram.averaged(bins))
            return Averages(gram, once, operator.left(once.T))

        return cls(operator, bins, grams.query, averages(grams.key), averages(grams.value))

    def shift(self) -> Matrix:
        """E A - C = C_ij query_ii [M_ii - m_ij + (key_jj - sum_k C_ik key_kk) / 2]; its products are the dense ones."""
        powers = self.key.gram.same
        below = np.diagonal(self.key.twice)[:, None] - self.key.once
        own = powers[None, :] - self.operator.left(powers[:, None])
        return np.asarray(self.operator.matrix() * self.query.same[:, None] * (below + own / 2))

    def fluctuation(self) -> Matrix:
        """T = C (a o v) C' - (m_a o m_v) C' - C (m_a o m_v)' + M_a o M_v, a the keys and v the values."""
        both = self.operator.average((self.key.gram * self.value.gram).averaged(self.bins))
        mixed = self.operator.left((self.key.once * self.value.once).T)
        return np.asarray(both - mixed - mixed.T + self.key.twice * self.value.twice)

    def spread(self, averages: Averages, weighted: Matrix) -> Kernel:
        """V = a o (C' W C) - B - B' + C' (W o M) C with B = C' (m o (W C)); W = G o query, given as mass."""
        right = self.operator.pull(weighted).T
        crossed = self.operator.pull(averages.once * right)
        rest = self.operator.gather(weighted * averages.twice) - crossed - crossed.T
        return averages.gram * from_mass(self.operator.pull(right), self.bins) + from_mass(rest, self.bins)

    def mixed(self) -> Kernel:
        """E A V A': shifted mean attention on both sides, and the fluctuations' energy."""
        shifted = self.shift() @ self.value.once.T
        return smooth(self.value.twice + shifted + shifted.T) + self.query * smooth(self.fluctuation())


def attention_grams(attention: AttentionSpec, width: int, x: Kernel) -> Grams:
    """Query, key and value Grams from the kernel of the branch's normalised input."""
    query = attention.query.forward(width, x)
    key = attention.key.forward(width, x)
    query = query if attention.query_norm is None else attention.query_norm.norm.forward(query)
    return Grams(
        query=query.scaled(attention.scale**2 * attention.head_dim),
        key=key if attention.key_norm is None else attention.key_norm.norm.forward(key),
        value=attention.value.forward(width, x),
    )


@dataclass(frozen=True)
class _Expansion(Level):
    """Content-free attention, with or without first-order corrections."""

    @property
    def first_order(self) -> bool:
        """Whether the corrections are included."""
        return self.name == "first"

    def forward(self, attention: AttentionSpec, x: Kernel, setting: Setting) -> Kernel:
        """By the expansion."""
        grams, outputs = attention_grams(attention, setting.width, x), []
        for share, operator in head_operators(attention.groups, setting.bins):
            if self.first_order:
                output = Heads.of(operator, grams, setting.bins).mixed()
            else:
                output = smooth(operator.average(grams.value.averaged(setting.bins)))
            outputs.append(output.scaled(share))
        return attention.output.forward(attention.heads * attention.head_dim, _total(outputs))

    def backward(self, attention: AttentionSpec, x: Kernel, gradient: Kernel, setting: Setting) -> Kernel:
        """By the expansion."""
        bins, features = setting.bins, attention.heads * attention.head_dim
        arriving = gradient.scaled(attention.output.variance * setting.width * features)
        grams, paths = attention_grams(attention, setting.width, x), []
        for share, operator in head_operators(attention.groups, bins):
            if self.first_order:
                path = _paths(attention, x, arriving, Heads.of(operator, grams, bins), setting.width)
            else:
                gathered = from_mass(operator.gather(arriving.mass(bins)), bins)
                path = gathered.scaled(attention.value.variance)
            paths.append(path.scaled(share))
        return _total(paths)


def _paths(attention: AttentionSpec, x: Kernel, arriving: Kernel, heads: Heads, width: int) -> Kernel:
    """Value path with shifted and fluctuating attention, key path and query path together."""
    mass, weighted = arriving.mass(heads.bins), (arriving * heads.query).mass(heads.bins)
    shifted = heads.shift().T @ heads.operator.pull(mass).T
    value_path = from_mass(heads.operator.gather(mass) + shifted + shifted.T, heads.bins)
    value_path = value_path + heads.spread(heads.key, weighted)
    key_path = heads.spread(heads.value, weighted)
    query_path = arriving * smooth(heads.fluctuation())
    if attention.key_norm is not None:
        key_path = attention.key_norm.norm.backward(key_path, attention.key.forward(width, x))
    if attention.query_norm is not None:
        query_path = attention.query_norm.norm.backward(query_path, attention.query.forward(width, x))
    return (
        value_path.scaled(attention.value.variance)
        + key_path.scaled(attention.key.variance)
        + query_path.scaled(attention.query.variance * attention.scale**2 * attention.head_dim)
    )


def _total(kernels: list[Kernel]) -> Kernel:
    return sum(kernels[1:], kernels[0])


@LEVELS.register("value")
@dataclass(frozen=True)
class ValueOnly(_Expansion):
    """Attention as if all logits were equal."""


@LEVELS.register("first")
@dataclass(frozen=True)
class FirstOrder(_Expansion):
    """First order in the variance of the logits; good below 0.3."""
