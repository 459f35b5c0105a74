"""`Engine`: does the units of a workload somewhere, and hands each result over as soon as it is there.

A unit is computed from the workload and its number alone, with a pinned number of threads (floating-point sums are
split by thread, so their last bits depend on it): every engine gives the same bits. A worker that dies costs its own
unit, which is tried again elsewhere. `collect` takes finished units from the disk and has the others done.
"""

import os
import re
import sys
from abc import ABC, abstractmethod
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol, runtime_checkable

import numpy as np

from posbias.checks import check_size, check_whole
from posbias.errors import RunError
from posbias.limits import REPEATS
from posbias.progress import announce, track
from posbias.registry import Registry
from posbias.runs.parts import PartStore

LIBRARIES = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
"""Variables that tell the libraries below NumPy and PyTorch their number of threads, read when they start."""

KEY_NAME = re.compile(r"(\w+_)?(API_?)?(KEY|TOKEN|SECRET)(_\w+)?", re.IGNORECASE)
"""Names of variables that hold keys."""
OF_THE_HUB = ("HF_", "HUGGING_FACE_", "HUGGINGFACE_")
"""Beginnings of the keys' names that a worker needs to load what its run has loaded."""


@contextmanager
def pinned(threads: int) -> Iterator[None]:
    """Compute with that many threads while the context lasts; nothing happens if PyTorch is not in use."""
    torch = sys.modules.get("torch")
    if torch is None:
        yield
        return
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def library_environment() -> dict[str, str]:
    """Variables that give a worker, wherever it runs, as many library threads as this process has."""
    # The others follow OpenMP's variable if their own is not set.
    usual = os.environ.get("OMP_NUM_THREADS") or str(len(os.sched_getaffinity(0)))
    return {name: os.environ.get(name) or usual for name in LIBRARIES}


def keys_of_environment(*needed: str) -> list[str]:
    """Names of the environment's variables that hold keys, but for those that begin with one of `needed`.

    Another process is started without them: whatever it loads, or downloads and runs, could read them.
    """
    return [name for name in os.environ if KEY_NAME.fullmatch(name) and not name.startswith(needed)]


ENGINES: Registry["Engine"] = Registry("engine")

Arrays = dict[str, np.ndarray]

MOST_AT_ONCE = 1025
"""Threads and processes are fewer: OpenMP ends the process if it cannot have as many as it asks for."""
STARTS_LOST = 3
"""Workers that may die before they are prepared, one after another; then no more are started."""


@runtime_checkable
class Workload(Protocol):
    """Work in independent units; picklable, so that any process can do it."""

    @property
    def description(self) -> str:
        """For the progress bar."""
        ...

    def prepare(self) -> Any:
        """Make what all units need (the loaded model), once per worker."""
        ...

    def compute(self, prepared: Any, unit: int) -> Arrays:
        """The result of one unit; UsageError and RunError as anywhere."""
        ...


@dataclass(frozen=True)
class Outcome:
    """The result of one unit, or why there is none."""

    unit: int
    arrays: Arrays | None
    """The result; None if every attempt lost its worker."""
    failure: str = ""
    """Why there is no result, one line."""


