"""An evaluation as a record of verb "evaluate"; `posbias.report.behaviour` draws it from there.

Arrays: `positions` [n_positions] int64; `scores/NAME` [n_samples n_positions], NaN where there is none, NAME as in
`Evaluation.tables`. Scalars: `n_items`, `skipped` {position: examples}, `measures` [name], `curves` {measure:
`PositionCurve.as_record`}, `cut_off`, `examples`, `reused`, `cost`. The texts go beside it, one JSON object per line.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from posbias.checks import checked
from posbias.directories import write_atomically
from posbias.errors import RunError, UsageError
from posbias.evaluation.evaluation import Evaluation, evaluation_fingerprint, reciprocal_rank
from posbias.evaluation.placement import MeasuredUse
from posbias.evaluation.responders.base import Responder
from posbias.evaluation.samples import EvaluateOptions
from posbias.parts import fingerprint, finished_run
from posbias.records import Record, load_record
from posbias.tasks.language import LanguageTask

OUTPUTS_FILE = "outputs.jsonl"
BEHAVIOUR = "behaviour"
"""Where the behaviour of an audited model is kept, below the audit's directory."""
PLACEABLE = ("accuracy", "probability", "reciprocal_rank")
"""Measures that an order of passages may be chosen by: all lie in 0 ... 1."""


def evaluation_record(evaluation: Evaluation, arguments: Mapping[str, Any], *, command: str = "") -> Record:
    """Tables, curves and statistics, with what was requested of whom."""
    options, model = evaluation.options, evaluation.responder.get("model")
    source = model.get("source") if isinstance(model, Mapping) else model
    record = Record(
        verb="evaluate",
        arguments=dict(arguments),
        resolved={
            "title": f"{source or 'model'}: {evaluation.task}",
            "command": command,
            "task": str(evaluation.task),
            "file_sha256": evaluation.file_sha256,
            "scoring": evaluation.task.scoring,
            "count": options.count,
            "positions": list(evaluation.positions),
            "max_tokens": options.max_tokens,
            "responder": dict(evaluation.responder),
            "fingerprint": fingerprint({"evaluation": evaluation.fingerprint}),
        },
        seeds={"samples": options.seed, "folds": options.seed},
    )
    record.scalars = {
        "n_items": evaluation.n_items,
        "skipped": {str(position): count for position, count in evaluation.skipped.items()},
        "measures": list(evaluation.measures),
        "curves": {name: curve.as_record() for name, curve in evaluation.curves.items()},
        "cut_off": sum(row["finish"] == "length" for row in evaluation.outputs),
        "examples": len(evaluation.outputs),
        "reused": evaluation.reused,
        "cost": dict(evaluation.cost),
    }
    record.arrays = {
        "positions": np.array(evaluation.positions),
        **{f"scores/{name}": table for name, table in evaluation.tables.items()},
    }
    return record


def finished_evaluation(
    task: str | LanguageTask, responder: Responder, options: EvaluateOptions, **beside: Any
) -> Record | None:
    """The record of just this evaluation where `options` name a directory that holds it finished, and resume it.

    Arguments as of `evaluate`; `beside`: what else the record depends on.
    """
    return finished_run(
        options.directory,
        lambda: {"evaluation": evaluation_fingerprint(task, responder, options), **beside},
        resume=options.resume,
    )


def write_outputs(evaluation: Evaluation, directory: Path) -> Path:
    """The generated texts with their samples, positions and accepted answers, one JSON object per line."""
    path = directory / OUTPUTS_FILE
    lines = "".join(json.dumps(dict(row), ensure_ascii=False) + "\n" for row in evaluation.outputs)
    try:
        write_atomically(path, lines.encode())
    except OSError as error:
        raise RunError(f"cannot write the outputs to {str(path)!r}: {error.strerror or error}") from None
    return path


def load_behaviour(run: str | Path) -> Record:
    """The record of an evaluation from its directory, or from that of the audit above it."""
    below = Path(run) / BEHAVIOUR
    return load_record(below if below.is_dir() else run)


@checked
def measured_use(run: Record | str | Path, *, measure: str | None = None) -> MeasuredUse:
    """The curve of a finished run, for placing passages.

    Args:
        run: A record of verb "evaluate", or an audit with behaviour, or its directory.
        measure: One of PLACEABLE; None: the first of them that the run measured.

    Raises:
        UsageError: another sort of run, an unfinished one, or a measure it does not have.
    """
    record = run if isinstance(run, Record) else load_behaviour(run)
    if record.verb != "evaluate" or record.status != "done" or "n_items" not in record.scalars:
        raise UsageError(f"placing needs a finished run of posbias evaluate, got {record.verb!r} ({record.status})")
    tables = {
        "accuracy": record.arrays["scores/correct"],
        "probability": np.exp(record.arrays["scores/logprob"]),
        "reciprocal_rank": reciprocal_rank(record.arrays["scores/first_rank"], record.arrays["scores/logprob"]),
    }
    there = [name for name in PLACEABLE if not np.isnan(tables[name]).all()]
    if measure is None and there:
        measure = there[0]
    if measure not in there:
        raise UsageError(f"the run has no {measure!r}; it has: {', '.join(there) or 'nothing to place by'}")
    return MeasuredUse(
        scores=tables[measure],
        positions=tuple(int(position) for position in record.arrays["positions"]),
        n_items=int(record.scalars["n_items"]),
        measure=measure,
    )
