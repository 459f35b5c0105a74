"""The shift of each mass, measured beside every theory, with intervals: a row for each ingredient and mass."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from posbias.records import Record
from posbias.report.figures import Curve, Figure
from posbias.report.palette import MEASURED, theory_strokes
from posbias.report.wording import KINDS, STATISTICS, label

SOURCE_NAMES = {
    "measured": "measured",
    "rollout_content": "architecture: residual rollout with content",
    "attention_rollout": "own attention rolled out, replaced",
    "power_rollout": "power rollout, replaced",
    "power_rollout_rerun": "power rollout, run again",
}
"""Replaced: on the unchanged model's activations. Run again: on the changed model's own."""

Stored = Mapping[str, Any]


def stored_shifts(record: Record, kind: str) -> list[Stored]:
    """Every stored shift of one kind of influence."""
    return [shift for shift in record.scalars["shifts"] if shift["kind"] == kind]


def shift_figure(record: Record, kind: str) -> Figure:
    """One row per ingredient and mass, one sort of point per source; the measurement is black."""
    shifts = stored_shifts(record, kind)
    shown = {shift["intervention"] for shift in shifts}
    masses = list(dict.fromkeys(shift["mass"] for shift in shifts))
    names = [entry["name"] for entry in record.scalars["interventions"] if entry["name"] in shown]
    rows = [(name, mass) for name in names for mass in masses]
    sources = [source for source in record.scalars["sources"] if any(shift["source"] == source for shift in shifts)]
    strokes = {**theory_strokes([source for source in sources if source != "measured"]), "measured": MEASURED}
    curves = []
    for source in sources:
        own = {(shift["intervention"], shift["mass"]): shift["shift"] for shift in shifts if shift["source"] == source}
        places = [place for place, row in enumerate(rows, start=1) if row in own]
        stored = [own[rows[place - 1]] for place in places]
        value = np.array([100 * entry["value"] for entry in stored])
        known = all(entry["low"] is not None and entry["high"] is not None for entry in stored)
        low, high = ([100 * entry[end] for entry in stored] if known else None for end in ("low", "high"))
        curves.append(
            Curve(
                label(SOURCE_NAMES, source),
                np.array(places, dtype=np.float64),
                value,
                strokes[source],
                None if low is None else np.array(low),
                None if high is None else np.array(high),
            )
        )
    return Figure(
        slug=f"shifts-{kind}",
        title=f"What replacing each ingredient does to the masses of the profile ({label(KINDS, kind)})",
        x_label="",
        y_label="percentage points",
        curves=tuple(curves),
        rows=tuple(f"{name}: {label(STATISTICS, mass)}" for name, mass in rows),
    )
