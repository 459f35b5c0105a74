"""How a command meets the terminal: streams that are there, no noise from libraries, one short line for an error."""

import logging
import os
import sys
import warnings
from contextlib import suppress
from typing import NoReturn

LONGEST = 500
"""Most characters of an error line."""
TAIL = 200
"""How many of them are kept of the end, where the remedy stands."""
CUT = " ... "
RENAMED = {"--births": "--initialisations"}
"""Options of earlier versions: what each is called now."""


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
    line = f"posbias: {' '.join(message.split())}"
    line = "".join(letter if letter.isprintable() else f"{letter!a}"[1:-1] for letter in line)
    if len(line) <= LONGEST:
        return line
    return line[: LONGEST - TAIL - len(CUT)] + CUT + line[-TAIL:]
