"""Commands that are killed while they write, run in children forked from one process that has all imports done.

Every change of the file system below a run directory is a point: making, opening for writing, flushing, renaming,
removing. The interpreter announces them (audit events; flushes are wrapped), so no way of writing is missed. A point is
counted before it happens, and a child that is to die there kills itself: nothing after it runs, as with a user's kill.
Pictures and the drawing library of pages are replaced by stand-ins: what takes time, and no change of the file system.
"""

import contextlib
import errno
import inspect
import io
import json
import os
import resource
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

CHANGES = ("os.mkdir", "os.rmdir", "os.remove", "os.rename", "os.truncate", "os.link", "os.symlink")
"""Audit events of what changes a directory; `open` counts where it is for writing."""
TAKING = ("open", "fsync", "os.mkdir")
"""Those that a full disk refuses."""
PICTURE = b"\x89PNG\r\n\x1a\n stand-in Software\0posbias"
STAND_INS: dict[str, Any] = {"image_of": PICTURE, "fragment_of": "stand-in"}
"""What functions that draw give back."""


@dataclass(frozen=True)
class Ended:
    """How one command ended."""

    code: int
    """Its exit code; -9 where it was killed."""
    stderr: str = ""
    stdout: str = ""


@dataclass(frozen=True)
class Outcome:
    """What became of some commands in one child."""

    status: int
    """The child's exit code; -9 where it was killed."""
    ended: tuple[Ended, ...] = ()
    """The commands that came to their end."""
    changes: tuple[tuple[str, str], ...] = ()
    """(sort, path below the watched directory) of every change in order; none of a child that was killed."""


class Nursery:
    """The process that children are forked from; where nothing `draws`, pictures are stand-ins."""

    def __init__(self, *, draws: bool = False) -> None:
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
        command = [sys.executable, __file__, *["draws"] * draws]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )

    def run(
        self,
        *commands: Sequence[object],
        watched: Path | None = None,
        point: int | None = None,
        full: int | None = None,
        directory: Path = Path(),
        seconds: int = 0,
        memory: int = 0,
    ) -> Outcome:
        """Run `posbias` commands one after another in a fresh child.

        Args:
            commands: Arguments of each.
            watched: Directory whose changes are counted.
            point: Change before which the child dies, from 0; None: none.
            full: Change from which on the disk is full: nothing can be made or written, only removed; None: never.
            directory: Where they run.
            seconds: Processor time after which the child is killed, or six times as long by the clock; 0: never.
            memory: Bytes that it may reserve, then.
        """
        job = {
            "commands": [list(map(str, command)) for command in commands],
            "watched": None if watched is None else str(watched),
            "point": point,
            "full": full,
            "directory": str(directory),
            "seconds": seconds,
            "memory": memory,
        }
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(job) + "\n")
        self._process.stdin.flush()
        found = json.loads(self._process.stdout.readline())
        return Outcome(
            found["status"],
            tuple(Ended(**each) for each in found["ended"]),
            tuple((sort, path) for sort, path in found["changes"]),
        )

    def close(self) -> None:
        """End the process."""
        self._process.communicate()


def _serve() -> None:
    """Jobs on stdin, outcomes on stdout, one JSON line each."""
    _import_all()
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    for line in sys.stdin:
        job = json.loads(line)
        reader, writer = os.pipe()
        child = os.fork()
        if not child:
            os.close(reader)
            _child(job, writer)
        os.close(writer)
        with os.fdopen(reader) as pipe:
            told = pipe.read()
        _, status = os.waitpid(child, 0)
        found = json.loads(told) if told else {"ended": [], "changes": []}
        print(json.dumps(found | {"status": os.waitstatus_to_exitcode(status)}), file=answers, flush=True)


