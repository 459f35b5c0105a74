"""Units done on this machine: in this process, or in worker processes that each prepare once.

Workers are fresh interpreters, so nothing is inherited that could change a result or an unguarded script's course.
A worker that is killed (by a user, or by the system for memory) is replaced, and its unit tried again. It ends when its
pipe closes, and at once if its run was killed: a unit may take hours, and the resumed run keeps its checkpoints in the
same place.
"""

import os
import pickle
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, Pipe, wait
from typing import Any

from posbias.checks import check_whole
from posbias.errors import RunError, UsageError
from posbias.memory import give_back_freed_memory, keep_freed_memory, keeps_freed_memory
from posbias.runs.engines.engine import (
    ENGINES,
    MOST_AT_ONCE,
    OF_THE_HUB,
    Engine,
    Outcome,
    Queue,
    Starts,
    Workload,
    keys_of_environment,
    library_environment,
    pinned,
)

ORPHANED_SECONDS = 0.5
"""How often a worker looks whether its run is there."""


def serve(descriptor: int, run: int, keeps: bool) -> None:
    """Answer the requests that arrive on an open pipe, while process `run`, which started this one, lives.

    Freed memory is treated as in that process, whose estimate speaks of this one: `keeps` says whether it is kept.

    The first message is (pickled workload, threads); every later one a unit. Each answer is ("done", arrays),
    ("usage", message) or ("failed", message); the first answer says whether preparing worked.
    """
    (keep_freed_memory if keeps else give_back_freed_memory)()
    threading.Thread(target=_end_with, args=(run,), daemon=True).start()
    with Connection(descriptor) as pipe:
        try:
            packed, threads = pipe.recv()
            workload, prepared, first = prepare_packed(packed)
            pipe.send(first)
            with pinned(threads):
                while first[0] == "done":
                    pipe.send(answer(workload, prepared, pipe.recv()))
        except (EOFError, OSError):
            return  # the run is over


def prepare_packed(packed: bytes) -> tuple[Any, Any, tuple[str, Any]]:
    """A pickled workload, what it prepares, and whether that worked, as `answer` says it."""
    try:
        workload = pickle.loads(packed)
        return workload, workload.prepare(), ("done", None)
    except Exception as error:
        return None, None, _complaint(error)


def answer(workload: Any, prepared: Any, unit: int) -> tuple[str, Any]:
    """The result of a unit, or what went wrong, as plain values that any process can read."""
    try:
        return "done", workload.compute(prepared, unit)
    except Exception as error:
        return _complaint(error)


def _complaint(error: Exception) -> tuple[str, str]:
    message = " ".join(str(error).split())
    if isinstance(error, UsageError | RunError):
        return "usage" if isinstance(error, UsageError) else "failed", message
    return "failed", f"{type(error).__name__}: {message}" if message else type(error).__name__


def unpack(reply: tuple[str, Any]) -> Any:
    """The arrays of a reply, or its error raised."""
    status, content = reply
    if status == "usage":
        raise UsageError(content)
    if status == "failed":
        raise RunError(content)
    return content


def _end_with(run: int) -> None:
    """End this process when another has become its parent."""
    while os.getppid() == run:
        time.sleep(ORPHANED_SECONDS)
    os._exit(1)


GRACE_SECONDS = 5.0
"""How long a process whose pipe is closed may take to end."""


