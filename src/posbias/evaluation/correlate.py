"""`correlate`: influence and behaviour at every position, over several runs, models, lengths and tasks.

Each run is an evaluation with influence on the same prompts (`posbias audit --behaviour`): one model, one task at one
length, some positions. Ranks are formed within each; runs that asked the same samples are resampled together. See
`correlation.py`.

The record has the verb "correlate"; its scalars are the fields of `InfluenceCorrelation`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import InstanceOf

from posbias.checks import Natural, checked
from posbias.display.naming import numbered
from posbias.display.showing import Shown
from posbias.errors import UsageError
from posbias.evaluation.correlation import Correlations, InfluenceSeries, Pair, SeriesName, corrected, correlate_pairs
from posbias.evaluation.curve import HIGHEST, Scores, position_means
from posbias.evaluation.evaluation import GENERATED, Evaluation, load_evaluation, measures_of
from posbias.runs.records import Record, plain
from posbias.runs.results import RESULTS, Result, from_stored
from posbias.statistics import Interval, StoredInterval
from posbias.tasks.language import LANGUAGE_TASKS

MODEL = ("source", "weights_sha256", "config_sha256", "dtype", "intervention")
"""Parts of a model's description that tell it from another."""


@checked
@dataclass(frozen=True)
class CorrelateOptions:
    """Settings of `correlate`."""

    seed: Natural = 0
    """Seed of resamples and permutations, >= 0."""


@dataclass(frozen=True)
class MeasuredGroup:
    """One run: means by position."""

    title: str
    """Model and task."""
    n_items: int
    n_samples: int
    positions: tuple[int, ...]
    prompt_tokens: float | None
    """Mean length of a prompt, if it is known."""
    curves: Mapping[str, Mapping[str, tuple[StoredInterval, ...]]]
    """The `means` at each position, by measure."""
    series: tuple[InfluenceSeries, ...]
    notices: Mapping[str, Any] = field(default_factory=dict)
    """Oddities of its samples, as `Evaluation.notices`."""

    @property
    def means(self) -> dict[str, tuple[Interval, ...]]:
        """Mean of each measure at each position."""
        return {measure: curve["means"] for measure, curve in self.curves.items()}


@RESULTS.register("correlate")
@dataclass(frozen=True, eq=False, repr=False)
class InfluenceCorrelation(Result):
    """Correlations of influence with behaviour over several runs."""

    record: InstanceOf[Record]
    groups: tuple[MeasuredGroup, ...] = ()
    pooled: tuple[InfluenceSeries, ...] = ()
    """Every series of influence over all groups that have it."""
    alone: tuple[InfluenceSeries, ...] = ()
    """Every series of influence in every group by itself; empty if there is only one group."""
    withheld: tuple[str, ...] = ()
    """Runs whose generated answers decide nothing, and are left out, with the reason."""

    @classmethod
    def from_record(cls, record: Record) -> "InfluenceCorrelation":
        """The correlations that a record holds; none if the run failed."""
        return cls(record) if record.status != "done" else from_stored(cls, {**record.scalars, "record": record})

    def shown(self) -> Shown:
        """Counts of the correlated series and runs; the ranks are drawn in the report."""
        return Shown(f"{len(self.pooled)} series of influence over {len(self.groups)} runs", facts=self.facts())


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
    evaluations = [load_evaluation(run, "a correlation") for run in runs]
    read = read_runs(evaluations)
    pooled, alone = pool(read, seed=seed)
    scalars = {
        "groups": [asdict(_group(run)) for run in read],
        "pooled": [asdict(entry) for entry in corrected(pooled)],
        "alone": [asdict(entry) for entry in corrected(alone)],
        "withheld": [f"{run.title}: {run.withheld}" for run in evaluations if run.withheld],
    }
    many = f"{len(read)} measurements of influence and behaviour"
    resolved = {
        "title": read[0].title if len(read) == 1 else many,
        "command": "",
        "runs": [run.record.run_id for run in evaluations],
    }
    arguments = {"runs": len(runs), "seed": seed}
    seeds = {"bootstrap": seed, "permutations": seed}
    return InfluenceCorrelation.from_record(Record("correlate", arguments, resolved, plain(scalars), seeds=seeds))


