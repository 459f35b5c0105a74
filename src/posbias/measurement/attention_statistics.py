"""`AttentionStatistics`, the result of `attention`: statistics of attention over prompts, each with its range.

A number that depends on prompts is kept per prompt if it is small, and carries a 95 % interval over prompts, whose ends
are infinite with a single prompt. Fields and those within them are arrays of the record, by name: `distance/per_prompt`
[count layers heads], `mixing/tokens/low` [layers]; beside them `rollouts/NAME/{per_prompt,influence,low,high}`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, ClassVar, TypeVar

import numpy as np
from jaxtyping import Float, Float64
from pydantic import ConfigDict

from posbias.comparison.distances import Sample, beside_flat, summarise
from posbias.profiles import Profile
from posbias.results.figures import BLUE, FLAT, Curve, Stroke
from posbias.results.records import Record
from posbias.results.result import RESULTS, Result, from_stored
from posbias.results.showing import Shown
from posbias.runs.parts import flat, nested
from posbias.statistics import Interval, mean_ends, mean_of

Mean = TypeVar("Mean", bound="PromptMean")


@dataclass(frozen=True, eq=False)
class PromptMean:
    """An array of shares, in [0, 1], per prompt and its mean over prompts."""

    per_prompt: Float64[np.ndarray, "count ..."]
    low: Float64[np.ndarray, "..."]
    """Ends of the pointwise interval of `value`."""
    high: Float64[np.ndarray, "..."]
    most: ClassVar[float] = 1.0
    """The largest value that the truth can have: 1 for a share."""
    averaged: ClassVar[tuple[int, ...]] = (0,)
    """Axes that `value` is the mean over."""

    @classmethod
    def of(cls: type[Mean], per_prompt: Float64[np.ndarray, "count *axes"]) -> Mean:
        """The statistic of these values, with its interval."""
        least = 0.0 if per_prompt.min() >= 0 else -np.inf
        return cls(per_prompt, *mean_ends(per_prompt.mean(axis=cls.averaged[1:]), least=least, most=cls.most))

    @property
    def value(self) -> Float64[np.ndarray, "*points"]:
        """Mean over prompts, and over heads if there are any."""
        return np.asarray(self.per_prompt.mean(axis=self.averaged))

    @property
    def overall(self) -> Interval:
        """Mean over prompts of the mean over everything else, with its 95 % interval over prompts."""
        means = self.per_prompt.reshape(len(self.per_prompt), -1).mean(axis=1)
        return mean_of(means).interval(least=0.0 if means.min() >= 0 else -np.inf, most=self.most)


@dataclass(frozen=True, eq=False)
class HeadStatistic(PromptMean):
    """One number per prompt, layer and head, [count layers heads]; `value`, `low` and `high` are of layers."""

    most: ClassVar[float] = np.inf
    averaged: ClassVar[tuple[int, ...]] = (0, 2)

    @property
    def by_head(self) -> Float64[np.ndarray, "layers heads"]:
        """Mean over prompts."""
        return np.asarray(self.per_prompt.mean(axis=0))


@dataclass(frozen=True, eq=False)
class HeadShare(HeadStatistic):
    """One share per prompt, layer and head."""

    most: ClassVar[float] = 1.0


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
class MixingStatistics:
    """Size of the attention branch a beside the stream x it is added to (`posbias.measurement.prompt`)."""

    tokens: PromptMean
    """Per prompt and layer: mean over tokens of |a| / (|x| + |a|)."""
    frobenius: PromptMean
    """Per prompt and layer: ||a||_F / (||x||_F + ||a||_F)."""


@RESULTS.register("attention")
@dataclass(frozen=True, eq=False, repr=False)
class AttentionStatistics(Result):
    """A model's attention over a set of prompts; its picture is of attention distance by layer.

    Source of the sink score: arXiv 2410.10781 and, with another threshold, 2502.01951.
    """

    drawn_by: ClassVar = "posbias.measurement.page:attention_report"
    distance: HeadStatistic
    """sum_j A_ij (i - j) in positions, >= 0, mean over queries; if a learned sink takes a part, of the rest."""
    even_distance: Float64[np.ndarray, "layers"]
    """Distance of attention that is even over the keys each query sees: the flat line of `distance`."""
    entropy: HeadShare
    """-sum_j A_ij log A_ij / log(visible keys), in [0, 1], mean over the queries that see at least 2 keys; even: 1.
    If a learned sink takes a part, of the rest."""
    learned_sink: HeadShare | None
    """Share of every row that a learned sink, a place that is no position, takes, in (0, 1), mean over queries; None
    for families without (all except GPT-OSS)."""
    content: ContentLogits
    sink_thresholds: tuple[float, ...]
    sinks: PromptMean
    """[thresholds, n_positions] per prompt: share of the queries that may see j with A_ij > threshold, in [0, 1], mean
    over layers and heads. Few queries see the last positions."""
    sinks_by_layer: Float64[np.ndarray, "thresholds layers n_positions"]
    """Sinks of every layer, mean over prompts."""
    kernels: Float[np.ndarray, "layers cells cells"]
    """Attention averaged over prompts and heads, in min(N, 128) cells of neighbouring positions: position p lies in
    cell p * cells // N. An entry is the mean over the queries of its row's cell of the sum over the keys of its
    column's cell, so rows sum to 1, or to what a learned sink leaves."""
    mixing: MixingStatistics | None
    """None if the blocks do not add branches to their input."""
    left_out: tuple[str, ...]
    """Statistics and rollouts that do not apply, with the reason."""
    caveats: tuple[str, ...]
    """Differences between the model that ran and what its name promises."""
    rollouts: Mapping[str, Float64[np.ndarray, "count n_positions"]] = field(default_factory=dict)
    """Each prompt's profile by every rollout of its attention (`theory.power_rollout.ROLLOUTS`); rows sum to 1."""
    about: Mapping[str, Any] = field(default_factory=dict)
    """Title, model, prompts, options and what repeats it, as a record describes them."""

    __pydantic_config__: ClassVar = ConfigDict(arbitrary_types_allowed=True)

    @classmethod
    def from_record(cls, record: Record) -> "AttentionStatistics":
        """The statistics that a record holds."""
        parts, missing = nested(record.arrays), dict.fromkeys(("learned_sink", "mixing"))
        rollouts = {name: parts["rollouts"][name]["per_prompt"] for name in record.scalars["rollouts"]}
        stored = {**missing, **parts, **record.scalars, "rollouts": rollouts, "about": record.resolved}
        return from_stored(cls, stored).with_record(record)

    @cached_property
    def record(self) -> Record:  # type: ignore[override]  # made when it is asked for
        """The statistics with model, prompts and options, as the shell writes them."""
        scalars = {
            "sink_thresholds": list(self.sink_thresholds),
            "rollouts": list(self.rollouts),
            "left_out": list(self.left_out),
            "caveats": list(self.caveats),
        }
        rollouts = {name: {**vars(Profile.mean_of(rows)), "per_prompt": rows} for name, rows in self.rollouts.items()}
        return Record("attention", {}, dict(self.about), scalars, flat({**vars(self), "rollouts": rollouts}))

    @property
    def title(self) -> str:
        """Name of the model."""
        return str(self.about["title"])

    @property
    def count(self) -> int:
        """Prompts measured."""
        return len(self.distance.per_prompt)

    @property
    def depth(self) -> int:
        """Layers whose attention was measured."""
        return len(self.even_distance)

    @property
    def n_positions(self) -> int:
        """Positions of every prompt."""
        return int(self.sinks.per_prompt.shape[-1])

    @cached_property
    def rollout_shares(self) -> Mapping[str, Mapping[str, Interval]]:
        """Shares of each rollout's profile, and as `flat` its distance to the flat line, with intervals."""
        found: dict[str, Mapping[str, Interval]] = {}
        for name, rows in self.rollouts.items():
            sample, flat = Sample.of(rows), Profile.uniform(rows.shape[1]).influence[None]
            distance = beside_flat(flat, sample).distance
            found[name] = {**summarise(sample, generator=np.random.default_rng(0)), "flat": distance}
        return found

    def shown(self) -> Shown:
        """Attention distance of every layer beside even attention's; the means over the whole model, with intervals."""
        prompts = "1 prompt" if self.count == 1 else f"{self.count} prompts"
        title = (
            f"{self.about.get('title', 'attention')} on {prompts} of {self.n_positions} tokens: attention looks back "
            f"{self.distance.overall.value:.1f} positions on average, even attention {self.even_distance.mean():.1f}"
        )
        layers, mean, blue = np.arange(self.depth), self.distance, Stroke(BLUE, "dot")
        heads = {"highest head": mean.by_head.max(axis=1), "lowest head": mean.by_head.min(axis=1)}
        curves = (
            Curve("mean over heads", layers, mean.value, Stroke(BLUE, "solid"), mean.low, mean.high),
            *(Curve(name, layers, of_head, blue) for name, of_head in heads.items() if mean.by_head.shape[1] > 1),
            Curve("even attention", layers, self.even_distance, FLAT),
        )
        return Shown(title, curves, "distance", "layer", unit="positions")

    def first_sink(self, number: int) -> Interval:
        """Share of queries, layers and heads that give position 0 more than the threshold of that number."""
        statistic = self.sinks
        return Interval(*(float(values[number, 0]) for values in (statistic.value, statistic.low, statistic.high)))
