"""`correlate`: influence and behaviour at every position, over several runs, models, lengths and tasks.

Each run is an evaluation with influence on the same prompts (`posbias audit --behaviour`). Ranks are formed within each
group (one model, one task at one length, the same positions); runs of one group with other seeds are more samples of
it. See `correlation.py`.

The record has the verb "correlate"; its scalars are the fields of `InfluenceCorrelation`, series of influence as
`InfluenceSeries`. Arrays: `groups/NUMBER/scores/NAME` and `groups/NUMBER/influence/...`, [n_samples n_positions], as in
the runs, joined.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from pydantic import InstanceOf

from posbias.checks import check_seed, checked
from posbias.display.showing import Shown
from posbias.errors import UsageError
from posbias.evaluation.correlation import (
    InfluenceSeries,
    Pair,
    Rows,
    SeriesName,
    correct_for_number,
    correlate_pairs,
)
from posbias.evaluation.curve import HIGHEST, Scores, position_means
from posbias.evaluation.evaluation import SCORES, Evaluation, load_evaluation, measures_of
from posbias.runs.records import Record
from posbias.runs.results import RESULTS, Result, from_stored
from posbias.statistics import Interval, StoredInterval
from posbias.tasks.language import LANGUAGE_TASKS

Key = TypeVar("Key")
MODEL = ("source", "weights_sha256", "config_sha256", "dtype", "intervention")
"""Parts of a model's description that tell it from another."""


@checked
@dataclass(frozen=True)
class CorrelateOptions:
    """Settings of `correlate`."""

    seed: int = 0
    """Seed of resamples and permutations, >= 0."""

    def __post_init__(self) -> None:
        check_seed(self.seed)


@dataclass(frozen=True, eq=False)
class Group:
    """A run whose answers and influence were taken on the same prompts; or several of one model and task, joined."""

    title: str
    """Model and task."""
    identity: tuple[str, ...]
    """Facts that runs of one group share: weights, configuration, task, positions and how responses were made."""
    run_ids: tuple[str, ...]
    positions: tuple[int, ...]
    n_items: int
    samples: tuple[str, ...]
    """Names; samples that other models were given, too, have the same names there."""
    tables: Mapping[str, Scores]
    """Tables of scores, as `Evaluation.tables`."""
    series: Mapping[SeriesName, Scores]
    """Shares of influence, [n_samples n_positions]."""
    from_lines: bool = False
    """True if the samples are the first lines of a file, whatever the seed."""

    @property
    def measures(self) -> dict[str, Scores]:
        """Measures that influence is correlated with, in units in which more is better."""
        return measures_of(self.tables)

    def pair(self, name: SeriesName, measure: str) -> Pair | None:
        """One series beside one measure; None if no sample has both."""
        if name not in self.series or measure not in self.measures:
            return None
        pair = Pair(self.series[name], self.measures[measure], self.positions, self.n_items, self.samples)
        return pair if len(pair.complete) else None


@dataclass(frozen=True)
class MeasuredGroup:
    """One group of runs as a record holds it: means by position."""

    title: str
    runs: tuple[str, ...]
    n_items: int
    n_samples: int
    positions: tuple[int, ...]
    prompt_tokens: float | None
    """Mean length of a prompt, if it is known."""
    curves: Mapping[str, Mapping[str, tuple[StoredInterval, ...]]]
    """The `means` at each position, by measure."""
    series: tuple[InfluenceSeries, ...]

    @property
    def means(self) -> dict[str, tuple[Interval, ...]]:
        """Mean of each measure at each position."""
        return {measure: curve["means"] for measure, curve in self.curves.items()}


