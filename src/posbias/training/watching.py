"""Who is told how a training goes: nobody, or a live table of losses on a terminal."""

import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.live import Live
    from rich.table import Table

    from posbias.training.members import Member

SHOWN = 20
"""Most members in the live table."""
REFRESH_SECONDS = 0.5


class Watcher:
    """Hears of every window of every member, and does nothing with it."""

    def window(self, members: Sequence["Member"], step: int, losses: Sequence[float]) -> None:
        """The mean losses (nats) of the members still in training, when `step` steps are done."""


class LiveTable(Watcher):
    """The latest loss of every member, redrawn in place.

    Args:
        live: Where it is drawn.
        total: Members in the whole training.
        steps: Steps of each.
    """

    def __init__(self, live: "Live", *, total: int, steps: int) -> None:
        self._live = live
        self._total, self._steps = total, steps
        self._latest: dict[str, tuple[int, float, float]] = {}
        """By member: steps done, first loss, latest loss."""
        self._drawn = 0.0

    def window(self, members: Sequence["Member"], step: int, losses: Sequence[float]) -> None:
        """Take note; redraw now and then."""
        for member, loss in zip(members, losses, strict=True):
            first = self._latest.get(member.name, (0, loss, loss))[1]
            self._latest[member.name] = (step, first, loss)
        if time.monotonic() - self._drawn >= REFRESH_SECONDS:
            self._drawn = time.monotonic()
            self._live.update(self.table(), refresh=True)

    def table(self) -> "Table":
        """The members heard of last, the highest losses first where there are too many."""
        from rich.table import Table

        seen = f"{len(self._latest)} of {self._total} members seen"
        table = Table(title=f"loss in nats ({seen})", title_justify="left")
        for column in ("member", "step", "first", "now"):
            table.add_column(column, justify="left" if column == "member" else "right")
        training = {name: entry for name, entry in self._latest.items() if entry[0] < self._steps} or self._latest
        worst = sorted(training.items(), key=lambda item: -item[1][2])
        for name, (step, first, loss) in worst[:SHOWN]:
            table.add_row(name, f"{step}/{self._steps}", f"{first:.4f}", f"{loss:.4f}")
        if len(worst) > SHOWN:
            table.add_row(f"... and {len(worst) - SHOWN} with lower losses", "", "", "")
        return table


@contextmanager
def watching(total: int, steps: int) -> Iterator[Watcher]:
    """A live table on stderr if someone is watching, else nobody."""
    if not sys.stderr.isatty():
        yield Watcher()
        return
    from rich.console import Console
    from rich.live import Live

    with Live(console=Console(stderr=True), transient=True, auto_refresh=False) as live:
        yield LiveTable(live, total=total, steps=steps)
