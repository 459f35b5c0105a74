"""Statistics of a model's attention over prompts, each with its definition and range, and `AttentionOptions`.

A number that depends on prompts is kept per prompt if it is small, and carries a 95 % interval over prompts, whose ends
are infinite with a single prompt.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Annotated, Any

import numpy as np
from jaxtyping import Float, Float64, Int64

from posbias.checks import check_size, check_whole, checked
from posbias.display.showing import Series, Shown
from posbias.errors import UsageError
from posbias.limits import AT_ONCE, CELLS
from posbias.memory import Bytes, show_bytes
from posbias.registry import split_numbers
from posbias.runs.caveats import Caveat, caveat_facts, caveat_text
from posbias.runs.records import Record
from posbias.runs.results import Answering
from posbias.statistics import Interval, mean_ends, mean_of


@dataclass(frozen=True, eq=False)
class HeadStatistic:
    """One number per prompt, layer and head."""

    per_prompt: Float64[np.ndarray, "count layers heads"]
    low: Float64[np.ndarray, "layers"]
    """Ends of the interval of `by_layer`."""
    high: Float64[np.ndarray, "layers"]

    @classmethod
    def of(cls, per_prompt: Float64[np.ndarray, "count layers heads"]) -> "HeadStatistic":
        """The statistic of these values, with its interval."""
        low, high = mean_ends(per_prompt.mean(axis=2), least=0.0 if per_prompt.min() >= 0 else -np.inf)
        return cls(per_prompt, low, high)

    def as_share(self) -> "HeadStatistic":
        """The statistic of a share, whose interval ends at 1; an open end stays open."""
        high = np.maximum(np.minimum(self.high, 1.0), self.by_layer)
        return replace(self, high=np.where(np.isfinite(self.high), high, self.high))

    @property
    def by_head(self) -> Float64[np.ndarray, "layers heads"]:
        """Mean over prompts."""
        return np.asarray(self.per_prompt.mean(axis=0))

    @property
    def by_layer(self) -> Float64[np.ndarray, "layers"]:
        """Mean over prompts and heads."""
        return np.asarray(self.per_prompt.mean(axis=(0, 2)))


@dataclass(frozen=True, eq=False)
class PromptMean:
    """An array of shares, in [0, 1], per prompt and its mean over prompts."""

    per_prompt: Float64[np.ndarray, "count *axes"]
    low: Float64[np.ndarray, "*axes"]
    """Ends of the pointwise interval of `value`."""
    high: Float64[np.ndarray, "*axes"]

    @classmethod
    def of(cls, per_prompt: Float64[np.ndarray, "count *axes"]) -> "PromptMean":
        """The statistic of these values, with its interval."""
        return cls(per_prompt, *mean_ends(per_prompt, least=0.0, most=1.0))

    @property
    def value(self) -> Float64[np.ndarray, "*axes"]:
        """Mean over prompts."""
        return np.asarray(self.per_prompt.mean(axis=0))


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
    by_head: Float[np.ndarray, "layers heads cells cells"] | None
    """`mean` for every head; None unless asked for."""
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

        by_head = None if self.by_head is None else merged(self.by_head)
        first = np.searchsorted(cell, np.arange(cells + 1))
        return MeanKernels(merged(self.mean), merged(self.squared), by_head, self.bounds[first])


@dataclass(frozen=True, eq=False)
class MixingStatistics:
    """Size of the attention branch a beside the stream x it is added to (`posbias.measurement.prompt`)."""

    tokens: PromptMean
    """Per prompt and layer: mean over tokens of |a| / (|x| + |a|)."""
    frobenius: PromptMean
    """Per prompt and layer: ||a||_F / (||x||_F + ||a||_F)."""
    by_position: Float64[np.ndarray, "layers n_positions"]
    """Mean over prompts of |a| / (|x| + |a|) at every position."""


@dataclass(frozen=True, eq=False, repr=False)
class AttentionStatistics(Answering):
    """A model's attention over a set of prompts; its picture is of attention distance by layer."""

    distance: HeadStatistic
    """sum_j A_ij (i - j) in positions, >= 0, mean over queries; if a learned sink takes a part, of the rest."""
    even_distance: Float64[np.ndarray, "layers"]
    """Distance of attention that is even over the keys each query sees: the flat line of `distance`."""
    entropy: HeadStatistic
    """-sum_j A_ij log A_ij / log(visible keys), in [0, 1], mean over the queries that see at least 2 keys; even: 1.
    If a learned sink takes a part, of the rest."""
    learned_sink: HeadStatistic | None
    """Share of every row that a learned sink, a place that is no position, takes, in (0, 1), mean over queries; None
    for families without (all except GPT-OSS)."""
    content: ContentLogits
    similarity: Similarity
    sink_thresholds: tuple[float, ...]
    sinks: PromptMean
    """[thresholds, n_positions] per prompt: share of the queries that may see j with A_ij > threshold, in [0, 1], mean
    over layers and heads. Few queries see the last positions."""
    sinks_by_layer: Float64[np.ndarray, "thresholds layers n_positions"]
    """Sinks of every layer, mean over prompts."""
    monotonicity: Monotonicity
    kernels: MeanKernels
    mixing: MixingStatistics
    row_error: float
    """Largest |sum_j A_ij - 1| met, learned sinks counted in."""
    left_out: tuple[Caveat, ...]
    """Statistics that were not kept, or do not apply."""
    caveats: tuple[Caveat, ...]
    """Differences between the model that ran and what its name promises."""
    about: Mapping[str, Any] = field(default_factory=dict)
    """Title, model, prompts and options, as a record describes them."""

    def as_run(self) -> Record:
        """The record that the shell writes of the same statistics, without rollouts."""
        return self.to_record({})

    def to_record(self, arguments: Mapping[str, Any], *, command: str = "") -> Record:
        """The record, with kernels in at most MAP_CELLS cells unless `arguments` ask for `kernels`."""
        arrays = _arrays(self, whole=bool(arguments.get("kernels")))
        scalars = {"sink_thresholds": list(self.sink_thresholds), "row_error": self.row_error, "rollouts": {}}
        scalars |= {"left_out": list(self.left_out), "caveats": list(self.caveats)}
        return Record("attention", dict(arguments), {**self.about, "command": command}, scalars, arrays)

    def __post_init__(self) -> None:
        object.__setattr__(self, "entropy", self.entropy.as_share())
        if self.learned_sink is not None:
            object.__setattr__(self, "learned_sink", self.learned_sink.as_share())

    @property
    def count(self) -> int:
        """Prompts measured."""
        return len(self.distance.per_prompt)

    @property
    def n_positions(self) -> int:
        """Positions of every prompt."""
        return self.kernels.n_positions

    def shown(self) -> Shown:
        """Attention distance of every layer beside even attention's; the means over the whole model, with intervals."""
        distance = _overall(self.distance.per_prompt, most=np.inf)
        even = float(self.even_distance.mean())
        title = (
            f"{self.count} prompts of {self.n_positions} tokens: attention looks back {distance.value:.1f} positions "
            f"on average, even attention {even:.1f}"
        )
        series = (
            Series("mean over heads", self.distance.by_layer, self.distance.low, self.distance.high),
            Series("even attention", self.even_distance),
        )
        layers = np.arange(len(self.even_distance))
        return Shown(title, series, "distance", "layer", layers, unit="positions", facts=self._facts(distance, even))

    def _facts(self, distance: Interval, even: float) -> Mapping[str, str]:
        facts = {
            "attention distance, positions": f"{distance.text('.1f')}; even attention {even:.1f}",
            "entropy, of the largest possible": _overall(self.entropy.per_prompt).text(),
        }
        for number, threshold in enumerate(self.sink_thresholds):
            share = _overall(self.sinks.per_prompt[:, number, :1]).text(".1f", scale=100, unit=" %")
            facts[f"queries that give position 0 more than {threshold:g}"] = share
        facts["attention's share of a layer's output (mixing)"] = _overall(self.mixing.tokens.per_prompt).text()
        left_out = {"left out": "; ".join(map(caveat_text, self.left_out))} if self.left_out else {}
        return facts | left_out | caveat_facts(self.caveats)