@dataclass(frozen=True)
class Engine(ABC):
    """A way of doing units."""

    name: ClassVar[str]
    threads: int | None = None
    """Threads for each unit, >= 1; None: as many as PyTorch would use in the process that starts the run. Equal
    threads, equal bits: with w workers on c cores, c / w is fastest."""
    retries: int = 2
    """How often a unit is tried again after its worker died, >= 0."""

    @classmethod
    def parse(cls, text: str) -> "Engine":
        """Read an engine from its spelling: `local`, `ray(retries=5)`."""
        return ENGINES.parse(text)

    def __post_init__(self) -> None:
        if self.threads is not None:
            check_whole(f"{self.name}: threads", self.threads, least=1, below=MOST_AT_ONCE)
        check_size(f"{self.name}: retries", self.retries, REPEATS, least=0)

    @abstractmethod
    def run(self, workload: Workload, units: Sequence[int], *, prepared: Any = None) -> Iterator[Outcome]:
        """Every unit's outcome, as they come.

        `prepared` is what `workload.prepare` would make, if the caller has it; only this process can use it.

        Raises:
            UsageError, RunError: as raised by a unit; the others are given up then.
            RunError: no worker could be started or prepared.
        """

    @property
    def pinned_threads(self) -> int:
        """The threads of every unit: as set, otherwise as many as PyTorch uses in this process."""
        if self.threads is not None:
            return self.threads
        import torch

        return torch.get_num_threads()

    @property
    def processes_here(self) -> int:
        """Number of processes that measure on this machine at a time."""
        return 1

    @property
    def in_process(self) -> bool:
        """True if units are done here, with what is prepared here: then no other process has to know the model."""
        return False

    def describe(self) -> dict[str, Any]:
        """Plain values for a record."""
        return {"name": self.name, "threads": self.pinned_threads}


class Queue(deque[int]):
    """Units that wait, are tried again after a loss, or are given up; shared by the engines with workers."""

    def __init__(self, units: Sequence[int], retries: int) -> None:
        super().__init__(units)
        self._retries, self._lost = retries, Counter[int]()

    def lose(self, unit: int, reason: str) -> Outcome | None:
        """A worker died over this unit: it waits again, first in line, or it has failed."""
        self._lost[unit] += 1
        if self._lost[unit] <= self._retries:
            self.appendleft(unit)
            return None
        return Outcome(unit, None, f"lost its worker {self._lost[unit]} times ({reason})")


@dataclass
class Starts:
    """Number of workers to have: fewer than requested once several have died while preparing, as for want of memory."""

    workers: int
    _lost: int = 0
    _reason: str = ""

    def wanted(self, alive: int) -> int:
        """Workers to have while so many are alive."""
        if self._lost < STARTS_LOST:
            return self.workers
        if alive == 0:
            raise RunError(f"{self._lost} workers died while preparing ({self._reason}); is there memory for them?")
        return alive

    def succeeded(self) -> None:
        """A worker is prepared: those lost before it do not count, unless they were enough to stop."""
        if self._lost < STARTS_LOST:
            self._lost = 0

    def failed(self, reason: str, *, remaining: int) -> None:
        """A worker died while preparing; so many remain."""
        self._lost, self._reason = self._lost + 1, reason
        if self._lost == STARTS_LOST and remaining:
            announce(f"{self._lost} workers died while preparing ({reason}): going on with {remaining}")

    def make_room(self, remaining: int) -> None:
        """A worker died over a unit; if no more were to be started, one may take its place and its memory."""
        if self._lost >= STARTS_LOST:
            self.workers, self._lost = remaining + 1, 0


def collect(
    workload: Workload, names: Sequence[str], *, engine: Engine, store: PartStore, prepared: Any = None
) -> list[Arrays]:
    """The results of all units, each kept in the store under its name as soon as it is there; as `Engine.run`.

    A unit whose workers died every time fails the run when all others are done and kept.
    """
    results = {unit: arrays for unit, name in enumerate(names) if (arrays := store.find(name)) is not None}
    store.report(len(names))
    missing = [unit for unit in range(len(names)) if unit not in results]
    failures: dict[int, str] = {}
    outcomes = engine.run(workload, missing, prepared=prepared)
    for outcome in track(outcomes, workload.description, total=len(missing)):
        if outcome.arrays is None:
            failures[outcome.unit] = outcome.failure
        else:
            results[outcome.unit] = store.keep(names[outcome.unit], outcome.arrays)
    if failures:
        first = min(failures)
        raise RunError(
            f"{len(failures)} of {len(names)} units failed, first {names[first]}: {failures[first]}; the others are "
            "kept if the run has a directory, and --resume tries these again"
        )
    return [results[unit] for unit in range(len(names))]
