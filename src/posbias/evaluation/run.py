"""`evaluate`: how well a model answers, by the position of the answer in its context.

Every sample is requested once per position. Scores go into score[sample, position] and from there into curves with
paired statistics; finished samples are kept, so that a killed run or one whose server went away goes on from there.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

import numpy as np

from posbias.errors import RunError, UsageError
from posbias.evaluation.curve import HIGHEST, position_curve
from posbias.evaluation.evaluation import (
    GENERATED,
    MEASURES,
    SCORES,
    Evaluation,
    LengthEvaluation,
    depths_of,
    length_evaluation,
    measures_of,
    write_outputs,
)
from posbias.evaluation.reading import judge_verdicts, reading_of, unjudged_in
from posbias.evaluation.responders.base import CLOSED, CUT_OFF, STOPPED, UNFINISHED, Responder
from posbias.evaluation.samples import (
    TEXTS,
    EvaluateOptions,
    Pieces,
    Sample,
    as_bytes,
    check_refused,
    notices_of,
    read_json,
    refused_in,
    request_samples,
    samples_of,
)
from posbias.measurement.units import check_passes
from posbias.models.model import Model
from posbias.progress import track
from posbias.runs.parts import PartStore, clear_parts, fingerprint, finished_run, made_by
from posbias.runs.records import Record, plain
from posbias.runs.running import OpenRun
from posbias.tasks.language import LanguageTask, file_sha256

DECIDING = ("kind", "model", "address", "body", "template_options", "structured", "tokenizer", "method")
"""Parts of a responder's description that a piece depends on; the rest says how the responses were made, at what cost.
"""
EFFORT = "effort"
"""Name of a piece's array that tells what the responses took and were expected to take, as UTF-8 bytes of JSON."""

LONGEST_METHOD = 40
"""Characters of a method's spelling in a title; of a longer one only the name stands there."""


class NothingAnsweredError(RunError):
    """Every example was too long for the model, or refused."""


def evaluate_lengths(responder: Responder, task: LanguageTask, options: EvaluateOptions) -> LengthEvaluation:
    """An evaluation at every length, each resumed from a directory of its own."""
    for length in options.lengths:
        following = options.tokens_of(task)
        if responder.max_positions is not None and length + following > responder.max_positions:
            raise UsageError(
                f"evaluate: prompts of {length} tokens and {following} of an answer do not fit into the model's "
                f"{responder.max_positions}; lengths up to {responder.max_positions - following} do"
            )
    tasks = {length: task.at_length(length, responder.tokenizer, seed=options.seed) for length in options.lengths}
    positions = {length: options.positions_of(lengthened) for length, lengthened in tasks.items()}
    depths = depths_of(positions, {length: lengthened.n_items for length, lengthened in tasks.items()})
    evaluations: dict[int, Evaluation] = {}
    for length, lengthened in tasks.items():
        directory = None if options.directory is None else options.directory / f"length-{length}"
        chosen = replace(options, lengths=(), directory=directory, require=None)
        try:
            evaluations[length] = evaluate_responder(responder, lengthened, chosen)
        except NothingAnsweredError:
            if not evaluations:
                raise
            break
    return length_evaluation(evaluations, task=str(task), options=options, depths=depths)


