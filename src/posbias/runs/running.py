"""A run while it runs: its directory held against other runs, its record written at the end or saying why it failed.

Every file goes there whole or not at all: it is written under a temporary name that tells whose it is, flushed and
renamed. A lock ends with the process that holds it, on this host or another, so a killed run leaves none behind.

Verbs open the directory of their options themselves. The shell opens it before, so that what it does first belongs to
the run, too; within it the verb finds the run open, which notes the shell's arguments and command.
"""

import fcntl
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

from posbias.errors import RunError, UsageError
from posbias.files import TEMPORARY, write_atomically
from posbias.results.records import Record, plain, portable, record_in, without_paths
from posbias.runs.parts import clear_parts, is_piece

LOCK_FILE = ".lock"
WRITTEN_BELOW = ("", "parts", "answers/*", "models/*", "arms/parts")
"""Places below its directory that a run writes to; what lies deeper is a run of its own."""
BELOW = ("arms", "behaviour", "studies", "length-*")
"""Directories of a run's parts that have names of their own; those of several subjects have the subjects'."""
OWN = ("parts/*.safetensors", *(f"{below}/**/parts/*.safetensors" for below in BELOW))
ANSWERS = "answers/*/*.json"
"""Answers of a server, which are asked and paid for again unless the run is resumed."""
WORK = (*OWN, "*/parts/*.safetensors", ANSWERS, "arms/*/record.json", "studies/*/record.json")
"""Files below a run's directory, beside its record, that took work."""
REMEDIES = {False: ("resume=True", "overwrite=True", "directory"), True: ("--resume", "--overwrite", "--out")}
"""Settings that take over or replace what a directory holds, and what names it: in Python and (True) in the shell."""
_OPEN: ContextVar[Mapping[Path, "OpenRun"]] = ContextVar("open runs", default={})  # noqa: B039 (never changed)
"""Runs of this thread by their directories."""


@dataclass
class OpenRun:
    """A run that has not ended, in a directory or without one."""

    directory: Path | None
    arguments: Mapping[str, Any] = field(default_factory=dict)
    """What was asked, for the record."""
    command: str = ""
    """Shell line that repeats the run; empty in Python."""

    def finish(self, record: Record, *, below: str = "") -> None:
        """Note what was asked in the record and write it, unless the directory holds it; its pieces are removed.

        Args:
            record: Of the run, or of a part of it.
            below: The part's directory within that of the run; empty for the run itself.
        """
        place = None if self.directory is None else self.directory / below
        there = None if place is None else record_in(place)
        told = there is not None and (there.run_id, there.scalars) == (record.run_id, plain(record.scalars))
        if not told:
            record.arguments = portable(dict(self.arguments))
            record.resolved["command"] = portable(self.command or record.resolved.get("command", ""))
            if place is not None:
                record.save(place, overwrite=True)
        if place is not None:
            clear_parts(place)


@contextmanager
def run_directory(
    directory: str | Path | None,
    *,
    verb: str,
    arguments: Mapping[str, Any],
    command: str = "",
    resume: bool | None = False,
    overwrite: bool = False,
) -> Iterator[OpenRun]:
    """Open a run in a directory that is writable and held against other runs; if it fails, a record says why.

    One that holds finished work is refused, unless that is taken over (`resume`; None: the verb cannot) or replaced
    (`overwrite`): a record stays until the new one is there, pieces of an unfinished run go at once. A request that
    turns out wrong (UsageError) leaves nothing behind; a run that fails in any other way leaves a record with status
    "failed" that says why, unless its own record was already saved and only the report failed, or it was to resume a
    finished one. Within a run its own directory stands for it; without a directory nothing is kept.
    """
    if directory is None:
        yield OpenRun(None, arguments, command)
        return
    place = Path(directory).absolute()
    if place in _OPEN.get():
        yield _OPEN.get()[place]
        return
    with held(directory) as held_directory:
        if overwrite and not resume:
            pieces = [path for place in OWN for path in held_directory.glob(place) if is_piece(path)]
            for path in (*pieces, *held_directory.glob(ANSWERS)):
                path.unlink(missing_ok=True)
        elif not resume:
            check_unfinished(held_directory, resumable=resume is not None, shell=bool(command))
        before = record_in(held_directory)
        run = OpenRun(held_directory, arguments, command)
        token = _OPEN.set({**_OPEN.get(), place: run})
        try:
            yield run
        except UsageError:
            raise
        except Exception as error:
            there = record_in(held_directory)
            saved = there is not None and (before is None or there.run_id != before.run_id)
            if not saved and not (resume and before is not None and before.status == "done"):
                with suppress(RunError):
                    failed_record(verb, arguments, error).save(held_directory, overwrite=True)
            raise
        finally:
            _OPEN.reset(token)


def check_unfinished(directory: Path, *, resumable: bool = True, shell: bool = False) -> None:
    """Refuse a directory that holds a finished run, or finished work of one that did not end, with its counts.

    `shell`: the remedies are spelled as on a command line.
    """
    record = record_in(directory, done=True)
    contents = [] if record is None else [f"a finished run of posbias {record.verb} ({record.created})"]
    if count := len({path for place in WORK for path in directory.glob(place)}):
        contents.append(f"{count} finished pieces")
    if contents:
        resume, overwrite, other = REMEDIES[shell]
        takes = f"{resume} takes over what is the same, " if resumable else ""
        raise UsageError(
            f"{str(directory)!r} holds {', '.join(contents)}; {takes}{overwrite} replaces it, or choose another {other}"
        )


def failed_record(verb: str, arguments: Mapping[str, Any], error: Exception) -> Record:
    """The record of a run that failed: why, in one line that names no directory."""
    reason = " ".join(without_paths(str(error)).split()) or type(error).__name__
    return Record(verb=verb, arguments=dict(arguments), status="failed", error=reason)


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
            lock = open(directory / LOCK_FILE, "a")  # noqa: SIM115 (closed below)
        with lock:
            with _refusing(directory):
                if not _locked(lock, directory / LOCK_FILE):
                    raise UsageError(f"another run is writing to {str(directory)!r}; choose another --out")
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


def _locked(lock: TextIO, path: Path) -> bool:
    """Lock an open file until it is closed: False if another run has it, or has removed it meanwhile."""
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return os.path.samestat(os.stat(path), os.fstat(lock.fileno()))
    except (BlockingIOError, FileNotFoundError):
        return False


@contextmanager
def _refusing(directory: Path) -> Iterator[None]:
    """Report a refusal of the system as a wrong request."""
    try:
        yield
    except OSError as error:
        raise UsageError(f"cannot write to {str(directory)!r}: {error.strerror or error}") from None


def directory_names(sources: Sequence[str]) -> dict[str, str]:
    """{name: source}: directories named by the last part of every model's name, with as many before it as needed."""
    if not sources:
        raise UsageError("no model to measure; give at least 1")
    parts: dict[str, list[str]] = {}
    for source in sources:
        path = Path(source.removeprefix("config:")).expanduser()
        whole = (path.resolve() if path.exists() else path).parts
        clean = [
            "".join(sign if sign.isalnum() or sign in "._-" else "_" for sign in part).strip(".") for part in whole
        ]
        parts[source] = [part for part in clean if part.strip("_")] or ["model"]
    for taken in range(1, max(map(len, parts.values())) + 1):
        names = {"-".join(own[-taken:]): source for source, own in parts.items()}
        if len(names) == len(sources):
            return names
    raise UsageError(f"the models {', '.join(sources)} cannot be told apart by their names; give each of them once")
