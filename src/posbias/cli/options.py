"""Flags that several verbs share, and the parsing of literals; one definition each."""

import ast
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from posbias.errors import UsageError
from posbias.memory import parse_bytes
from posbias.registry import UNREADABLE

if TYPE_CHECKING:
    from posbias.engines import Engine as AnyEngine


def directory(text: str) -> Path:
    """A directory that was named; an empty name (often a shell variable that is not set) is not the current one."""
    if not text.strip():
        raise typer.BadParameter("allowed: the name of a directory, '.' for this one")
    return Path(text)


def out_option(what: str, *, default: bool | str = False) -> Any:
    """`--out`, for what it holds; `default` as a verb's help shows it."""
    return typer.Option("--out", help=what, parser=directory, metavar="<path>", show_default=default)


def check_resume(resume: bool, out: Path | None) -> None:
    """Refuse to continue a run of which nothing says where it is.

    Raises:
        UsageError: `--resume` without `--out`.
    """
    if resume and out is None:
        raise UsageError("--resume needs --out: the directory of the run that is continued")


def check_apart(out: Path | None, runs: Sequence[Path], *, verb: str) -> None:
    """Refuse to write over a run that is read.

    Raises:
        UsageError: `--out` is the directory of one of them.
    """
    if out is not None and out.resolve() in [run.resolve() for run in runs]:
        raise UsageError(f"--out {str(out)!r} is one of the runs {verb}, and would be replaced; choose another --out")


RECORD_AND_REPORT = "Directory for record and report."
Out = Annotated[Path | None, out_option(RECORD_AND_REPORT)]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document on stdout and nothing else.")]
Seed = Annotated[int, typer.Option("--seed", help="Seed of everything that is drawn.", min=0)]
UnusedSeed = Annotated[int, typer.Option("--seed", help="Taken by every verb; nothing is drawn here.", min=0)]
Length = Annotated[int, typer.Option("--length", help="Context length N in positions.", min=1)]
Count = Annotated[int, typer.Option("--count", help="How many prompts.", min=1)]
PromptSource = Annotated[
    str,
    typer.Option(
        "--prompts",
        help="'default', 'synthetic', a .txt, .jsonl or .parquet file ('file.jsonl#field'), "
        "'hf:owner/name:split', or 'chat:FILE.jsonl' (conversations).",
    ),
]
Windows = Annotated[str, typer.Option("--windows", help="random: anywhere in a document. starts: its first tokens.")]
Shuffle = Annotated[bool, typer.Option("--shuffle", help="Put each prompt's tokens into random order: a control.")]
Kinds = Annotated[
    str,
    typer.Option(
        "--kinds",
        help="Comma-separated: jacobian, probability, logprob, logit, fisher, integrated_gradients, perturbation.",
    ),
]
Output = Annotated[
    str,
    typer.Option("--output", help="Which output: last, at(position=-5), mean(last=16), target(text=' Paris')."),
]
DepthProfiles = Annotated[
    str | None,
    typer.Option("--depth-profiles", help="Profile after each layer: all, or e.g. 0,5,11.", show_default=False),
]
Keep = Annotated[str, typer.Option("--keep", help="Profiles that a record holds: prompts (each prompt's), or mean.")]
PrecisionPrompts = Annotated[
    int, typer.Option("--precision-prompts", help="Below float32: prompts measured again in float32.", min=0)
]
InitSeed = Annotated[
    int | None,
    typer.Option("--init-seed", help="Measure the model re-initialised at random with this seed.", show_default=False),
]
Dtype = Annotated[str, typer.Option("--dtype", help="float32, bfloat16, float16 or float64.")]
Device = Annotated[
    str, typer.Option("--device", help="Where to run: cpu, cuda, cuda:1 ..., or auto: spread, to the disk if need be.")
]
Engine = Annotated[str, typer.Option("--engine", help="Where prompts are measured: local, or ray (a cluster).")]
Workers = Annotated[
    int | None,
    typer.Option("--workers", help="Prompts at a time, each in its own process.", min=1, show_default="1; ray: all"),
]
Threads = Annotated[
    int | None,
    typer.Option("--threads", help="Threads per prompt; equal threads, equal bits.", min=1, show_default="all cores"),
]
RayAddress = Annotated[
    str | None,
    typer.Option("--ray-address", help="host:port of a Ray cluster, or auto.", show_default="one on this machine"),
]
MaxMemory = Annotated[
    str | None,
    typer.Option("--max-memory", help="Most that the process may hold, e.g. 6GB.", show_default="what is free"),
]
Resume = Annotated[bool, typer.Option("--resume", help="Continue without redoing finished prompts.")]
Checkpointing = Annotated[bool, typer.Option("--checkpointing", help="Trade time for memory.")]


def literal(text: str) -> Any:
    """A flag's value: a list is read as a Python literal (never evaluated), a number as a number, the rest as text.

    Raises:
        UsageError: a list that cannot be read.
    """
    if text.strip().startswith("["):
        try:
            return ast.literal_eval(text.strip())
        except UNREADABLE:
            raise UsageError(f"{text!r} is not a list of numbers or quoted names") from None
    try:
        return float(text)
    except ValueError:
        return text


def layers_of(text: str | None) -> str | tuple[int, ...] | None:
    """The layers that `--depth-profiles` names.

    Raises:
        UsageError: neither "all" nor whole numbers.
    """
    if text is None or text.strip() == "all":
        return None if text is None else "all"
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise UsageError(f"--depth-profiles {text!r}: need 'all' or layer indices such as 0,5,11") from None


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


def engine_of(spelled: str, *, workers: int | None, threads: int | None, address: str | None) -> "AnyEngine":
    """The engine of a literal spelling such as "ray(retries=5)", with what the flags add.

    Raises:
        UsageError: an unknown engine, or an address for one that has none.
    """
    from dataclasses import fields, replace

    from posbias.engines import ENGINES

    engine = ENGINES.parse(spelled)
    given = {"workers": workers, "threads": threads, "address": address}
    added: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    if "address" in added and not any(field.name == "address" for field in fields(engine)):
        raise UsageError(f"--ray-address goes with --engine ray, got --engine {engine.name}")
    return replace(engine, **added)


def bytes_of(text: str | None) -> int | None:
    """A --max-memory flag in bytes."""
    return None if text is None else parse_bytes(text)
