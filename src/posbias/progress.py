"""Progress on stderr: a bar on a terminal, into a log a line now and then; lines for a log, always."""

import sys
import time
from collections.abc import Iterable, Iterator, Sized
from typing import TypeVar

from posbias.errors import printable

Item = TypeVar("Item")


def track(items: Iterable[Item], description: str, *, total: int | None = None) -> Iterator[Item]:
    """Iterate over `items` (`total` of them) with a progress bar on stderr, or a line a minute for a log."""
    total = len(items) if isinstance(items, Sized) else total
    if not sys.stderr.isatty():
        told = time.monotonic()
        for done, item in enumerate(items):
            if time.monotonic() - told > 60:
                report(f"{description}: {done}" + ("" if total is None else f" of {total}"))
                told = time.monotonic()
            yield item
        return
    from rich.console import Console
    from rich.markup import escape
    from rich.progress import track as rich_track

    yield from rich_track(
        items, description=escape(printable(description)), total=total, console=Console(stderr=True), transient=True
    )


def report(line: str) -> None:
    """One line on stderr, for a log too."""
    print(printable(line), file=sys.stderr, flush=True)


def announce(line: str) -> None:
    """One line on stderr, if someone is watching."""
    if sys.stderr.isatty():
        print(printable(line), file=sys.stderr)
