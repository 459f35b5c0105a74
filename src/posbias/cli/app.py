"""The `posbias` command: its verbs, and how errors become one line and an exit code.

0: done. 1: the run failed (its record says why). 2: bad usage. Heavy imports happen inside the verbs, so `--help`
answers at once.
"""

import os
import sys

import typer

from posbias.cli import audit, compare, listing, measure, models, predict, report, reproduce, verify
from posbias.errors import RunError, UsageError
from posbias.version import __version__

app = typer.Typer(
    name="posbias",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
    help="Predict, measure and explain how a transformer language model weighs the positions of its context.\n\n"
    "Start with `posbias audit demo`: the position bias of a small real model, at birth and trained, with the "
    "theories' errors beside a flat baseline.",
)
app.command("predict", epilog=predict.EXAMPLE)(predict.predict)
app.command("measure", epilog=measure.EXAMPLE)(measure.measure)
app.command("compare", epilog=compare.EXAMPLE)(compare.compare)
app.command("audit", epilog=audit.EXAMPLE)(audit.audit)
app.command("verify", epilog=verify.EXAMPLE)(verify.verify)
app.command("reproduce", epilog=reproduce.EXAMPLE)(reproduce.reproduce)
app.command("report", epilog=report.EXAMPLE)(report.report)
app.command("list", epilog=listing.EXAMPLE)(listing.list_variants)
app.add_typer(models.app, name="models")


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(__version__)
        raise typer.Exit


@app.callback()
def _root(version: bool = typer.Option(False, "--version", callback=_version, is_eager=True, help="Print it.")) -> None:
    """Options before the verb."""


def main() -> None:
    """Run the command line; UsageError exits 2, RunError and anything unforeseen exit 1, each with one line."""
    # Before torch loads OpenMP: waiting threads sleep instead of spinning, two to four times faster on a busy machine.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    try:
        app()
    except UsageError as error:
        _fail(str(error), 2)
    except (RunError, MemoryError) as error:
        _fail(str(error) or "out of memory; try a shorter --length or fewer --kinds", 1)
    except OSError as error:
        _fail(f"{error.strerror or error}{f': {error.filename}' if error.filename else ''}", 1)
    except KeyboardInterrupt:
        _fail("interrupted; an audit can be continued with --resume", 130)
    except Exception as error:
        if os.environ.get("POSBIAS_DEBUG"):
            raise
        first_line = next(iter(str(error).splitlines()), "")
        _fail(f"unexpected {type(error).__name__}: {first_line} (POSBIAS_DEBUG=1 shows the traceback)", 1)


def _fail(message: str, code: int) -> None:
    print(f"posbias: {' '.join(message.split())}", file=sys.stderr)
    sys.exit(code)
