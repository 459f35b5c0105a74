"""`posbias place`: the order of passages that suits one measured model."""

from collections.abc import Iterable
from pathlib import Path
from typing import Annotated

import typer

from posbias.cli import options
from posbias.cli.output import running
from posbias.errors import UsageError, check_most
from posbias.files import decoded, file_exists, read_lines

EXAMPLE = (
    "Examples: `posbias place --run runs/pairs --scores 0.9,0.4,0.4,0.1` · scores from a file, one number per line: "
    "`posbias place --run runs/pairs --scores scores.txt`"
)
MOST_SCORES = 100_000
"""Passages of one prompt."""


@options.grouped
def place(
    context: typer.Context,
    run: Annotated[Path, typer.Option(help="Directory of a run of posbias evaluate (or audit --behaviour).")],
    scores: Annotated[str, typer.Option(help="Relevance of each passage: a file, or 0.9,0.4,...")],
    *,
    method: Annotated[
        str | None,
        typer.Option(
            help="If --run is of mitigate: the method to order for, or 'unchanged'.", show_default="the recommended"
        ),
    ] = None,
    by: Annotated[
        str | None,
        typer.Option(help="accuracy, logprob or reciprocal_rank.", show_default="the first that was measured"),
    ] = None,
    flags: options.RunFlags,
) -> None:
    """Order passages for one model. Says where relevant ones should stand, and what that gains on held-out data."""
    from posbias.evaluation.evaluation import load_evaluation
    from posbias.evaluation.place import PlaceOptions
    from posbias.evaluation.place import place as order_passages

    relevance = scores_of(scores)
    with running(context, flags) as this:
        evaluation = load_evaluation(arm_of(run, method), "placing")
        chosen = PlaceOptions(by, flags.seed)
        placement = order_passages(relevance, evaluation, options=chosen)
        this.finish(placement.record)


def arm_of(run: Path, method: str | None) -> Path:
    """The evaluation of one method below a run of `mitigate`, the recommended one if none is named; else the run."""
    from posbias import load_record  # from the front door, behind which runs of every verb can be read
    from posbias.mitigation.result import MitigationTrial

    trial = load_record(run) if (run / "record.json").exists() else None
    if not isinstance(trial, MitigationTrial):
        if method is not None:
            raise UsageError(f"--method {method!r} names a method of a run of posbias mitigate; {str(run)!r} is none")
        return run
    names = [arm.name for arm in trial.arms]
    name = method or trial.judgement.recommended or names[0]
    if name not in names:
        raise UsageError(f"--method {name!r} is not in {str(run)!r}; allowed: {', '.join(names)}")
    return run / trial.arms[names.index(name)].directory


def scores_of(text: str) -> list[float]:
    """Relevances from a list, or from a file with one number per line."""
    given: Iterable[tuple[str, str]]
    given = ((f"--scores, value {number}", part) for number, part in enumerate(text.split(","), start=1))
    if file_exists(text):
        given = ((source, decoded(line, source)) for source, line in read_lines(text))
    relevance = []
    for source, spelled in given:
        try:
            relevance.append(float(spelled))
        except ValueError:
            raise UsageError(
                f"{source}: {spelled.strip()!r} is not a number (allowed: such as 0.4, or a file with one per line)"
            ) from None
        check_most(f"{text!r}: what one file holds", len(relevance), MOST_SCORES, "scores")
    return relevance
