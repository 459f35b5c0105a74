"""`collect`: all units of a workload in order, the finished ones from the disk, the others by an engine."""

from collections.abc import Sequence
from typing import Any

from posbias.engines.engine import Arrays, Engine, Workload
from posbias.errors import RunError
from posbias.parts import PartStore
from posbias.progress import track


def collect(
    workload: Workload, names: Sequence[str], *, engine: Engine, store: PartStore, prepared: Any = None
) -> list[Arrays]:
    """The results of units 0 ... len(names) - 1, each kept under its name as soon as it is there.

    Args:
        workload: What to do.
        names: Of the pieces, distinct, one per unit.
        engine: What does the units that are not finished yet.
        store: Where finished units are found and kept.
        prepared: What `workload.prepare` would make, where the caller has it.

    Raises:
        UsageError, RunError: as raised by a unit.
        RunError: units whose workers died every time; all others are done and kept by then.
    """
    done = {unit: arrays for unit, name in enumerate(names) if (arrays := store.find(name)) is not None}
    store.tell(len(names))
    missing = [unit for unit in range(len(names)) if unit not in done]
    failures: dict[int, str] = {}
    outcomes = engine.run(workload, missing, prepared=prepared)
    for outcome in track(outcomes, workload.description, total=len(missing)):
        if outcome.arrays is None:
            failures[outcome.unit] = outcome.failure
        else:
            done[outcome.unit] = store.keep(names[outcome.unit], outcome.arrays)
    if failures:
        first = min(failures)
        raise RunError(
            f"{len(failures)} of {len(names)} units failed, first {names[first]}: {failures[first]}; the others are "
            "kept where the run has a directory, and --resume tries these again"
        )
    return [done[unit] for unit in range(len(names))]
