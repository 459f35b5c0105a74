"""Correlations pooled over several runs: what weighs and what is used at every position, over models, lengths, tasks.

Runs are the saved records of `posbias.audit_behaviour`. Ranks are formed within each group (one model, one task at one
length, the same positions); runs of one group with other seeds are more samples of it. See `correlation.py`.

The record has the verb "correlate"; `posbias.report` draws it. Scalars: `groups` [{title, runs [run_id], n_items,
n_samples, positions, prompt_tokens, curves {measure: {means [interval]}}, series [{source, kind, what, means
[interval]}]}]; `pooled` [{source, kind, what, groups {measure: [title]}, correlations {measure:
`Correlations.as_record`}}]; `alone`, the same for every group by itself with its `group`; empty where there is only
one. Arrays: `groups/NUMBER/scores/NAME` and `groups/NUMBER/influence/...`, [n_samples n_positions], as in the runs,
joined.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np

from posbias.checks import checked
from posbias.errors import UsageError
from posbias.evaluation.correlation import Pair, Rows, correct_for_number, correlate
from posbias.evaluation.curve import Scores, position_means
from posbias.evaluation.evaluation import load_behaviour, measures_of
from posbias.runs.records import Record
from posbias.tasks.language import LANGUAGE_TASKS

Key = TypeVar("Key")
MODEL = ("source", "weights_sha256", "config_sha256", "dtype", "intervention")
"""What of a model's description tells it from another."""
SCORES = "scores/"


class Name(NamedTuple):
    """A series of influence."""

    source: str
    """"measured", or a theory."""
    kind: str | None
    what: str
    """"gold" (the answer's item) or "place" (a position where another item stands)."""

    @property
    def array(self) -> str:
        """Under which name a record holds it."""
        return "/".join(["influence", *filter(None, self)])


@dataclass(frozen=True, eq=False)
class Group:
    """A run whose answers and influence were taken on the same prompts; or several of one model and task, joined."""

    title: str
    """Model and task."""
    same: tuple[str, ...]
    """What runs of one group have in common: weights, configuration, task, positions and how responses were made."""
    run_ids: tuple[str, ...]
    positions: tuple[int, ...]
    n_items: int
    samples: tuple[str, ...]
    """Names; samples that other models were given, too, have the same names there."""
    tables: Mapping[str, Scores]
    """As `Evaluation.tables`."""
    series: Mapping[Name, Scores]
    """Shares of influence, [n_samples n_positions]."""
    from_lines: bool = False
    """Whether the samples are the first lines of a file, whatever the seed."""

    @property
    def measures(self) -> dict[str, Scores]:
        """What influence is correlated with, in units in which more is better."""
        return measures_of(self.tables)

    def pair(self, name: Name, measure: str) -> Pair | None:
        """One series beside one measure; None where no sample has both."""
        if name not in self.series or measure not in self.measures:
            return None
        pair = Pair(self.series[name], self.measures[measure], self.positions, self.n_items, self.samples)
        return pair if len(pair.complete) else None


@checked
def correlate_runs(
    runs: Sequence[Record | str | Path],
    *,
    seed: int = 0,
    arguments: Mapping[str, Any] | None = None,
    command: str = "",
) -> Record:
    """What weighs and what is used over several saved runs of `audit_behaviour`: over positions, lengths and models.

    Args:
        runs: Records of behaviour, or directories of audits with behaviour (or of the behaviour itself), at least 1.
        seed: Of resamples and permutations, >= 0.
        arguments, command: As the user passed them, for the record.

    Raises:
        UsageError: no runs, other sorts of run, or samples that come twice.
    """
    records = [run if isinstance(run, Record) else load_behaviour(run) for run in runs]
    groups = group_runs([read_run(record) for record in records])
    pooled, alone = pool(groups, seed=seed)
    many = f"{len(groups)} measurements of influence and behaviour"
    record = Record(
        verb="correlate",
        arguments={"runs": len(runs), "seed": seed} if arguments is None else dict(arguments),
        resolved={
            "title": groups[0].title if len(groups) == 1 else many,
            "command": command,
            "runs": [run for group in groups for run in group.run_ids],
        },
        seeds={"bootstrap": seed, "permutations": seed},
    )
    for family in (pooled, alone):
        correct_for_number(family)
    notices = [
        {"title": each.resolved["title"], "count": each.resolved["count"], "notices": each.scalars["notices"]}
        for each in records
        if each.scalars.get("notices")
    ]
    record.scalars = {"groups": [_group_scalars(group) for group in groups], "pooled": pooled, "alone": alone}
    record.scalars["notices"] = notices
    for number, group in enumerate(groups):
        record.arrays |= {f"groups/{number}/{SCORES}{name}": table for name, table in group.tables.items()}
        record.arrays |= {f"groups/{number}/{name.array}": table for name, table in group.series.items()}
    return record


