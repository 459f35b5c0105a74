"""`evaluate`: how well a model answers, by the position of the answer in its context.

Samples, replies, tables: every sample is requested once per position; what a model replies is kept as it comes, so that
a killed run or one whose server went away goes on from there; the task's rule makes score[sample, position] of it, and
paired statistics make curves of the scores.
"""

import time
from collections import Counter
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
from posbias.evaluation.options import EvaluateOptions
from posbias.evaluation.reading import judge_verdicts, reading_of, unjudged_in
from posbias.evaluation.responders.base import CLOSED, CUT_OFF, REFUSED, STOPPED, UNFINISHED, Reply, Responder
from posbias.evaluation.samples import Sample, notices_of, requests_of, samples_of, tables_of, task_for
from posbias.measurement.units import check_passes
from posbias.models.model import Model
from posbias.progress import track
from posbias.results.records import Record, plain
from posbias.results.result import from_stored
from posbias.runs.parts import PartStore, clear_parts, fingerprint, finished_run, made_by, packed, unpacked
from posbias.runs.running import OpenRun
from posbias.tasks.language import LanguageTask, file_sha256

DECIDING = ("kind", "model", "address", "body", "template_options", "structured", "tokenizer", "method")
"""Parts of a responder's description that a piece depends on; the rest says how the responses were made, at what cost.
"""
LONGEST_METHOD = 40
"""Characters of a method's spelling in a title; of a longer one only the name stands there."""
REFUSED_SHARE = 0.1
"""Share of all examples: a server that refuses more of them, and at least REFUSED_LEAST, ends the run."""
REFUSED_LEAST = 3


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
    task = task_for(responder, task)
    tasks = {length: task.at_length(length, responder.tokenizer, seed=options.seed) for length in options.lengths}
    depths = depths_of(tasks, options)
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
    task = task_for(responder, task)
    samples = list(samples_of(task, responder.tokenizer, options))
    positions = list(options.positions_of(task))
    asked = {
        "task": str(task),
        "positions": positions,
        "max_tokens": options.max_tokens or task.max_tokens,
        "thinking_tokens": options.thinking_tokens,
        "answer_pattern": options.answer_pattern,
    }
    described = responder.describe()
    deciding = {name: value for name, value in described.items() if name in DECIDING}
    done = {"generate": options.generate, "score": options.score, "responder": deciding, "made_by": made_by()}
    settings = {"verb": "evaluate", **asked, **done}  # what a reply depends on, beside the prompts that name it
    whole = {**settings, "samples": [sample.piece for sample in samples], "seed": options.seed}  # draws have a seed
    depends = {"evaluation": fingerprint(whole), **(beside or {})}
    if (record := finished_run(options.directory, lambda: depends, resume=options.resume)) is not None:
        evaluation = Evaluation.from_record(record)
        return replace(evaluation, found=True, reused=evaluation.count)
    data = file_sha256(task)
    if options.directory is not None and options.overwrite and not options.resume:
        clear_parts(options.directory)  # of one among several subjects, whose name the run's directory does not know
    store = PartStore(options.directory, settings)
    replies, learnt, work = _replies(samples, task, options, responder, store)
    tables, outputs = tables_of(task, samples, replies)
    described |= {**learnt, **{name: work.get(name, 0) for name in responder.counts()}}
    _check_scored(tables, outputs, options, described)
    resolved = {
        "title": _title(described, task),
        "command": "",
        **asked,
        "file_sha256": data,
        "scoring": task.answer_rule.name,
        "count": len(samples),
        **({"skip": options.skip} if options.skip else {}),
        "responder": described,
        "fingerprint": fingerprint(depends),
    }
    record = Record("evaluate", {}, resolved, seeds={"samples": options.seed})
    record.arrays = {"positions": np.array(positions), **{SCORES + name: table for name, table in tables.items()}}
    record.scalars = {
        "n_items": task.n_items,
        **_scored(tables, outputs, positions, options),
        "moved_blanks": sum(example.moved_blanks > 0 for sample in samples for example in sample.examples),
        "reused": store.reused,
        "seconds": work["seconds"],
        "notices": notices_of(samples),
    }
    if "first_pick" in tables and len(positions) == task.n_items and options.generate:
        verdicts = judge_verdicts(tables["correct"], tables["first_pick"], tables["tie"], tables)
        record.scalars["verdicts"] = plain(asdict(verdicts))
    return replace(Evaluation.from_record(record), outputs=tuple(outputs))


