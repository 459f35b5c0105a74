"""`posbias verify`: published claims put to the test."""

import textwrap
import warnings
from collections.abc import Sequence
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from posbias.cli import options
from posbias.cli.invocation import command_line, passed_arguments, was_given
from posbias.errors import UsageError
from posbias.files import read_whole
from posbias.limits import MASK_BYTES

if TYPE_CHECKING:
    import numpy as np

    from posbias.papers.claims import Verdict
    from posbias.records import Record

EXAMPLE = (
    "Examples: `posbias verify` · `posbias verify wu2025` · `posbias verify wu2025/theorem-4.5 --json` · "
    "a figure for each: `posbias verify --report --out runs/claims` · "
    "your own mask: `posbias verify --mask mask.npy` · on a model: `posbias verify --model demo --length 48`"
)
MODEL_FLAGS = ("prompts", "count", "init_seed")
DEFAULT_REPORT = Path("runs/verify")
TEXT_WIDTH = 112


def verify(
    context: typer.Context,
    claim: Annotated[
        str | None, typer.Argument(help="A paper (wu2025) or a claim (wu2025/theorem-4.1); all by default.")
    ] = None,
    mask: Annotated[
        str | None,
        typer.Option(
            help="Centre nodes of this mask: prefix(length=4) ..., or a .npy, .csv or .txt file of 0 and 1.",
            show_default=False,
        ),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(help="Put the claims to the test on this model's attention, as for measure.", show_default=False),
    ] = None,
    prompts: Annotated[str, typer.Option(help="With --model: prompts, as for measure.")] = "default",
    count: options.Count = 8,
    init_seed: options.InitSeed = None,
    length: options.Length = 32,
    seed: options.Seed = 0,
    report: Annotated[
        bool,
        typer.Option("--report", help="Write an HTML page with a figure per claim to --out (default runs/verify)."),
    ] = False,
    out: options.Out = None,
    json: options.Json = False,
) -> None:
    """Run published theorems and claims as numerical experiments: the number, the verdict, and the sharper fact.

    With --model on the attention of one model, trained or random: which premises it meets, and what holds on it.
    """
    from posbias.cli.output import print_json
    from posbias.papers.claims import claims_record
    from posbias.records import run_directory

    arguments = passed_arguments(context)
    for name in MODEL_FLAGS if model is None else ("mask",):
        if was_given(context, name):
            raise UsageError(
                f"--{name.replace('_', '-')} " + ("needs" if model is None else "cannot go with") + " --model"
            )
    with run_directory(out or (DEFAULT_REPORT if report else None), verb="verify", arguments=arguments) as directory:
        verdicts: Sequence[Verdict]
        if model is None:
            verdicts, read = _verdicts(claim, mask, n_positions=length, seed=seed), None
        else:
            verdicts, read = _on_model(claim, model, prompts, length=length, draw=(count, seed, init_seed))
        record = claims_record(verdicts, arguments, seed=seed, command=command_line(context), read=read)
        page = _save(record, directory, report=report)
    if json:
        print_json([verdict.as_dict() for verdict in verdicts])
        return
    for verdict in verdicts:
        typer.echo(described(verdict.as_dict()) + "\n")
    typer.echo(tally([verdict.verdict for verdict in verdicts], on_model=model is not None))
    if page is not None:
        typer.echo(f"report: {page}")


def _verdicts(claim: str | None, mask: str | None, *, n_positions: int, seed: int) -> "Sequence[Verdict]":
    from posbias.papers import verify as verify_claims
    from posbias.papers import verify_mask

    if mask is None:
        return verify_claims(claim, seed=seed)
    if claim not in {None, "wu2025", "wu2025/centre-nodes"}:
        raise UsageError(f"--mask belongs to wu2025/centre-nodes, got claim {claim!r}")
    return [verify_mask(read_mask(mask, n_positions), seed=seed)]


