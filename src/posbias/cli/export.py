"""`posbias export`: a fitted method as files that other programs load."""

from pathlib import Path
from typing import Annotated

import typer

from posbias.cli import options
from posbias.cli.output import print_document

EXAMPLE = (
    "Examples: `posbias export runs/mitigate --to adapter` (for PEFT, vLLM, SGLang) · beside it a file for llama.cpp: "
    "`--gguf` · a whole checkpoint: `posbias export recipe.json --model demo --to merged --merged`"
)


def export(
    fitted: Annotated[
        str,
        typer.Argument(help="Run of posbias mitigate, or a recipe.", show_default=False),
    ],
    to: Annotated[Path, typer.Option("--to", help="A new directory.", show_default=False)],
    merged: Annotated[bool, typer.Option("--merged", help="Write the whole model, changed, not an adapter.")] = False,
    gguf: Annotated[bool, typer.Option("--gguf", help="Also write adapter.gguf, for llama.cpp.")] = False,
    method: Annotated[
        str | None, typer.Option(help="Which of the run's methods.", show_default="the recommended or only one")
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(help="The model that it was fitted to, if its name alone does not lead there.", show_default="it"),
    ] = None,
    dtype: options.Dtype = "own",
    json: options.Json = False,
) -> None:
    """Write a fitted method as files that other programs load."""
    from dataclasses import asdict

    from posbias.errors import UsageError
    from posbias.exporting import choose
    from posbias.exporting import export as write
    from posbias.measurement.measurement import Loading
    from posbias.mitigation.methods.recipe import Recipe

    if to.exists():  # before a model is loaded
        raise UsageError(f"{str(to)!r} exists; a method is exported to a new directory only")
    chosen = choose(fitted, method=method)
    loaded = Loading(device="cpu", dtype=dtype).load(model or Recipe.read(chosen.recipe).model.source)
    exported = write(chosen, to, model=loaded, merged=merged, gguf=gguf)
    print_document(asdict(exported), as_json=json, line=f"{exported.form}: {to} ({', '.join(exported.files)})")
