"""What each ingredient of the power rollout costs, as a table, from the record of `predict --ingredients`."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from posbias.comparison import UNITS_FOR_CLAIM
from posbias.records import Record
from posbias.report.conditions import caveats_of
from posbias.report.tables import VERDICTS, Table, print_notes, print_tables
from posbias.report.wording import KINDS, label
from posbias.statistics.intervals import MISSING

if TYPE_CHECKING:
    from rich.console import Console

TITLE = "What does leaving out each ingredient cost?"


def show_ingredients(record: Record, console: "Console") -> None:
    """Print the table: ruled on a terminal, aligned plain columns into a pipe or a file."""
    found = record.scalars["ingredients"]
    print_tables([Table(TITLE, *ingredient_cells(found))], console)
    count = min((entry["count"] for entry in found.values()), default=0)
    few = [f"{count} prompts: with fewer than {UNITS_FOR_CLAIM} nothing is decided."] * (count < UNITS_FOR_CLAIM)
    print_notes([*few, *record.scalars["left_out"], *caveats_of(record)], console)


def ingredient_cells(found: Mapping[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Header and cells: for each measured kind the whole theory, what was left out of it, and the flat line.

    Args:
        found: The scalar `ingredients` of the record; empty where there is none.
    """
    header = ["measured", "left out", "W1 [95 %]", "more than with nothing left out [95 %]", "verdict"]
    cells = []
    for kind, entry in found.items():
        name = label(KINDS, kind)
        for left_out, row in entry["left_out"].items():
            cost = row["cost"]
            rest = [MISSING, MISSING] if cost is None else [_text(cost, "+.3f"), _verdict(cost, entry["count"])]
            what = "nothing" if cost is None else left_out.replace("_", " ")
            cells.append([name, what, _text(row["distance"]), *rest])
        cells.append([name, "(flat line)", _text(entry["flat"]), MISSING, MISSING])
    return header, cells


def _text(stored: Mapping[str, float | None], style: str = ".3f") -> str:
    """A number with its interval."""
    value, low, high = (stored[part] for part in ("value", "low", "high"))
    if value is None:
        return MISSING
    ends = "" if low is None or high is None else f" [{format(low, style)}, {format(high, style)}]"
    return f"{format(value, style)}{ends}"


def _verdict(cost: Mapping[str, float | None], count: int) -> str:
    """Whether the theory is closer or farther without it, where the interval says."""
    low, high = cost["low"], cost["high"]
    if count < UNITS_FOR_CLAIM or low is None or high is None:
        return VERDICTS[0]
    return VERDICTS[(low > 0) - (high < 0)]
