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
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Annotated, Any, ClassVar, Protocol, runtime_checkable

import numpy as np
from annotated_types import Ge, Interval

from posbias.checks import NonNegative
from posbias.errors import RunError, UsageError
from posbias.memory import keep_freed_memory, keeps_freed_memory
from posbias.progress import track
from posbias.registry import Registry
from posbias.runs.parts import PartStore

MOST_AT_ONCE = 1025
"""Threads and processes are fewer: OpenMP ends the process if it cannot have as many as it asks for."""
AtOnce = Annotated[int, Interval(ge=1, lt=MOST_AT_ONCE)]
KEPT = "what is finished is kept if the run has a directory, and --resume goes on from there"

ENGINES: Registry["Engine"] = Registry("engine")

Arrays = dict[str, np.ndarray]
Done = Iterator[tuple[int, Arrays]]
"""Units with their results, as they come."""
Submit = Callable[[int], "Future[Arrays]"]
"""Has a worker do a unit."""


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
        """Read an engine from its spelling: `local`, `ray(gpus=1)`."""
        return ENGINES.parse(text)

    @abstractmethod
    def workers_for(self, workload: Workload, count: int) -> AbstractContextManager[Submit]:
        """Workers for so many units while the context lasts, which ends with RunError if one of them dies."""

    def run(self, workload: Workload, units: Sequence[int], *, prepared: Any = None) -> Done:
        """Every unit with its result, as they come.

        `prepared` is what `workload.prepare` would make, if the caller has it; only this process can use it.

        Raises:
            Exception: as raised by a unit; the others are given up then.
            RunError: a worker died.
        """
        if not units:
            return
        waiting, calls = iter(units), dict[Future[Arrays], int]()
        with self.workers_for(workload, len(units)) as submit:
            while True:
                for unit in islice(waiting, (self.workers or MOST_AT_ONCE) - len(calls)):
                    calls[submit(unit)] = unit
                if not calls:
                    return
                for call in wait(calls, return_when=FIRST_COMPLETED).done:
                    # Copies: what Ray hands over lies in a store that goes with the cluster.
                    yield calls.pop(call), {name: np.array(array) for name, array in call.result().items()}

    @property
    def pinned_threads(self) -> int:
        """The threads of every unit: as set, otherwise as many as PyTorch uses in this process."""
        if self.threads is not None:
            return self.threads
        import torch

        return torch.get_num_threads()

    @property
    def in_process(self) -> bool:
        """True if units are done here, with what is prepared here: then no other process has to know the model."""
        return self.name == "local" and self.workers == 1

    @property
    def processes_here(self) -> int:
        """Number of processes that measure on this machine at a time."""
        return self.workers or max(1, (os.cpu_count() or 1) // self.pinned_threads)

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
        if not self.in_process:
            yield from super().run(workload, units)
            return
        for unit in units:
            # Pinned around each unit only: between units the caller's own code runs.
            with pinned(self.pinned_threads):
                prepared = workload.prepare() if prepared is None else prepared
                arrays = workload.compute(prepared, unit)
            yield unit, arrays

    @contextmanager
    def workers_for(self, workload: Workload, count: int) -> Iterator[Submit]:
        """See `Engine.workers_for`."""
        from loky import ProcessPoolExecutor

        workers, finished = min(self.workers, count), False
        begin = {"initializer": _begin_worker, "initargs": (os.getpid(), keeps_freed_memory())}
        pool = ProcessPoolExecutor(workers, timeout=None, env=library_environment(), **begin)
        try:
            yield partial(pool.submit, compute_packed, pickle.dumps(workload), self.pinned_threads)
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

    @contextmanager
    def workers_for(self, workload: Workload, count: int) -> Iterator[Submit]:
        """See `Engine.workers_for`."""
        with _connected(self.address) as ray:
            nodes = [node["Resources"] for node in ray.nodes() if node["Alive"] and node["Resources"].get("CPU")]
            if not any(node.get("GPU", 0) >= self.gpus for node in nodes):
                raise UsageError(f"the ray cluster has no node with a processor and {self.gpus:g} GPUs for a worker")
            compute = ray.remote(compute_packed).options(
                num_cpus=min(self.pinned_threads, *(node["CPU"] for node in nodes)),
                num_gpus=self.gpus,
                max_retries=2,  # of a unit whose worker died
                scheduling_strategy="SPREAD",
                runtime_env={"env_vars": library_environment()},
            )
            packed, calls = ray.put(pickle.dumps(workload)), set[Any]()

            def submit(unit: int) -> "Future[Arrays]":
                call = compute.remote(packed, self.pinned_threads, unit)
                calls.add(call)
                future: Future[Arrays] = call.future()
                future.add_done_callback(lambda _: calls.discard(call))
                return future

            try:
                yield submit
            except ray.exceptions.RayTaskError as error:  # the unit's own error, in one of Ray's
                raise error.cause from None
            except ray.exceptions.RayError as error:
                raise RunError(
                    f"a worker of the cluster died over a unit each time it was tried ({type(error).__name__}); {KEPT}"
                ) from None
            finally:
                for call in list(calls):
                    ray.cancel(call, force=True)

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
    # Libraries below NumPy and PyTorch read them when they start; they follow OpenMP's if their own is not set.
    usual = os.environ.get("OMP_NUM_THREADS") or str(len(os.sched_getaffinity(0)))
    names = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
    return {name: os.environ.get(name) or usual for name in names}


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
            time.sleep(0.5)
        os._exit(1)

    keep_freed_memory(keeps)
    threading.Thread(target=end_with_run, daemon=True).start()


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
            socket.create_connection((host, int(port)), timeout=10).close()
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
