"""The three levels of the theory, as variants: how an attention branch maps kernels forwards and backwards."""

from abc import ABC, abstractmethod
from dataclasses import dataclass

import numpy as np

from posbias.checks import check_whole
from posbias.errors import UsageError
from posbias.registry import Registry
from posbias.theory.mean_field.bins import MOST_BINS, Bins, Kernel
from posbias.theory.mean_field.first_order import Expansion
from posbias.theory.mean_field.sampled import HeadSampler
from posbias.theory.mean_field.spec import AttentionSpec

FORWARD_SHARE = 8
"""Forward kernels average over many rows and need that many times fewer heads than gradients of one position: with 200
heads both ways the forward pass contributed 0.2 % of noise, the backward pass 5 %."""
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


@dataclass(frozen=True)
class _Expansion(Level):
    """Content-free attention, with or without first-order corrections."""

    @property
    def first_order(self) -> bool:
        """Whether the corrections are included."""
        return self.name == "first"

    def forward(self, attention: AttentionSpec, x: Kernel, setting: Setting) -> Kernel:
        """By the expansion."""
        return Expansion(attention, setting.width, setting.bins, self.first_order).forward(x)

    def backward(self, attention: AttentionSpec, x: Kernel, gradient: Kernel, setting: Setting) -> Kernel:
        """By the expansion."""
        return Expansion(attention, setting.width, setting.bins, self.first_order).backward(x, gradient)


@LEVELS.register("value")
@dataclass(frozen=True)
class ValueOnly(_Expansion):
    """Attention as if all logits were equal."""


@LEVELS.register("first")
@dataclass(frozen=True)
class FirstOrder(_Expansion):
    """First order in the variance of the logits; good below 0.3."""


@LEVELS.register("sampled")
@dataclass(frozen=True)
class SampledHeads(Level):
    """Any size of logits, by Monte Carlo over heads."""

    heads: int = 2000
    """Heads drawn per layer going backwards (>= 1); the noise falls as 1/sqrt(heads), 1.5 % of a value by default."""

    def __post_init__(self) -> None:
        check_whole("sampled: heads", self.heads, least=1)

    def forward(self, attention: AttentionSpec, x: Kernel, setting: Setting) -> Kernel:
        """By sampling."""
        return self._sampler(attention, setting, -(-self.heads // FORWARD_SHARE)).forward(x)

    def backward(self, attention: AttentionSpec, x: Kernel, gradient: Kernel, setting: Setting) -> Kernel:
        """By sampling."""
        return self._sampler(attention, setting, self.heads).backward(x, gradient)

    def _sampler(self, attention: AttentionSpec, setting: Setting, heads: int) -> HeadSampler:
        if not setting.bins.exact:
            raise UsageError(f"sampled heads take at most {MOST_BINS} positions, got {setting.bins.n_positions}")
        # Samples take the model's heads in turn: whole rounds, or steep ALiBi heads would count more than shallow ones.
        rounds = -(-heads // attention.heads)
        return HeadSampler(attention, setting.width, rounds * attention.heads, setting.generator)
