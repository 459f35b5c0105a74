"""`posbias models`: obtain models that need more than a hub."""

from pathlib import Path
from typing import Annotated

import typer

from posbias.cli import options
from posbias.errors import UsageError

app = typer.Typer(no_args_is_help=True, help="Obtain models.", rich_markup_mode="markdown")


@app.command("get", epilog="Example: `posbias models get demo`")
def get(
    name: Annotated[str, typer.Argument(help="demo: SmolLM2-135M-Instruct, 98 MB, Apache-2.0.")] = "demo",
    seed: options.UnusedSeed = 0,
    out: Annotated[Path | None, options.out_option("A new directory for a copy of the model.")] = None,
    json: options.Json = False,
) -> None:
    """Download a named model once and keep it in the user's cache."""
    from posbias.cli.output import print_document
    from posbias.models import copy_demo, fetch_demo

    if name != "demo":
        raise UsageError(f"unknown model {name!r}; known: demo (other models load by hub id, directory or file)")
    directory = fetch_demo() if out is None else copy_demo(out)
    print_document({"model": name, "directory": str(directory)}, as_json=json, line=f"{name}: {directory}")


@app.callback()
def _verbs() -> None:
    """Obtain models."""
