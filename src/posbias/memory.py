"""Bytes that this machine has left, and what the process does with those that it frees."""

import ctypes
import re
import sys
from collections.abc import Iterator
from pathlib import Path

from posbias.errors import UsageError

CGROUPS = Path("/sys/fs/cgroup")
"""The kernel's view of control groups, whose memory limits bind containers, batch jobs and services."""

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


def show_bytes(count: float) -> str:
    """A number of bytes for a reader, to three digits, such as "3.2 GB"."""
    if count < 999.5:
        return f"{count:.0f} B"
    power = next((power for power in (1, 2, 3) if count < 999.5 * 1000**power), 4)
    return f"{float(f'{count / 1000**power:.3g}'):.15g} {'KMGT'[power - 1]}B"


def available_bytes() -> int | None:
    """Bytes that this process could still take, within the machine and every limit above it; None if unknown.

    Limits are those of the process's control group and of all groups that hold it (container, service, batch job).
    Pages of files that the kernel may drop at any time do not count as used.
    """
    free = _number("/proc/meminfo", r"^MemAvailable:\s+(\d+) kB")
    bounds = [] if free is None else [free * 1024]
    for group, (limit, used, file_pages) in _memory_groups():
        allowed, in_use = (_number(group / name, r"^(\d+)$") for name in (limit, used))
        if allowed is not None and in_use is not None:  # else no file, or "max"
            bounds.append(allowed - in_use + (_number(group / "memory.stat", rf"^{file_pages} (\d+)$") or 0))
    return max(min(bounds), 0) if bounds else None


def check_room(needed: int, what: str, advice: str) -> None:
    """Refuse what this machine's memory cannot hold: a CPU's kernel kills such a process instead of saying so."""
    free = available_bytes()
    if free is not None and needed > free:
        raise UsageError(f"{what} take {show_bytes(needed)}, and {show_bytes(free)} of memory are free; {advice}")


def _memory_groups() -> Iterator[tuple[Path, tuple[str, str, str]]]:
    """Control groups that may limit this process, each with its names of limit, use and file pages."""
    for line in _text("/proc/self/cgroup").splitlines():
        _, controllers, path, *_ = [*line.split(":", 2), "", ""]
        if not controllers:
            root, names = CGROUPS, ("memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            root, names = CGROUPS / "memory", ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        else:
            continue
        group_of_process = root / path.strip("/")
        groups = (group_of_process, *group_of_process.parents)
        # Inside a container the path may be the host's; then only the mounted root is there.
        yield from ((group, names) for group in groups if group.is_relative_to(root) and group.is_dir())


def _number(path: str | Path, pattern: str) -> int | None:
    """A number in a file of the kernel's; None if it does not stand there, or the file cannot be read."""
    match = re.search(pattern, _text(path), re.MULTILINE)
    return int(match[1]) if match else None


def _text(path: str | Path) -> str:
    """Content of a file of the kernel's; empty if it cannot be read."""
    try:
        return Path(path).read_text()
    except OSError:
        return ""
