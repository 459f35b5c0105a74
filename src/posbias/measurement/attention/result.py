"""`AttentionStatistics`, the result of `attention`: its statistics in typed fields, and the record that holds them.

The record has this layout, with `/per_prompt`, `/low` and `/high` below the names of the first lines:

    distance, entropy, content/{diagonal,off_diagonal,difference,published}           [count layers heads], [layers]
    learned_sink (families that have them)                                            [count layers heads], [layers]
    similarity/{diagonal,off_diagonal,diagonal_outside,off_diagonal_outside}          [count layers heads], [layers]
    similarity/edges [count 2], similarity/of_mean/{diagonal,...} [layers heads], content/scale [layers]
    distance/even [layers]; sinks [count thresholds n_positions], sinks/by_layer [thresholds layers n_positions]
    monotonicity/{violated,gap} [count layers], monotonicity/of_mean/{violated,gap} [layers]
    mixing/{tokens,frobenius} [count layers], mixing/by_position [layers n_positions]
    kernels/{mean,squared} [layers cells cells], kernels/bounds [cells + 1]
    rollouts/NAME/per_prompt [count n_positions], rollouts/NAME/{influence,low,high} [n_positions]
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import Any

import numpy as np
from jaxtyping import Float64

from posbias.comparison import Sample, compare_with_prompts, summarise
from posbias.display.showing import Series, Shown
from posbias.measurement.attention.statistics import (
    ContentLogits,
    HeadStatistic,
    MeanKernels,
    MeanSimilarity,
    MixingStatistics,
    Monotonicity,
    PerPrompt,
    PrefixMonotonicity,
    PromptMean,
    Similarity,
)
from posbias.profiles import Profile
from posbias.runs.parts import below
from posbias.runs.records import Record
from posbias.runs.results import RESULTS, Result
from posbias.statistics import Interval

SIMILARITIES = tuple(part.name for part in fields(MeanSimilarity))


@RESULTS.register("attention")
@dataclass(frozen=True, eq=False, repr=False)
class AttentionStatistics(Result):
    """A model's attention over a set of prompts; its picture is of attention distance by layer.

    Read from a record, the kernels are those that it holds: in cells, unless they were saved whole.

    Source of the sink score: arXiv 2410.10781 and, with another threshold, 2502.01951.
    """

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
    mixing: MixingStatistics | None
    """None if the blocks do not add branches to their input."""
    row_error: float
    """Largest |sum_j A_ij - 1| met, learned sinks counted in."""
    left_out: tuple[str, ...]
    """Statistics that were not kept, and statistics and rollouts that do not apply, with the reason."""
    caveats: tuple[str, ...]
    """Differences between the model that ran and what its name promises."""
    rollouts: Mapping[str, Float64[np.ndarray, "count n_positions"]] = field(default_factory=dict)
    """Each prompt's profile by every rollout of its attention (`theory.power_rollout.ROLLOUTS`); rows sum to 1."""
    about: Mapping[str, Any] = field(default_factory=dict)
    """Title, model, prompts, options and what repeats it, as a record describes them."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "entropy", self.entropy.as_share())
        if self.learned_sink is not None:
            object.__setattr__(self, "learned_sink", self.learned_sink.as_share())

    @classmethod
    def from_record(cls, record: Record) -> Result:
        """The statistics that a record holds."""
        return _of_record(record).with_record(record)

    @cached_property
    def record(self) -> Record:  # type: ignore[override]  # made when it is asked for
        """The statistics with model, prompts and options, as the shell writes them."""
        scalars = {
            "sink_thresholds": list(self.sink_thresholds),
            "row_error": self.row_error,
            "rollouts": {
                name: {share: interval.as_record() for share, interval in shares.items()}
                for name, shares in self.rollout_shares.items()
            },
            "left_out": list(self.left_out),
            "caveats": list(self.caveats),
        }
        return Record("attention", {}, dict(self.about), scalars, _arrays(self))

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
        return {name: _shares(Sample.of(rows)) for name, rows in self.rollouts.items()}

    def shown(self) -> Shown:
        """Attention distance of every layer beside even attention's; the means over the whole model, with intervals."""
        distance, even = self.distance.overall, float(self.even_distance.mean())
        model, prompts = (
            self.about.get("title", "attention"),
            "1 prompt" if self.count == 1 else f"{self.count} prompts",
        )
        title = (
            f"{model} on {prompts} of {self.n_positions} tokens: attention looks back {distance.value:.1f} positions "
            f"on average, even attention {even:.1f}"
        )
        series = (
            Series("mean over heads", self.distance.by_layer, self.distance.low, self.distance.high),
            Series("even attention", self.even_distance),
        )
        return Shown(title, series, "distance", "layer", np.arange(self.depth), unit="positions", facts=self.facts())

    def facts(self) -> Mapping[str, str]:
        """The means over the whole model with their intervals, what was left out, and caveats."""
        even = self.even_distance.mean()
        facts = {
            "attention distance, positions": f"{self.distance.overall.text('.1f')}; even attention {even:.1f}",
            "entropy, of the largest possible": self.entropy.overall.text(),
        }
        for number, threshold in enumerate(self.sink_thresholds):
            share = self.first_sink(number).text(".1f", scale=100, unit=" %")
            facts[f"queries that give position 0 more than {threshold:g}"] = share
        if self.mixing is not None:
            facts["attention's share of a layer's output (mixing)"] = self.mixing.tokens.overall.text()
        left_out = {"left out": "; ".join(self.left_out)} if self.left_out else {}
        return facts | left_out | {f"caveat {number}": text for number, text in enumerate(self.caveats, 1)}

    def first_sink(self, number: int) -> Interval:
        """Share of queries, layers and heads that give position 0 more than the threshold of that number."""
        statistic = self.sinks
        return Interval(*(float(values[number, 0]) for values in (statistic.value, statistic.low, statistic.high)))


