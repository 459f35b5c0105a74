"""Influence beside behaviour: do the positions that weigh more also get used more?

The model answers a task at several positions (`evaluate`); then, on each of those prompts, measured influence, a
profile over tokens that sums to 1, is summed over the tokens of the item that holds the answer (`with_influence`,
`posbias audit --behaviour`). Kinds that score tokens score the first token of the right answer, at
which it is decided which item is used; the others look at the last position's output. `correlate` pools several such
runs: each is one model, one task at one length, some positions.

Rank correlation over positions, plainly and with position itself held fixed: both curves often are U-shaped or
monotone for reasons of their own, and then agree without any further relation. Ranks are formed within each run.
Intervals resample samples, the same ones in both curves, and in all runs that asked them; the positions are those that
were chosen, and the permutation p-value speaks of them.

Beside an evaluation's record: arrays `influence/measured/KIND/gold` [n_samples n_positions], shares of a prompt's
influence; scalars `influence`: its `series`. The record of the verb "correlate" has the
fields of `InfluenceCorrelation`.
"""

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from itertools import permutations
from pathlib import Path
from typing import Annotated, Any, ClassVar

import numpy as np
from jaxtyping import Bool, Float64, Int64
from pydantic import InstanceOf

from posbias.checks import checked
from posbias.errors import UsageError
from posbias.evaluation.curve import ALPHA, SAMPLES_FOR_CLAIM, Scores
from posbias.evaluation.evaluation import Correlations, Evaluation, InfluenceSeries, RankCorrelation, load_evaluation
from posbias.evaluation.options import CorrelateOptions, EvaluateOptions
from posbias.evaluation.responders.base import Request
from posbias.evaluation.responders.encoding import WITHIN_THOUGHTS, encode_requests
from posbias.evaluation.samples import Sample, samples_of
from posbias.measurement.kinds import Kind, resolve_kinds
from posbias.measurement.options import PassOptions
from posbias.measurement.outputs import Target
from posbias.measurement.prompt import measure_prompt
from posbias.measurement.units import check_passes
from posbias.models.model import Model
from posbias.profiles import Profile
from posbias.progress import track
from posbias.results.naming import numbered
from posbias.results.records import Record, plain
from posbias.results.result import RESULTS, Result
from posbias.results.showing import Shown
from posbias.runs.parts import PartStore, made_by
from posbias.statistics import Interval, draw_weights, holm, percentile_interval
from posbias.tasks.language import LANGUAGE_TASKS, Example, LanguageTask

MODEL = ("source", "weights_sha256", "config_sha256", "dtype", "intervention")
"""Parts of a model's description that tell it from another."""
PERMUTATIONS = 5000
"""Random permutations of positions when there are too many to go through all."""
EXACT_POSITIONS = 7
"""Positions up to which all permutations are gone through (5040)."""
ZERO_VARIANCE = 1e-12
"""Share of a rank variance that counts as none left, far above rounding and far below one rank."""

CONTROLS: Mapping[str, tuple[str, ...]] = {
    "nothing": (),
    "position": ("position",),
    "ends": ("ends",),
    "position_and_ends": ("position", "ends"),
}
"""What may be held fixed: the position itself, the distance to the nearer end, or both."""

Rows = Float64[np.ndarray, "_ _"]
"""A table whose shape is checked with a message of our own, or is one of several groups'."""


@dataclass(frozen=True)
class MeasuredGroup:
    """One run among those that are correlated."""

    title: str
    """Model and task."""
    n_samples: int
    positions: tuple[int, ...]
    notices: Mapping[str, Any] = field(default_factory=dict)
    """Oddities of its samples, as `Evaluation.notices`."""


@RESULTS.register("correlate")
@dataclass(frozen=True, eq=False, repr=False)
class InfluenceCorrelation(Result):
    """Correlations of influence with behaviour over several runs."""

    drawn_by: ClassVar = "posbias.evaluation.finished_page:correlation_report"
    record: InstanceOf[Record]
    groups: tuple[MeasuredGroup, ...] = ()
    pooled: tuple[InfluenceSeries, ...] = ()
    """Every series of influence over all groups that have it."""
    withheld: tuple[str, ...] = ()
    """Runs whose generated answers decide nothing, and are left out, with the reason."""

    def shown(self) -> Shown:
        """Counts of the correlated series and runs."""
        return Shown(f"{len(self.pooled)} series of influence over {len(self.groups)} runs")