def finish_evaluation(evaluation: Evaluation | LengthEvaluation, run: OpenRun, *, below: str = "") -> None:
    """Write an evaluation with its texts into the directory of its run, or of a part `below` it; a found one stays."""
    if run.directory is not None and isinstance(evaluation, Evaluation) and not evaluation.found:
        write_outputs(evaluation, run.directory / below)
    run.finish(evaluation.record, below=below)


def _title(described: Mapping[str, Any], task: LanguageTask) -> str:
    """The model, its method, and the task."""
    model, method = described.get("model"), described.get("method") or ""
    source = model.get("source") if isinstance(model, Mapping) else model
    named = method if len(method) <= LONGEST_METHOD else method.partition("(")[0]
    return f"{source or 'model'}{f' under {named}' if named else ''}: {task}"


def _replies(
    samples: Sequence[Sample], task: LanguageTask, options: EvaluateOptions, responder: Responder, store: PartStore
) -> tuple[list[Reply], dict[str, Any], dict[str, float]]:
    """The replies to all examples, in order, what they showed of the responder, and the work they took.

    What is not finished is asked now, and kept as soon as it is.

    Raises:
        UsageError: a request that the model cannot take, such as a conversation without a chat template.
        RunError: the model fails, or its server cannot be reached or refuses many prompts.
    """
    pieces = {sample.piece: unpacked(piece) for sample in samples if (piece := store.find(sample.piece)) is not None}
    kept = {name: [from_stored(Reply, reply) for reply in piece["replies"]] for name, piece in pieces.items()}
    waiting = [sample for sample in samples if sample.piece not in kept]
    model = getattr(responder, "model", None)
    if waiting and isinstance(model, Model):  # prompts whose passes a CPU's memory cannot hold are refused
        longest = max(example.n_tokens or 0 for sample in waiting for example in sample.examples)
        check_passes(model, longest, gradients=False)
    for begin in track(range(0, len(waiting), options.together), f"requests of {task}"):
        chunk = waiting[begin : begin + options.together]
        before, since = responder.counts(), time.perf_counter()
        requests = requests_of(chunk, task, options)
        replies = iter(responder.respond(requests, generate=options.generate, score=options.score))
        work = {name: count - before.get(name, 0) for name, count in responder.counts().items()}
        work["seconds"] = time.perf_counter() - since
        answered = {sample.piece: [next(replies) for _ in sample.examples] for sample in chunk}
        _check_refused(samples, {**kept, **answered})
        for name, of_sample in answered.items():
            pieces[name] = {"replies": of_sample, "learnt": responder.learnt(), "work": work}
            store.keep(name, packed(pieces[name]))
            kept[name], work = of_sample, {}  # what the samples took together is stored with the first one
    total = Counter[str]()
    for sample in samples:
        total.update(pieces[sample.piece]["work"])
    every = [reply for sample in samples for reply in kept[sample.piece]]
    # Of a local model's prompts it is known whether they open thoughts.
    told = every if responder.renders else _with_unmarked_thoughts(every)
    return told, pieces[samples[-1].piece]["learnt"], dict(total)


