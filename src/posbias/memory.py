"""Bytes: how many a user allows, how many this machine has left, how many this process holds and held at most."""

import ctypes
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path

from posbias.checks import MACHINE_INTEGERS
from posbias.errors import UsageError

UNITS = {"": 1, "B": 1} | {
    unit: base**power
    for power, letter in enumerate("KMGT", start=1)
    for unit, base in ((f"{letter}B", 1000), (f"{letter}IB", 1024))
}
"""By upper-case unit: bytes."""

CGROUPS = Path("/sys/fs/cgroup")
"""Where the kernel shows control groups: their memory limits bind containers, batch jobs and services."""


M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
"""Numbers of glibc's settings, from its malloc.h."""
KEPT, MAPPED_FROM = 1 << 29, 1 << 25
"""Freed bytes that glibc may keep at the end of a heap, and the size from which a block is given back at once."""


def keep_freed_memory() -> None:
    """Let this process keep up to 512 MiB of what it frees, for the next allocation; only glibc has the setting.

    Training allocates and frees the same megabytes at every step. Unless told otherwise glibc returns them each time,
    and the kernel clears every page anew: up to a fifth of the processor time (benchmarks/train).
    """
    setting = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform.startswith("linux") else None
    if setting is not None:
        setting(M_TRIM_THRESHOLD, KEPT)
        setting(M_MMAP_THRESHOLD, MAPPED_FROM)


def parse_bytes(text: str) -> int:
    """Bytes from "6GB" (10^9), "512MiB" (2^20), "1.5 TB" or a plain number.

    Raises:
        UsageError: anything else, or nothing at all.
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", text)
    factor = UNITS.get(match[2].upper()) if match else None
    amount = float(match[1]) * factor if match and factor else 0.0
    if not 1 <= amount < MACHINE_INTEGERS:
        raise UsageError(
            f"{text!r} is no amount of memory; allowed: a number in [1 B, 2^63 B) with B, KB, MB, GB, TB, KiB ... TiB"
        )
    return int(amount)


def show_bytes(count: float) -> str:
    """A number of bytes for a reader, such as "3.2 GB"."""
    for unit, size in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("KB", 1e3)):
        if count >= size:
            return f"{count / size:.3g} {unit}"
    return f"{count:.0f} B"


def available_bytes() -> int | None:
    """What this process could still take: of the machine and of every limit above it; None if unknown.

    Limits are those of the process's control group and of all groups that hold it (container, service, batch job).
    Pages of files that the kernel may drop at any time do not count as used.
    """
    free = _field("/proc/meminfo", "MemAvailable")
    left = [_left_of(group, *names) for group, names in _memory_groups()]
    known = [value for value in (free, *left) if value is not None]
    return max(min(known), 0) if known else None


def resident_bytes() -> int | None:
    """What this process holds; None where the system does not say."""
    return _field("/proc/self/status", "VmRSS")


def peak_bytes() -> int | None:
    """The most this process has held since it began or since `reset_peak`; None where the system does not say."""
    return _field("/proc/self/status", "VmHWM")


def reset_peak() -> bool:
    """Begin `peak_bytes` anew; whether the system allowed it."""
    try:
        Path(f"/proc/{os.getpid()}/clear_refs").write_text("5")
    except OSError:
        return False
    return True


def _memory_groups() -> Iterator[tuple[Path, tuple[str, str, str]]]:
    """Control groups that may limit this process, each with its names of limit, use and file pages."""
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if not controllers:
            root, names = CGROUPS, ("memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            root, names = CGROUPS / "memory", ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        else:
            continue
        own = root / path.strip("/")
        # Inside a container the path may be the host's; then only the mounted root is there.
        yield from ((group, names) for group in (own, *own.parents) if group.is_relative_to(root) and group.is_dir())


def _left_of(group: Path, limit: str, used: str, file_pages: str) -> int | None:
    """Limit less use of one control group; None where it has no limit."""
    allowed, taken = _number(group / limit), _number(group / used)
    if allowed is None or taken is None:
        return None
    try:
        droppable = re.search(rf"^{file_pages} (\d+)$", (group / "memory.stat").read_text(), re.MULTILINE)
    except OSError:
        droppable = None
    return allowed - taken + (int(droppable[1]) if droppable else 0)


def _field(path: str, name: str) -> int | None:
    """A "Name:  123 kB" line of a file of the kernel's, in bytes."""
    try:
        text = Path(path).read_text()
    except OSError:
        return None
    match = re.search(rf"^{name}:\s+(\d+) kB", text, re.MULTILINE)
    return int(match[1]) * 1024 if match else None


def _number(path: Path) -> int | None:
    """The number a file holds; None where there is no file, or no number in it ("max")."""
    try:
        text = path.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None
