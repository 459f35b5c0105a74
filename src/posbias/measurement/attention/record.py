"""A model's attention statistics and the rollouts of its attention: what they will cost, and both as one record.

`AttentionRun` reads the record in this layout: `/per_prompt`, `/low`, `/high` below each name where they exist:

    distance, entropy, content/{diagonal,off_diagonal,difference,published}           [count layers heads], [layers]
    learned_sink (families that have them)                                            [count layers heads], [layers]
    similarity/{diagonal,off_diagonal,diagonal_outside,off_diagonal_outside}          [count layers heads], [layers]
    similarity/edges [count 2], similarity/of_mean/{diagonal,...} [layers heads], content/scale [layers]
    distance/even [layers]; sinks [count thresholds n_positions], sinks/by_layer [thresholds layers n_positions]
    monotonicity/{violated,gap} [count layers], monotonicity/of_mean/{violated,gap} [layers]
    mixing/{tokens,frobenius} [count layers], mixing/by_position [layers n_positions]
    kernels/{mean,squared} [layers cells cells], kernels/by_head [layers heads cells cells], kernels/bounds [cells + 1]
    rollouts/NAME [count n_positions], rollouts/NAME/influence, rollouts/mixing [count layers]
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from jaxtyping import Float64, Int64
from pydantic import InstanceOf

from posbias.checks import checked
from posbias.comparison import Sample, compare_with_prompts, summarise
from posbias.display.showing import Series, Shown
from posbias.errors import UsageError
from posbias.measurement.attention.statistics import (
    KERNEL_CELLS,
    AttentionOptions,
)
from posbias.measurement.attention.streaming import attention, statistics_of, working_precision
from posbias.measurement.cost_estimate import CostEstimate
from posbias.measurement.work import Work, calibrate, short_lengths
from posbias.models.attention import block_elements, blocks_of, describe_attention
from posbias.models.hugging_face import HuggingFaceModel
from posbias.models.model import Model
from posbias.profiles import Profile
from posbias.prompts.prompts import Prompts
from posbias.runs.caveats import Caveat
from posbias.runs.records import Record
from posbias.runs.results import RESULTS, Result, from_stored
from posbias.statistics import Interval, StoredInterval, mean_of
from posbias.theory.power_rollout import AttentionRollouts, attention_rollouts

SHARES = ("entropy", "learned_sink", "similarity/", "sinks", "monotonicity/", "mixing/", "rollouts/")
"""Beginnings of the names of numbers in [0, 1]."""

Line = Float64[np.ndarray, "n_points"]


@RESULTS.register("attention")
@dataclass(frozen=True, eq=False, repr=False)
class AttentionRun(Result):
    """An attention run as stored: values per layer, head and position with their intervals, by the names above.

    Source of the sink score: arXiv 2410.10781 and, with another threshold, 2502.01951.
    """

    record: InstanceOf[Record]
    sink_thresholds: tuple[float, ...] = ()
    rollouts: Mapping[str, Mapping[str, StoredInterval]] = field(default_factory=dict)
    """Shares of each rollout's profile, and as `flat` its distance to the flat line, with intervals over prompts."""
    left_out: tuple[Caveat, ...] = ()
    """Statistics and rollouts that do not apply to this model, and why."""

    @classmethod
    def from_record(cls, record: Record) -> "AttentionRun":
        """The statistics that a record holds; none if the run failed."""
        if record.status != "done":
            return cls(record)
        needed = {name: record.scalars[name] for name in ("sink_thresholds", "rollouts", "left_out")}
        return from_stored(cls, {**needed, "record": record})

    def shown(self) -> Shown:
        """Attention distance of every layer beside even attention's."""
        if self.record.status != "done":
            return Shown(self.record.line)
        even, layers = self.array("distance/even"), np.arange(self.depth)
        series = (
            Series("mean over heads", self.by_layer("distance"), *self.ends("distance")),
            Series("even attention", even),
        )
        return Shown(self.record.line, series, "distance", "layer", layers, unit="positions", facts=self.facts())

    @property
    def title(self) -> str:
        """Name of the model."""
        return self.record.title

    @property
    def count(self) -> int:
        """Prompts measured."""
        return len(self.array("distance/per_prompt"))

    @property
    def depth(self) -> int:
        """Layers."""
        return int(self.array("distance/per_prompt").shape[1])

    @property
    def n_positions(self) -> int:
        """Positions of every prompt."""
        return int(self.array("sinks/per_prompt").shape[-1])

    def array(self, name: str) -> np.ndarray:
        """An array of the layout above; one that the record lacks is refused."""
        if name not in self.record.arrays:
            raise UsageError(f"the {self.record.verb} run {self.record.run_id} has no array {name}")
        return self.record.arrays[name]

    def by_head(self, name: str) -> Float64[np.ndarray, "layers heads"]:
        """Mean over prompts."""
        return np.asarray(self.array(f"{name}/per_prompt").mean(axis=0))

    def by_layer(self, name: str) -> Line:
        """Mean over prompts, and over heads if there are heads."""
        values = self.array(f"{name}/per_prompt")
        return np.asarray(values.reshape(*values.shape[:2], -1).mean(axis=(0, 2)))

    def overall(self, name: str) -> Interval:
        """Mean over layers (and heads) and prompts, with its 95 % interval over prompts."""
        values = self.array(f"{name}/per_prompt")
        means = values.reshape(len(values), -1).mean(axis=1)
        return mean_of(means).interval(least=0.0 if means.min() >= 0 else -np.inf, most=_most(name))

    def ends(self, name: str) -> tuple[np.ndarray | None, np.ndarray | None]:
        """Ends of an interval; None if a single prompt leaves it open."""
        low, high = self.array(f"{name}/low"), self.array(f"{name}/high")
        return (low, np.minimum(high, _most(name))) if np.isfinite([low, high]).any() else (None, None)

    def sinks(self, threshold: int) -> tuple[Line, Line | None, Line | None]:
        """Sink score of every position above a threshold, by its number, with the ends of its interval."""
        low, high = (None if end is None else end[threshold] for end in self.ends("sinks"))
        return self.array("sinks/per_prompt")[:, threshold].mean(axis=0), low, high