@checked
def correlate(
    runs: Sequence[Evaluation | str | Path], *, options: CorrelateOptions | None = None
) -> InfluenceCorrelation:
    """Correlate influence with behaviour over several finished evaluations: over positions, lengths and models.

    Args:
        runs: Evaluations with influence on the same prompts, or directories of audits with behaviour (or of the
            behaviour itself), at least 1.
        options: The seed.

    Raises:
        UsageError: no runs, runs of another kind, or two of one model, task and positions.
    """
    seed = (options or CorrelateOptions()).seed
    if not runs:
        raise UsageError("no run to correlate; give at least 1")
    evaluations = [load_evaluation(run, "a correlation", made_by="posbias audit --behaviour") for run in runs]
    check_different(evaluations)
    named = dict(zip(numbered([run.title for run in evaluations]), evaluations, strict=True))
    groups = [MeasuredGroup(title, run.count, run.positions, run.notices) for title, run in named.items()]
    withheld = [f"{run.title}: {run.withheld}" for run in evaluations if run.withheld]
    pooled = [asdict(entry) for entry in pool(named, seed)]
    scalars = plain({"groups": [asdict(group) for group in groups], "pooled": pooled, "withheld": withheld})
    title = next(iter(named)) if len(runs) == 1 else f"{len(runs)} measurements of influence and behaviour"
    resolved = {"title": title, "runs": [run.record.run_id for run in evaluations]}
    arguments, seeds = {"runs": len(runs), "seed": seed}, {"bootstrap": seed, "permutations": seed}
    return InfluenceCorrelation.from_record(Record("correlate", arguments, resolved, scalars, seeds=seeds))


def check_different(evaluations: Sequence[Evaluation]) -> None:
    """Refuse evaluations without influence on the same prompts, and two of one model, task and positions."""
    known: dict[tuple[str, ...], str] = {}
    for run in evaluations:
        if not run.series:
            raise UsageError(
                "a correlation needs finished runs of posbias audit --behaviour, got a run without influence "
                f"({run.record.run_id})"
            )
        model: Any = run.responder["model"]
        facts = [*(model.get(name) for name in MODEL), run.task, run.max_tokens, run.file_sha256, *run.positions]
        first = known.setdefault(tuple(map(str, facts)), run.record.run_id)
        if first != run.record.run_id:
            raise UsageError(
                f"runs {first} and {run.record.run_id} are of one model and task ({run.title}); "
                "give one, with as many samples as both (--behaviour-count)"
            )


def source_of(run: Evaluation) -> str:
    """Name of the samples: runs of the same source asked the same ones, the first of them if they are fewer."""
    # Lines of a file are the same whatever the seed; records keep the last part of its name, and its hash.
    drawn = getattr(LANGUAGE_TASKS.parse(run.task), "file", None) is None
    return " ".join([run.task, run.file_sha256 or "", str(run.record.seeds["samples"]) if drawn else ""])


def pool(runs: Mapping[str, Evaluation], seed: int) -> tuple[InfluenceSeries, ...]:
    """Every series of influence correlated with every measure, over all runs, by title, that have both."""
    pooled = []
    for array, entry in {entry.array: entry for run in runs.values() for entry in run.series}.items():
        groups: dict[str, tuple[str, ...]] = {}
        found: dict[str, Correlations] = {}
        for measure in dict.fromkeys(measure for run in runs.values() for measure in run.measures):
            pairs = {
                title: Pair(run.record.arrays[array], scores, run.positions, run.n_items, source_of(run))
                for title, run in runs.items()
                if array in run.record.arrays and (scores := run.measures.get(measure)) is not None
            }
            if pairs := {title: pair for title, pair in pairs.items() if pair.complete.any()}:
                groups[measure] = tuple(pairs)
                found[measure] = correlate_pairs(list(pairs.values()), seed=seed)
        if found:
            pooled.append(replace(entry, correlations=found, groups=groups))
    return corrected(pooled)


@dataclass(frozen=True, eq=False)
class Pair:
    """Two quantities of one model at one length, on the same samples and positions."""

    first: Rows
    """For instance the share of influence of the item at each position; NaN if not measured."""
    second: Rows
    """For instance whether the answer was right."""
    positions: tuple[int, ...]
    """Positions of the columns, ascending."""
    n_items: int
    source: str = ""
    """Names whose samples these are: pairs of one source share the sample of each row; empty: those of no other."""

    def __post_init__(self) -> None:
        if self.first.shape != self.second.shape or self.first.shape[1] != len(self.positions):
            raise UsageError(
                f"a correlation needs two equal tables with a column for each of {len(self.positions)} positions, got "
                f"{self.first.shape} and {self.second.shape}"
            )
        if np.isinf(self.first).any() or np.isinf(self.second).any():
            raise UsageError("a correlation needs finite values, or NaN if nothing was measured; got an infinite one")

    @property
    def complete(self) -> Bool[np.ndarray, "n_samples"]:
        """Does each sample have both quantities at every position?"""
        return np.asarray(~(np.isnan(self.first) | np.isnan(self.second)).any(axis=1))


