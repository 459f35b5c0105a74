"""A design in pictures: target, before and after, every row of the designed rollout, and how it carries to lengths."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from posbias.display.figures import (
    BLUE,
    MEASURED,
    ORANGE,
    VERMILION,
    Curve,
    Figure,
    HeatMap,
    Panel,
    Stroke,
    profile_curve,
    profile_figure,
)
from posbias.profiles import Profile
from posbias.report.layout import caveats_of
from posbias.report.page import REPORTS, Report
from posbias.report.tables import Table, interval_text
from posbias.runs.records import Record
from posbias.statistics import MISSING

BEFORE, AFTER, TARGET = Stroke(VERMILION, "dashdot"), Stroke(BLUE, "solid"), Stroke(ORANGE, "dash")
APART = ", the last position left out, since the residual stream alone decides what it keeps"
NOTE = (
    "W1: Wasserstein distance between the shapes of two profiles with the context scaled to [0, 1]{apart}. "
    "Brackets are 95 % intervals over initialisations."
)
EQUAL = 1e-9
"""A distance to the target below this is none: the target is the flat line."""
# What a length's row shows of its distances.
SHOWN = (("after", ".3g"), ("before", ".3f"), ("flat", ".3f"))


@REPORTS.register("design")
def design_report(record: Record) -> Report:
    """What was aimed at, what was found, and what it does at other lengths."""
    statements, figures, tables = _statements(record), _figures(record), _tables(record)
    measured = record.scalars.get("measured")
    return Report(
        f"Design: {record.resolved['title']}",
        kicker="posbias · an architecture with a chosen position bias",
        verdict=[*statements[:1], *statements[-1:]] if measured else statements[:2],
        picture=figures[:1],
        summary=tables[:1],
        statements=statements,
        caveats=caveats_of(record),
        figures=figures[1:],
        note=NOTE.format(apart="" if record.scalars.get("whole") else APART),
        tables=tables[1:],
        record=record,
    )


def _statements(record: Record) -> list[str]:
    scalars = record.scalars
    at = {entry["n_positions"]: entry for entry in scalars["distances"]}
    said = _met(record, [at[length] for length in scalars["lengths"]])
    other = [entry for length, entry in at.items() if length not in scalars["lengths"]]
    if other:
        carried = ", ".join(f"{entry['after']:.2g} at {entry['n_positions']}" for entry in other)
        said.append(f"At lengths that were not asked for: W1 {carried}.")
    for name, ended in scalars.get("at_ends", {}).items():
        said.append(
            f"Of the {ended['of']} values of {name}, {ended['count']} ended at an end of the range that is searched; "
            "what lies beyond was not tried."
        )
    if chosen := scalars["parameters"].get("norm_placement"):
        others = ", ".join(name for name in scalars["choices"] if name != chosen[0])
        said.append(f"Norm placement {chosen[0]} comes nearest; the others are {others}.")
    if scalars["range_nats"]:
        said.append(f"The key biases of a layer span at most {scalars['range_nats']:.3g} nats.")
    if record.resolved["theory"] == "rollout":
        said.append(
            f"The residual stream alone leaves {scalars['residual']:.3g} on the last position; no design goes below."
        )
    said += [
        f"Measured at {found['n_positions']} positions on {found['networks']} fresh initialisations: W1 to the target "
        f"{interval_text(found['distance'], '.4f')}, undesigned {interval_text(found['before'], '.4f')}; one half of "
        f"the designed networks lies {found['noise']:.4f} from the other."
        for found in scalars.get("measured", [])
    ]
    return said


def _met(record: Record, asked: list[dict[str, Any]]) -> list[str]:
    """Whether the target is met at every length that was asked for, and what would meet it where it is not."""
    scalars, tolerance = record.scalars, record.scalars.get("tolerance")
    theory = "the residual rollout" if record.resolved["theory"] == "rollout" else "the mean field"
    left = f"W1 {_at_lengths(asked, 'after')} positions, where it was {_at_lengths(asked[-1:], 'before', '.3f')}"
    if tolerance is None:
        return [f"Under {theory} the design leaves {left}."]  # a record of a version that did not judge
    near = all(entry["after"] is not None and entry["after"] <= tolerance for entry in asked)
    if scalars.get("met", near):
        how = "exactly, by a closed form" if scalars["exact"] else f"to within W1 {tolerance:g}, by search"
        flat = [entry for entry in asked if EQUAL < entry.get("flat", 0.0) <= tolerance]
        said = [f"Under {theory} the profile meets the target {how}: {left}."]
        if flat:
            said.append(f"So does a flat line: W1 {_at_lengths(flat, 'flat')} positions.")
        return said
    said = [
        f"The target is not met: under {theory} the best design that was found leaves {left}; at most {tolerance:g} "
        "counts as met." + (" Its attention is off: every mixing ended at its lower end." if near else "")
    ]
    others = scalars.get("alternatives", [])
    for other in others:
        over = " and ".join(other["over"])
        if "mixing" in other["over"]:
            over += f" ({other['mixing']:.2g} on average)"
        verb = "meets it" if other["met"] else "does not meet it either"
        said.append(f"A design over {over} {verb}: W1 {_at_lengths(other['distances'], 'after')} positions.")
    if not any(other["met"] for other in others):
        said.append("Nothing else that was tried meets it." if others else "Nothing else was tried.")
    return [" ".join(said)] if scalars.get("measured") else [said[0], " ".join(said[1:])]


def _at_lengths(entries: Sequence[Mapping[str, Any]], key: str, spec: str = ".2g") -> str:
    """The distances at several lengths in words."""
    return ", ".join(
        f"{'undefined' if entry[key] is None else format(entry[key], spec)} at {entry['n_positions']}"
        for entry in entries
    )


def _tables(record: Record) -> list[Table]:
    rows = [
        [
            f"{entry['n_positions']}",
            *(MISSING if entry.get(key) is None else format(entry[key], spec) for key, spec in SHOWN),
        ]
        for entry in record.scalars["distances"]
    ]
    tables = [Table("W1 to the target, by length", ["positions", "designed", "as it was", "flat line"], rows)]
    if choices := record.scalars.get("choices"):
        lengths = [f"{entry['n_positions']} positions" for entry in next(iter(choices.values()))]
        rows = [[name, *(f"{entry['after']:.3g}" for entry in entries)] for name, entries in choices.items()]
        tables.append(Table("W1 to the target with every norm placement, designed", ["norms", *lengths], rows))
    for name, values in record.scalars["parameters"].items():
        if len(values) <= 128 and name != "norm_placement":
            rows = [value if isinstance(value, list) else [value] for value in values]
            cells = [[str(index), *(f"{value:.6g}" for value in row)] for index, row in enumerate(rows)]
            # A spline has a column for every knot.
            columns = [name, *[""] * (len(rows[0]) - 1)]
            tables.append(Table(f"{name} (layer 0 is nearest the input; alibi: by head)", ["", *columns], cells))
    return tables


def _figures(record: Record) -> list[Figure | HeatMap]:
    arrays, scalars = record.arrays, record.scalars
    length = max(scalars["lengths"])
    profiles = {name: Profile(arrays[f"{name}/{length}"]) for name in ("profile", "before")}
    target = Profile.normalised(arrays[f"target/{length}"])
    curves = [
        profile_curve("as it was", profiles["before"], BEFORE),
        profile_curve("designed", profiles["profile"], AFTER, emphasis=True),
    ]
    if f"measured/{length}/influence" in arrays:
        ends = {name: arrays[f"measured/{length}/{name}"] for name in ("influence", "low", "high")}
        curves.append(profile_curve("designed, measured at initialisation", Profile(**ends), MEASURED))
    curves.append(profile_curve("target", target, TARGET))  # on top of what meets it
    figures: list[Figure | HeatMap] = [
        profile_figure("design", f"Influence at {length} positions: target, as it was, designed", curves)
    ]
    if "rows" in arrays:
        shown = np.where(arrays["rows"] > 0, arrays["rows"], np.nan)
        figures.append(
            HeatMap(
                "rows",
                "Every output position: where its influence comes from in the designed rollout",
                "input position",
                "output position",
                "influence",
                (Panel("", shown),),
                x=(0.0, float(length - 1)),
                y=(0.0, float(length - 1)),
                scale="logarithmic",
                floor=max(float(np.nanmin(shown)), float(np.nanmax(shown)) * 1e-5),
            )
        )
    at = scalars["distances"]
    lengths = np.array([entry["n_positions"] for entry in at], dtype=np.float64)
    transfer = [
        Curve(
            name, lengths, np.array([np.nan if entry[key] is None else max(entry[key], 1e-17) for entry in at]), stroke
        )
        for name, key, stroke in (("as it was", "before", BEFORE), ("designed", "after", AFTER))
    ]
    figures.append(
        Figure(
            "transfer",
            "W1 to the target at lengths that were asked for and others",
            "context length N (positions)",
            "W1 to the target",
            tuple(transfer),
            markers=True,
            log_axes="xy",
        )
    )
    return figures
