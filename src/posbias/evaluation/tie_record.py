"""The tie over several runs as a record of verb "tie"; `posbias.report.ties` draws it from there.

Scalars: `groups` [{title, runs [run_id], n_items, n_contents, positions, prompt_tokens, curves {measure: {means
[interval]}}, series [{source, kind, what, means [interval]}]}]; `pooled` [{source, kind, what, groups {measure:
[title]}, ties {measure: Tie.as_record}}]; `alone`, the same for every group by itself with its `group`; empty where
there is only one. Arrays: `groups/NUMBER/scores/NAME` and `groups/NUMBER/tie/...`, [n_contents n_positions], as in the
runs, joined.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from posbias.checks import checked
from posbias.evaluation.pooling import PooledTie, TiedRun, group_runs, pool_ties, read_run
from posbias.evaluation.statistics import Scores, position_means
from posbias.evaluation.ties import correct_for_number
from posbias.records import Record


@checked
def tie_runs(
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
        arguments: What the user passed, for the record.
        command: What repeats it in a shell.

    Raises:
        UsageError: no runs, other sorts of run, or contents that come twice.
    """
    groups = group_runs([read_run(run) for run in runs])
    pooled = pool_ties(groups, seed=seed)
    record = Record(
        verb="tie",
        arguments={"runs": len(runs), "seed": seed} if arguments is None else dict(arguments),
        resolved={
            "title": _title(groups),
            "command": command,
            "runs": [run for group in groups for run in group.run_ids],
        },
        seeds={"bootstrap": seed, "permutations": seed},
    )
    record.scalars = {
        "groups": [_group(group, seed) for group in groups],
        "pooled": [
            {
                **_named(entry),
                "groups": {measure: list(titles) for measure, titles in entry.groups.items()},
                "ties": _ties(entry.pooled),
            }
            for entry in pooled
        ],
        "alone": [
            {**_named(entry), "group": title, "ties": _ties(ties)}
            for entry in pooled
            for title, ties in entry.alone.items()
        ],
    }
    for family in ("pooled", "alone"):
        correct_for_number(record.scalars[family])
    for number, group in enumerate(groups):
        record.arrays |= _arrays(group, f"groups/{number}")
    return record


def _title(groups: Sequence[TiedRun]) -> str:
    if len(groups) == 1:
        return groups[0].title
    return f"{len(groups)} measurements of influence and behaviour"


def _named(entry: PooledTie) -> dict[str, str | None]:
    return dict(zip(("source", "kind", "what"), entry.name, strict=True))


def _ties(ties: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    return {measure: found.as_record() for measure, found in ties.items()}


def _group(group: TiedRun, seed: int) -> dict[str, Any]:
    """What is told of one group: its curves and series over positions, with intervals."""
    lengths = group.tables["prompt_tokens"]
    return {
        "title": group.title,
        "runs": list(group.run_ids),
        "n_items": group.n_items,
        "n_contents": len(group.contents),
        "positions": list(group.positions),
        "prompt_tokens": None if np.isnan(lengths).all() else float(np.nanmean(lengths)),
        "curves": {measure: {"means": _means(table, seed)} for measure, table in group.measures.items()},
        "series": [
            {"source": source, "kind": kind, "what": what, "means": _means(table, seed)}
            for (source, kind, what), table in group.series.items()
        ],
    }


def _means(table: Scores, seed: int) -> list[dict[str, float | None]]:
    return [mean.as_record() for mean in position_means(table)]


def _arrays(group: TiedRun, stem: str) -> dict[str, np.ndarray]:
    arrays = {f"{stem}/scores/{name}": table for name, table in group.tables.items()}
    for name, table in group.series.items():
        arrays["/".join([stem, "tie", *(part for part in name if part is not None)])] = table
    return arrays
