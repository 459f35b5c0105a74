"""Bounds on the time and the memory that a chat template, which is a program that came with a model, may take.

Time is bounded in the main thread only, where Python lets a signal interrupt it; memory wherever the system tells how
much this process has mapped (Linux). Both hold for the whole process while a template runs.
"""

import resource
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from posbias.errors import UsageError
from posbias.limits import TEMPLATE_BYTES, TEMPLATE_SECONDS


@contextmanager
def bounded(what: str) -> Iterator[None]:
    """While open, end what runs in it once it takes too much.

    Raises:
        UsageError: it did; `what` is named.
    """
    with _time(TEMPLATE_SECONDS.exceeded(f"{what}: the chat template does not end")):
        try:
            with _memory(TEMPLATE_BYTES.most):
                yield
        except MemoryError:
            raise TEMPLATE_BYTES.exceeded(f"{what}: the chat template takes too much memory") from None


@contextmanager
def _time(refusal: UsageError) -> Iterator[None]:
    """Processor time, so that a busy machine ends nothing; raised from the signal's handler."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def end(*_: Any) -> None:
        raise refusal

    before = signal.signal(signal.SIGVTALRM, end)
    signal.setitimer(signal.ITIMER_VIRTUAL, TEMPLATE_SECONDS.most)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)


@contextmanager
def _memory(most: int) -> Iterator[None]:
    """Address space beyond what is mapped already; a template may run in several threads, so nothing is lowered."""
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    if not sys.platform.startswith("linux") or soft != resource.RLIM_INFINITY:
        yield
        return
    mapped = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (mapped + most, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
