"""Flags that several verbs share, and the parsing of literals; one definition each."""

import ast
from pathlib import Path
from typing import Annotated, Any

import typer

from posbias.errors import UsageError

Out = Annotated[Path | None, typer.Option("--out", help="Directory for record and report.", show_default=False)]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document on stdout and nothing else.")]
Seed = Annotated[int, typer.Option("--seed", help="Seed of everything that is drawn.", min=0)]
UnusedSeed = Annotated[int, typer.Option("--seed", help="Taken by every verb; nothing is drawn here.", min=0)]
Length = Annotated[int, typer.Option("--length", help="Context length N in positions.", min=1)]
Count = Annotated[int, typer.Option("--count", help="How many prompts.", min=1)]
PromptSource = Annotated[
    str, typer.Option("--prompts", help="'default', or a .txt, .jsonl or .parquet file ('file.jsonl#field').")
]
Kinds = Annotated[
    str,
    typer.Option("--kinds", help="Comma-separated: jacobian, probability, logprob, logit, fisher."),
]
InitSeed = Annotated[
    int | None,
    typer.Option("--init-seed", help="Measure the model re-initialised at random with this seed.", show_default=False),
]
Dtype = Annotated[str, typer.Option("--dtype", help="float32, bfloat16, float16 or float64.")]
Device = Annotated[str, typer.Option("--device", help="Where to run: cpu, cuda, cuda:1 ...")]


def literal(text: str) -> Any:
    """A flag's value: a list is read as a Python literal (never evaluated), a number as a number, the rest as text.

    Raises:
        UsageError: a list that cannot be read.
    """
    if text.strip().startswith("["):
        try:
            return ast.literal_eval(text.strip())
        except (ValueError, SyntaxError):
            raise UsageError(f"{text!r} is not a list of numbers or quoted names") from None
    try:
        return float(text)
    except ValueError:
        return text


def split_literals(text: str) -> list[str]:
    """Split a comma-separated list of literal calls at the commas outside brackets: "a,b(x=1,y=2)" is two."""
    parts, depth, current = [], 0, ""
    for character in text:
        depth += (character in "([") - (character in ")]")
        if character == "," and depth == 0:
            parts.append(current)
            current = ""
        else:
            current += character
    return [part.strip() for part in [*parts, current] if part.strip()]
