"""A placement in words and a table, from its record alone."""

from collections.abc import Mapping
from typing import Any

from posbias.records import Record
from posbias.report.conditions import title_of
from posbias.report.page import REPORTS, Report
from posbias.report.tables import Table
from posbias.statistics import Interval
from posbias.statistics.intervals import MISSING

ORDERS = {"best_first": "best first", "best_last": "best last", "alternating": "best at both ends"}


@REPORTS.register("place")
def placement_report(record: Record) -> Report:
    """The order, what it is worth against the usual ones, and what the data do not decide."""
    header = ["against", "its order", "gain", "judged on", "raises it"]
    cells = [
        [
            ORDERS[gain["over"]],
            _order(gain["order"]),
            *_worth(gain, same=gain["order"] == record.scalars["order"]),
        ]
        for gain in record.scalars["gains"]
    ]
    return Report(
        kicker="posbias · where relevant passages should stand",
        title=title_of(record),
        statements=statements_of(record),
        tables=[Table(f"Gain in {record.scalars['measure'].replace('_', ' ')}, per unit of relevance", header, cells)],
    )


def statements_of(record: Record) -> list[str]:
    """The order, and what it rests on."""
    found = record.scalars
    rest = (
        f"{100 * found['kept']:.0f} % of the measured differences between positions are kept, the rest is noise"
        if found["decided"]
        else "the samples do not show that positions differ, so best first is kept"
    )
    statements = [
        f"order of the passages, first to last (0 is the first given): {_order(found['order'])}",
        f"curve of {found['n_samples']} samples, p {found['p_flat']:.2g} against flat: {rest}",
    ]
    if found["interpolated"]:
        statements.append("the slots were not all measured themselves: the curve is interpolated between positions")
    return statements


def _worth(gain: Mapping[str, Any], *, same: bool) -> list[str]:
    """The gain, on what it was judged, and whether it is shown to be one."""
    if same:
        return ["0", MISSING, "the same order"]
    judged = "held-out samples" if gain["held_out"] else "all samples"
    return [Interval.of_record(gain["gain"]).text("+.3f"), judged, "yes" if gain["raises"] else "not shown"]


def _order(order: list[int]) -> str:
    return " ".join(map(str, order))
