"""Units done on this machine: in this process, or in worker processes that each prepare once.

The processes are loky's: fresh interpreters, so nothing is inherited that could change a result, and a script needs no
guard of its main part.
"""

import os
import pickle
import re
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from typing import Any

from posbias.checks import check_whole
from posbias.errors import RunError
from posbias.memory import keep_freed_memory, keeps_freed_memory
from posbias.runs.engines.engine import (
    ENGINES,
    MOST_AT_ONCE,
    Arrays,
    Engine,
    Workload,
    compute_packed,
    library_environment,
    pinned,
)

ORPHANED_SECONDS = 0.5
"""How often a worker looks whether its run is there."""


@ENGINES.register("local")
@dataclass(frozen=True)
class Local(Engine):
    """This machine: one worker is this process itself, more are processes of their own."""

    workers: int = 1
    """Units done at a time, >= 1; each worker of several holds its own copy of the model."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_whole("local: workers", self.workers, least=1, below=MOST_AT_ONCE)

    def run(self, workload: Workload, units: Sequence[int], *, prepared: Any = None) -> Iterator[tuple[int, Arrays]]:
        """See `Engine.run`."""
        if self.workers > 1 and units:
            yield from self._in_workers(workload, units)
            return
        for unit in units:
            # Pinned around each unit only: between units the caller's own code runs.
            with pinned(self.pinned_threads):
                prepared = workload.prepare() if prepared is None else prepared
                arrays = workload.compute(prepared, unit)
            yield unit, arrays

    def _in_workers(self, workload: Workload, units: Sequence[int]) -> Iterator[tuple[int, Arrays]]:
        from loky import ProcessPoolExecutor

        workers = min(self.workers, len(units))
        pool = ProcessPoolExecutor(
            workers,
            timeout=None,
            env=library_environment(),
            initializer=_begin,
            initargs=(os.getpid(), keeps_freed_memory()),
        )
        packed = pickle.dumps(workload)
        finished = False
        try:
            calls = {pool.submit(compute_packed, packed, self.pinned_threads, unit): unit for unit in units}
            for call in as_completed(calls):
                yield calls[call], call.result()
            finished = True
        except BrokenProcessPool as error:
            raise RunError(
                f"one of {workers} workers died ({_reason(error)}); is there memory for so many? What is finished is "
                "kept if the run has a directory, and --resume goes on from there"
            ) from None
        finally:
            pool.shutdown(kill_workers=not finished)

    @property
    def processes_here(self) -> int:
        """The workers."""
        return self.workers

    @property
    def in_process(self) -> bool:
        """True with a single worker."""
        return self.workers == 1

    def describe(self) -> dict[str, Any]:
        """Plain values for a record."""
        return {**super().describe(), "workers": self.workers}


def _begin(run: int, keeps: bool) -> None:
    """Make a process a worker of process `run`, whose way with freed memory it takes over (`keeps`)."""
    keep_freed_memory(keeps)
    threading.Thread(target=_end_with, args=(run,), daemon=True).start()


def _end_with(run: int) -> None:
    """End this process with its run: a unit may take hours, and a resumed run keeps its checkpoints in its place."""
    while os.getppid() == run:
        time.sleep(ORPHANED_SECONDS)
    os._exit(1)


def _reason(error: BrokenProcessPool) -> str:
    """How workers ended, out of loky's sentences."""
    return ", ".join(re.findall(r"SIG\w+|EXIT\(\d+\)", str(error))) or "it is not known why"