MAP_CELLS = 128
"""Side of the kernels in a record unless the kept ones are asked for."""


def _arrays(statistics: AttentionStatistics, *, whole: bool) -> dict[str, np.ndarray]:
    content, similarity, monotonicity = statistics.content, statistics.similarity, statistics.monotonicity
    averaged: dict[str, HeadStatistic | PromptMean] = {
        "distance": statistics.distance,
        "entropy": statistics.entropy,
        "sinks": statistics.sinks,
        **{f"content/{name}": getattr(content, name) for name in ("diagonal", "off_diagonal", "difference")},
        "content/published": content.published,
        **{
            f"similarity/{name}{where}": getattr(similarity, name + where)
            for where in ("", "_outside")
            for name in ("diagonal", "off_diagonal")
        },
        "monotonicity/violated": monotonicity.violated,
        "monotonicity/gap": monotonicity.gap,
        "mixing/tokens": statistics.mixing.tokens,
        "mixing/frobenius": statistics.mixing.frobenius,
    }
    if statistics.learned_sink is not None:
        averaged["learned_sink"] = statistics.learned_sink
    arrays = {
        f"{name}/{part}": getattr(entry, part)
        for name, entry in averaged.items()
        for part in ("per_prompt", "low", "high")
    }
    arrays |= {
        "distance/even": statistics.even_distance,
        "content/scale": content.scale,
        "similarity/edges": similarity.edges,
        "sinks/by_layer": statistics.sinks_by_layer,
        "mixing/by_position": statistics.mixing.by_position,
    }
    for stem, single in (("similarity/of_mean", similarity.of_mean), ("monotonicity/of_mean", monotonicity.of_mean)):
        if single is not None:
            arrays |= {f"{stem}/{name}": values for name, values in vars(single).items()}
    kernels = statistics.kernels if whole else _map(statistics.kernels)
    arrays |= {f"kernels/{name}": getattr(kernels, name) for name in ("mean", "squared", "bounds")}
    return arrays if kernels.by_head is None else {**arrays, "kernels/by_head": kernels.by_head}