@checked
def correlate_pairs(pairs: Sequence[Pair] | Pair, *, seed: int = 0) -> Correlations:
    """Rank correlations over positions of one model, or pooled over several models and lengths, one pair each.

    Ranks of the mean curves are formed within each model and length, then cleared of the ranks of what is held fixed
    (partial rank correlation), then correlated over all positions together. Resamples draw the samples of each pair
    anew, those that pairs share (`Pair.source`) together; permutations move the positions within each pair. Samples
    with a gap are left out.

    Raises:
        UsageError: no pairs, or no sample that has both quantities at every position.
    """
    given = [pairs] if isinstance(pairs, Pair) else list(pairs)
    if not given:
        raise UsageError("no pair of curves to correlate; give at least 1")
    if not (n_samples := min(int(pair.complete.sum()) for pair in given)):
        raise UsageError("no sample has both quantities at every position, so nothing can be correlated")
    generator = np.random.default_rng(seed)
    weights = drawn_together(given, generator=generator)
    groups = [replace(pair, first=pair.first[pair.complete], second=pair.second[pair.complete]) for pair in given]
    found = tuple(_correlation(name, groups, weights, generator) for name in CONTROLS)
    return Correlations(found, n_positions=sum(len(group.positions) for group in groups), n_samples=n_samples)


def corrected(entries: Sequence[InfluenceSeries]) -> tuple[InfluenceSeries, ...]:
    """The series with p-values corrected for their number (Holm, for each control by itself).

    A correlation then counts as established only if the corrected p-value is at most 0.05, too. All correlations of all
    series, with every measure, are one family.
    """
    every = [rank for entry in entries for found in entry.correlations.values() for rank in found.correlations]
    adjusted: dict[int, float] = {}
    for controlled in CONTROLS:
        family = [rank for rank in every if rank.controlled == controlled and not np.isnan(rank.p)]
        adjusted |= zip(map(id, family), holm(np.array([rank.p for rank in family])).tolist(), strict=True)

    def judged(rank: RankCorrelation) -> RankCorrelation:
        p = adjusted.get(id(rank))
        return rank if p is None else replace(rank, adjusted_p=p, established=rank.established and p <= ALPHA)

    return tuple(
        replace(
            entry,
            correlations={
                measure: replace(found, correlations=tuple(map(judged, found.correlations)))
                for measure, found in entry.correlations.items()
            },
        )
        for entry in entries
    )


def drawn_together(pairs: Sequence[Pair], *, generator: np.random.Generator) -> list[Rows]:
    """Bootstrap weights of the complete samples of several pairs, row by row belonging to the same draw.

    Two models that were given the same samples do not give independent evidence about samples, so one draw decides for
    both; runs on different samples are independent.

    Returns:
        For every pair one row per draw, one column per sample, each row summing to 1: the plain mean in the first row,
        then the draws; one that takes none of a pair's samples has NaN there. No draws at all if a pair has a single
        sample and shares none.
    """
    rows = [np.flatnonzero(pair.complete) for pair in pairs]
    sources = [pair.source or number for number, pair in enumerate(pairs)]
    drawn: dict[str | int, tuple[np.ndarray, Rows]] = {}
    for source in dict.fromkeys(sources):
        together = np.unique(np.concatenate([own for own, of in zip(rows, sources, strict=True) if of == source]))
        drawn[source] = together, draw_weights(len(together), generator=generator)
    weights = []
    for own, source in zip(rows, sources, strict=True):
        together, draws = drawn[source]
        counts = np.concatenate([np.ones((1, len(own))), draws[:, np.searchsorted(together, own)]])
        totals = counts.sum(axis=1, keepdims=True)
        weights.append(np.divide(counts, totals, out=np.full_like(counts, np.nan), where=totals > 0))
    fewest = min(map(len, weights))
    return [of_pair[:fewest] for of_pair in weights]


