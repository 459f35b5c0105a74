"""Directories that runs write: held by one run at a time, proven writable, freed of what killed runs left half-written.

Every file goes there whole or not at all: it is written under a temporary name that tells whose it is, flushed and
renamed. A lock ends with the process that holds it, on this host or another, so a killed run leaves none behind.
"""

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from posbias.errors import UsageError
from posbias.files import TEMPORARY, write_atomically

LOCK_FILE = ".lock"
WRITTEN_BELOW = ("", "parts", "answers/*", "models/*")
"""Places below its directory that a run writes to; what lies deeper is a run of its own."""


@contextmanager
def held(directory: str | Path) -> Iterator[Path]:
    """Hold a directory against other runs: made if missing, proven writable, free of what killed runs left.

    A request that turns out wrong (UsageError) leaves no directory behind that was made for it.
    """
    directory = Path(directory)
    created = [path for path in (directory, *directory.parents) if not path.exists()]
    try:
        with _refusing(directory):
            directory.mkdir(parents=True, exist_ok=True)
        with exclusive(directory):
            with _refusing(directory):
                for place in WRITTEN_BELOW:  # what runs that were killed while writing left
                    for path in directory.glob(f"{place}/.*.{TEMPORARY}".lstrip("/")):
                        path.unlink(missing_ok=True)
                probe = directory / f".probe.{TEMPORARY}"
                write_atomically(probe, b"posbias")
                probe.unlink()
            try:
                yield directory
            except UsageError:
                if created and os.listdir(directory) == [LOCK_FILE]:  # while it is ours
                    (directory / LOCK_FILE).unlink()
                raise
    except UsageError:
        with suppress(OSError):
            for path in created:  # innermost first, as far as they are empty
                path.rmdir()
        raise


@contextmanager
def exclusive(directory: Path) -> Iterator[None]:
    """Hold a directory that is there; a second run into it is refused while the first one lives."""
    with _refusing(directory):
        file = open(directory / LOCK_FILE, "a")  # noqa: SIM115 (closed below)
    with file:
        with _refusing(directory):
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                # The file that lies there, which another run may have removed meanwhile.
                ours = os.path.samestat(os.stat(directory / LOCK_FILE), os.fstat(file.fileno()))
            except (BlockingIOError, FileNotFoundError):
                ours = False
        if not ours:
            raise UsageError(f"another run is writing to {str(directory)!r}; choose another --out")
        yield


@contextmanager
def _refusing(directory: Path) -> Iterator[None]:
    """Report a refusal of the system as a wrong request."""
    try:
        yield
    except OSError as error:
        raise UsageError(f"cannot write to {str(directory)!r}: {error.strerror or error}") from None