def _map(kernels: MeanKernels) -> MeanKernels:
    """The kernels in at most MAP_CELLS cells, merged in runs as equal as can be, or the map would have stripes."""
    kept = kernels.mean.shape[-1]
    run = -(-kept // MAP_CELLS)
    return kernels.coarser(min(kept, MAP_CELLS) if kernels.complete else -(-kept // run))


def _overall(per_prompt: Float64[np.ndarray, "count ..."], *, most: float = 1.0) -> Interval:
    """Mean over prompts of the mean over everything else, with its interval over prompts; by default of a share."""
    return mean_of(per_prompt.reshape(len(per_prompt), -1).mean(axis=1)).interval(least=0.0, most=most)


KERNEL_POSITIONS = 1024
"""Longest prompts whose mean kernels are kept position by position unless asked for: 4 MB each in float32."""
KERNEL_CELLS = 256
"""Side of the mean kernels of longer prompts, in cells of neighbouring positions."""
CONTENT_BYTES = 1 << 29
"""Mean content logits (layers x heads x N x N) are kept without being asked for up to this size: 512 MiB."""
MEMORY_LIMIT = 4 * 10**9
"""Largest size of all kept matrices together, in bytes."""
FEWEST_POSITIONS = 3
"""Fewest positions of a prompt: the content and the monotonicity of fewer say nothing."""
NUMBER_BYTES = 4
"""Bytes of one kept number, unless the model is in float64."""


@checked
@dataclass(frozen=True)
class AttentionOptions:
    """Settings of `attention`: thresholds, the matrices that are kept, and their memory."""

    sink_thresholds: Annotated[Sequence[float], partial(split_numbers, sort=float)] = (0.2, 0.3)
    """Thresholds of the sink score, in (0, 1), at least one; 0.2 in Wu et al. (arXiv 2502.01951), 0.3 in Gu et al."""
    kernel_cells: int | None = None
    """Side of the kept mean kernels, 1 to N; N keeps every entry. None: N up to KERNEL_POSITIONS, else KERNEL_CELLS."""
    by_head: bool = False
    """Keep the mean kernel of every head beside the mean over heads."""
    mean_content: bool | None = None
    """Keep the mean content logits of every head and pair; by default if they fit CONTENT_BYTES."""
    block: int | None = None
    """Most queries at a time, >= 1; long prompts take fewer. None: as suits the device. Never changes what is measured.
    """
    memory_limit: Bytes = MEMORY_LIMIT
    """Bytes that the kept matrices may take together, >= 0."""

    def __post_init__(self) -> None:
        thresholds = tuple(map(float, self.sink_thresholds))
        if not thresholds or not all(0 < threshold < 1 for threshold in thresholds):
            raise UsageError(f"sink_thresholds must be numbers in (0, 1), at least one; got {self.sink_thresholds!r}")
        object.__setattr__(self, "sink_thresholds", thresholds)
        if self.block is not None:
            check_size("block", self.block, AT_ONCE)
        check_whole("memory_limit", self.memory_limit, least=0)
        if self.kernel_cells is not None:
            check_size("kernel_cells", self.kernel_cells, CELLS)

    def cells(self, n_positions: int) -> int:
        """Side of the kept kernels for prompts of `n_positions` tokens."""
        if self.kernel_cells is None:
            return n_positions if n_positions <= KERNEL_POSITIONS else KERNEL_CELLS
        if self.kernel_cells > n_positions:
            raise UsageError(f"kernel_cells must be 1 to {n_positions}, one per position; got {self.kernel_cells}")
        return self.kernel_cells

    def keeps_content(self, matrices: int, n_positions: int, *, number_bytes: int = NUMBER_BYTES) -> bool:
        """True if the mean content logits of `matrices` heads are kept."""
        if self.mean_content is not None:
            return self.mean_content
        return matrices * n_positions**2 * number_bytes <= CONTENT_BYTES

    def kept_bytes(self, *, layers: int, heads: int, n_positions: int, number_bytes: int = NUMBER_BYTES) -> int:
        """Bytes of all kept matrices."""
        numbers = layers * (2 + (heads if self.by_head else 0)) * self.cells(n_positions) ** 2
        if self.keeps_content(layers * heads, n_positions, number_bytes=number_bytes):
            numbers += layers * heads * n_positions**2
        return numbers * number_bytes

    def check_memory(self, *, layers: int, heads: int, n_positions: int, number_bytes: int = NUMBER_BYTES) -> int:
        """Return the bytes of all kept matrices; above the limit refuse, and name settings that take less."""
        size = self.kept_bytes(layers=layers, heads=heads, n_positions=n_positions, number_bytes=number_bytes)
        if size > self.memory_limit:
            cells = self.cells(n_positions)
            content = self.keeps_content(layers * heads, n_positions, number_bytes=number_bytes)
            fewer = ", no kernels of heads (--by-head, by_head)" if self.by_head else ""
            fewer += ", in Python no mean content logits (mean_content=False)" if content else ""
            raise UsageError(
                f"the kept matrices would take {show_bytes(size)} ({layers} layers, {heads} heads, kernels of"
                f" {cells} x {cells}); allowed are {show_bytes(self.memory_limit)}: take shorter prompts (--length),"
                f" fewer kernel cells (--kernel-cells, kernel_cells){fewer}, or allow more (--max-memory, memory_limit)"
            )
        return size

    def describe(self) -> dict[str, Any]:
        """Plain values for a record."""
        return asdict(self)
