"""The live table of losses: drawn on a terminal, absent elsewhere."""

import io

from rich.console import Console
from rich.live import Live

from posbias.training.trainer import SHOWN, LiveTable, live_report, no_report
from training_cases import copier


def test_the_table_shows_the_highest_losses_of_members_still_in_training():
    members = [copier(target % 6, seed=target) for target in range(SHOWN + 3)]
    console = Console(file=io.StringIO(), width=120)
    table = LiveTable(Live(console=console, auto_refresh=False), total=len(members), steps=100)
    table(members, 10, [2.0] * len(members))
    table(members, 20, [float(place) for place in range(len(members))])
    table(members[:1], 100, [50.0])
    console.print(table.table())
    shown = console.file.getvalue()
    assert f"{len(members)} of {len(members)} members seen" in shown
    rows = [line for line in shown.splitlines() if "20/100" in line]
    assert len(rows) == SHOWN
    assert "2.0000" in rows[0]
    assert f"{len(members) - 1:.4f}" in rows[0]
    assert "100/100" not in shown  # it has ended
    assert "and 2 with lower losses" in shown


def test_nothing_is_drawn_where_there_is_no_terminal():
    with live_report(3, 10) as report:
        assert report is no_report
