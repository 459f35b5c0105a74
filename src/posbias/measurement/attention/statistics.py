"""Statistics of a model's attention over prompts, each with its definition and range.

A number that depends on prompts is kept per prompt if it is small, and carries a 95 % interval over prompts, whose ends
are infinite with a single prompt.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np
from jaxtyping import Float, Float64, Int64

from posbias.errors import UsageError
from posbias.statistics import Interval, mean_ends, mean_of

MAP_CELLS = 128
"""Side of the mean kernels in a picture, and in a record unless they are saved whole."""
Statistic = TypeVar("Statistic", bound="PerPrompt")


@dataclass(frozen=True, eq=False)
class PerPrompt(ABC):
    """A statistic per prompt, and its mean over prompts with an interval."""

    per_prompt: Float64[np.ndarray, "count *axes"]
    low: Float64[np.ndarray, "*points"]
    """Ends of the pointwise interval of `value`."""
    high: Float64[np.ndarray, "*points"]
    most: float
    """The largest value that the truth can have: 1 for a share."""

    @property
    @abstractmethod
    def value(self) -> Float64[np.ndarray, "*points"]:
        """Mean over prompts, and over heads if there is a number for every head."""

    @property
    def overall(self) -> Interval:
        """Mean over prompts of the mean over everything else, with its 95 % interval over prompts."""
        means = self.per_prompt.reshape(len(self.per_prompt), -1).mean(axis=1)
        return mean_of(means).interval(least=0.0 if means.min() >= 0 else -np.inf, most=self.most)

    def as_share(self: Statistic) -> Statistic:
        """The statistic of a share, whose interval ends at 1; an open end stays open."""
        high = np.maximum(np.minimum(self.high, 1.0), self.value)
        return replace(self, high=np.where(np.isfinite(self.high), high, self.high), most=1.0)


@dataclass(frozen=True, eq=False)
class PromptMean(PerPrompt):
    """An array of shares, in [0, 1], per prompt and its mean over prompts."""

    most: float = 1.0

    @classmethod
    def of(cls, per_prompt: Float64[np.ndarray, "count *axes"]) -> "PromptMean":
        """The statistic of these values, with its interval."""
        return cls(per_prompt, *mean_ends(per_prompt, least=0.0, most=1.0))

    @property
    def value(self) -> Float64[np.ndarray, "*axes"]:
        """Mean over prompts."""
        return np.asarray(self.per_prompt.mean(axis=0))


@dataclass(frozen=True, eq=False)
class HeadStatistic(PerPrompt):
    """One number per prompt, layer and head, [count layers heads]; `low` and `high` are the interval of `by_layer`."""

    most: float = np.inf

    @classmethod
    def of(cls, per_prompt: Float64[np.ndarray, "count layers heads"]) -> "HeadStatistic":
        """The statistic of these values, with its interval."""
        low, high = mean_ends(per_prompt.mean(axis=2), least=0.0 if per_prompt.min() >= 0 else -np.inf)
        return cls(per_prompt, low, high)

    @property
    def by_head(self) -> Float64[np.ndarray, "layers heads"]:
        """Mean over prompts."""
        return np.asarray(self.per_prompt.mean(axis=0))

    @property
    def by_layer(self) -> Float64[np.ndarray, "layers"]:
        """Mean over prompts and heads."""
        return np.asarray(self.per_prompt.mean(axis=(0, 2)))

    @property
    def value(self) -> Float64[np.ndarray, "layers"]:
        """The same as `by_layer`."""
        return self.by_layer


@dataclass(frozen=True, eq=False)
class ContentLogits:
    """Content logits: scale * q_i.k_j with the model's own scale and without its positions.

    Taken after projection, bias, clamp and q/k norm; before rotation, soft cap and ALiBi. Pairs a window hides do not
    count.
    """

    diagonal: HeadStatistic
    """Mean at j = i."""
    off_diagonal: HeadStatistic
    """Mean at visible j < i."""
    scale: Float64[np.ndarray, "layers"]

    @property
    def difference(self) -> HeadStatistic:
        """Diagonal less off-diagonal mean: the c of "constant + diagonal" content (docs/theory, section 1)."""
        return HeadStatistic.of(self.diagonal.per_prompt - self.off_diagonal.per_prompt)

    @property
    def published(self) -> HeadStatistic:
        """`difference` of q.k itself, without the scale: what the code of arXiv 2602.16837 measures."""
        return HeadStatistic.of(self.difference.per_prompt / self.scale[:, None])


@dataclass(frozen=True, eq=False)
class MeanSimilarity:
    """`Similarity` of the content logits' mean over prompts, as published; computed once, so without an interval."""

    diagonal: Float64[np.ndarray, "layers heads"]
    off_diagonal: Float64[np.ndarray, "layers heads"]
    diagonal_outside: Float64[np.ndarray, "layers heads"]
    off_diagonal_outside: Float64[np.ndarray, "layers heads"]


