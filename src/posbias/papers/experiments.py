"""The experiments that can be reproduced, by name; each is registered in its paper's folder, and imported when run."""

from collections.abc import Callable
from typing import Any

from posbias.papers.reproduction import Reproduction
from posbias.registry import Registry

PAPERS: Registry[Callable[[Any], Reproduction]] = Registry("paper")


def reproduce(paper: str, *, settings: Any = None) -> Reproduction:
    """Run a published experiment again.

    Args:
        paper: A name in `PAPERS`.
        settings: Of that experiment (`BirthSettings` for birth-2603.10123), or None for its defaults.

    Returns:
        Sentences, rows, tables and figures; `posbias.papers.reproduction.reproduction_record` makes a record of it.

    Raises:
        UsageError: unknown paper, or settings it does not take.
        RunError: a measurement failed.
    """
    run: Callable[[Any], Reproduction] = PAPERS[paper]
    return run(settings)