def _correlation(
    name: str, groups: Sequence[Pair], weights: Sequence[Rows], generator: np.random.Generator
) -> RankCorrelation:
    fixed, first, second = [], [], []
    for rows, group in zip(weights, groups, strict=True):
        positions = np.array(group.positions, dtype=np.float64)
        values = {"position": positions, "ends": np.minimum(positions, group.n_items - 1 - positions)}
        fixed.append(np.array([values[control] for control in CONTROLS[name]]).reshape(-1, len(positions)))
        # Rounding must not decide a rank between equal means.
        first.append(_freed(_ranks(np.round(rows @ group.first, 12)), fixed[-1]))
        second.append(_freed(_ranks(np.round(rows @ group.second, 12)), fixed[-1]))
    enough = sum(rows.shape[1] - 1 - len(held) for rows, held in zip(first, fixed, strict=True)) >= 2
    draws = _coefficients(first, second) if enough else np.full(len(first[0]), np.nan)
    value, p_value = Interval(float(draws[0]), -math.inf, math.inf), float("nan")
    n_samples = min(len(group.first) for group in groups)
    if not np.isnan(draws[0]):
        moved = [generator.permuted(np.repeat(rows[:1], PERMUTATIONS, axis=0), axis=1) for rows in second]
        moved = [np.concatenate([rows[:1], orders]) for rows, orders in zip(second, moved, strict=True)]
        if len(groups) == 1 and (count := second[0].shape[1]) <= EXACT_POSITIONS:
            moved = [second[0][0][np.array(list(permutations(range(count))))]]
        # Cleared again, or what is held fixed would come back with the new order and make chance look weak.
        shuffled = [_freed(rows, held) for rows, held in zip(moved, fixed, strict=True)]
        by_chance = _coefficients([np.repeat(rows[:1], len(shuffled[0]), axis=0) for rows in first], shuffled)
        # An order that leaves nothing to correlate counts as one that does as well.
        p_value = float(np.mean(~(np.abs(by_chance) < abs(draws[0]) - ZERO_VARIANCE)))
        if len(draws) > 1 and n_samples > 1:
            value = percentile_interval(float(draws[0]), draws[1:], n_samples)
    established = n_samples >= SAMPLES_FOR_CLAIM and value.excludes(0.0) and p_value <= ALPHA
    return RankCorrelation(name, value, p_value, established)


def _ranks(rows: Rows) -> Rows:
    """Ranks within each row, up to 1; ties share theirs."""
    from scipy.stats import rankdata

    return np.asarray(rankdata(rows, axis=1) / rows.shape[1])


def _freed(rows: Rows, fixed: Rows) -> Rows:
    """Rows less what a linear function of the ranks of `fixed` explains of them."""
    design = np.column_stack([np.ones(rows.shape[1]), *_ranks(fixed)])
    return np.asarray(rows - rows @ (design @ np.linalg.pinv(design)))


def _coefficients(first_groups: Sequence[Rows], second_groups: Sequence[Rows]) -> Float64[np.ndarray, "draws"]:
    """Correlation, draw by draw, of all columns of all groups together; NaN if a side has no variance."""
    first, second = np.concatenate(first_groups, axis=1), np.concatenate(second_groups, axis=1)
    squares = np.square(first).sum(axis=1), np.square(second).sum(axis=1)
    defined = np.minimum(*squares) > ZERO_VARIANCE
    scale = np.sqrt(np.where(defined, squares[0] * squares[1], 1.0))
    return np.where(defined, np.clip((first * second).sum(axis=1) / scale, -1, 1), np.nan)


def encoded_prompt(example: Example, tokenizer: Any) -> tuple[Int64[np.ndarray, "_"], int]:
    """The tokens of a prompt, and the right answer's first token; UsageError if thoughts come before it."""
    request = Request(prompt=example.prompt, answer=example.target, own_control=example.own_control)
    (encoded,) = encode_requests(tokenizer, [request])
    if encoded.thinks:
        raise UsageError(f"there is no influence on the answer: {WITHIN_THOUGHTS}")
    return encoded.prompt, int(encoded.answer[0])


@checked
@dataclass(frozen=True)
class BehaviourPlan:
    """The task that is put to a model, and the influence that is measured on its prompts."""

    task: Annotated[LanguageTask, LANGUAGE_TASKS.parse]
    evaluation: EvaluateOptions = field(default_factory=lambda: EvaluateOptions(count=16))
    """Contents, positions, seed; influence is measured on the same prompts. Its directory is set by the run."""
    kinds: Annotated[Sequence[Kind], resolve_kinds] = resolve_kinds("jacobian(probes=2),logprob")

    def __post_init__(self) -> None:
        self.evaluation.check_plain("influence on a task's prompts")

    @property
    def measured(self) -> dict[str, Any]:
        """Settings of the influence in plain values: all that it depends on, beside model and prompts."""
        return {"kinds": list(map(str, self.kinds))}


