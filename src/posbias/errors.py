"""The errors a user can meet, each one line that names the value and what is allowed.

`UsageError` is a wrong request (exit code 2), `RunError` a run that could not be finished (exit code 1).
Both derive from ValueError / RuntimeError so that library users need not import them. Everything that comes from
elsewhere, names above all, passes `printable` before a person sees it.
"""

import os
import traceback


def printable(text: str) -> str:
    """A text with everything escaped that steers a terminal, turns the direction of writing or ends a line."""
    if text.isprintable():
        return text
    return "".join(letter if letter.isprintable() else ascii(letter)[1:-1] for letter in text)


LONGEST = 600
"""Characters of a message."""
TAIL = 200
"""Characters kept of the end of a longer one, which names the remedy."""


def shortened(text: str, most: int) -> str:
    """The two ends of a text that is too long, such as one that repeats a long list."""
    return text if len(text) <= most else f"{text[: most - TAIL - 5]} ... {text[-TAIL:]}"


class _OneSentenceError(Exception):
    """An error that one sentence tells: printable, not too long, and in a notebook shown without its traceback."""

    _shown = False

    def __init__(self, message: str) -> None:
        super().__init__(printable(shortened(message, LONGEST)))

    def _render_traceback_(self) -> list[str]:
        """Text in IPython: the sentence at first, the traceback when asked again (`%tb`) or with POSBIAS_DEBUG."""
        if self._shown or os.environ.get("POSBIAS_DEBUG"):
            return "".join(traceback.format_exception(self)).splitlines()
        self._shown = True
        return [f"{type(self).__name__}: {self}", "(%tb shows the traceback)"]


class UsageError(_OneSentenceError, ValueError):
    """The request is wrong: an unknown name, a value out of range, a length that does not fit."""


class RunError(_OneSentenceError, RuntimeError):
    """The request was fine, but the run could not be finished (NaN gradients, a full disk ...)."""


MOST_REPEATED = 240
"""Characters of another library's message, or of a value, that one of ours repeats."""


def one_line(error: BaseException | str) -> str:
    """The first line of an error's message (its class if there is none) or of a text: short, and printable.

    Other libraries repeat what they read; it may be of any length, and hold characters that steer a terminal.
    """
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    line = lines[0] if lines else type(error).__name__
    line = line if len(line) <= MOST_REPEATED else f"{line[: MOST_REPEATED - 4]} ..."
    return printable(line)


def check_most(subject: str, number: int, most: int, unit: str = "cells") -> None:
    """Refuse a size that follows from several arguments, or from a file, above what is allowed."""
    if number > most:
        digits = f"{number:,}" if number < 10**15 else f"10^{len(str(number)) - 1} or more"
        raise UsageError(f"{subject}: {digits} {unit}; at most {most:,} are allowed")