def _most(name: str) -> float:
    """The largest value that the truth can have; records of older versions have intervals that exceed it."""
    return 1.0 if name.startswith(SHARES) else np.inf


def attention_record(
    model: Model,
    prompts: Prompts,
    *,
    options: AttentionOptions,
    arguments: Mapping[str, Any],
    command: str = "",
    max_memory: int | None = None,
) -> Record:
    """Attention statistics and rollouts of a model, announced and measured, with every prompt's own numbers.

    Args:
        model, prompts, options: As `attention` takes them.
        arguments: As the user passed them; without `kernels` the mean kernels are saved in at most MAP_CELLS cells.
        command: What repeats the run.
        max_memory: Bytes that the process may hold; None: what is free.

    Raises:
        UsageError: the work does not fit into memory.
    """
    cost = preflight_attention(model, prompts, options=options, max_memory=max_memory)
    statistics, rollouts = attention(model, prompts, options=options), attention_rollouts(model, prompts)
    record = statistics.to_record(arguments, command=command)
    record.arrays |= _rollout_arrays(rollouts)
    record.scalars["left_out"] += rollouts.left_out
    record.scalars["rollouts"] = {name: _summary(Sample.of(rows)) for name, rows in rollouts.rollouts.items()}
    record.scalars["cost"] = cost
    return record


def _summary(sample: Sample) -> dict[str, Any]:
    """Shares of the profile, and its distance to the flat line, with intervals over prompts."""
    shares = summarise(sample, generator=np.random.default_rng(0))
    flat = Profile.uniform(sample.units.shape[1])
    shares["flat"] = compare_with_prompts(flat, sample, generator=np.random.default_rng(0)).distance
    return {name: share.as_record() for name, share in shares.items()}


def _rollout_arrays(rollouts: AttentionRollouts) -> dict[str, np.ndarray]:
    arrays = {"rollouts/mixing": rollouts.mixing}
    for name, rows in rollouts.rollouts.items():
        parts = {**vars(Profile.mean_of(rows)), "per_prompt": rows}
        arrays |= {f"rollouts/{name}/{part}": values for part, values in parts.items() if values is not None}
    return arrays


