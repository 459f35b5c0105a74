"""The live table of losses: drawn on a terminal, absent elsewhere."""

import io
import sys

from rich.console import Console

from posbias.training.trainer import SHOWN, live_report, losses_table, no_report
from training_cases import copier


def test_the_table_shows_the_highest_losses_of_members_still_in_training():
    latest = {f"member {place}": (20, 2.0, float(place)) for place in range(SHOWN + 3)}
    latest["member 0"] = (100, 2.0, 50.0)
    console = Console(file=io.StringIO(), width=120)
    console.print(losses_table(latest, total=len(latest), steps=100))
    shown = console.file.getvalue()
    assert f"{len(latest)} of {len(latest)} members seen" in shown
    rows = [line for line in shown.splitlines() if "20/100" in line]
    assert len(rows) == SHOWN
    assert "2.0000" in rows[0]
    assert f"{len(latest) - 1:.4f}" in rows[0]
    assert "100/100" not in shown  # it has ended
    assert "and 2 with lower losses" in shown


def test_a_terminal_sees_first_and_latest_losses(monkeypatch):
    terminal = io.StringIO()
    terminal.isatty = lambda: True
    monkeypatch.setattr(sys, "stderr", terminal)
    with live_report(1, 100) as report:
        report([copier(0)], 10, [3.0])
        report([copier(0)], 20, [1.5])
    assert "20/100" in terminal.getvalue()
    assert "3.0000" in terminal.getvalue()


def test_nothing_is_drawn_where_there_is_no_terminal():
    with live_report(3, 10) as report:
        assert report is no_report
