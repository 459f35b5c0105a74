"""Engines do the units of a workload somewhere, and hand each result over as soon as it is there.

A unit is computed from the workload and its number alone, with a pinned number of threads (floating-point sums are
split by thread, so their last bits depend on it): this process, worker processes and a Ray cluster give the same bits.
`collect` takes finished units from the disk and has the others done.
"""

import os
import pickle
import re
import socket
import sys
import threading
import time
import warnings
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Protocol, runtime_checkable

import numpy as np
from annotated_types import Ge, Interval

from posbias.checks import CountOrZero, NonNegative
from posbias.errors import RunError, UsageError
from posbias.memory import keep_freed_memory, keeps_freed_memory
from posbias.progress import track
from posbias.registry import Registry
from posbias.runs.parts import PartStore

LIBRARIES = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
"""Variables that tell the libraries below NumPy and PyTorch their number of threads, read when they start."""
MOST_AT_ONCE = 1025
"""Threads and processes are fewer: OpenMP ends the process if it cannot have as many as it asks for."""
AtOnce = Annotated[int, Interval(ge=1, lt=MOST_AT_ONCE)]
ORPHANED_SECONDS = 0.5
"""How often a worker looks whether its run is there."""
REACH_SECONDS = 10.0
"""How long a cluster's address may take to answer."""
PLACE_SECONDS = 300.0
"""How often the cluster is asked whether it still has room, while nothing gets finished."""
KEPT = "what is finished is kept if the run has a directory, and --resume goes on from there"

ENGINES: Registry["Engine"] = Registry("engine")