@dataclass(frozen=True)
class RunNotices:
    """Oddities of one run's samples."""

    title: str
    count: int
    notices: Mapping[str, Any]


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
    notices: tuple[RunNotices, ...] = ()
    withheld: tuple[str, ...] = ()
    """Runs whose generated answers decide nothing, and are left out, with the reason."""

    @classmethod
    def from_record(cls, record: Record) -> "InfluenceCorrelation":
        """The correlations that a record holds; none if the run failed."""
        if record.status != "done":
            return cls(record)
        needed = {name: record.scalars[name] for name in ("groups", "pooled", "alone")}
        return from_stored(cls, {**record.scalars, **needed, "record": record})

    def shown(self) -> Shown:
        """Counts of the correlated series and runs; the ranks are drawn in the report."""
        runs = sum(len(group.runs) for group in self.groups)
        return Shown(f"{len(self.pooled)} series of influence over {runs} runs", facts=self.facts())


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
        UsageError: no runs, runs of another kind, or samples that occur twice.
    """
    seed = (options or CorrelateOptions()).seed
    evaluations = [load_evaluation(run, "a correlation") for run in runs]
    groups = group_runs([read_run(evaluation) for evaluation in evaluations])
    pooled, alone = pool(groups, seed=seed)
    for family in (pooled, alone):
        correct_for_number(family)
    many = f"{len(groups)} measurements of influence and behaviour"
    record = Record(
        verb="correlate",
        arguments={"runs": len(runs), "seed": seed},
        resolved={
            "title": groups[0].title if len(groups) == 1 else many,
            "command": "",
            "runs": [run for group in groups for run in group.run_ids],
        },
        scalars={
            "groups": [_group_scalars(group) for group in groups],
            "pooled": pooled,
            "alone": alone,
            "withheld": [f"{run.title}: {run.withheld}" for run in evaluations if run.withheld],
            "notices": [
                {"title": run.title, "count": run.count, "notices": dict(run.notices)}
                for run in evaluations
                if run.notices
            ],
        },
        seeds={"bootstrap": seed, "permutations": seed},
    )
    for number, group in enumerate(groups):
        record.arrays |= {f"groups/{number}/{SCORES}{name}": table for name, table in group.tables.items()}
        record.arrays |= {f"groups/{number}/{name.array}": table for name, table in group.series.items()}
    return InfluenceCorrelation.from_record(record)


def read_run(run: Evaluation) -> Group:
    """A finished evaluation with influence on the same prompts."""
    if run.influence is None or not run.influence.series:
        raise UsageError(
            "a correlation needs finished runs of posbias audit --behaviour, got a run without influence "
            f"({run.record.run_id})"
        )
    undecided = [name for name in ("correct", "found", "starts") if run.withheld and name in run.tables]
    model: Any = run.responder["model"]
    identity = [*(model.get(name) for name in MODEL), run.task, run.max_tokens, run.file_sha256, *run.positions]
    from_lines = getattr(LANGUAGE_TASKS.parse(run.task), "file", None) is not None
    # Records keep only the last part of a file's name, which other files may bear; records without a hash are older.
    data = [run.file_sha256] if run.file_sha256 else []
    stem = " ".join([run.task, *data, *([] if from_lines else [str(run.record.seeds["samples"])])])
    return Group(
        title=run.title,
        identity=tuple(map(str, identity)),
        run_ids=(run.record.run_id,),
        positions=run.positions,
        n_items=run.n_items,
        samples=tuple(f"{stem} {index}" for index in range(run.count)),
        tables=dict(run.tables) | {name: np.full_like(run.tables[name], np.nan) for name in undecided},
        series={series.name: run.record.arrays[series.name.array] for series in run.influence.series},
        from_lines=from_lines,
    )


def group_runs(runs: Sequence[Group]) -> list[Group]:
    """Runs of one model, task, length and positions joined to one; titles that would be equal are numbered."""
    if not runs:
        raise UsageError("no run to correlate; give at least 1")
    groups: dict[tuple[str, ...], Group] = {}
    for run in runs:
        groups[run.identity] = _joined(groups[run.identity], run) if run.identity in groups else run
    titles = [group.title for group in groups.values()]
    return [
        replace(group, title=f"{group.title} ({titles[:number].count(group.title) + 1})")
        if titles.count(group.title) > 1
        else group
        for number, group in enumerate(groups.values())
    ]


def pool(groups: Sequence[Group], *, seed: int = 0) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Every series of influence correlated with every measure, over all groups that have both, and in each group alone.

    As `pooled` and `alone` of the record, p-values not yet corrected for their number.
    """
    pooled, alone = [], []
    for name in dict.fromkeys(name for group in groups for name in group.series):
        titles: dict[str, list[str]] = {}
        together: dict[str, Any] = {}
        apart: dict[str, dict[str, Any]] = {}
        for measure in dict.fromkeys(measure for group in groups for measure in group.measures):
            pairs = {group.title: pair for group in groups if (pair := group.pair(name, measure)) is not None}
            if not pairs:
                continue
            titles[measure] = list(pairs)
            together[measure] = correlate_pairs(list(pairs.values()), seed=seed).as_record()
            for title, pair in pairs.items() if len(groups) > 1 else ():
                apart.setdefault(title, {})[measure] = correlate_pairs(pair, seed=seed).as_record()
        if together:
            pooled.append({**name._asdict(), "groups": titles, "correlations": together})
            alone += [
                {**name._asdict(), "group": title, "correlations": correlations}
                for title, correlations in apart.items()
            ]
    return pooled, alone


def _joined(first: Group, second: Group) -> Group:
    """Both runs' samples under one; only the series that both have."""
    twice = sorted(set(first.samples) & set(second.samples))
    if twice:
        remedy = (
            "the lines of a file are the same whatever the seed, so give only one of these runs, the one with more "
            "samples"
            if first.from_lines
            else "runs of one model and task need different seeds"
        )
        raise UsageError(
            f"runs {first.run_ids[-1]} and {second.run_ids[0]} ({first.title}) both have sample {twice[0]!r}; {remedy}"
        )
    return replace(
        first,
        run_ids=(*first.run_ids, *second.run_ids),
        samples=(*first.samples, *second.samples),
        tables=_stacked(first.tables, second.tables),
        series=_stacked(first.series, second.series),
    )


def _stacked(first: Mapping[Key, Rows], second: Mapping[Key, Rows]) -> dict[Key, Rows]:
    """The tables that both have, one below the other."""
    return {name: np.concatenate([table, second[name]]) for name, table in first.items() if name in second}


def _group_scalars(group: Group) -> dict[str, Any]:
    lengths = group.tables["prompt_tokens"]
    return {
        "title": group.title,
        "runs": list(group.run_ids),
        "n_items": group.n_items,
        "n_samples": len(group.samples),
        "positions": list(group.positions),
        "prompt_tokens": None if np.isnan(lengths).all() else float(np.nanmean(lengths)),
        "curves": {measure: {"means": _means(table, measure)} for measure, table in group.measures.items()},
        "series": [{**name._asdict(), "means": _means(table)} for name, table in group.series.items()],
    }


def _means(table: Scores, measure: str = "") -> list[dict[str, float | None]]:
    return [mean.as_record() for mean in position_means(table, highest=HIGHEST.get(measure, np.inf))]