def evaluate_responder(
    responder: Responder,
    task: LanguageTask,
    options: EvaluateOptions,
    *,
    beside: Mapping[str, Any] | None = None,
) -> Evaluation:
    """Put every sample of a task, at every position, to a responder; errors as `evaluate`.

    If `options` resume a directory that holds just this evaluation finished, that one is `found`, without a request.
    Several lengths are for `evaluate_lengths`.

    Args:
        responder, task, options: As for `evaluate`, which opens its subject first.
        beside: What else the record depends on.
    """
    samples = list(samples_of(task, responder.tokenizer, options))
    described = responder.describe()
    settings = _settings(task, options, described)
    asked = {**settings, "samples": [sample.piece for sample in samples], "seed": options.seed}  # draws have a seed
    depends = {"evaluation": fingerprint(asked), **(beside or {})}
    if (record := finished_run(options.directory, lambda: depends, resume=options.resume)) is not None:
        evaluation = Evaluation.from_record(record)
        return replace(evaluation, found=True, reused=evaluation.count)
    data = file_sha256(task)
    if options.directory is not None and options.overwrite and not options.resume:
        clear_parts(options.directory)  # of one among several subjects, whose name the run's directory does not know
    store = PartStore(options.directory, settings)
    finished = {sample.piece: piece for sample in samples if (piece := store.find(sample.piece)) is not None}
    _check_room([sample for sample in samples if sample.piece not in finished], responder)
    pieces = _asked(samples, task, options, responder, store=store, finished=finished)
    outputs = tuple(row for piece in pieces for row in read_json(piece, TEXTS))
    tables = {name: np.stack([piece[name] for piece in pieces]) for name in pieces[0] if name not in (TEXTS, EFFORT)}
    efforts = [read_json(piece, EFFORT) for piece in pieces]
    described |= efforts[-1]["learnt"]
    described |= {name: sum(effort["counts"].get(name, 0) for effort in efforts) for name in responder.counts()}
    _check_scored(tables, outputs, options, described)
    record = Record("evaluate", {}, _resolved(task, options, described), seeds={"samples": options.seed})
    record.resolved |= {"count": len(samples), "file_sha256": data, "fingerprint": fingerprint(depends)}
    record.arrays = {"positions": np.array(record.resolved["positions"])}
    record.arrays |= {SCORES + name: table for name, table in tables.items()}
    record.scalars = {
        "n_items": task.n_items,
        **_scored(tables, outputs, record.resolved["positions"], options),
        "moved_blanks": sum(example.moved_blanks > 0 for sample in samples for example in sample.examples),
        "reused": store.reused,
        "seconds": sum(effort["seconds"] for effort in efforts),
        "notices": notices_of(samples),
    }
    if "first_pick" in tables and len(record.resolved["positions"]) == task.n_items and options.generate:
        verdicts = judge_verdicts(tables["correct"], tables["first_pick"], tables["tie"], tables)
        record.scalars["verdicts"] = plain(asdict(verdicts))
    return replace(Evaluation.from_record(record), outputs=outputs)


def _check_room(waiting: Sequence[Sample], responder: Responder) -> None:
    """Refuse prompts whose passes a CPU's memory cannot hold."""
    model = getattr(responder, "model", None)
    lengths = [example.n_tokens or 0 for sample in waiting for example in sample.examples]
    if isinstance(model, Model) and lengths:
        check_passes(model, max(lengths), gradients=False)


def finish_evaluation(evaluation: Evaluation | LengthEvaluation, run: OpenRun, *, below: str = "") -> None:
    """Write an evaluation with its texts into the directory of its run, or of a part `below` it; a found one stays."""
    if run.directory is not None and isinstance(evaluation, Evaluation) and not evaluation.found:
        write_outputs(evaluation, run.directory / below)
    run.finish(evaluation.record, below=below)


def _asked(
    samples: Sequence[Sample],
    task: LanguageTask,
    options: EvaluateOptions,
    responder: Responder,
    *,
    store: PartStore,
    finished: dict[str, Pieces],
) -> list[Pieces]:
    """The pieces of all samples, in order; what is not finished is asked now, and kept as soon as it is.

    Raises:
        RunError: as `request_samples`.
    """
    refused = [row for piece in finished.values() for row in refused_in(read_json(piece, TEXTS))]
    waiting = [sample for sample in samples if sample.piece not in finished]
    for begin in track(range(0, len(waiting), options.together), f"requests of {task}"):
        chunk = waiting[begin : begin + options.together]
        before, since = responder.counts(), time.perf_counter()
        pieces = request_samples(chunk, task, options, responder)
        seconds = time.perf_counter() - since
        counts = {name: count - before.get(name, 0) for name, count in responder.counts().items()}
        refused += [row for piece in pieces for row in refused_in(read_json(piece, TEXTS))]
        check_refused(refused, sum(len(sample.examples) for sample in samples))
        for sample, piece in zip(chunk, pieces, strict=True):
            effort = {"counts": counts, "learnt": responder.learnt(), "seconds": seconds}
            finished[sample.piece] = store.keep(sample.piece, {**piece, EFFORT: as_bytes(effort)})
            counts, seconds = {}, 0.0  # what the samples took together is stored with the first one
    pieces = [finished[sample.piece] for sample in samples]
    # Of a local model's prompts it is known whether they open thoughts.
    return pieces if responder.describe()["kind"] == "local" else _with_unmarked_thoughts(pieces)


def _resolved(task: LanguageTask, options: EvaluateOptions, described: Mapping[str, Any]) -> dict[str, Any]:
    """The request and the responder in plain values, for a record."""
    model, method = described.get("model"), described.get("method") or ""
    source = model.get("source") if isinstance(model, Mapping) else model
    named = method if len(method) <= LONGEST_METHOD else method.partition("(")[0]
    return {
        "title": f"{source or 'model'}{f' under {named}' if named else ''}: {task}",
        "command": "",
        "task": str(task),
        "file_sha256": None,
        "scoring": task.answer_rule.name,
        "count": options.count,
        **({"skip": options.skip} if options.skip else {}),
        "positions": list(options.positions_of(task)),
        "max_tokens": options.max_tokens or task.max_tokens,
        "thinking_tokens": options.thinking_tokens,
        "answer_pattern": options.answer_pattern,
        "responder": dict(described),
    }


