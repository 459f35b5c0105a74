"""Bytes that this machine has left, and what the process does with those that it frees."""

import ctypes
import sys
from contextlib import suppress
from pathlib import Path

import psutil

from posbias.errors import UsageError

CGROUPS, OWN_GROUPS = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")
"""Linux's control groups, whose memory limits bind containers, batch jobs and services; those of this process."""
FILES = {
    "": ("memory.max", "memory.current", "inactive_file"),
    "memory": ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
}
"""By controllers, none in version 2: the files of a group's limit and use, and the statistic of pages of files."""

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
"""Numbers of glibc's settings, from its malloc.h."""
KEPT, MAPPED_FROM = 1 << 29, 1 << 25
"""Freed bytes that glibc may keep at the end of a heap, and the size from which a block is given back at once."""
GIVEN_BACK_FROM = 1 << 16
"""Both numbers when memory is promised: no tensor that counts is smaller."""

_keeps_freed = False
"""The last setting of this process: keep what it frees, or give it back."""


def keep_freed_memory(keep: bool = True) -> None:
    """Let this process keep up to 512 MiB of what it frees for the next allocation, or give every block back at once.

    Only glibc has the setting. Training and passes allocate and free the same megabytes again and again. If they are
    returned each time, the kernel clears every page anew: up to a fifth of the processor time of training
    (benchmarks/train), a third of a measurement's. But kept blocks leave holes: by default glibc holds 1.4 times what
    the tensors of a pass hold, and 2 to 4 times with checkpointing (benchmarks/README.md).
    """
    global _keeps_freed
    _keeps_freed = keep
    if not sys.platform.startswith("linux"):
        return
    library = ctypes.CDLL(None)
    if hasattr(library, "mallopt"):
        library.mallopt(M_TRIM_THRESHOLD, KEPT if keep else GIVEN_BACK_FROM)
        library.mallopt(M_MMAP_THRESHOLD, MAPPED_FROM if keep else GIVEN_BACK_FROM)
    if hasattr(library, "malloc_trim") and not keep:
        library.malloc_trim(0)


def keeps_freed_memory() -> bool:
    """True if this process keeps what it frees."""
    return _keeps_freed


def available_bytes() -> int:
    """Bytes that this process could still take, within the machine and every limit above it.

    Limits are those of the process's control group and of all groups that hold it (container, service, batch job).
    Pages of files that the kernel may drop at any time do not count as used.
    """
    bounds = [int(psutil.virtual_memory().available)]
    lines = OWN_GROUPS.read_text().splitlines() if OWN_GROUPS.exists() else []
    for _, controllers, path in (line.split(":", 2) for line in lines):
        kind = "memory" if "memory" in controllers.split(",") else controllers  # version 1 may mount several as one
        if kind not in FILES:
            continue
        limit, used, dropped = FILES[kind]
        group = CGROUPS / kind / path.strip("/")
        for folder in (group, *group.parents):  # inside a container the path may be the host's: only some are there
            with suppress(OSError, ValueError):  # a limit may be "max"
                allowed, in_use = (int((folder / name).read_text()) for name in (limit, used))
                bounds.append(allowed - in_use)  # of a group without statistics, too
                statistics = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
                bounds[-1] += int(statistics.get(dropped, 0))
    return max(min(bounds), 0)


def check_room(needed: int, what: str, advice: str) -> None:
    """Refuse what this machine's memory cannot hold: a CPU's kernel kills such a process instead of saying so."""
    if needed > (free := available_bytes()):
        raise UsageError(f"{what} take {needed / 1e9:,.1f} GB, and {free / 1e9:,.1f} GB of memory are free; {advice}")
