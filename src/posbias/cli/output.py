"""The terminal side of a command: what it prints and saves, one short line for an error, no noise from libraries."""

import json
import logging
import os
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import typer

from posbias.cli.options import UNRECORDED, RunFlags, command_line
from posbias.errors import LONGEST, UsageError, printable, shortened

if TYPE_CHECKING:
    from posbias.results.records import Record
    from posbias.runs.running import OpenRun

FAILED, WRONG, NOT_MET = 1, 2, 3
"""Exit codes: the run failed; the request is wrong; the run is done, but a bound that was required is not met."""


@dataclass(frozen=True)
class Run:
    """A run while it runs, and how it is printed."""

    open: "OpenRun"
    flags: RunFlags

    def draw(self, record: "Record", *, below: str = "") -> Path | None:
        """Draw the page of the run, or of a part in a directory `below` its own; without a directory there is none."""
        from posbias.results.result import write_report

        return None if self.flags.out is None else write_report(record, self.flags.out / below)

    def finish(self, record: "Record", document: Any = None, *lines: str) -> None:
        """Keep the record in the directory, if there is one, unless the verb has done so; draw its page and print.

        A `document` and lines are printed instead of the whole record.
        """
        self.open.finish(record)
        page = self.draw(record)
        if self.flags.json:
            print_json(record_document(record) if document is None else document)
            return
        if document is None:
            print_record(record)
        say(*lines, *([] if page is None else [f"report: {page}"]))


@contextmanager
def running(flags: RunFlags, **instead: Any) -> Iterator[Run]:
    """The run of a verb, opened before the verb opens it: what loads a model belongs to the run, too.

    With --resume, a finished run in the directory is kept. `instead` goes into the record, not what was passed.
    """
    from posbias.results.records import plain
    from posbias.runs.running import run_directory

    passed = flags.context.params
    if passed.get("resume") and flags.out is None:
        raise UsageError("--resume needs --out: the directory of the run that is continued")
    arguments = {name: plain(value) for name, value in {**passed, **instead}.items() if name not in UNRECORDED}
    with run_directory(
        flags.out,
        verb=str(flags.context.info_name),
        arguments=arguments,
        command=command_line(),
        resume=passed.get("resume"),  # None: the verb takes none over
        overwrite=flags.overwrite,
    ) as run:
        yield Run(run, flags)


def record_document(record: "Record") -> dict[str, Any]:
    """A record with its verdict and arrays, as one JSON document; `record.schema.json` describes it, too."""
    from posbias.results.records import plain
    from posbias.results.result import verdict

    answer = verdict(record) if record.status == "done" else ()
    arrays = {name: plain(array) for name, array in record.arrays.items()}
    return {**record.as_json(), "verdict": list(answer), "arrays": arrays}


def print_record(record: "Record") -> None:
    """Tables and sentences of a run."""
    from rich.console import Console

    from posbias.results.page import show_report
    from posbias.results.result import report_of

    show_report(report_of(record), Console())


def print_json(document: Any) -> None:
    """One JSON document on stdout."""
    from posbias.results.records import plain

    typer.echo(json.dumps(plain(document), indent=1, allow_nan=False))


def tell(flags: RunFlags, document: Any, *lines: str) -> None:
    """A short result: as one JSON document, or as lines."""
    if flags.json:
        print_json(document)
    else:
        say(*lines)


def say(*lines: str) -> None:
    """Lines on stdout; of what comes from elsewhere nothing steers the terminal."""
    for line in lines:
        typer.echo(printable(line))


def prepare() -> None:
    """Fill closed standard streams, and silence the warnings and logs of libraries unless POSBIAS_DEBUG asks for them.

    Python writes what is meant for a closed stderr to stdout, and a file opened while a standard descriptor is free
    would receive what libraries write there.
    """
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest free descriptor, which is this one
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(number, "r" if name == "stdin" else "w", encoding="utf-8"))
    if not os.environ.get("POSBIAS_DEBUG"):
        warnings.showwarning = lambda *_, **__: None
        logging.lastResort = logging.NullHandler()
        for library in ("TRANSFORMERS_VERBOSITY", "HF_HUB_VERBOSITY"):
            os.environ.setdefault(library, "critical")
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")


def fail(message: str, code: int) -> NoReturn:
    """Print one line on stderr and exit."""
    with suppress(OSError):
        print(error_line(message), file=sys.stderr, flush=True)
    try:
        sys.stdout.flush()
    except OSError:  # a full disk, or nobody reads: what is held would be tried again, with a traceback, as Python ends
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    sys.exit(code)


def error_line(message: str) -> str:
    """A message as one line of at most LONGEST characters, cut in the middle; what cannot be printed is escaped."""
    return shortened(printable(f"posbias: {' '.join(message.split())}"), LONGEST)