def _on_model(
    claim: str | None, source: str, prompts: str, *, length: int, draw: tuple[int, int, int | None]
) -> "tuple[Sequence[Verdict], dict[str, Any]]":
    """Verdicts on a model, and what was read; `draw`: count and seed of prompts, seed of initialisation."""
    from posbias.models import load_model
    from posbias.papers import verify_model
    from posbias.papers.claims import selected
    from posbias.prompts import load_prompts

    selected(claim)  # before the model is loaded
    count, seed, init_seed = draw
    loaded = load_model(source, init_seed=init_seed)
    drawn = load_prompts(prompts, loaded, n_positions=length, count=count, seed=seed)
    return verify_model(loaded, drawn, claim), {"model": loaded.describe(), "prompts": drawn.describe()}


def read_mask(text: str, n_positions: int) -> "np.ndarray":
    """A mask from its literal spelling at `n_positions`, or from a file of 0 and 1 (rows are queries).

    Raises:
        UsageError: an unknown mask, a file that cannot be read, or values other than 0 and 1.
    """
    import numpy as np

    from posbias.architecture import MASKS
    from posbias.papers.wu2025.graphs import LARGEST_MASK

    path = Path(text)
    if path.suffix not in {".npy", ".csv", ".txt"}:
        if not 2 <= n_positions <= LARGEST_MASK:
            raise UsageError(f"--mask {text!r} needs --length 2 to {LARGEST_MASK}, got {n_positions}")
        return np.asarray(MASKS.parse(text).visible(n_positions))
    content = BytesIO(read_whole(path, "mask file", MASK_BYTES))
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # numpy's word on an empty file
            if path.suffix == ".npy":
                values = np.lib.format.read_array(content, allow_pickle=False)
            else:
                values = np.loadtxt(content, delimiter="," if path.suffix == ".csv" else None, ndmin=2)
    except (ValueError, EOFError, MemoryError) as error:
        raise UsageError(f"mask file {text!r} is not a matrix of 0 and 1: {str(error).split(chr(10))[0]}") from None
    if values.dtype.kind not in "biuf" or values.ndim != 2 or not np.isin(values, (0, 1)).all():
        raise UsageError(f"mask file {text!r} must hold a matrix of 0 and 1, got shape {list(values.shape)}")
    return np.asarray(values, dtype=bool)


def _save(record: "Record", directory: Path | None, *, report: bool) -> Path | None:
    from posbias.report import write_report

    if directory is None:
        return None
    record.save(directory)
    return write_report([record], directory) if report else None


def described(verdict: dict[str, Any]) -> str:
    """One verdict as text: name and verdict, where it is stated, the statement, the number, the sharper fact."""
    lines = [f"{verdict['claim']}: {verdict['verdict'].upper()}", f"  {verdict['source']} of {verdict['paper']}"]
    lines.append(_indented(verdict["statement"]))
    lines.append(_indented(f"computed {verdict['value']:.4g}: {verdict['computed']}"))
    for premise in verdict.get("premises", ()):
        found = f" ({premise['found']})" if premise["found"] else ""
        lines.append(_indented(f"premise {'met' if premise['met'] else 'NOT MET'}: {premise['premise']}{found}"))
    if verdict["sharper"]:
        lines.append(_indented(f"sharper: {verdict['sharper']}"))
    return "\n".join(lines)


def _indented(text: str) -> str:
    return textwrap.fill(text, TEXT_WIDTH, initial_indent="  ", subsequent_indent="    ")


def tally(verdicts: Sequence[str], *, on_model: bool = False) -> str:
    """How many of each verdict."""
    kinds = ["holds", "holds with a correction", "fails as stated"]
    if on_model:
        kinds = list(dict.fromkeys(["holds", "fails", *sorted(verdicts)]))
    return f"claims: {len(verdicts)}; " + ", ".join(f"{kind}: {verdicts.count(kind)}" for kind in kinds)