Arrays = dict[str, np.ndarray]
Done = Iterator[tuple[int, Arrays]]
"""Units with their results, as they come."""


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
    threads: AtOnce | None = None
    """Threads for each unit, >= 1; None: as many as PyTorch would use in the process that starts the run. Equal
    threads, equal bits: with w workers on c cores, c / w is fastest."""
    workers: AtOnce | None = None
    """Units done at a time, >= 1; None: as many as there is room for."""

    @classmethod
    def parse(cls, text: str) -> "Engine":
        """Read an engine from its spelling: `local`, `ray(retries=5)`."""
        return ENGINES.parse(text)

    @abstractmethod
    def run(self, workload: Workload, units: Sequence[int], *, prepared: Any = None) -> Done:
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
        return self.workers or max(1, (os.cpu_count() or 1) // self.pinned_threads)

    @property
    def in_process(self) -> bool:
        """True if units are done here, with what is prepared here: then no other process has to know the model."""
        return isinstance(self, Local) and self.workers == 1

    def describe(self) -> dict[str, Any]:
        """Plain values for a record."""
        return {"name": self.name, "threads": self.pinned_threads, "workers": self.workers}


@ENGINES.register("local")
@dataclass(frozen=True)
class Local(Engine):
    """This machine: one worker is this process itself, more are processes of their own.

    The processes are loky's: fresh interpreters, so nothing is inherited that could change a result, and a script needs
    no guard of its main part.
    """

    workers: AtOnce = 1
    """Units done at a time, >= 1; each worker of several holds its own copy of the model."""

    def run(self, workload: Workload, units: Sequence[int], *, prepared: Any = None) -> Done:
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

    def _in_workers(self, workload: Workload, units: Sequence[int]) -> Done:
        from loky import ProcessPoolExecutor

        workers, packed, finished = min(self.workers, len(units)), pickle.dumps(workload), False
        begin = {"initializer": _begin_worker, "initargs": (os.getpid(), keeps_freed_memory())}
        pool = ProcessPoolExecutor(workers, timeout=None, env=library_environment(), **begin)
        try:
            calls = {pool.submit(compute_packed, packed, self.pinned_threads, unit): unit for unit in units}
            for call in as_completed(calls):
                yield calls[call], call.result()
            finished = True
        except BrokenProcessPool as error:  # how they ended stands in loky's sentences
            reason = ", ".join(re.findall(r"SIG\w+|EXIT\(\d+\)", str(error))) or "it is not known why"
            raise RunError(
                f"one of {workers} workers died ({reason}); is there memory for so many? {KEPT.capitalize()}"
            ) from None
        finally:
            pool.shutdown(kill_workers=not finished)


@ENGINES.register("ray")
@dataclass(frozen=True)
class Ray(Engine):
    """A Ray cluster: the one at `address`, or one started on this machine for the run.

    A node or worker that dies costs the units it was at; Ray tries them again on what is left of the cluster. The nodes
    must be able to load what the workload names (a hub id, or a path that all of them share) and to import posbias.
    """

    workers: Annotated[int, Ge(1)] | None = None
    """Units done at a time, >= 1; None: as many as the cluster has room for."""
    address: str | None = None
    """"host:port", "ray://host:port" or "auto"; None: $RAY_ADDRESS, else a cluster on this machine."""
    gpus: NonNegative = 0
    """Graphics processors that each worker reserves, >= 0."""
    retries: CountOrZero = 2
    """How often a unit is tried again after its worker died, >= 0."""

    def run(self, workload: Workload, units: Sequence[int], *, prepared: Any = None) -> Done:
        """See `Engine.run`."""
        if not units:
            return
        with _connected(self.address) as ray:
            places, cpus = self._places(ray)
            compute = ray.remote(compute_packed).options(
                num_cpus=cpus,
                num_gpus=self.gpus,
                max_retries=self.retries,
                scheduling_strategy="SPREAD",
                runtime_env={"env_vars": library_environment()},
            )
            packed, waiting = ray.put(pickle.dumps(workload)), deque(units)
            calls: dict[Any, int] = {}
            try:
                while waiting or calls:
                    while waiting and len(calls) < places:
                        unit = waiting.popleft()
                        calls[compute.remote(packed, self.pinned_threads, unit)] = unit
                    ready, _ = ray.wait(list(calls), num_returns=1, timeout=PLACE_SECONDS)
                    if not ready:
                        self._places(ray)  # refuses what is left of the cluster if it has no room any more
                        continue
                    yield calls.pop(ready[0]), _received(ray, ready[0])
            finally:
                for call in calls:
                    ray.cancel(call, force=True)

    def _places(self, ray: Any) -> tuple[int, float]:
        """Workers to use, and processors that each reserves: its threads, if every node has that many."""
        offers = [node["Resources"] for node in ray.nodes() if node["Alive"] and node["Resources"].get("CPU", 0) > 0]
        if not offers:
            raise UsageError("the ray cluster has no node with a processor; start one with `ray start`")
        cpus = min(self.pinned_threads, *(offer["CPU"] for offer in offers))
        room = int(sum(offer["CPU"] // cpus for offer in offers))
        if self.gpus:
            room = min(room, int(sum(offer.get("GPU", 0) // self.gpus for offer in offers)))
        if room < 1:
            needed = f"{cpus:g} processors and {self.gpus:g} GPUs"
            raise UsageError(f"the ray cluster has no room for a worker with {needed}")
        return self.workers or room, cpus

    @property
    def processes_here(self) -> int:
        """Those of a cluster that is started here for the run; of another one nothing is known."""
        return 1 if self.address is not None or os.environ.get("RAY_ADDRESS") else super().processes_here


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


def _begin_worker(run: int, keeps: bool) -> None:
    """Make a process a worker of process `run`, whose way with freed memory it takes over, and with which it ends.

    A unit may take hours, and a resumed run keeps its checkpoints in its place.
    """

    def end_with_run() -> None:
        while os.getppid() == run:
            time.sleep(ORPHANED_SECONDS)
        os._exit(1)

    keep_freed_memory(keeps)
    threading.Thread(target=end_with_run, daemon=True).start()


def _received(ray: Any, call: Any) -> Arrays:
    """The result of a finished task."""
    try:
        content = ray.get(call)
    except ray.exceptions.RayTaskError as error:  # the unit's own error, in one of Ray's
        raise error.cause from None
    except ray.exceptions.RayError as error:
        raise RunError(
            f"a worker of the cluster died over a unit each time it was tried ({type(error).__name__}); {KEPT}"
        ) from None
    # Copies: what Ray hands over lies in a store that goes with the cluster.
    return {name: np.array(array) for name, array in content.items()}


@contextmanager
def _connected(address: str | None) -> Iterator[Any]:
    """The ray module, connected; a connection that was there before stays."""
    try:
        import ray
    except ImportError:
        raise UsageError("engine ray needs the ray package: pip install 'posbias[ray]'") from None
    if ray.is_initialized():
        yield ray
        return
    started_here = {"include_dashboard": False} if address is None else {}
    host, _, port = (address or "").removeprefix("ray://").rpartition(":")
    try:
        if host and port.isdigit():  # Ray itself would try for minutes
            socket.create_connection((host, int(port)), timeout=REACH_SECONDS).close()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            ray.init(address=address, log_to_driver=False, logging_level="ERROR", **started_here)
    except Exception as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise UsageError(f"no ray cluster at {address or 'this machine'!r}: {reason[:200]}") from None
    try:
        yield ray
    finally:
        ray.shutdown()