@ENGINES.register("local")
@dataclass(frozen=True)
class Local(Engine):
    """This machine: one worker is this process itself, more are processes of their own."""

    workers: int = 1
    """Units done at a time, >= 1; each worker of several holds its own copy of the model."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_whole("local: workers", self.workers, least=1, below=MOST_AT_ONCE)

    def run(self, workload: Workload, units: Sequence[int], *, prepared: Any = None) -> Iterator[Outcome]:
        """See `Engine.run`."""
        if self.workers > 1 and units:
            yield from _Crew(workload, units, self).run()
            return
        for unit in units:
            # Pinned around each unit only: between units the caller's own code runs.
            with pinned(self.pinned_threads):
                prepared = workload.prepare() if prepared is None else prepared
                arrays = workload.compute(prepared, unit)
            yield Outcome(unit, arrays)

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


@dataclass
class _Worker:
    process: subprocess.Popen[bytes]
    pipe: Connection
    unit: int | None = None


class _Crew:
    def __init__(self, workload: Workload, units: Sequence[int], engine: Local) -> None:
        self._packed, self._threads = pickle.dumps(workload), engine.pinned_threads
        self._queue, self._starts = Queue(units, engine.retries), Starts(engine.workers)
        self._workers: list[_Worker] = []
        self._leaving: list[_Worker] = []
        """Told to go; each ends by itself, and so cleans up behind itself."""

    def run(self) -> Iterator[Outcome]:
        """All outcomes; every process is gone afterwards, however this ends."""
        try:
            while self._queue or self._workers:
                busy = sum(worker.unit is not None for worker in self._workers)
                while len(self._workers) < min(self._starts.wanted(len(self._workers)), len(self._queue) + busy):
                    self._workers.append(_start(self._packed, self._threads))
                ready = wait([worker.pipe for worker in self._workers])
                for worker in [worker for worker in self._workers if worker.pipe in ready]:
                    outcome = self._hear(worker)
                    if outcome is not None:
                        yield outcome
        finally:
            for worker in self._workers:
                _end(worker)
            for worker in self._leaving:
                _end(worker, leaving=True)

    def _hear(self, worker: _Worker) -> Outcome | None:
        """One message of a worker, or its death; the worker gets its next unit, or goes."""
        try:
            content = unpack(worker.pipe.recv())
        except (EOFError, OSError):
            return self._lose(worker)
        unit, worker.unit = worker.unit, None
        if unit is None:
            self._starts.succeeded()
        if self._queue:
            worker.unit = self._queue.popleft()
            with suppress(OSError):  # it died just now: the next message from it is its end
                worker.pipe.send(worker.unit)
        else:
            self._workers.remove(worker)
            worker.pipe.close()
            self._leaving.append(worker)
        return None if unit is None else Outcome(unit, content)

    def _lose(self, worker: _Worker) -> Outcome | None:
        """A worker has died: over a unit, which is tried again, or while preparing."""
        self._workers.remove(worker)
        reason = _end(worker, leaving=True)
        if worker.unit is not None:
            self._starts.make_room(len(self._workers))
            return self._queue.lose(worker.unit, reason)
        self._starts.failed(reason, remaining=len(self._workers))
        return None


def _start(packed: bytes, threads: int) -> _Worker:
    ours, theirs = Pipe()
    # This interpreter's own search path, so that the worker finds the same modules.
    served = f"{theirs.fileno()}, {os.getpid()}, {keeps_freed_memory()}"
    code = f"import sys; sys.path[:] = {sys.path!r}; from posbias.runs.engines.local import serve; serve({served})"
    environment, keys = {**os.environ, **library_environment()}, keys_of_environment(*OF_THE_HUB)
    with theirs:
        process = subprocess.Popen(
            [sys.executable, "-c", code],
            env={name: value for name, value in environment.items() if name not in keys},
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            start_new_session=True,  # an interrupt at the terminal is this process's to handle
        )
    worker = _Worker(process, ours)
    with suppress(OSError):  # it died at once: the next message from it is its end
        ours.send((packed, threads))
    return worker


def _end(worker: _Worker, *, leaving: bool = False) -> str:
    """Make sure the process is gone, with a moment's grace if it is leaving by itself; how it ended, for a message."""
    worker.pipe.close()
    try:
        ended = worker.process.wait(timeout=GRACE_SECONDS if leaving else 0)
    except subprocess.TimeoutExpired:
        worker.process.kill()
        ended = worker.process.wait()
    return f"ended by signal {-ended}" if ended < 0 else f"exit code {ended}"
