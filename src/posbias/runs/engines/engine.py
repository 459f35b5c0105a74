"""`Engine`: does the units of a workload somewhere, and hands each result over as soon as it is there.

A unit is computed from the workload and its number alone, with a pinned number of threads (floating-point sums are
split by thread, so their last bits depend on it): every engine gives the same bits. `collect` takes finished units from
the disk and has the others done.
"""

import os
import pickle
import sys
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol, runtime_checkable

import numpy as np

from posbias.checks import check_whole
from posbias.progress import track
from posbias.registry import Registry
from posbias.runs.parts import PartStore

LIBRARIES = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
"""Variables that tell the libraries below NumPy and PyTorch their number of threads, read when they start."""


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


ENGINES: Registry["Engine"] = Registry("engine")

Arrays = dict[str, np.ndarray]

MOST_AT_ONCE = 1025
"""Threads and processes are fewer: OpenMP ends the process if it cannot have as many as it asks for."""


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
class Engine(ABC):
    """A way of doing units."""

    name: ClassVar[str]
    threads: int | None = None
    """Threads for each unit, >= 1; None: as many as PyTorch would use in the process that starts the run. Equal
    threads, equal bits: with w workers on c cores, c / w is fastest."""

    @classmethod
    def parse(cls, text: str) -> "Engine":
        """Read an engine from its spelling: `local`, `ray(retries=5)`."""
        return ENGINES.parse(text)

    def __post_init__(self) -> None:
        if self.threads is not None:
            check_whole(f"{self.name}: threads", self.threads, least=1, below=MOST_AT_ONCE)

    @abstractmethod
    def run(self, workload: Workload, units: Sequence[int], *, prepared: Any = None) -> Iterator[tuple[int, Arrays]]:
        """Every unit with its result, as they come.

        `prepared` is what `workload.prepare` would make, if the caller has it; only this process can use it.

        Raises:
            Exception: as raised by a unit; the others are given up then.
            RunError: a worker died.
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


_READY: dict[bytes, tuple[Workload, Any]] = {}
"""The workload of this worker, pickled, with what it has prepared."""


def compute_packed(packed: bytes, threads: int, unit: int) -> Arrays:
    """The result of a unit of a pickled workload, in a worker, which prepares once."""
    with pinned(threads):
        if packed not in _READY:
            workload: Workload = pickle.loads(packed)
            _READY.clear()
            _READY[packed] = (workload, workload.prepare())
        workload, prepared = _READY[packed]
        return workload.compute(prepared, unit)


def collect(
    workload: Workload, names: Sequence[str], *, engine: Engine, store: PartStore, prepared: Any = None
) -> list[Arrays]:
    """The results of all units, each kept in the store under its name as soon as it is there; as `Engine.run`."""
    results = {unit: arrays for unit, name in enumerate(names) if (arrays := store.find(name)) is not None}
    store.report(len(names))
    missing = [unit for unit in range(len(names)) if unit not in results]
    finished = engine.run(workload, missing, prepared=prepared)
    for unit, arrays in track(finished, workload.description, total=len(missing)):
        results[unit] = store.keep(names[unit], arrays)
    return [results[unit] for unit in range(len(names))]
