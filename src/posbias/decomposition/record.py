"""A decomposition as a record of verb "decompose"; `posbias.report.decompositions` draws it from there.

Scalars: `count`, `kinds` (names), `sources`, `left_out` {source: reason}, `interventions` [{name, ingredient, reasons,
divergence}], `shifts` [{intervention, source, kind, mass, before, after, shift, gap}], `scores` [{source, kind, error,
no_shift, difference, interventions, n_units, decides}]. An interval is {value, low, high}, None where infinite. Arrays
[count n_positions], one profile per prompt: `baseline/SOURCE/KIND` and `changed/INTERVENTION/SOURCE/KIND`; and
`divergence/INTERVENTION` [count], in nats.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np

from posbias.decomposition.decomposition import Counterfactual, Decomposition
from posbias.decomposition.shifts import Score, Shift
from posbias.records import Record, plain
from posbias.statistics import Interval


def decomposition_record(decomposition: Decomposition, arguments: Mapping[str, Any], *, command: str = "") -> Record:
    """The decomposition with every prompt's profile.

    Args:
        decomposition: What `counterfactuals` returns.
        arguments: What the user passed.
        command: What repeats it in a shell.
    """
    describes = dict(decomposition.describes)
    record = Record(
        verb="decompose",
        arguments=dict(arguments),
        resolved={
            "title": str(describes.get("model", {}).get("source", "model")),
            "command": command,
            "interventions": [item.name for item in decomposition.counterfactuals],
            "kinds": [str(kind) for kind in decomposition.kinds],
            **plain(describes),
        },
        seeds={"measure": decomposition.seed},
        arrays=_arrays(decomposition),
    )
    divergences = decomposition.divergences
    record.scalars = {
        "count": decomposition.count,
        "kinds": [kind.name for kind in decomposition.kinds],
        "sources": list(dict.fromkeys(source for source, _ in decomposition.baseline)),
        "left_out": dict(decomposition.left_out),
        "interventions": [_intervention(item, divergences) for item in decomposition.counterfactuals],
        "shifts": [_shift(shift) for shift in decomposition.shifts],
        "scores": [_score(score) for score in decomposition.scores],
    }
    return record


def _arrays(decomposition: Decomposition) -> dict[str, np.ndarray]:
    arrays: dict[str, np.ndarray] = {
        f"baseline/{source}/{kind}": rows for (source, kind), rows in decomposition.baseline.items()
    }
    for item in decomposition.counterfactuals:
        stem = f"changed/{item.name}"
        arrays |= {f"{stem}/{source}/{kind}": rows for (source, kind), rows in item.profiles.items()}
        if item.divergence is not None:
            arrays[f"divergence/{item.name}"] = item.divergence
    return arrays


def _intervention(item: Counterfactual, divergences: Mapping[str, Interval]) -> dict[str, Any]:
    divergence = divergences.get(item.name)
    return {
        "name": item.name,
        "ingredient": item.intervention.ingredient,
        "reasons": dict(item.reasons),
        "divergence": None if divergence is None else divergence.as_record(),
    }


def _shift(shift: Shift) -> dict[str, Any]:
    texts = {name: getattr(shift, name) for name in ("intervention", "source", "kind", "mass")}
    numbers = {name: getattr(shift, name).as_record() for name in ("before", "after", "shift")}
    return {**texts, **numbers, "gap": None if shift.gap is None else shift.gap.as_record()}


def _score(score: Score) -> dict[str, Any]:
    numbers = {name: getattr(score, name).as_record() for name in ("error", "no_shift", "difference")}
    return {
        "source": score.source,
        "kind": score.kind,
        **numbers,
        "interventions": list(score.interventions),
        "n_units": score.n_units,
        "decides": score.decides,
    }