SHORT_BLOCKS = 4
"""Blocks of queries in the longest short run, so that blocks are as large in all of them, as in long prompts."""
NUMBERS_PER_WEIGHT = 6
"""Held per attention weight of a block: the logits, their softmax, and what is summed of it, some in float64."""
NUMBERS_PER_LOGIT = 3
"""Held per mean content logit of a layer while its similarity is formed, at the end."""


@checked
def preflight_attention(
    model: Model, prompts: Prompts, *, options: AttentionOptions | None = None, max_memory: int | None = None
) -> dict[str, Any]:
    """Say what `attention` and `attention_rollouts` will cost, and refuse what cannot fit; as `preflight`.

    The matrices that `options` keep are counted exactly.
    """
    wanted, n_positions = options or AttentionOptions(), prompts.n_positions

    def under(**changes: Any) -> CostEstimate | None:
        return estimate_attention(model, n_positions, options=replace(wanted, **changes))

    remedies: dict[str, dict[str, Any]] = {}
    if wanted.by_head:
        remedies["no --by-head"] = {"by_head": False}
    if wanted.cells(n_positions) > KERNEL_CELLS:
        remedies[f"--kernel-cells {KERNEL_CELLS}"] = {"kernel_cells": KERNEL_CELLS}
    return Work(model, n_positions, prompts.count, under, remedies, max_memory=max_memory).announce()


def estimate_attention(model: Model, n_positions: int, *, options: AttentionOptions) -> CostEstimate | None:
    """The cost of one prompt, from short runs in small blocks: memory is then linear but for the model's pass."""
    layers = describe_attention(model, n_positions=n_positions)
    depth, heads, number_bytes = len(layers), layers[0].parts.heads, working_precision(model).itemsize
    options.check_memory(layers=depth, heads=heads, n_positions=n_positions, number_bytes=number_bytes)
    smallest = replace(options, kernel_cells=1, mean_content=False)

    def measured(token_ids: Int64[np.ndarray, "n"]) -> None:
        statistics_of(model, Prompts(token_ids[None]), smallest)

    def rolled_out(token_ids: Int64[np.ndarray, "n"]) -> None:
        attention_rollouts(model, Prompts(token_ids[None]))

    def both(token_ids: Int64[np.ndarray, "n"]) -> None:
        with blocks_of(None):
            measured(token_ids)
            rolled_out(token_ids)

    def forward(token_ids: Int64[np.ndarray, "n"]) -> None:
        model.last(model.embed(model.token_tensor([token_ids.tolist()])))

    def kept(n_positions: int) -> int:
        cells = None if options.kernel_cells is None else min(options.kernel_cells, n_positions)
        shorter = replace(options, kernel_cells=cells)
        matrices = shorter.kept_bytes(layers=depth, heads=heads, n_positions=n_positions, number_bytes=number_bytes)
        content = shorter.keeps_content(depth * heads, n_positions, number_bytes=number_bytes)
        return matrices + content * NUMBERS_PER_LOGIT * heads * n_positions**2 * number_bytes

    longest = short_lengths(n_positions)[-1]
    with blocks_of(heads * longest**2 // SHORT_BLOCKS):
        statistics = calibrate(model, n_positions, measured, usual=both, squares=forward)
        rollouts = statistics
        if isinstance(model, HuggingFaceModel) and not model.family.beyond_attention(model.network):
            rollouts = calibrate(model, n_positions, rolled_out, usual=lambda _: None, squares=forward)
    if statistics is None or rollouts is None:
        return None
    # One after the other: short prompts take most for the one's histograms, long ones for what the other keeps.
    larger = max(statistics, rollouts, key=lambda estimate: estimate.passes_bytes)
    constant, *others = larger.coefficients
    block = block_elements(heads, n_positions, device=model.device, block=options.block)
    block *= NUMBERS_PER_WEIGHT * number_bytes
    return replace(statistics, coefficients=(constant + block, *others), kept=kept)
