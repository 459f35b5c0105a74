"""The tie over several runs: what weighs and what is used at every position, over models, lengths and tasks together.

Runs are the saved records of `posbias.audit_behaviour`. Ranks are formed within each group (one model, one task at one
length, the same positions); runs of one group with other seeds are more contents of it. See `ties.py` for the rest.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

import numpy as np

from posbias.errors import UsageError
from posbias.evaluation.evaluation import measures_of
from posbias.evaluation.record import load_behaviour
from posbias.evaluation.statistics import Scores
from posbias.evaluation.ties import Pair, Rows, Tie, tie
from posbias.records import Record
from posbias.tasks.language import LANGUAGE_TASKS

Key = TypeVar("Key")
MODEL = ("source", "weights_sha256", "config_sha256", "dtype", "intervention")
"""What of a model's description tells it from another."""
SCORES = "scores/"
Name = tuple[str, str | None, str]
"""A series of influence: source (measured, or a theory), kind, and what it is about (the answer's item, or a place)."""


@dataclass(frozen=True, eq=False)
class TiedRun:
    """One run whose answers and influence were taken on the same prompts; or several of them, joined."""

    title: str
    """Model and task."""
    same: tuple[str, ...]
    """What runs of one group have in common: weights, configuration, task, positions and how they were asked."""
    run_ids: tuple[str, ...]
    positions: tuple[int, ...]
    n_items: int
    contents: tuple[str, ...]
    """Names of the contents; other models that were asked the same ones name them alike."""
    tables: Mapping[str, Scores]
    """As `Evaluation.tables`."""
    series: Mapping[Name, Scores]
    """Shares of influence, [n_contents n_positions]."""
    from_lines: bool = False
    """Whether the contents are the first lines of a file, whatever the seed."""

    @property
    def measures(self) -> dict[str, Scores]:
        """What influence is tied to, in units in which more is better."""
        return measures_of(self.tables)

    def pair(self, name: Name, measure: str) -> Pair | None:
        """One series beside one measure; None where no content has both."""
        if name not in self.series or measure not in self.measures:
            return None
        pair = Pair(self.series[name], self.measures[measure], self.positions, self.n_items, self.contents)
        return pair if len(pair.complete[0]) else None


@dataclass(frozen=True, eq=False)
class PooledTie:
    """One series of influence tied to the measures, over all groups that have it."""

    name: Name
    pooled: Mapping[str, Tie]
    """By measure."""
    groups: Mapping[str, tuple[str, ...]]
    """Titles of the groups that went into it, by measure."""
    alone: Mapping[str, Mapping[str, Tie]]
    """By title of the group, then measure; empty with a single group."""


def read_run(run: Record | str | Path) -> TiedRun:
    """A finished run of `posbias audit --behaviour` from its record.

    Args:
        run: The record of its behaviour, or the directory of the audit or of the behaviour below it.

    Raises:
        UsageError: another sort of run, an unfinished one, or one without influence.
    """
    record = run if isinstance(run, Record) else load_behaviour(run)
    if record.verb != "evaluate" or record.status != "done" or not record.scalars.get("tie", {}).get("series"):
        sort = "a run without influence" if record.verb == "evaluate" else f"a run of {record.verb!r}"
        found = sort if record.status == "done" else "a run that failed"
        raise UsageError(f"a tie needs finished runs of posbias audit --behaviour, got {found} ({record.run_id})")
    asked = record.resolved
    model = asked["responder"]["model"]
    positions = tuple(int(place) for place in record.arrays["positions"])
    names = [(entry["source"], entry["kind"], entry["what"]) for entry in record.scalars["tie"]["series"]]
    data = asked.get("file_sha256")
    identity = [*(model.get(name) for name in MODEL), asked["task"], asked["max_tokens"], data]
    from_lines = getattr(LANGUAGE_TASKS.parse(asked["task"]), "file", None) is not None
    # Records keep only the last part of a file's name, which other files may bear; records without a hash are older.
    stem = " ".join(
        [asked["task"], *([data] if data else []), *([] if from_lines else [str(record.seeds["contents"])])]
    )
    return TiedRun(
        title=str(asked["title"]),
        same=(*map(str, identity), *map(str, positions)),
        run_ids=(record.run_id,),
        positions=positions,
        n_items=int(record.scalars["n_items"]),
        contents=tuple(f"{stem} {index}" for index in range(asked["count"])),
        tables={name.removeprefix(SCORES): table for name, table in record.arrays.items() if name.startswith(SCORES)},
        series={
            (source, kind, what): record.arrays["/".join(["tie", source, *([] if kind is None else [kind]), what])]
            for source, kind, what in names
        },
        from_lines=from_lines,
    )


def group_runs(runs: Sequence[TiedRun]) -> list[TiedRun]:
    """Runs of one model, task, length and positions joined to one; titles that would be equal are numbered.

    Raises:
        UsageError: none, or contents that come twice.
    """
    if not runs:
        raise UsageError("no run to tie; give at least 1")
    groups: dict[tuple[str, ...], TiedRun] = {}
    for run in runs:
        groups[run.same] = _joined(groups[run.same], run) if run.same in groups else run
    titles = [group.title for group in groups.values()]
    return [
        replace(group, title=f"{group.title} ({titles[:number].count(group.title) + 1})")
        if titles.count(group.title) > 1
        else group
        for number, group in enumerate(groups.values())
    ]


def pool_ties(groups: Sequence[TiedRun], *, seed: int = 0) -> list[PooledTie]:
    """Every series of influence tied to every measure, over all groups that have both, and in each group alone.

    Args:
        groups: As `group_runs` makes them.
        seed: Of resamples and permutations, >= 0.
    """
    names = list(dict.fromkeys(name for group in groups for name in group.series))
    measures = list(dict.fromkeys(measure for group in groups for measure in group.measures))
    found = []
    for name in names:
        pairs = {
            measure: {group.title: pair for group in groups if (pair := group.pair(name, measure)) is not None}
            for measure in measures
        }
        there = {measure: by_group for measure, by_group in pairs.items() if by_group}
        alone: dict[str, dict[str, Tie]] = {}
        for measure, by_group in there.items():
            for title, pair in by_group.items() if len(groups) > 1 else ():
                alone.setdefault(title, {})[measure] = tie(pair, seed=seed)
        pooled = {measure: tie(list(by_group.values()), seed=seed) for measure, by_group in there.items()}
        found.append(PooledTie(name, pooled, {measure: tuple(by_group) for measure, by_group in there.items()}, alone))
    return [entry for entry in found if entry.pooled]


def _joined(first: TiedRun, second: TiedRun) -> TiedRun:
    """Both runs' contents under one; only the series that both have."""
    twice = sorted(set(first.contents) & set(second.contents))
    if twice:
        other = (
            "the lines of a file are the same whatever the seed, so give one of these runs, that of more contents"
            if first.from_lines
            else "runs of one model and task need different seeds"
        )
        raise UsageError(
            f"runs {first.run_ids[-1]} and {second.run_ids[0]} ({first.title}) both have content {twice[0]!r}; {other}"
        )
    return replace(
        first,
        run_ids=(*first.run_ids, *second.run_ids),
        contents=(*first.contents, *second.contents),
        tables=_stacked(first.tables, second.tables),
        series=_stacked(first.series, second.series),
    )


def _stacked(first: Mapping[Key, Rows], second: Mapping[Key, Rows]) -> dict[Key, Rows]:
    """The tables that both have, one below the other."""
    return {name: np.concatenate([table, second[name]]) for name, table in first.items() if name in second}
