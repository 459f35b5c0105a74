"""Progress on stderr for anything longer than a second, silent if it is no terminal; lines for a log, always."""

import sys
from collections.abc import Iterable, Iterator, Sized
from typing import TypeVar

from posbias.errors import printable

Item = TypeVar("Item")


def track(items: Iterable[Item], description: str, *, total: int | None = None) -> Iterator[Item]:
    """Iterate over `items` (`total` of them) with a progress bar on stderr, if someone is watching."""
    if not sys.stderr.isatty():
        yield from items
        return
    from rich.console import Console
    from rich.markup import escape
    from rich.progress import track as rich_track

    total = len(items) if isinstance(items, Sized) else total
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