@dataclass(frozen=True, eq=False)
class Similarity:
    """How concentrated content logits are: 1 - entropy / log(199) of their histogram over 199 equal bins, in [0, 1].

    The bins run from the 0.5 % to the 99.5 % quantile of all visible content logits of all layers and heads together,
    so a head's similarity is relative to the whole model's range. 1: all in one bin; 0: spread evenly. The model's own
    scale drops out where all layers share it.
    """

    diagonal: HeadStatistic
    """Similarity of the entries j = i of each prompt."""
    off_diagonal: HeadStatistic
    """Similarity of the visible entries j < i of each prompt."""
    diagonal_outside: HeadStatistic
    """Share of the diagonal entries outside the bins, which the histogram leaves out; at 1 the similarity is 0."""
    off_diagonal_outside: HeadStatistic
    edges: Float64[np.ndarray, "count 2"]
    of_mean: MeanSimilarity | None
    """Similarity of the mean content logits over prompts; None if those were not kept."""

    def __post_init__(self) -> None:
        for name in ("diagonal", "off_diagonal", "diagonal_outside", "off_diagonal_outside"):
            object.__setattr__(self, name, getattr(self, name).as_share())


@dataclass(frozen=True, eq=False)
class PrefixMonotonicity:
    """Distance of kernels from stochastic monotonicity, F_i+1(k) <= F_i(k), F the mass of keys 0..k."""

    violated: Float64[np.ndarray, "layers"]
    """Share of the triples (i, i+1, k), k < i, whose prefix mass rises, in [0, 1]."""
    gap: Float64[np.ndarray, "layers"]
    """Mean rise F_i+1(k) - F_i(k) over the violated triples, in (0, 1]; 0 if there are none."""


@dataclass(frozen=True, eq=False)
class Monotonicity:
    """Prefix-monotonicity of each prompt's attention (mean over heads) and of the mean over prompts."""

    violated: PromptMean
    """Per prompt and layer, as in `PrefixMonotonicity`."""
    gap: PromptMean
    of_mean: PrefixMonotonicity | None
    """Monotonicity of the mean kernel over prompts; None if it was not kept position by position."""


@dataclass(frozen=True, eq=False)
class MeanKernels:
    """Attention averaged over prompts and heads, position by position or in cells of neighbouring positions.

    An entry is the mean over the queries of its row's cell of the sum over the keys of its column's cell, so rows of
    `mean` sum to 1, or to what a learned sink leaves. As measured, position p lies in cell p * cells // N.
    """

    mean: Float[np.ndarray, "layers cells cells"]
    squared: Float[np.ndarray, "layers cells cells"]
    """Mean of A_ij^2, each head squared first: rows sum to the mean participation sum_j A_ij^2, in (0, 1]."""
    bounds: Int64[np.ndarray, "edges"]
    """First position of each cell, and N."""

    @property
    def n_positions(self) -> int:
        """Positions of every prompt."""
        return int(self.bounds[-1])

    @property
    def complete(self) -> bool:
        """True if every pair of positions has its own entry."""
        return bool(self.mean.shape[-1] == self.n_positions)

    def coarser(self, cells: int) -> "MeanKernels":
        """The kernels in fewer cells, each of them a run of these: cell k of K goes to cell k * cells // K.

        If `cells` does not divide K, runs differ by one cell, and `bounds` says where each begins.
        """
        present = self.mean.shape[-1]
        if not 1 <= cells <= present:
            raise UsageError(f"kernels of {present} cells cannot be drawn in {cells}; allowed: 1 to {present}")
        cell = np.arange(present) * cells // present
        columns = (np.arange(cells)[:, None] == cell).astype(self.mean.dtype)  # [cells present]
        queries, cell_pairs = np.diff(self.bounds), (present, present)
        rows = columns * queries / (columns * queries).sum(1, keepdims=True)

        def merged(kernel: Float[np.ndarray, "*layers fine fine"]) -> Float[np.ndarray, "*layers cells cells"]:
            # Matrix by matrix: a product of all of them would copy them all in float64.
            matrices = [(rows @ matrix @ columns.T).astype(kernel.dtype) for matrix in kernel.reshape(-1, *cell_pairs)]
            return np.stack(matrices).reshape(*kernel.shape[:-2], cells, cells)

        first = np.searchsorted(cell, np.arange(cells + 1))
        return MeanKernels(merged(self.mean), merged(self.squared), self.bounds[first])

    def drawn(self) -> "MeanKernels":
        """The kernels in at most MAP_CELLS cells, in runs as equal as can be, or a picture would have stripes."""
        present = self.mean.shape[-1]
        run = -(-present // MAP_CELLS)
        return self.coarser(min(present, MAP_CELLS) if self.complete else -(-present // run))


@dataclass(frozen=True, eq=False)
class MixingStatistics:
    """Size of the attention branch a beside the stream x it is added to (`posbias.measurement.prompt`)."""

    tokens: PromptMean
    """Per prompt and layer: mean over tokens of |a| / (|x| + |a|)."""
    frobenius: PromptMean
    """Per prompt and layer: ||a||_F / (||x||_F + ||a||_F)."""
    by_position: Float64[np.ndarray, "layers n_positions"]
    """Mean over prompts of |a| / (|x| + |a|) at every position."""
