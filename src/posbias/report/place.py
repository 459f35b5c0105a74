"""An order of passages in words, a table and a figure: what it is worth, and the curve of the model that it follows.

Everything comes from the record (layout: `Placement.as_record` in posbias/evaluation/placement.py).
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from posbias.display.figures import MEASURED, Curve, Figure
from posbias.report.layout import sample_notices, title_of
from posbias.report.page import REPORTS, Report
from posbias.report.tables import Table, interval_text
from posbias.runs.records import Record
from posbias.statistics import MISSING

ORDERS = {"best_first": "best first", "best_last": "best last", "alternating": "best at both ends"}

Stored = Mapping[str, Any]


@REPORTS.register("place")
def placement_report(record: Record) -> Report:
    """The order, what it is worth against the usual ones, why, and what the data do not decide."""
    found = record.scalars
    statements = [
        f"Best order of the passages, first to last (0 is the first given): {_order(found['order'])}.",
        _worth(found),
        "Why: "
        + (
            f"over {found['n_samples']} samples the places differ ({_tests(found)}); "
            f"{100 * found['kept']:.0f} % of the measured differences are kept, the rest is noise."
            if found["decided"]
            else f"{found['n_samples']} samples do not show that the places differ ({_tests(found)}), so best first is "
            "kept."
        ),
    ]
    if found["interpolated"]:
        statements.append("Not every place was measured itself: the curve is interpolated between those that were.")
    cells = []
    for gain in found["gains"]:
        worth = ["0", MISSING, "the same order"]  # the gain, what it was judged on, whether it is shown to be one
        if gain["order"] != found["order"]:
            judged = "held-out samples" if gain["held_out"] else "all samples"
            worth = [interval_text(gain["gain"], "+.3f"), judged, "yes" if gain["raises"] else "not shown"]
        cells.append([ORDERS[gain["over"]], _order(gain["order"]), *worth])
    title = f"Gain in {_measure(found)}, per unit of relevance"
    return Report(
        title_of(record),
        kicker="posbias · where relevant passages should stand",
        verdict=statements,
        notices=sample_notices(record),
        picture=[_placement_figure(found)],
        summary=[Table(title, ["against", "its order", "gain", "judged on", "raises it"], cells)],
        record=record,
    )


def _tests(found: Stored) -> str:
    """The p-value that decides, and why that of `evaluate` on the same samples is another."""
    told = f"p {found['p_flat']:.2g}, an F-test of all differences between them"
    if "p_shape" not in found:  # records before it was kept
        return told
    return f"{told}; evaluate says {found['p_shape']:.2g}, since it looks for a trend and a bend alone"


def _worth(found: Stored) -> str:
    """Over which of the usual orders the chosen one is shown to gain, and by how much."""
    measure = _measure(found)
    others = [gain for gain in found["gains"] if gain["order"] != found["order"]]
    shown = [f"{interval_text(gain['gain'], '+.2f')} over {ORDERS[gain['over']]}" for gain in others if gain["raises"]]
    rest = [f"{ORDERS[gain['over']]} ({interval_text(gain['gain'], '+.2f')})" for gain in others if not gain["raises"]]
    if not others:
        return "This is the usual order, best first."
    if not shown:
        return f"No gain in {measure} is shown over {' and '.join(rest)}."
    left = f"; not shown against {' and '.join(rest)}" if rest else ""
    return f"It raises the {measure}, on samples that had no part in the choice: {' and '.join(shown)}{left}."


def _placement_figure(found: Stored) -> Figure:
    """The curve by which the passages were ordered."""
    curve = np.array(found["curve"], dtype=np.float64)
    best, worst = int(curve.argmax()), int(curve.argmin())
    title = (
        "No difference between the places is shown"
        if not found["decided"]
        else (
            f"Place {best} is used best and holds passage {found['order'][best]}; "
            f"place {worst} is used worst and holds passage {found['order'][worst]}"
        )
    )
    return Figure(
        "placement",
        title,
        f"place among {curve.size} (0 is the first)",
        f"expected {_measure(found)}",
        (Curve("the curve that the order follows", np.arange(curve.size, dtype=np.float64), curve, MEASURED),),
        markers=True,
    )


def _measure(found: Stored) -> str:
    return str(found["measure"]).replace("_", " ")


def _order(order: Sequence[int]) -> str:
    return " ".join(map(str, order))
