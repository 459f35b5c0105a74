"""Figures of behaviour by position: each score with its band, and every influence beside the accuracy on one scale."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import Float64

from posbias.records import Record
from posbias.report.figures import Curve, Figure
from posbias.report.palette import FAINT, GREEN, MEASURED, RUNS, SKY, YELLOW, Stroke, theory_strokes
from posbias.report.wording import KINDS, THEORIES, label

MEASURES = {
    "accuracy": "accuracy",
    "values_found": "share of the values found",
    "logprob": "log-probability of the answer per token (nats)",
    "reciprocal_rank": "1 / rank of the answer's first token",
}
WHAT = {
    "gold": "answer's item",
    "place": "place, another item",
}
"""What a series of influence is about."""
INFLUENCES = tuple(Stroke(colour, "solid") for colour in (GREEN, YELLOW, SKY))
"""Strokes of measured kinds, none a theory's."""
TIE_RANGE = (0.02, 20.0)
"""Multiples of the mean shown on the logarithmic axis; theories fall far below."""
ON_ONE_SCALE = ("accuracy", "reciprocal_rank")
"""Measures that can be drawn as multiples of their mean: none is negative."""


def behaviour_figures(record: Record) -> list[Figure]:
    """One figure per measure; then, where influence was measured on the same prompts, everything on one scale."""
    curves = record.scalars["curves"]
    figures = [_score_figure(record, name, curve) for name, curve in curves.items()]
    if record.scalars.get("influence", {}).get("series"):
        figures.insert(0, _own_tie_figure(record))
    return [figure for figure in figures if figure.curves]


def series_name(series: Mapping[str, Any]) -> str:
    """What a series of influence is called."""
    source, kind = series["source"], series["kind"]
    name = f"influence ({label(KINDS, kind)})" if source == "measured" else label(THEORIES, source)
    return f"{name}: {WHAT[series['what']]}"


def _score_figure(record: Record, name: str, curve: Mapping[str, Any]) -> Figure:
    stroke = MEASURED if name == "accuracy" else RUNS[0]
    drawn = _curve(label(MEASURES, name), curve["positions"], curve["means"], stroke)
    finding = curve["findings"][0] if curve["findings"] else ""
    return Figure(
        f"behaviour-{name.replace('_', '-')}",
        f"{record.resolved['title']}, {label(MEASURES, name)}: {finding}",
        _axis(record.scalars["n_items"]),
        label(MEASURES, name),
        () if drawn is None else (drawn,),
        markers=True,
    )


def _own_tie_figure(record: Record) -> Figure:
    title = f"{record.resolved['title']}: what weighs, and what is used, by position (each as a multiple of its mean)"
    group = {
        "positions": record.resolved["positions"],
        "n_items": record.scalars["n_items"],
        "curves": record.scalars["curves"],
        "series": record.scalars["influence"]["series"],
    }
    return tie_figure("behaviour-influence", title, group)


def tie_figure(slug: str, title: str, group: Mapping[str, Any]) -> Figure:
    """Accuracy, influence and theories of one model, each as a multiple of its mean over positions.

    Args:
        slug: Short name for files and anchors.
        title: What is seen, as a sentence.
        group: `positions`, `n_items`, `curves` {measure: {means}} and `series` [{source, kind, what, means}].
    """
    places = group["positions"]
    curves = []
    for name, stroke in zip(ON_ONE_SCALE, (MEASURED, Stroke(MEASURED.colour, "dash")), strict=True):
        if name in group["curves"]:
            curves.append(_scaled(label(MEASURES, name), places, group["curves"][name]["means"], stroke))
    theories = theory_strokes([series["source"] for series in group["series"] if series["source"] != "measured"])
    kinds = list(dict.fromkeys(series["kind"] for series in group["series"] if series["source"] == "measured"))
    for series in group["series"]:
        measured = series["source"] == "measured"
        stroke = INFLUENCES[kinds.index(series["kind"]) % len(INFLUENCES)] if measured else theories[series["source"]]
        if series["what"] == "place" and any(  # beside the answer's item of the same source
            other["what"] == "gold" and (other["source"], other["kind"]) == (series["source"], series["kind"])
            for other in group["series"]
        ):
            stroke = Stroke(stroke.colour, "dot")
        curves.append(_scaled(series_name(series), places, series["means"], stroke))
    return Figure(
        slug,
        title,
        _axis(group["n_items"]),
        "multiple of the mean over positions",
        tuple(curve for curve in curves if curve is not None),
        markers=True,
        log_range=TIE_RANGE,
        linear_range=(0.0, 4.0),
    )


def _axis(n_items: int) -> str:
    return f"position of the answer among {n_items} (0 is the first)"


def _curve(
    name: str, places: Sequence[int], stored: Sequence[Mapping[str, Any]], stroke: Stroke, *, scale: float = 1.0
) -> Curve | None:
    """The positions that have a value, with the band where it is known."""
    kept = [index for index, entry in enumerate(stored) if entry["value"] is not None]
    if not kept:
        return None
    return Curve(
        name,
        np.array([places[index] for index in kept], dtype=np.float64),
        _numbers(stored, kept, "value") / scale,
        stroke,
        low=_numbers(stored, kept, "low") / scale,
        high=_numbers(stored, kept, "high") / scale,
        emphasis=stroke.colour != FAINT,
    )


def _scaled(name: str, places: Sequence[int], stored: Sequence[Mapping[str, Any]], stroke: Stroke) -> Curve | None:
    """A curve as a multiple of its mean; None where that is 0 or unknown."""
    values = [entry["value"] for entry in stored if entry["value"] is not None]
    mean = float(np.mean(values)) if values else 0.0
    return _curve(name, places, stored, stroke, scale=mean) if mean > 0 else None


def _numbers(stored: Sequence[Mapping[str, Any]], kept: Sequence[int], end: str) -> Float64[np.ndarray, "n_kept"]:
    return np.array([np.nan if stored[index][end] is None else stored[index][end] for index in kept], dtype=np.float64)