@dataclass(frozen=True, eq=False)
class ReadRun:
    """A run whose answers and influence were taken on the same prompts."""

    title: str
    """Model and task; told apart from the other runs'."""
    evaluation: Evaluation
    source: str
    """Names the samples: runs of the same source asked the same ones, the first of them if they are fewer."""
    measures: Mapping[str, Scores]
    """Measures that influence is correlated with, in units in which more is better; none that decide nothing."""
    series: Mapping[SeriesName, Scores]
    """Shares of influence, [n_samples n_positions]."""

    def pair(self, name: SeriesName, measure: str) -> Pair | None:
        """One series beside one measure; None if no sample has both."""
        if name not in self.series or measure not in self.measures:
            return None
        run = self.evaluation
        pair = Pair(self.series[name], self.measures[measure], run.positions, run.n_items, self.source)
        return pair if pair.complete.any() else None


def read_runs(evaluations: Sequence[Evaluation]) -> list[ReadRun]:
    """Finished evaluations with influence on the same prompts, each of another model, task or positions."""
    if not evaluations:
        raise UsageError("no run to correlate; give at least 1")
    known: dict[tuple[str, ...], str] = {}
    read: list[ReadRun] = []
    for run, title in zip(evaluations, numbered([run.title for run in evaluations]), strict=True):
        if run.influence is None or not run.influence.series:
            raise UsageError(
                "a correlation needs finished runs of posbias audit --behaviour, got a run without influence "
                f"({run.record.run_id})"
            )
        model: Any = run.responder["model"]
        facts = [*(model.get(name) for name in MODEL), run.task, run.max_tokens, run.file_sha256, *run.positions]
        identity = tuple(map(str, facts))
        if identity in known:
            raise UsageError(
                f"runs {known[identity]} and {run.record.run_id} are of one model and task ({run.title}); "
                "give one, with as many samples as both (--behaviour-count)"
            )
        known[identity] = run.record.run_id
        # Lines of a file are the same whatever the seed; records keep the last part of its name, and its hash.
        drawn = getattr(LANGUAGE_TASKS.parse(run.task), "file", None) is None
        source = " ".join([run.task, run.file_sha256 or "", str(run.record.seeds["samples"]) if drawn else ""])
        measures = {
            name: table for name, table in measures_of(run.tables).items() if not (run.withheld and name in GENERATED)
        }
        series = {series.name: run.record.arrays[series.name.array] for series in run.influence.series}
        read.append(ReadRun(title, run, source, measures, series))
    return read


def pool(runs: Sequence[ReadRun], *, seed: int = 0) -> tuple[list[InfluenceSeries], list[InfluenceSeries]]:
    """Every series of influence correlated with every measure, over all runs that have both, and in each run alone.

    As `pooled` and `alone` of the result, p-values not yet corrected for their number.
    """
    pooled, alone = [], []
    for name in dict.fromkeys(name for run in runs for name in run.series):
        titles: dict[str, tuple[str, ...]] = {}
        together: dict[str, Correlations] = {}
        apart: dict[str, dict[str, Correlations]] = {}
        for measure in dict.fromkeys(measure for run in runs for measure in run.measures):
            pairs = {run.title: pair for run in runs if (pair := run.pair(name, measure)) is not None}
            if not pairs:
                continue
            titles[measure] = tuple(pairs)
            together[measure] = correlate_pairs(list(pairs.values()), seed=seed)
            for title, pair in pairs.items() if len(runs) > 1 else ():
                apart.setdefault(title, {})[measure] = correlate_pairs(pair, seed=seed)
        if together:
            pooled.append(InfluenceSeries(*name, correlations=together, groups=titles))
            alone += [InfluenceSeries(*name, correlations=found, group=title) for title, found in apart.items()]
    return pooled, alone


def _group(run: ReadRun) -> MeasuredGroup:
    """The means of a run by position."""
    lengths, evaluation = run.evaluation.tables["prompt_tokens"], run.evaluation
    return MeasuredGroup(
        title=run.title,
        n_items=evaluation.n_items,
        n_samples=evaluation.count,
        positions=evaluation.positions,
        prompt_tokens=None if np.isnan(lengths).all() else float(np.nanmean(lengths)),
        curves={measure: {"means": _means(table, measure)} for measure, table in run.measures.items()},
        series=tuple(InfluenceSeries(*name, means=_means(table)) for name, table in run.series.items()),
        notices=evaluation.notices,
    )


def _means(table: Scores, measure: str = "") -> tuple[Interval, ...]:
    return position_means(table, highest=HIGHEST.get(measure, np.inf))
