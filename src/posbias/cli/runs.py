"""Verbs on finished runs: `posbias compare`, `posbias correlate`, `posbias place` and `posbias report`."""

from pathlib import Path
from typing import Annotated

import typer

from posbias.cli import options
from posbias.cli.output import print_document, running
from posbias.errors import UsageError
from posbias.files import decoded, file_exists, json_object, read_lines
from posbias.limits import ITEMS

COMPARE_EXAMPLE = (
    "Example: `posbias compare runs/predicted runs/measured --kind jacobian`; what two audits measured: "
    "`posbias compare runs/one runs/other --theory jacobian --kind jacobian`"
)
CORRELATE_EXAMPLE = (
    "Example, after two runs of `posbias audit ... --behaviour ...`: `posbias correlate runs/a runs/b --out runs/ab`"
)
PLACE_EXAMPLE = (
    "Examples: `posbias place --run runs/pairs --scores 0.9,0.4,0.4,0.1` · scores from a file, one number or one JSON "
    "object with a `score` per line: `posbias place --run runs/pairs --scores scores.jsonl`"
)
REPORT_EXAMPLE = (
    "Example: `posbias report runs/demo` · its figures as PNGs, too: `posbias report runs/demo --png` · several side "
    "by side: `posbias report runs/a runs/b --out runs/both`"
)


@options.grouped
def compare(
    context: typer.Context,
    predicted: Annotated[Path, typer.Argument(help="Run whose predictions are judged.", show_default=False)],
    measured: Annotated[Path, typer.Argument(help="Run with the measurement.", show_default=False)],
    *,
    kind: Annotated[
        str | None, typer.Option(help="Compare to this measured kind only; all by default.", show_default=False)
    ] = None,
    theory: Annotated[
        str | None,
        typer.Option(
            help="Compare this theory of the first run only, or a kind measured there; all its theories by default.",
            show_default=False,
        ),
    ] = None,
    subject: Annotated[
        str | None,
        typer.Option(
            help="Of an audit, the model trained or initialised; by default as the other run has it, else trained.",
            show_default=False,
        ),
    ] = None,
    flags: options.RunFlags,
) -> None:
    """Compare the profiles of two runs. Every distance, beside a flat line's; prompts of both are resampled."""
    from posbias.auditing import Chosen, comparison_record
    from posbias.records import load_record, reading

    options.check_apart(flags.out, (predicted, measured), verb="compared")
    with running(context, flags) as run:
        records = load_record(predicted), load_record(measured)
        with reading(*records):
            chosen = Chosen(theory=theory, kind=kind, subject=subject)
            record = comparison_record(*records, chosen, command=run.command, seed=flags.seed)
        record.arguments = run.arguments
        run.finish(record)


@options.grouped
def correlate(
    context: typer.Context,
    runs: Annotated[
        list[Path], typer.Argument(metavar="RUN...", help="Directories of audits with --behaviour.", show_default=False)
    ],
    *,
    flags: options.RunFlags,
) -> None:
    """Correlate influence with behaviour over finished audits. Rank and partial correlations, ranks within each run."""
    from posbias.evaluation import correlate_runs
    from posbias.evaluation.evaluation import load_behaviour
    from posbias.records import reading

    with running(context, flags) as run:
        records = [load_behaviour(each) for each in runs]
        with reading(*records):
            record = correlate_runs(records, seed=flags.seed, arguments=run.arguments, command=run.command)
        run.finish(record)


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
                "count": measured.resolved.get("count"),
                "responder": {"kind": measured.resolved.get("responder", {}).get("kind")},
            },
            scalars={**found.as_record(), "notices": measured.scalars.get("notices", {})},
            seeds={"bootstrap": flags.seed},
        )
        this.finish(record)


def scores_of(text: str) -> list[float]:
    """Relevances from a file or a list: numbers, or JSON objects with a `score`, one per line."""
    if not file_exists(text):
        return [_number(part, f"--scores, value {number}") for number, part in enumerate(text.split(","), start=1)]
    found = []
    for where, line in read_lines(text):
        score: object = decoded(line, where)
        if line.lstrip().startswith(b"{"):
            score = json_object(line, where).get("score")
            if isinstance(score, bool) or not isinstance(score, int | float):
                raise UsageError(f"{where}: needs a number 'score', got {score!r}")
        found.append(_number(score, where))
        ITEMS.check(f"{text!r}: what one file holds", len(found))
    return found


def _number(given: object, where: str) -> float:
    try:
        return float(given)  # type: ignore[arg-type]
    except (ValueError, OverflowError):
        raise UsageError(
            f"{where}: {str(given).strip()!r} is not a number (allowed: such as 0.4, or a file of them)"
        ) from None


def report(
    runs: Annotated[list[Path], typer.Argument(help="Run directories.", show_default=False)],
    seed: options.UnusedSeed = 0,
    png: Annotated[bool, typer.Option("--png", help="Every figure as a PNG, too, for papers and slides.")] = False,
    out: options.Out = None,
    json: options.Json = False,
) -> None:
    """Draw the report of finished runs anew. No model is loaded."""
    from posbias.directories import held
    from posbias.records import RECORD_FILE, load_record, reading
    from posbias.report import write_report

    records = [load_record(run) for run in runs]
    if len(runs) > 1:
        if out is None:
            raise UsageError(f"{len(runs)} runs side by side need a directory of their own: --out DIRECTORY")
        options.check_apart(out, runs, verb="drawn")
    if out is not None and out.resolve() not in [run.resolve() for run in runs] and (out / RECORD_FILE).exists():
        raise UsageError(f"--out {str(out)!r} holds a run, whose page would be replaced; choose another --out")
    with held(out or runs[0]) as directory, reading(*records):
        page = write_report(records, directory, png=png)
    print_document({"report": str(page), "runs": [str(run) for run in runs]}, as_json=json, line=f"report: {page}")