def _check_refused(samples: Sequence[Sample], kept: Mapping[str, Sequence[Reply]]) -> None:
    """Refuse to go on with a server that refuses many prompts; a few are left out.

    Raises:
        RunError: more than `REFUSED_SHARE` of all examples are refused, and at least `REFUSED_LEAST`.
    """
    refused = [
        (example, reply.response)
        for sample in samples
        for example, reply in zip(sample.examples, kept.get(sample.piece, ()), strict=False)
        if reply.response is not None and reply.response.finish == REFUSED
    ]
    examples = sum(len(sample.examples) for sample in samples)
    if len(refused) >= REFUSED_LEAST and len(refused) > REFUSED_SHARE * examples:
        first, response = refused[0]
        raise RunError(
            f"the server refuses {len(refused)} of {examples} prompts so far; at most {REFUSED_SHARE:.0%} are left "
            f"out, or {REFUSED_LEAST - 1}. The first: sample {first.sample!r}, position {first.gold_position}: "
            f"{response.skipped}"
        )


def _with_unmarked_thoughts(replies: Sequence[Reply]) -> list[Reply]:
    """Replies in which answers that are thoughts throughout are none, so far as other answers give them away.

    If most answers that ended by themselves hold only the mark that closes thoughts, the prompt opens them: then one
    that was cut off without any mark is still within them, though nothing in itself tells.
    """
    responses = [reply.response for reply in replies]
    ended = [response.thinking for response in responses if response is not None and response.finish == STOPPED]
    opened = ended.count(CLOSED) > ended.count(None)
    return [
        replace(reply, response=replace(response, text="", thoughts=response.text, thinking=UNFINISHED))
        if opened and response is not None and response.thinking is None and response.finish == CUT_OFF
        else reply
        for reply, response in zip(replies, responses, strict=True)
    ]


def _scored(
    tables: Mapping[str, np.ndarray],
    outputs: Sequence[Mapping[str, Any]],
    positions: Sequence[int],
    options: EvaluateOptions,
) -> dict[str, Any]:
    """Counts and statistics of all answers, for a record."""
    reading, tokens = reading_of(tables, outputs), tables["gold_token"]
    gold = tokens.mean(axis=0).tolist() if not np.isnan(tokens).any() else None
    withheld = (*(GENERATED if reading.withheld else ()), "starts")
    curves = {
        name: position_curve(
            table, positions=positions, gold_tokens=gold, quantity=MEASURES[name], highest=HIGHEST.get(name, np.inf)
        )
        for name, table in measures_of(tables).items()
        if name not in withheld
    }
    lost = tables["too_long"].sum(axis=0).astype(int).tolist()
    unscored = sum(np.isnan(tables["logprob"].ravel()) & [row["skipped"] is None for row in outputs])
    return {
        "skipped": {str(position): count for position, count in zip(positions, lost, strict=True) if count},
        "unjudged": unjudged_in(outputs),
        "measures": list(curves),
        "curves": {name: plain(asdict(curve)) for name, curve in curves.items()},
        "cut_off": sum(row["finish"] == CUT_OFF for row in outputs),
        "examples": len(outputs),
        "reading": plain(asdict(reading)),
        "unscored": int(unscored) if options.score else 0,
    }


def _check_scored(
    tables: Mapping[str, np.ndarray],
    rows: Sequence[Mapping[str, Any]],
    options: EvaluateOptions,
    described: Mapping[str, Any],
) -> None:
    """Refuse results without a single answer and, if nothing is generated, without a single score."""
    if all(row["skipped"] is not None for row in rows):
        refused = any(row["finish"] == REFUSED for row in rows)
        how = "were refused or are too long" if refused else "are too long for the model"
        raise NothingAnsweredError(f"No example was answered: all {len(rows)} {how} (the first: {rows[0]['skipped']})")
    fitting = tables["logprob"][tables["too_long"] == 0]
    if not options.generate and len(fitting) and np.isnan(fitting).all():
        why = described.get("no_scores_because") or "none came back"
        raise RunError(f"no answer could be scored ({why}), and none was to be generated; allow generating")
