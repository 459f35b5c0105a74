"""`posbias compare`, `correlate`, `place`, `export` and `report`: what is made of finished runs."""

from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

from posbias.cli import options
from posbias.cli.output import running, tell
from posbias.comparison.options import CompareOptions
from posbias.errors import UsageError, check_most
from posbias.evaluation.options import CorrelateOptions, PlaceOptions
from posbias.files import decoded, file_exists, read_lines
from posbias.measurement.options import Loading

MOST_SCORES = 100_000
"""Passages of one prompt."""


def compare(predicted: Path, measured: Path, *, settings: CompareOptions, flags: options.RunFlags) -> None:
    """Compare the profiles of two runs.

    Every distance is given with that of a flat line; intervals resample the prompts of both runs.

    Args:
        predicted: Run whose predictions are judged.
        measured: Run with the measurement.

    Example: `posbias compare runs/predicted runs/measured --kind jacobian`; what two audits measured: `posbias compare
    runs/one runs/other --theory jacobian --kind jacobian`
    """
    from posbias import compare as compare_runs  # from the front door, behind which runs of every verb can be read
    from posbias.results.records import read_record

    if flags.out is not None and flags.out.resolve() in (predicted.resolve(), measured.resolve()):
        raise UsageError(f"--out {str(flags.out)!r} is one of the runs compared; choose another --out")
    with running(flags) as run:
        run.finish(compare_runs(read_record(predicted), read_record(measured), options=settings).record)


def correlate(runs: list[Path], *, settings: CorrelateOptions, flags: options.RunFlags) -> None:
    """Correlate influence with behaviour over finished audits. Ranks are formed within each measurement.

    Args:
        runs: Directories of audits with --behaviour.

    Example, after two runs of `posbias audit ... --behaviour ...`: `posbias correlate runs/a runs/b --out runs/ab`
    """
    from posbias.evaluation.correlate import correlate as correlate_runs

    with running(flags) as run:
        run.finish(correlate_runs(runs, options=settings).record)


def place(*, run: Path, scores: str, settings: PlaceOptions, flags: options.RunFlags) -> None:
    """Order passages for one model. Says where relevant ones should stand, and what that gains on held-out data.

    Args:
        run: Directory of a run of posbias evaluate (or audit --behaviour), or of mitigate with arms/METHOD.
        scores: Relevance of each passage: a file, or 0.9,0.4,...

    Examples: `posbias place --run runs/pairs --scores 0.9,0.4,0.4,0.1` · scores from a file, one number per line:
    `posbias place --run runs/pairs --scores scores.txt`
    """
    from posbias.evaluation.place import place as order_passages

    relevance = scores_of(scores)
    with running(flags) as this:
        this.finish(order_passages(relevance, run, options=settings).record)


def scores_of(text: str) -> list[float]:
    """Relevances from a list, or from a file with one number per line."""
    given = [("--scores", part) for part in text.split(",")]
    if file_exists(text):
        given = [(source, decoded(line, source)) for source, line in read_lines(text)]
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


def show(
    run: Path,
    *,
    sample: int | None = None,
    position: int | None = None,
    task: str | None = None,
    tokenizer: str | None = None,
    flags: options.Printed,
) -> None:
    """Show a prompt of a finished run as it was asked, the answer, and how that was judged.

    Args:
        run: Directory of a run of posbias evaluate; of one with several parts, or of mitigate, that of a part.
        sample: Number of a sample, by default of the first wrong answer.
        position: Position of its item, by default of the first wrong answer.
        task: The task with its files, if they are not where the run has read them.
        tokenizer: The model's tokenizer, for a task that counts tokens, if it is not where the run has read it.

    Example: `posbias show runs/pairs --sample 3 --position 2` · at one length: `posbias show runs/lengths/length-1024`
    """
    from posbias.evaluation.evaluation import load_evaluation, outputs_of
    from posbias.evaluation.page import answer_lines
    from posbias.evaluation.samples import asked_again, row_of

    evaluation = load_evaluation(run, "show")
    row = row_of(outputs_of(run), sample=sample, position=position)
    requests = [asked_again(evaluation, row, run, task=task, tokenizer=tokenizer)]
    method, sends_messages = evaluation.responder.get("method"), evaluation.responder.get("kind") == "chat"
    if method:
        from posbias.mitigation.methods.base import MITIGATIONS, PromptMitigation

        found = MITIGATIONS.parse(method)
        requests = found.asked(requests[0]) if isinstance(found, PromptMitigation) else requests
    prompts: list[Any] = [request.prompt for request in requests]
    if sends_messages:
        prompts = [[{"role": "user", "content": each}] if isinstance(each, str) else each for each in prompts]
    title = f"{evaluation.title}: sample {row['sample']}, position {row['position']}"
    tell(flags, {**row, "prompts": prompts}, title, *answer_lines(row, prompts))