def _shares(
    model: Model, plan: BehaviourPlan, samples: Sequence[Sample], evaluation: Evaluation, directory: Path | None
) -> dict[str, Scores]:
    """The share of influence of the item that holds the answer, by kind; NaN of samples that are too long.

    Measured prompts are kept beside the answers, which were already taken over or begun anew.
    """
    positions, tokenizer = evaluation.positions, model.tokenizer
    settings = {"verb": "audit_behaviour", "model": model.describe(), **plan.measured, "positions": list(positions)}
    store = PartStore(directory, {**settings, "seed": plan.evaluation.seed, "made_by": made_by()})
    shares: dict[str, Scores] = {}
    for row in track(np.flatnonzero(evaluation.tables["too_long"].sum(axis=1) == 0).tolist(), "influence"):
        for column, example in enumerate(samples[row].examples):
            token_ids, answer = encoded_prompt(example, tokenizer)
            digest = hashlib.sha256(token_ids.astype("<i8").tobytes()).hexdigest()[:16]
            compute = partial(_measured, model, plan, token_ids, answer, row * len(positions) + column)
            profiles = store.get(f"influence-{row:05d}-{positions[column]:05d}-{digest}", compute)
            for kind, profile in profiles.items():
                blank = np.full((len(samples), len(positions)), np.nan)
                shares.setdefault(kind, blank)[row, column] = profile[example.gold_token : example.gold_end].sum()
    return shares


def _measured(
    model: Model, plan: BehaviourPlan, token_ids: Int64[np.ndarray, "_"], answer: int, index: int
) -> dict[str, np.ndarray]:
    """The profile of one prompt by every kind."""
    profiles: dict[str, np.ndarray] = {}
    for takes_targets, output in ((True, str(Target(tokens=(answer,)))), (False, "last")):
        if kinds := [kind for kind in plan.kinds if kind.takes_targets is takes_targets]:
            key, passes = (plan.evaluation.seed, index), PassOptions(output=output)
            measured = measure_prompt(model, token_ids, kinds=kinds, key=key, options=passes)
            profiles |= {kind: Profile.normalised(norms).influence for kind, norms in measured.norms.items()}
    return profiles


def check_behaviour(model: Model, plan: BehaviourPlan) -> list[Sample]:
    """The samples of a plan's task. Refused, before any work, are a wrong task, one of whose moved item it is not known
    where it stands in tokens, and passes that a CPU cannot hold.
    """
    task = plan.task.asked_of(model.tokenizer)
    samples = list(samples_of(task, model.tokenizer, plan.evaluation))
    examples = [example for sample in samples for example in sample.examples]
    if any(example.cluster for example in examples):
        raise UsageError(f"{task}: influence is correlated over independent samples; leave out groups")
    if any(example.gold_position is None for example in examples):
        raise UsageError(f"{task}: no item holds the answer, so there is no influence of one to measure")
    if any(example.gold_token is None or example.gold_end is None for example in examples):
        raise UsageError(f"{task}: the places of items in tokens need a tokenizer with character offsets")
    lengths = [example.n_tokens or 0 for example in examples]
    if fitting := [length for length in lengths if model.max_positions is None or length <= model.max_positions]:
        check_passes(model, max(fitting))
    return samples


def with_influence(
    model: Model, plan: BehaviourPlan, samples: Sequence[Sample], evaluation: Evaluation, directory: Path | None
) -> Evaluation:
    """The evaluation with the influence of items on its prompts, and how both hang together.

    Args:
        model: The model that answered, with a tokenizer that knows character offsets.
        plan: What was asked, and what is measured.
        samples: These prompts, as `check_behaviour` gives them.
        evaluation: Their answers; the record gets what is measured.
        directory: Folder in which measured prompts are kept until the record is saved.
    """
    record = evaluation.record
    series = []
    for kind, table in _shares(model, plan, samples, evaluation, directory).items():
        series.append(InfluenceSeries("measured", kind, "gold"))
        record.arrays[series[-1].array] = table
    measured = replace(evaluation, series=tuple(series))
    found = {entry.array: entry.correlations for entry in pool({"": measured}, record.seeds["samples"])}
    series = [replace(entry, correlations=found.get(entry.array, {})) for entry in series]
    record.resolved["kinds"] = plan.measured["kinds"]
    record.scalars["influence"] = {"series": [plain(asdict(entry)) for entry in series]}
    return replace(Evaluation.from_record(record), outputs=evaluation.outputs)
