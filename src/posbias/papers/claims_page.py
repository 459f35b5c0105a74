"""Verdicts on published claims as a record, and that record as one offline HTML page with a figure per claim.

The page is drawn from the record alone: verdicts from its scalars, curves from its arrays.
"""

import html
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from posbias.errors import UsageError
from posbias.papers.claims import Verdict
from posbias.records import Record
from posbias.report.files import page_template, write_page
from posbias.report.interactive import CONFIG, FONT, plotly_source
from posbias.report.palette import GRID, INK, RUNS
from posbias.version import __version__

TEMPLATE = "claims.html.jinja"


def claims_record(
    verdicts: Sequence[Verdict],
    arguments: Mapping[str, Any],
    *,
    seed: int,
    command: str = "",
    read: Mapping[str, Any] | None = None,
) -> Record:
    """Verdicts with the evidence behind them.

    Args:
        verdicts: On random instances, or on one model.
        arguments: What the user passed.
        seed: Of the instances, or of the prompts.
        command: What repeats it in a shell.
        read: Of a model: `model` and `prompts` as they describe themselves.

    Returns:
        A record of verb "verify": `scalars["verdicts"]` is the list of verdicts, each with its `figure` (labels and
        array names); the curves are arrays `evidence/<claim>/<number>/x` and `/y`.
    """
    record = Record(
        verb="verify",
        arguments=dict(arguments),
        resolved={"title": _title(read or {}), "command": command, **(read or {})},
        seeds={"claims": seed},
    )
    entries = []
    for verdict in verdicts:
        figure = verdict.finding.figure
        stems = [f"evidence/{verdict.claim.name}/{number}" for number in range(len(figure.series))]
        for stem, series in zip(stems, figure.series, strict=True):
            record.arrays[f"{stem}/x"], record.arrays[f"{stem}/y"] = series.x, series.y
        drawn = {
            "x_label": figure.x_label,
            "y_label": figure.y_label,
            "log_x": figure.log_x,
            "log_y": figure.log_y,
            "curves": [
                {"label": series.label, "arrays": stem} for stem, series in zip(stems, figure.series, strict=True)
            ],
        }
        entries.append({**verdict.as_dict(), "figure": drawn})
    record.scalars["verdicts"] = entries
    return record


def _title(read: Mapping[str, Any]) -> str:
    tested = "Published claims put to the test"
    return f"{tested} on {read['model'].get('source', 'a model')}" if "model" in read else tested


def write_claims_report(record: Record, out: Path) -> Path:
    """Write `report.html` into `out`, atomically.

    Raises:
        UsageError: the record is not one of verified claims.
        RunError: the file cannot be written.
    """
    if record.verb != "verify" or "verdicts" not in record.scalars:
        raise UsageError(f"a claims report needs a record of verb 'verify', got {record.verb!r}")
    return write_page(render_claims(record), out)


def render_claims(record: Record) -> str:
    """The page as text."""
    verdicts = record.scalars["verdicts"]
    return page_template(TEMPLATE).render(
        title=record.resolved.get("title", "Published claims put to the test"),
        command=record.resolved.get("command", ""),
        seed=record.seeds.get("claims", 0),
        verdicts=verdicts,
        charts=[_chart(record, entry, f"figure-{number}") for number, entry in enumerate(verdicts)],
        plotly=plotly_source(),
        version=__version__,
    )


def _chart(record: Record, entry: Mapping[str, Any], anchor: str) -> str:
    """The evidence for one verdict as an HTML fragment."""
    import plotly.graph_objects as graph

    figure = entry["figure"]
    chart = graph.Figure()
    for curve, stroke in zip(figure["curves"], RUNS, strict=False):
        chart.add_trace(
            {
                "type": "scatter",
                "mode": "lines",
                "name": html.escape(curve["label"]),
                "x": record.arrays[f"{curve['arrays']}/x"],
                "y": record.arrays[f"{curve['arrays']}/y"],
                "line": {"color": stroke.colour, "dash": stroke.dash, "width": 2.2},
                "hovertemplate": "%{y:.3g}",
            }
        )
    chart.update_layout(
        font={"family": FONT, "color": INK, "size": 13},
        paper_bgcolor="white",
        plot_bgcolor="white",
        hovermode="x unified",
        margin={"l": 80, "r": 20, "t": 30, "b": 90},
        legend={"orientation": "h", "y": -0.22, "yanchor": "top", "x": 0},
        xaxis=_axis(figure["x_label"], logarithmic=figure["log_x"]),
        yaxis=_axis(figure["y_label"], logarithmic=figure["log_y"]),
    )
    fragment: str = chart.to_html(
        full_html=False, include_plotlyjs=False, div_id=anchor, default_height="400px", config=CONFIG
    )
    return fragment


def _axis(label: str, *, logarithmic: bool) -> dict[str, Any]:
    return {
        "title": {"text": html.escape(label)},
        "type": "log" if logarithmic else "linear",
        "exponentformat": "power",
        "gridcolor": GRID,
        "linecolor": INK,
        "showline": True,
        "ticks": "outside",
        "zeroline": False,
    }