def _import_all() -> None:
    """What the verbs import, with stand-ins for what only costs time."""
    import importlib
    import pkgutil

    import torch
    import typer

    import posbias

    verbs = ("comparison", "decomposition", "designing", "evaluation", "measurement", "mitigation", "training")
    for package in ("cli", "auditing", "results", "tasks", *verbs):
        for module in pkgutil.walk_packages([str(Path(posbias.__file__).parent / package)], f"posbias.{package}."):
            importlib.import_module(module.name)
    importlib.import_module("posbias_papers.published")
    for module in ("llama.modeling_llama", "auto.tokenization_auto"):
        importlib.import_module(f"transformers.models.{module}")
    importlib.import_module("transformers.convert_slow_tokenizer")
    importlib.import_module("transformers.conversion_mapping").get_checkpoint_conversion_mapping("llama")
    typer.main.get_command = cache(typer.main.get_command)  # the parser is the same for every child
    torch.set_num_threads(1)
    training: Any = inspect.unwrap(importlib.import_module("posbias.training.options").TrainOptions.__init__)
    minute = 60.0  # between checkpoints; here there is one after every window
    training.__defaults__ = tuple(0.0 if value == minute else value for value in training.__defaults__)
    for name, module in list(sys.modules.items()):
        if name.startswith("posbias.results") and sys.argv[1:] != ["draws"]:
            for drawing in set(STAND_INS) & set(vars(module)):
                setattr(module, drawing, lambda *_, drawing=drawing, **__: STAND_INS[drawing])
    with tempfile.TemporaryDirectory() as run:  # the template of pages and kernels are found ready by every child
        _ended(["predict", "--depth", "2", "--length", "16", "--out", f"{run}/run"])


def _child(job: dict[str, Any], writer: int) -> None:
    """The commands of one job, to the end or to the point where they are killed."""
    os.chdir(job["directory"])
    if job["seconds"]:
        signal.alarm(6 * job["seconds"])
        resource.setrlimit(resource.RLIMIT_CPU, (job["seconds"],) * 2)
        mapped = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (mapped + job["memory"], resource.RLIM_INFINITY))
    changes: list[tuple[str, str]] = []
    if job["watched"] is not None:
        _watch(job["watched"], changes, point=job["point"], full=job["full"])
    ended = [_ended(arguments) for arguments in job["commands"]]
    with os.fdopen(writer, "w") as pipe:
        pipe.write(json.dumps({"ended": ended, "changes": changes}))
    os._exit(0)


def _ended(arguments: list[str]) -> dict[str, Any]:
    from posbias.cli import main

    sys.argv = ["posbias", *arguments]
    printed, complained = io.StringIO(), io.StringIO()
    code = 0
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(complained):
        try:
            main()
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else 0
    return {"code": code, "stderr": complained.getvalue(), "stdout": printed.getvalue()}


def _watch(directory: str, changes: list[tuple[str, str]], *, point: int | None, full: int | None) -> None:
    """Note every change below a directory, die before that of number `point`, find the disk full from `full` on."""
    root = os.path.realpath(directory)

    def met(sort: str, path: object) -> None:
        if not isinstance(path, str | bytes | os.PathLike):
            return
        whole = os.path.abspath(os.fsdecode(path))
        if whole != root and not whole.startswith(root + os.sep):
            return
        if (sort == "os.mkdir" and os.path.exists(whole)) or (sort == "os.remove" and not os.path.lexists(whole)):
            return  # nothing will change
        if len(changes) == point:
            if sort == "fsync":  # the power fails, and half of the content has reached the disk
                os.truncate(whole, os.path.getsize(whole) // 2)
            os.kill(os.getpid(), signal.SIGKILL)
        changes.append((sort, os.path.relpath(whole, root)))
        if full is not None and len(changes) > full and sort in TAKING:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), whole)

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open" and isinstance(arguments[2], int) and arguments[2] & (os.O_WRONLY | os.O_RDWR):
            met("open", arguments[0])
        elif event in CHANGES:
            met(event, arguments[0])

    flush = os.fsync

    def flushed(descriptor: int) -> None:
        met("fsync", os.readlink(f"/proc/self/fd/{descriptor}"))
        flush(descriptor)

    os.fsync = flushed  # type: ignore[assignment]
    sys.addaudithook(hook)


if __name__ == "__main__":
    _serve()
