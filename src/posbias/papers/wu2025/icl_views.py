"""In-context retrieval as figures and tables: gaps by depth, by training data and mask, accuracy by place, sinks."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import Float64

from posbias.papers.wu2025.icl_cells import ENCODINGS, GAPS, Cells
from posbias.papers.wu2025.icl_sink_statements import SINK_PREFIXES, SINK_WINDOWS
from posbias.papers.wu2025.icl_statements import ENDS, NAMED, RELATIVE
from posbias.report.figures import BLUE, FAINT, GREEN, ORANGE, PURPLE, SKY, VERMILION, Curve, Figure, Stroke
from posbias.report.tables import Table
from posbias.statistics import mean_ends, mean_of

_COLOURS = {"none": BLUE, "decay": VERMILION, "rope": GREEN, "sinusoidal": ORANGE}
_DASHES = {"full": "dash", "causal": "solid"}
_SPARE = (BLUE, SKY, GREEN, ORANGE, VERMILION, PURPLE, FAINT)
NOTHING = "no bias"
Cell = dict[str, Any]


def retrieval_figures(name: str, cells: Cells) -> list[Figure]:
    """The source's figures for one variant, as far as its members were trained.

    Args:
        name: Of the variant, for titles and file names: letters, digits, hyphens.
        cells: Its members.
    """
    figures = []
    for residual, word in ((False, "without residual"), (True, "with residual")):
        for number, gap in enumerate(GAPS):
            figure = _depth_figure(
                f"icl-{name}-{'residual' if residual else 'plain'}-{number}", cells, number, residual
            )
            if figure is not None:
                figures.append(Figure(**{**vars(figure), "title": f"{name}: gap {gap} by depth, {word} connections"}))
    for answers in (ENDS, *NAMED):
        shown = {
            f"{ENCODINGS[encoding]}, {'no mask' if mask == 'full' else mask}": (
                {"answers": answers, "mask": mask, "encoding": encoding, "residual": True},
                Stroke(_COLOURS[encoding], _DASHES[mask]),
            )
            for mask in ("full", "causal")
            for encoding in ("none", "sinusoidal", "rope")
        }
        title = f"{name}: accuracy by place of the answer, trained on {answers.replace('_', ' ')}"
        figures += _curves(f"icl-{name}-{answers.replace('_', '-')}", title, cells, shown)
    figures += _curves(
        f"icl-{name}-places", f"{name}: accuracy by place, no bias in the data, two layers", cells, _plain_cells()
    )
    return [*figures, *_sink_figure(name, cells)]


def _plain_cells() -> dict[str, tuple[Cell, Stroke]]:
    return {
        f"{ENCODINGS[encoding]}, {'residual' if residual else 'no residual'}": (
            {"encoding": encoding, "residual": residual},
            Stroke(_COLOURS[encoding], "dash" if residual else "solid"),
        )
        for encoding in RELATIVE
        for residual in (False, True)
    }


def _depth_figure(slug: str, cells: Cells, gap: int, residual: bool) -> Figure | None:
    curves = []
    for encoding in RELATIVE:
        depths = cells.depths(encoding=encoding, residual=residual)
        if depths:
            rows = cells.gaps(*({"encoding": encoding, "residual": residual, "depth": depth} for depth in depths))
            by_depth = np.stack([row[:, gap] for row in rows], axis=1)
            at = np.array(depths, dtype=np.float64)
            curves.append(_banded(ENCODINGS[encoding], at, by_depth, Stroke(_COLOURS[encoding], "solid")))
    if not curves:
        return None
    ends = np.array([curves[0].x.min(), curves[0].x.max()])
    curves.append(Curve(NOTHING, ends, np.zeros(2), Stroke(FAINT, "dot")))
    return Figure(slug, "", "layers", "accuracy gap (earlier minus later)", tuple(curves), markers=True)


def _curves(slug: str, title: str, cells: Cells, shown: Mapping[str, tuple[Cell, Stroke]]) -> list[Figure]:
    """Accuracy by place of the answer of several cells; empty where none was trained."""
    curves = []
    for name, (cell, stroke) in shown.items():
        if cells.has(cell):
            rows = cells.values("accuracy", cell)[0]
            curves.append(_banded(name, np.arange(1.0, rows.shape[1] + 1), rows, stroke))
    return (
        [Figure(slug, title, "place of the answer (1 ... 8)", "accuracy", tuple(curves), markers=True)]
        if curves
        else []
    )


def _sink_figure(name: str, cells: Cells) -> list[Figure]:
    shown: dict[str, Cell] = {"causal": {}}
    shown.update({f"window {width}": {"mask": f"sliding_window(width={width})"} for width in SINK_WINDOWS})
    shown.update({f"prefix {length}": {"mask": f"prefix(length={length})"} for length in SINK_PREFIXES})
    curves = []
    for colour, (label, cell) in zip(_SPARE, shown.items(), strict=True):
        if cells.has(cell):
            rows = cells.values("sinks", cell)[0]
            curves.append(_banded(label, np.arange(1.0, rows.shape[1] + 1), rows, Stroke(colour, "solid")))
    title = f"{name}: attention sink score by token (share of queries that give it more than .2)"
    return [Figure(f"icl-{name}-sinks", title, "token", "sink score", tuple(curves), markers=True)] if curves else []


def _banded(
    name: str, x: Float64[np.ndarray, "n_points"], rows: Float64[np.ndarray, "n_seeds n_points"], stroke: Stroke
) -> Curve:
    return Curve(name, x, rows.mean(axis=0), stroke, *mean_ends(rows))


def gaps_table(name: str, cells: Cells) -> Table:
    """Every trained cell of a variant: accuracy, and the three gaps with intervals over seeds."""
    header = ["mask", "encoding", "layers", "residual", "trained on", "seeds", "accuracy", *GAPS]
    rows: list[Sequence[str]] = []
    seen: set[tuple[Any, ...]] = set()
    for member in cells.outcomes.members:
        factors = dict(member.factors)
        key = tuple(factors.values())
        if key in seen or not member.has(cells.base) or not cells.outcomes.seeds(**factors):
            continue
        seen.add(key)
        seeds = cells.outcomes.seeds(**factors)
        accuracy = cells.outcomes.values("accuracy", factors, seeds).mean(axis=1)
        gaps = cells.outcomes.values("gaps", factors, seeds)
        texts = [mean_of(column).interval().text("+.3f") for column in gaps.T]
        words = [factors["mask"], ENCODINGS[factors["encoding"]], str(factors["depth"])]
        words += ["yes" if factors["residual"] else "no", str(factors["answers"])]
        rows.append([*words, str(len(seeds)), f"{accuracy.mean():.3f}", *texts])
    return Table(f"Gaps, {name}", header, rows)
