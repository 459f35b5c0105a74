"""The `posbias` command: its verbs, and how errors become one line and an exit code.

Heavy imports happen inside the verbs, so `--help` answers at once.
"""

import os
import re
import sys
from functools import cache
from itertools import pairwise
from pkgutil import resolve_name
from typing import Any

import typer
from typer.core import TyperGroup

from posbias.cli.options import spread, told
from posbias.cli.output import FAILED, WRONG, fail, prepare
from posbias.errors import RunError, UsageError
from posbias.files import check_text
from posbias.version import __version__

WrongUse: type[Exception] = typer.BadParameter.__bases__[0]
"""Error that typer raises for wrong flags and arguments; it exports only its children."""
INTERRUPTED = 130
LEFT = {
    "--averaging": "every prompt's profile is normalised first",
    "--by-estimate": "the value of `requirement` in record.json is the estimate",
    "--by-head": "what pb.attention returns has every head's",
    "--influence": "pb.measure under pb.mitigated",
    "--inspect-ai": "inspect eval posbias/TASK",
    "--kernel-cells": "mean kernels have at most 128 x 128 cells",
    "--lm-eval": "inspect eval posbias/TASK",
    "--max-cost": "a small --count first, then more with --resume",
    "--max-memory": "what does not fit is refused",
    "--methods": "posbias mitigate MODEL --methods RECIPE judges a method beside the unchanged model",
    "--oracle": "posbias evaluate",
    "--png": "figures as PDF and SVG with --paper",
    "--repeats": "evaluate several servers with other seeds",
    "--seed": "nothing is drawn here, or what is read has its own seeds",
    "--template-options": "evaluate, mitigate and audit --behaviour have it, which render conversations",
    "--sequential": "a small --count first, then more with --resume",
    "--vllm": "vllm serve, and --server",
    "--windows": "a file of documents as long as the prompts",
}
"""Flags that posbias had, and what to do instead."""
VERBS = {
    "demo": "posbias.cli.evaluate:demo",
    "predict": "posbias.cli.predict:predict",
    "measure": "posbias.cli.measure:measure",
    "attention": "posbias.cli.measure:attention",
    "decompose": "posbias.cli.measure:decompose",
    "design": "posbias.cli.predict:design",
    "explore": "posbias.cli.predict:explore",
    "compare": "posbias.cli.finished:compare",
    "audit": "posbias.cli.audit:audit",
    "evaluate": "posbias.cli.evaluate:evaluate",
    "plan": "posbias.cli.evaluate:plan",
    "mitigate": "posbias.cli.evaluate:mitigate",
    "export": "posbias.cli.finished:export",
    "correlate": "posbias.cli.finished:correlate",
    "place": "posbias.cli.finished:place",
    "train": "posbias.cli.measure:train",
    "show": "posbias.cli.finished:show",
    "report": "posbias.cli.finished:report",
    "verify": "posbias_papers.commands:verify",
    "reproduce": "posbias_papers.commands:reproduce",
    "list": "posbias.cli.listing:list_variants",
    "models": "posbias.cli.listing:models",
}
"""The function of each verb."""


class Verbs(TyperGroup):
    """The verbs, each made when it is asked for: what lists their names needs no options."""

    def list_commands(self, ctx: Any) -> list[str]:
        """Names, in the order of the help."""
        return list(VERBS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """A verb by its name."""
        return command_of(cmd_name) if cmd_name in VERBS else None

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write the names, each with the first sentence of its function."""
        texts = {verb: str(resolve_name(function).__doc__) for verb, function in VERBS.items()}
        with formatter.section("Commands"):
            formatter.write_dl([(verb, re.split(r"(?<=\.)\s", text)[0]) for verb, text in texts.items()])


@cache
def command_of(verb: str) -> Any:
    """The command of a verb; of `models` the group of its commands."""
    alone = typer.Typer(add_completion=False, rich_markup_mode=None, no_args_is_help=verb == "models")
    function = resolve_name(VERBS[verb])
    if verb == "models":
        alone.callback()(function)
        verb, function = "get", resolve_name("posbias.cli.listing:get")
    text, _, examples = told(function)
    alone.command(verb, help=text, epilog=examples)(spread(function))
    return typer.main.get_command(alone)


app = typer.Typer(
    name="posbias",
    cls=Verbs,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # plain help breaks lines at words; tables cut the names of options where they are narrow
    help="Predict, measure and explain how a transformer language model weighs the positions of its context.\n\n"
    "Start with `posbias audit demo`: the position bias of a small real model, at initialisation and trained, with the "
    "theories' errors beside a flat baseline.\n\n"
    "Exit codes: 0 done; 1 the run failed, and its record says why; 2 the request is wrong; 3 a bound that was asked "
    "for (--require, --strict) is not met.",
)


def _version(asked_for: bool) -> None:
    if asked_for:
        typer.echo(__version__)
        raise typer.Exit


@app.callback()
def _root(version: bool = typer.Option(False, "--version", callback=_version, is_eager=True, help="Print it.")) -> None:
    """Options before the verb."""


def main() -> None:
    """Run the command line; a wrong request, and whatever else goes wrong, ends with one line and its exit code."""
    # Before torch loads OpenMP: waiting threads sleep instead of spinning, two to four times faster on a busy machine.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    prepare()
    try:
        for word in sys.argv:
            check_text(word, "the command line")  # records and reports are Unicode, names of files included
        code = app(standalone_mode=False)
        sys.stdout.flush()
    except WrongUse as error:
        _refuse(error)
    except UsageError as error:
        fail(str(error), WRONG)
    except RunError as error:
        fail(str(error), FAILED)
    except MemoryError as error:
        fail(f"{str(error) or 'out of memory'}; try a shorter --length, a smaller --count or fewer --kinds", FAILED)
    except OSError as error:
        fail(f"{error.strerror or error}{f': {error.filename}' if error.filename else ''}", FAILED)
    except Exception as error:
        if os.environ.get("POSBIAS_DEBUG"):
            raise
        first_line = next(iter(str(error).splitlines()), "")
        if "memory" in first_line:  # of a device, whose library raises an error of its own
            first_line = f"{first_line.rstrip('.')}; try a shorter --length, --dtype bfloat16 or another --device"
        fail(f"unexpected {type(error).__name__}: {first_line} (POSBIAS_DEBUG=1 shows the traceback)", FAILED)
    else:
        if code == INTERRUPTED:
            fail("interrupted; a measurement or audit can be continued with --resume", INTERRUPTED)
        sys.exit(code or 0)


def _refuse(error: Any) -> None:
    """Refuse a wrong flag or argument in one line, or print the whole help if nothing was given."""
    command = error.ctx.command_path if error.ctx else "posbias"
    if type(error).__name__ == "NoArgsIsHelpError":
        error.show()
        sys.exit(WRONG)
    names = getattr(getattr(error, "param", None), "opts", ())
    values = [value for name, value in pairwise(sys.argv) if name in names]
    if (flag := getattr(error, "option_name", None)) in LEFT:
        fail(f"{flag} left posbias after 0.1.0: {LEFT[flag]}", WRONG)
    got = f", got {values[-1]!r}" if values else ""  # typer's message leaves it out
    fail(f"{error.format_message().rstrip('.')}{got}; `{command} --help` says what is allowed", WRONG)