def _scored(
    tables: Mapping[str, np.ndarray],
    outputs: Sequence[Mapping[str, Any]],
    positions: Sequence[int],
    options: EvaluateOptions,
) -> dict[str, Any]:
    """Counts and statistics of all answers, for a record."""
    reading = reading_of(tables, outputs)
    tokens = tables["gold_token"]
    gold = tokens.mean(axis=0).tolist() if not np.isnan(tokens).any() else None
    withheld = (*(GENERATED if reading.withheld else ()), "starts")
    curves = {
        name: position_curve(
            table,
            positions=positions,
            gold_tokens=gold,
            quantity=MEASURES[name],
            highest=HIGHEST.get(name, np.inf),
        )
        for name, table in measures_of(tables).items()
        if name not in withheld
    }
    requested = np.array([row["skipped"] is None for row in outputs])
    return {
        "skipped": {
            str(position): int(lost)
            for position, lost in zip(positions, tables["too_long"].sum(axis=0), strict=True)
            if lost
        },
        "unjudged": unjudged_in(outputs),
        "measures": list(curves),
        "curves": {name: plain(asdict(curve)) for name, curve in curves.items()},
        "cut_off": sum(row["finish"] == CUT_OFF for row in outputs),
        "examples": len(outputs),
        "reading": plain(asdict(reading)),
        "unscored": int((np.isnan(tables["logprob"].ravel()) & requested).sum()) if options.score else 0,
    }


def _with_unmarked_thoughts(pieces: Sequence[Pieces]) -> list[Pieces]:
    """Pieces in which answers that are thoughts throughout are none, so far as other answers give them away.

    If most answers that ended by themselves hold only the mark that closes thoughts, the prompt opens them: then one
    that was cut off without any mark is still within them, though nothing in itself tells.
    """
    outputs = [read_json(piece, TEXTS) for piece in pieces]
    ended = [row["thinking"] for rows in outputs for row in rows if row["finish"] == STOPPED]
    if ended.count(CLOSED) <= ended.count(None):
        return list(pieces)
    judged = []
    for piece, rows in zip(pieces, outputs, strict=True):
        hidden = np.array([row["thinking"] is None and row["finish"] == CUT_OFF for row in rows])
        within = {"text": "", "thinking": UNFINISHED}
        rows = [
            {**row, "thoughts": row["text"], **within} if inside else row
            for row, inside in zip(rows, hidden, strict=True)
        ]
        blank = {
            "correct": 0.0,
            "found": 0.0,
            "starts": 0.0,
            "cut": 1.0,
            "first_pick": np.nan,
            "tie": np.nan,
            "chosen": np.nan,
        }
        tables = {
            name: np.where(hidden & ~np.isnan(piece[name]), value, piece[name])
            for name, value in blank.items()
            if name in piece
        }
        judged.append({**piece, **tables, TEXTS: as_bytes(rows)})
    return judged


def _check_scored(
    tables: Mapping[str, np.ndarray],
    rows: Sequence[Mapping[str, Any]],
    options: EvaluateOptions,
    described: Mapping[str, Any],
) -> None:
    """Refuse results without a single answer and, if nothing is generated, without a single score."""
    if all(row["skipped"] is not None for row in rows):
        how = "were refused or are too long" if refused_in(rows) else "are too long for the model"
        raise NothingAnsweredError(f"No example was answered: all {len(rows)} {how} (the first: {rows[0]['skipped']})")
    fitting = tables["logprob"][tables["too_long"] == 0]
    if not options.generate and len(fitting) and np.isnan(fitting).all():
        why = described.get("no_scores_because") or "none came back"
        raise RunError(f"no answer could be scored ({why}), and none was to be generated; allow generating")


def _settings(task: LanguageTask, options: EvaluateOptions, responder: Mapping[str, Any]) -> dict[str, Any]:
    """Everything a piece depends on beside its own prompts, which its name stands for."""
    return {
        "verb": "evaluate",
        "task": str(task),
        "positions": list(options.positions_of(task)),
        "max_tokens": options.max_tokens or task.max_tokens,
        "thinking_tokens": options.thinking_tokens,
        "answer_pattern": options.answer_pattern,
        "generate": options.generate,
        "score": options.score,
        "responder": {name: value for name, value in responder.items() if name in DECIDING},
        "made_by": made_by(),
    }