def _shares(sample: Sample) -> dict[str, Interval]:
    shares = summarise(sample, generator=np.random.default_rng(0))
    flat = Profile.uniform(sample.units.shape[1])
    return {**shares, "flat": compare_with_prompts(flat, sample, generator=np.random.default_rng(0)).distance}


def _per_prompt(statistics: AttentionStatistics) -> dict[str, PerPrompt]:
    """What has a number per prompt, by its name in a record."""
    content, monotonicity, mixing = statistics.content, statistics.monotonicity, statistics.mixing
    named: dict[str, PerPrompt | None] = {
        "distance": statistics.distance,
        "entropy": statistics.entropy,
        "learned_sink": statistics.learned_sink,
        "sinks": statistics.sinks,
        **{
            f"content/{name}": getattr(content, name)
            for name in ("diagonal", "off_diagonal", "difference", "published")
        },
        **{f"similarity/{name}": getattr(statistics.similarity, name) for name in SIMILARITIES},
        "monotonicity/violated": monotonicity.violated,
        "monotonicity/gap": monotonicity.gap,
        "mixing/tokens": None if mixing is None else mixing.tokens,
        "mixing/frobenius": None if mixing is None else mixing.frobenius,
    }
    return {name: statistic for name, statistic in named.items() if statistic is not None}


def _arrays(statistics: AttentionStatistics) -> dict[str, np.ndarray]:
    similarity, monotonicity = statistics.similarity, statistics.monotonicity
    arrays = {
        f"{name}/{part}": getattr(statistic, part)
        for name, statistic in _per_prompt(statistics).items()
        for part in ("per_prompt", "low", "high")
    }
    arrays |= {
        "distance/even": statistics.even_distance,
        "content/scale": statistics.content.scale,
        "similarity/edges": similarity.edges,
        "sinks/by_layer": statistics.sinks_by_layer,
    }
    if statistics.mixing is not None:
        arrays["mixing/by_position"] = statistics.mixing.by_position
    for stem, single in (("similarity/of_mean", similarity.of_mean), ("monotonicity/of_mean", monotonicity.of_mean)):
        if single is not None:
            arrays |= {f"{stem}/{name}": values for name, values in vars(single).items()}
    arrays |= {f"kernels/{name}": values for name, values in vars(statistics.kernels.drawn()).items()}
    for name, rows in statistics.rollouts.items():
        parts = {**vars(Profile.mean_of(rows)), "per_prompt": rows}
        arrays |= {f"rollouts/{name}/{part}": values for part, values in parts.items() if values is not None}
    return arrays


def _of_record(record: Record) -> AttentionStatistics:
    """Finished statistics from their record."""
    arrays, scalars = record.arrays, record.scalars

    def by_head(name: str) -> HeadStatistic:
        return HeadStatistic(arrays[f"{name}/per_prompt"], arrays[f"{name}/low"], arrays[f"{name}/high"])

    def share(name: str) -> PromptMean:
        # Records of older versions have intervals that exceed 1.
        return PromptMean(arrays[f"{name}/per_prompt"], arrays[f"{name}/low"], arrays[f"{name}/high"]).as_share()

    of_mean = below(arrays, "similarity/of_mean/")
    monotone = below(arrays, "monotonicity/of_mean/")
    statistics = AttentionStatistics(
        distance=by_head("distance"),
        even_distance=arrays["distance/even"],
        entropy=by_head("entropy"),
        learned_sink=by_head("learned_sink") if "learned_sink/per_prompt" in arrays else None,
        content=ContentLogits(by_head("content/diagonal"), by_head("content/off_diagonal"), arrays["content/scale"]),
        similarity=Similarity(
            **{name: by_head(f"similarity/{name}") for name in SIMILARITIES},
            edges=arrays["similarity/edges"],
            of_mean=MeanSimilarity(**of_mean) if of_mean else None,
        ),
        sink_thresholds=tuple(scalars["sink_thresholds"]),
        sinks=share("sinks"),
        sinks_by_layer=arrays["sinks/by_layer"],
        monotonicity=Monotonicity(
            share("monotonicity/violated"),
            share("monotonicity/gap"),
            PrefixMonotonicity(**monotone) if monotone else None,
        ),
        kernels=MeanKernels(*(arrays[f"kernels/{name}"] for name in ("mean", "squared", "bounds"))),
        mixing=MixingStatistics(share("mixing/tokens"), share("mixing/frobenius"), arrays["mixing/by_position"])
        if "mixing/by_position" in arrays
        else None,
        row_error=scalars["row_error"],
        left_out=tuple(map(str, scalars["left_out"])),
        caveats=tuple(map(str, scalars["caveats"])),
        rollouts={name: arrays[f"rollouts/{name}/per_prompt"] for name in scalars["rollouts"]},
        about=record.resolved,
    )
    stored = {
        name: {share: Interval.of_record(interval) for share, interval in shares.items()}
        for name, shares in scalars["rollouts"].items()
    }
    vars(statistics)["rollout_shares"] = stored
    return statistics
