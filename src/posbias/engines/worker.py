"""A worker process of the local engine: prepares once, then does the units it is sent, one at a time.

Started as a fresh interpreter with one end of a pipe. It ends when the pipe closes, and at once where its run was
killed: a unit may take hours, and keep checkpoints where the resumed run keeps its own.
"""

import os
import pickle
import threading
import time
from multiprocessing.connection import Connection
from typing import Any

from posbias.engines.threads import pinned
from posbias.errors import RunError, UsageError
from posbias.memory import give_back_freed_memory

ORPHANED_SECONDS = 0.5
"""How often a worker looks whether its run is there."""


def serve(descriptor: int, run: int) -> None:
    """Answer the requests that arrive on an open pipe, while process `run`, which started this one, lives.

    The first message is (pickled workload, threads); every later one a unit. Each answer is ("done", arrays),
    ("usage", message) or ("failed", message); the first answer says whether preparing worked.
    """
    give_back_freed_memory()  # as in the process whose estimate speaks of this one
    threading.Thread(target=_end_with, args=(run,), daemon=True).start()
    with Connection(descriptor) as pipe:
        try:
            packed, threads = pipe.recv()
            workload, prepared, complaint = _prepare(packed)
            pipe.send(complaint)
            with pinned(threads):
                while complaint[0] == "done":
                    pipe.send(answer(workload, prepared, pipe.recv()))
        except (EOFError, OSError):
            return  # the run is over


def answer(workload: Any, prepared: Any, unit: int) -> tuple[str, Any]:
    """The result of a unit, or what went wrong, as plain values that any process can read."""
    try:
        return "done", workload.compute(prepared, unit)
    except Exception as error:
        return complain(error)


def complain(error: Exception) -> tuple[str, str]:
    """An error as plain values."""
    message = " ".join(str(error).split())
    if isinstance(error, UsageError):
        return "usage", message
    if isinstance(error, RunError):
        return "failed", message
    return "failed", f"{type(error).__name__}: {message}" if message else type(error).__name__


def unpack(reply: tuple[str, Any]) -> Any:
    """The arrays of a reply, or its error raised.

    Raises:
        UsageError, RunError: as the worker met them.
    """
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


def _prepare(packed: bytes) -> tuple[Any, Any, tuple[str, Any]]:
    try:
        workload = pickle.loads(packed)
        return workload, workload.prepare(), ("done", os.getpid())
    except Exception as error:
        return None, None, complain(error)
