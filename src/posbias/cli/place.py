"""`posbias place`: the order of retrieved passages that a measured model is expected to use best."""

from pathlib import Path
from typing import Annotated

import typer

from posbias.cli import options
from posbias.cli.output import running
from posbias.errors import UsageError
from posbias.files import decoded, file_exists, json_object, read_lines

EXAMPLE = (
    "Examples: `posbias place --run runs/pairs --scores 0.9,0.4,0.4,0.1` · scores from a file, one number or one JSON "
    "object with a `score` per line: `posbias place --run runs/pairs --scores scores.jsonl`"
)


@options.grouped
def place(
    context: typer.Context,
    run: Annotated[Path, typer.Option(help="Directory of a run of posbias evaluate (or audit --behaviour).")],
    scores: Annotated[str, typer.Option(help="Relevance of each passage: a file, or 0.9,0.4,...")],
    *,
    by: Annotated[
        str | None,
        typer.Option(help="accuracy, probability or reciprocal_rank.", show_default="the first that was measured"),
    ] = None,
    flags: options.RunFlags,
) -> None:
    """Order passages for one model. Where the relevant ones should stand, and what that is worth on held-out data."""
    from posbias.evaluation import measured_use
    from posbias.evaluation import place as find_order
    from posbias.evaluation.evaluation import load_behaviour
    from posbias.records import Record, reading

    relevance = scores_of(scores)
    with running(context, flags) as this:
        measured = load_behaviour(run)
        with reading(measured):
            found = find_order(relevance, measured_use(measured, measure=by), seed=flags.seed)
        record = Record(
            verb="place",
            arguments=this.arguments,
            resolved={
                "title": f"{measured.resolved.get('title', 'a model')}: order of {len(relevance)} passages",
                "command": this.command,
                "run": measured.run_id,
                "relevance": relevance,
            },
            scalars=found.as_record(),
            seeds={"bootstrap": flags.seed},
        )
        this.finish(record)


def scores_of(text: str) -> list[float]:
    """Relevances from a file or a list: numbers, or JSON objects with a `score`, one per line.

    Raises:
        UsageError: something else; a wrong line is named.
    """
    if not file_exists(text):
        return [_number(part, f"--scores, value {number}") for number, part in enumerate(text.split(","), start=1)]
    return [_score_in(line, where) for where, line in read_lines(text)]


def _score_in(line: bytes, where: str) -> float:
    if not line.lstrip().startswith(b"{"):
        return _number(decoded(line, where), where)
    score = json_object(line, where).get("score")
    if isinstance(score, bool) or not isinstance(score, int | float):
        raise UsageError(f"{where}: needs a number 'score', got {score!r}")
    return _number(score, where)


def _number(text: str | float, where: str) -> float:
    try:
        return float(text)
    except (ValueError, OverflowError):
        raise UsageError(
            f"{where}: {str(text).strip()!r} is not a number (allowed: such as 0.4, or a file of them)"
        ) from None
