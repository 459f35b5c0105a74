"""`posbias reproduce`: a published experiment run again, its numbers beside the published ones."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from posbias.cli import options
from posbias.errors import UsageError

if TYPE_CHECKING:
    from posbias.records import Record

EXAMPLE = (
    "Examples: `posbias reproduce rollout-2602.16837 --out runs/rollout` · `posbias reproduce birth-2603.10123` · "
    "at the real sizes: `posbias reproduce birth-2603.10123 --size full --births 2`"
)
BIRTH = "birth-2603.10123"


def reproduce(
    context: typer.Context,
    paper: Annotated[str, typer.Argument(help="rollout-2602.16837 or birth-2603.10123.", show_default=False)],
    size: Annotated[str, typer.Option(help="birth: small (d 256), full (Qwen2-0.5B, GPT-2 medium) or tiny.")] = "small",
    length: options.Length = 256,
    births: Annotated[int, typer.Option(help="birth: random initialisations, each with its own prompt.", min=2)] = 8,
    probes: Annotated[int, typer.Option(help="birth: random probes per Jacobian.", min=1)] = 8,
    tokenizer: Annotated[str, typer.Option(help="birth: text as 'bytes', or with the 'demo' tokenizer.")] = "bytes",
    seed: options.Seed = 0,
    out: options.Out = None,
    json: options.Json = False,
) -> None:
    """Run a published experiment again: what the paper reports, what comes out, and what survives."""
    from posbias.cli.invocation import command_line, passed_arguments
    from posbias.records import run_directory
    from posbias.report.reproductions import reproduction_record
    from posbias.reproduce import PAPERS
    from posbias.reproduce import reproduce as run_again

    arguments = passed_arguments(context)
    _ = PAPERS[paper]
    settings = None
    if paper == BIRTH:
        from posbias.reproduce.birth_models import BirthSettings

        settings = BirthSettings(
            size=size, n_positions=length, births=births, probes=probes, seed=seed, tokenizer=tokenizer
        )
    else:
        _refuse_settings(context, paper)
    with run_directory(out, verb="reproduce", arguments=arguments) as directory:
        record = reproduction_record(run_again(paper, settings=settings), arguments, command=command_line(context))
        _finish(record, directory, as_json=json)


def _refuse_settings(context: typer.Context, paper: str) -> None:
    """Flags of the other experiment change nothing here; that is said rather than passed over."""
    for name in ("size", "length", "births", "probes", "tokenizer", "seed"):
        source = context.get_parameter_source(name)
        if source is not None and source.name == "COMMANDLINE":
            raise UsageError(f"--{name} belongs to {BIRTH}; {paper} takes --out and --json only")


def _finish(record: "Record", directory: Path | None, *, as_json: bool) -> None:
    from rich.console import Console

    from posbias.cli.output import print_json
    from posbias.records import plain
    from posbias.report.reproductions import show_reproduction, write_reproduction_report

    page = None
    if directory is not None:
        record.save(directory)
        page = write_reproduction_report(record, directory)
    if as_json:
        arrays = {name: plain(array) for name, array in record.arrays.items() if not name.startswith("figures/")}
        print_json({**record.as_json(), "arrays": arrays})
        return
    show_reproduction(record, Console())
    if page is not None:
        typer.echo(f"report: {page}")