def read_run(run: Record | str | Path) -> Group:
    """A finished run of `posbias audit --behaviour`; a directory is that of the audit, or of the behaviour below it."""
    record = run if isinstance(run, Record) else load_behaviour(run)
    entries = record.scalars.get("influence", {}).get("series")
    if record.verb != "evaluate" or record.status != "done" or not entries:
        sort = "a run without influence" if record.verb == "evaluate" else f"a run of {record.verb!r}"
        found = sort if record.status == "done" else "a run that failed"
        raise UsageError(
            f"a correlation needs finished runs of posbias audit --behaviour, got {found} ({record.run_id})"
        )
    resolved = record.resolved
    model, task, data = resolved["responder"]["model"], resolved["task"], resolved.get("file_sha256")
    positions = tuple(int(position) for position in record.arrays["positions"])
    identity = [*(model.get(name) for name in MODEL), task, resolved["max_tokens"], data, *positions]
    from_lines = getattr(LANGUAGE_TASKS.parse(task), "file", None) is not None
    # Records keep only the last part of a file's name, which other files may bear; records without a hash are older.
    stem = " ".join([task, *([data] if data else []), *([] if from_lines else [str(record.seeds["samples"])])])
    names = [Name(entry["source"], entry["kind"], entry["what"]) for entry in entries]
    return Group(
        title=str(resolved["title"]),
        same=tuple(map(str, identity)),
        run_ids=(record.run_id,),
        positions=positions,
        n_items=int(record.scalars["n_items"]),
        samples=tuple(f"{stem} {index}" for index in range(resolved["count"])),
        tables={name.removeprefix(SCORES): table for name, table in record.arrays.items() if name.startswith(SCORES)},
        series={name: record.arrays[name.array] for name in names},
        from_lines=from_lines,
    )


def group_runs(runs: Sequence[Group]) -> list[Group]:
    """Runs of one model, task, length and positions joined to one; titles that would be equal are numbered."""
    if not runs:
        raise UsageError("no run to correlate; give at least 1")
    groups: dict[tuple[str, ...], Group] = {}
    for run in runs:
        groups[run.same] = _joined(groups[run.same], run) if run.same in groups else run
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
        each: dict[str, dict[str, Any]] = {}
        for measure in dict.fromkeys(measure for group in groups for measure in group.measures):
            pairs = {group.title: pair for group in groups if (pair := group.pair(name, measure)) is not None}
            if not pairs:
                continue
            titles[measure] = list(pairs)
            together[measure] = correlate(list(pairs.values()), seed=seed).as_record()
            for title, pair in pairs.items() if len(groups) > 1 else ():
                each.setdefault(title, {})[measure] = correlate(pair, seed=seed).as_record()
        if together:
            pooled.append({**name._asdict(), "groups": titles, "correlations": together})
            alone += [{**name._asdict(), "group": title, "correlations": own} for title, own in each.items()]
    return pooled, alone


def _joined(first: Group, second: Group) -> Group:
    """Both runs' samples under one; only the series that both have."""
    twice = sorted(set(first.samples) & set(second.samples))
    if twice:
        other = (
            "the lines of a file are the same whatever the seed, so give one of these runs, that of more samples"
            if first.from_lines
            else "runs of one model and task need different seeds"
        )
        raise UsageError(
            f"runs {first.run_ids[-1]} and {second.run_ids[0]} ({first.title}) both have sample {twice[0]!r}; {other}"
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
        "curves": {measure: {"means": _means(table)} for measure, table in group.measures.items()},
        "series": [{**name._asdict(), "means": _means(table)} for name, table in group.series.items()],
    }


def _means(table: Scores) -> list[dict[str, float | None]]:
    return [mean.as_record() for mean in position_means(table)]