def export(
    fitted: str,
    *,
    to: Path,
    merged: bool = False,
    gguf: bool = False,
    method: str | None = None,
    model: str | None = None,
    loading: Annotated[Loading, options.Take("init_seed", "device", "template_options", dtype="own", device="cpu")],
    flags: options.Printed,
) -> None:
    """Write a fitted method as files that other programs load.

    Args:
        fitted: Run of posbias mitigate, or a recipe.
        to: A new directory.
        merged: Write the whole model, changed, not an adapter.
        gguf: Also write adapter.gguf, for llama.cpp.
        method: Which of the run's methods; by default the recommended or only one.
        model: The model that it was fitted to, if its name alone does not lead there.

    Examples: `posbias export runs/mitigate --to adapter` (for PEFT, vLLM, SGLang) · beside it a file for llama.cpp:
    `--gguf` · a whole checkpoint: `posbias export recipe.json --model demo --to merged --merged`
    """
    from posbias.exporting import choose
    from posbias.exporting import export as write
    from posbias.mitigation.methods.recipe import Recipe

    if to.exists():  # before a model is loaded
        raise UsageError(f"{str(to)!r} exists; a method is exported to a new directory only")
    chosen = choose(fitted, method=method)
    loaded: Any = loading.load(model or Recipe.read(chosen.recipe).model.source)
    exported = write(chosen, to, model=loaded, merged=merged, gguf=gguf)
    tell(flags, asdict(exported), f"{exported.form}: {to} ({', '.join(exported.files)})")


def report(
    runs: list[Path],
    *,
    paper: Path | None = None,
    flags: Annotated[options.RunFlags, options.Take("overwrite")],
) -> None:
    """Write the report of finished runs again. No model is loaded.

    Args:
        runs: Run directories.
        paper: A new directory for a paper: figures (PDF, SVG) and tables (LaTeX); no page is drawn.

    Example: `posbias report runs/demo` · for a paper or slides: `posbias report runs/demo --paper paper` · several side
    by side: `posbias report runs/a runs/b --out runs/both`
    """
    from posbias import write_report  # from the front door, behind which runs of every verb have their words
    from posbias.results.records import RECORD_FILE, read_record
    from posbias.results.result import write_paper
    from posbias.runs.running import held

    records, out, names = [read_record(run) for run in runs], flags.out, [str(run) for run in runs]
    if paper is not None:
        if out is not None:
            raise UsageError("--paper writes no page; leave out --out")
        written = str(write_paper(records, paper))
        tell(flags, {"paper": written, "runs": names}, f"paper: {written}")
        return
    if len(runs) > 1 and out is None:
        raise UsageError(f"{len(runs)} runs side by side need a directory of their own: --out DIRECTORY")
    if out is not None and (out / RECORD_FILE).exists() and [out.resolve()] != [run.resolve() for run in runs]:
        raise UsageError(f"--out {str(out)!r} holds a run, whose page would be replaced; choose another --out")
    with held(out or runs[0]) as directory:
        page = str(write_report(records, directory))
    tell(flags, {"report": page, "runs": names}, f"report: {page}")
