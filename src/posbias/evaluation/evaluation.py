"""`evaluate`: how well a model answers, by where the answer stands in its context.

Every sample is requested once per position. Scores go into score[sample, position] and from there into curves with
paired statistics; finished samples are kept, so that a killed run or one whose server went away goes on from there.

The record has the verb "evaluate"; `posbias.report.evaluate` draws it. Arrays: `positions` [n_positions] int64;
`scores/NAME` [n_samples n_positions], NaN where there is none, NAME as in `Evaluation.tables`. Scalars: `n_items`,
`skipped` {position: examples that were too long}, `refused` [{sample, position, reason}], `measures` [name], `curves`
{measure: `PositionCurve.as_record`}, `cut_off`, `endings` (`Endings.as_record`), `empty`, `examples`, `reading`
(`Reading.as_record`), `unscored` (answers), `moved_blanks` (examples), `reused`, `cost`, `seconds`, `notices`
(`samples.notices_of`). The texts go beside it, one JSON object per line.
"""

import json
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from posbias.checks import checked
from posbias.display.showing import Showing, Shown
from posbias.errors import RunError, UsageError
from posbias.evaluation.cost import preflight_answers
from posbias.evaluation.curve import PositionCurve, Scores, position_curve
from posbias.evaluation.endings import Endings, endings_of
from posbias.evaluation.placement import MeasuredUse
from posbias.evaluation.responders.base import CUT_OFF, STOPPED, Responder
from posbias.evaluation.responders.local import as_responder
from posbias.evaluation.responders.thoughts import CLOSED, UNFINISHED
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
from posbias.evaluation.verdicts import Reading, Verdicts, judge_verdicts
from posbias.files import write_atomically
from posbias.progress import track
from posbias.runs.parts import PartStore, fingerprint, finished_run, made_by
from posbias.runs.records import Record, read_record
from posbias.tasks.language import LANGUAGE_TASKS, LanguageTask, file_sha256
from posbias.tasks.language.base import NOTICES

MEASURES = {
    "accuracy": "accuracy",
    "values_found": "share of the values found",
    "logprob": "log-probability of the answer per token (nats)",
    "reciprocal_rank": "1 / rank of the answer's first token",
    "starts": "answers that begin with the right one",
}
"""What each measure is called."""
GENERATED = ("accuracy", "values_found", "starts")
"""Measures that rest on what was generated."""
DECIDING = ("kind", "model", "address", "body", "template_options", "tokenizer", "method")
"""What of a responder's description a piece depends on; the rest says how the responses were made, at what cost."""
OUTPUTS_FILE = "outputs.jsonl"
BEHAVIOUR = "behaviour"
"""Where the behaviour of an audited model is kept, below the audit's directory."""
PLACEABLE = ("accuracy", "probability", "reciprocal_rank")
"""Measures that an order of passages may be chosen by: all lie in 0 ... 1."""
EFFORT = "effort"
"""Name of a piece's array that tells what the responses took and were expected to take, as UTF-8 bytes of JSON."""


class NothingAnsweredError(RunError):
    """Every example was too long for the model, or refused."""


@dataclass(frozen=True, eq=False, repr=False)
class Evaluation(Showing):
    """What a model did with one task."""

    task: LanguageTask
    positions: tuple[int, ...]
    """Of the moved item, ascending: the columns of every table."""
    tables: Mapping[str, Scores]
    """score[sample, position]: `correct` (1 or 0), `found`, `logprob` (nats, of the whole answer), `answer_tokens`,
    `first_rank` (of the answer's first token, 1 = the model's choice), `greedy`, `gold_token`, `prompt_tokens`,
    `too_long` (1 where it was), `starts` (1 where the answer begins with the right one), `cut` (1 where it was cut off
    in its first line), and what a task notes beside (`LanguageTask.noted`); NaN where there is none."""
    outputs: tuple[Mapping[str, Any], ...]
    """Every generated text with its sample, position and answers."""
    options: EvaluateOptions
    responder: Mapping[str, Any]
    """What `Responder.describe` says."""
    reused: int
    """Samples found finished."""
    cost: Mapping[str, Any] = field(default_factory=dict)
    """What was expected before it began, as plain values; empty for a server."""
    file_sha256: str | None = None
    """Hash of the file that the samples were read from; None where the task makes its own."""
    fingerprint: str = ""
    """Of everything the evaluation depends on."""
    moved_blanks: int = 0
    """Examples whose prompt ended in blanks, with which the right answer begins instead."""
    seconds: float = 0.0
    """That the requests took, over all sittings."""
    notices: Mapping[str, Any] = field(default_factory=dict)
    """What is odd about which samples, as `notices_of`."""

    def shown(self) -> Shown:
        """The curve of its first measure (accuracy, where answers were generated); `curves` has the others."""
        if not self.curves:
            return Shown(f"{self.task}: nothing was scored")
        found = next(iter(self.curves.values())).shown()
        facts = {f"notice {number}": text for number, text in enumerate(self._noticed(), 1)}
        return replace(found, title=f"{self.task}; {found.title}", facts={**facts, **found.facts})

    def _noticed(self) -> Iterator[str]:
        """What is odd about samples, in a few words; pages say what follows from it."""
        for name, entry in self.notices.items():
            yield f"{NOTICES[name]}, in {len(entry['samples'])} of {self.options.count} samples"

    def as_run(self) -> Record:
        """As `evaluation_record`, of no arguments."""
        return evaluation_record(self, {})

    @property
    def skipped(self) -> dict[int, int]:
        """Examples that were too long, by position; only positions that lost some."""
        lost = self.tables["too_long"].sum(axis=0)
        return {position: int(count) for position, count in zip(self.positions, lost, strict=True) if count}

    @property
    def refused(self) -> list[dict[str, Any]]:
        """The examples that a server refused, such as by a content filter: `sample`, `position` and its `reason`."""
        return refused_in(self.outputs)

    @cached_property
    def measures(self) -> dict[str, Scores]:
        """What curves are drawn of: tables that hold anything, in units in which more is better; those of generated
        answers only where enough of them could be read (`reading`).
        """
        withheld = GENERATED if self.reading.withheld else ()
        return {name: table for name, table in measures_of(self.tables).items() if name not in (*withheld, "starts")}

    @cached_property
    def endings(self) -> Endings:
        """How the generated answers ended, and how many of them hold the right one, or begin with it."""
        return endings_of(self.tables, self.outputs)

    @cached_property
    def reading(self) -> Reading:
        """How many of the generated answers could be read."""
        unfinished = unread = sum(row["thinking"] == UNFINISHED for row in self.outputs)
        answered = ~np.isnan(self.tables["correct"])
        if "tie" in self.tables:
            unread = int((np.isnan(self.tables["tie"]) & answered).sum())
        thought = sum(bool((row["thoughts"] or "").strip()) for row in self.outputs)
        return Reading(int(answered.sum()), unread, unfinished, thought)

    @property
    def unscored(self) -> int:
        """Right answers that should have been scored and were not, of the examples that were not skipped."""
        put = np.array([row["skipped"] is None for row in self.outputs])
        return int((np.isnan(self.tables["logprob"].ravel()) & put).sum()) if self.options.score else 0

    @cached_property
    def curves(self) -> dict[str, PositionCurve]:
        """A curve with its statistics for every measure: accuracy, log-probability per token, 1 / rank."""
        tokens = self.tables["gold_token"]
        gold = tokens.mean(axis=0).tolist() if not np.isnan(tokens).any() else None
        return {
            name: position_curve(
                table,
                positions=self.positions,
                gold_tokens=gold,
                seed=self.options.seed,
                quantity=MEASURES.get(name, name),
            )
            for name, table in self.measures.items()
        }

    @cached_property
    def verdicts(self) -> Verdicts | None:
        """Accuracy, flips and first picks of a judge that was asked in both orders; None for other tasks."""
        if "first_pick" not in self.tables or len(self.positions) < 2 or not self.options.generate:
            return None
        return judge_verdicts(self.tables["correct"], self.tables["first_pick"], self.tables["tie"])


def measures_of(tables: Mapping[str, Scores]) -> dict[str, Scores]:
    """Tables as `Evaluation.tables` in units in which more is better; those that hold nothing are left out."""
    with np.errstate(invalid="ignore", divide="ignore"):
        found = {
            "accuracy": tables["correct"],
            "values_found": tables["found"],
            "logprob": tables["logprob"] / tables["answer_tokens"],
            "reciprocal_rank": reciprocal_rank(tables["first_rank"], tables["logprob"]),
            "starts": tables.get("starts", np.full_like(tables["correct"], np.nan)),
        }
    return {name: table for name, table in found.items() if not np.isnan(table).all()}


def reciprocal_rank(first_rank: Scores, logprob: Scores) -> Scores:
    """1 / rank; NaN throughout where a scored answer's rank is not known, for then only good ranks would be counted."""
    unknown = np.isnan(first_rank) & ~np.isnan(logprob)
    return np.full_like(first_rank, np.nan) if unknown.any() else np.asarray(1 / first_rank)


@checked
def evaluate(subject: Any, task: str | LanguageTask, *, options: EvaluateOptions | None = None) -> Evaluation:
    """Put every sample of a task, at every position, to one model, and judge its answers.

    Args:
        subject: What `as_responder` takes: a hub id, a directory, "demo", a loaded model, or a responder such as
            `ServerResponder`. With its own tokenizer, lengths and places in tokens are exact.
        task: An object or its literal spelling, such as `"key_value(pairs=20)"`.
        options: Count, positions, seed, and where an interrupted run continues.

    Raises:
        UsageError: an unknown model or task, a wrong line of a file (its number is named), an impossible position, a
            conversation for a model without a chat template, or prompts that do not fit into memory.
        RunError: the model fails, its server cannot be reached or refuses more than a tenth of all examples, at least 3
            (finished samples are kept in the directory), or nothing is generated and the server gives no scores. Fewer
            refused examples are left out of the curves and counted.
    """
    options = options or EvaluateOptions()
    task = LANGUAGE_TASKS.parse(task) if isinstance(task, str) else task
    options.positions_of(task)  # refused before a model is loaded
    return evaluate_responder(as_responder(subject, max_memory=options.max_memory), task, options)


def evaluate_responder(
    responder: Responder,
    task: LanguageTask,
    options: EvaluateOptions,
    *,
    cost: Mapping[str, Any] | None = None,
    answered: Mapping[str, Pieces] | None = None,
) -> Evaluation:
    """Put samples to a responder that is there already, as `evaluate` does, with what was done of it beforehand.

    Args:
        responder, task, options: As of `evaluate`.
        cost: What `preflight_answers` expects; None: it is still to be asked.
        answered: What `answer_samples` made of samples elsewhere, such as in another process, by `Sample.piece`.
    """
    samples = list(samples_of(task, responder.tokenizer, options))
    described = responder.describe()
    settings = _settings(task, options, described)
    data = file_sha256(task)
    store = PartStore(options.directory, settings, resume=options.resume, overwrite=options.overwrite)
    finished = {sample.piece: piece for sample in samples if (piece := store.find(sample.piece)) is not None}
    finished |= answered or {}
    waiting = [sample for sample in samples if sample.piece not in finished]
    cost = preflight_answers(waiting, task, options, responder) if cost is None else cost
    chunks = [waiting[start : start + options.together] for start in range(0, len(waiting), options.together)]
    refused = [row for piece in finished.values() for row in refused_in(read_json(piece, TEXTS))]
    for chunk in track(chunks, f"requests of {task}"):
        found = answer_samples(chunk, task, options, responder, cost=cost)
        refused += [row for piece in found for row in refused_in(read_json(piece, TEXTS))]
        check_refused(refused, sum(len(sample.examples) for sample in samples))
        finished |= {sample.piece: store.keep(sample.piece, piece) for sample, piece in zip(chunk, found, strict=True)}
    pieces = [finished[sample.piece] for sample in samples]
    if described["kind"] != "local":  # of a local model's prompt it is known whether it opens thoughts
        pieces = _with_unmarked_thoughts(pieces)
    efforts = [read_json(piece, EFFORT) for piece in pieces]
    described |= {**efforts[-1]["learnt"], **_total(effort["counts"] for effort in efforts)}
    _check_scored(pieces, options, described)
    return Evaluation(
        task=task,
        positions=options.positions_of(task),
        tables={name: np.stack([piece[name] for piece in pieces]) for name in pieces[0] if name not in (TEXTS, EFFORT)},
        outputs=tuple(row for piece in pieces for row in read_json(piece, TEXTS)),
        options=replace(options, max_tokens=options.max_tokens or task.max_tokens),
        responder=described,
        reused=store.reused,
        # What the first sitting expected, which had most of it before it.
        cost=max([effort["cost"] for effort in efforts], key=lambda expected: expected.get("prompts", 0)),
        file_sha256=data,
        fingerprint=_fingerprint(settings, samples, options),
        moved_blanks=sum(example.moved_blanks > 0 for sample in samples for example in sample.examples),
        seconds=sum(effort["seconds"] for effort in efforts),
        notices=notices_of(samples),
    )


def _with_unmarked_thoughts(pieces: Sequence[Pieces]) -> list[Pieces]:
    """Pieces in which answers that are thoughts throughout are none, so far as other answers give them away.

    If most answers that ended by themselves hold only the mark that closes thoughts, the prompt opens them: then one
    that was cut off without any mark is still within them, though nothing in itself tells.
    """
    outputs = [read_json(piece, TEXTS) for piece in pieces]
    ended = [row["thinking"] for rows in outputs for row in rows if row["finish"] == STOPPED]
    if ended.count(CLOSED) <= ended.count(None):
        return list(pieces)
    found = []
    for piece, rows in zip(pieces, outputs, strict=True):
        hidden = np.array([row["thinking"] is None and row["finish"] == CUT_OFF for row in rows])
        within = {"text": "", "thinking": UNFINISHED}
        rows = [
            {**row, "thoughts": row["text"], **within} if each else row for row, each in zip(rows, hidden, strict=True)
        ]
        blank = {"correct": 0.0, "found": 0.0, "starts": 0.0, "cut": 1.0, "first_pick": np.nan, "tie": np.nan}
        tables = {
            name: np.where(hidden & ~np.isnan(piece[name]), value, piece[name])
            for name, value in blank.items()
            if name in piece
        }
        found.append({**piece, **tables, TEXTS: as_bytes(rows)})
    return found


def answer_samples(
    samples: Sequence[Sample],
    task: LanguageTask,
    options: EvaluateOptions,
    responder: Responder,
    *,
    cost: Mapping[str, Any],
) -> list[Pieces]:
    """Everything about some samples, requested together, with what that took; errors as `request_samples`."""
    before, begin = responder.counts(), time.perf_counter()
    with responder.counting():
        found = request_samples(samples, task, options, responder)
    seconds = time.perf_counter() - begin
    taken = {name: count - before.get(name, 0) for name, count in responder.counts().items()}
    pieces = []
    for piece in found:
        effort = {"counts": taken, "learnt": responder.learnt(), "cost": dict(cost), "seconds": seconds}
        pieces.append({**piece, EFFORT: as_bytes(effort)})
        taken, seconds = {}, 0.0  # what the samples took together is the first one's
    return pieces


def _total(counts: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """What counts of several chunks add up to."""
    total: Counter[str] = Counter()
    for each in counts:
        total.update(each)
    return dict(total)


def _check_scored(pieces: Sequence[Pieces], options: EvaluateOptions, described: Mapping[str, Any]) -> None:
    """Some example must have been answered; where nothing is generated, a score must have come back."""
    rows = [row for piece in pieces for row in read_json(piece, TEXTS)]
    if all(row["skipped"] is not None for row in rows):
        why = "are too long for the model" if not refused_in(rows) else "were refused or are too long"
        raise NothingAnsweredError(f"No example was answered: all {len(rows)} {why} (the first: {rows[0]['skipped']})")
    fitting = [piece["logprob"][piece["too_long"] == 0] for piece in pieces]
    if not options.generate and any(map(len, fitting)) and all(np.isnan(scores).all() for scores in fitting):
        why = described.get("no_scores_because") or "none came back"
        raise RunError(f"no answer could be scored ({why}), and none was to be generated; allow generating")


def _fingerprint(settings: Mapping[str, Any], samples: Sequence[Sample], options: EvaluateOptions) -> str:
    """Of everything an evaluation depends on; its intervals depend on the seed, too."""
    return fingerprint({**settings, "samples": [sample.piece for sample in samples], "seed": options.seed})


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
            **({"skip": options.skip} if options.skip else {}),
            "positions": list(evaluation.positions),
            "max_tokens": options.max_tokens,
            "thinking_tokens": options.thinking_tokens,
            "answer_pattern": options.answer_pattern,
            "responder": dict(evaluation.responder),
            "fingerprint": fingerprint({"evaluation": evaluation.fingerprint}),
        },
        seeds={"samples": options.seed, "folds": options.seed},
    )
    record.scalars = {
        "n_items": evaluation.task.n_items,
        "skipped": {str(position): count for position, count in evaluation.skipped.items()},
        "refused": evaluation.refused,
        "measures": list(evaluation.measures),
        "curves": {name: curve.as_record() for name, curve in evaluation.curves.items()},
        "cut_off": sum(row["finish"] == CUT_OFF for row in evaluation.outputs),
        "endings": evaluation.endings.as_record(),
        "empty": sum(row["text"] is not None and not row["text"].strip() for row in evaluation.outputs),
        "examples": len(evaluation.outputs),
        "reading": evaluation.reading.as_record(),
        "unscored": evaluation.unscored,
        "moved_blanks": evaluation.moved_blanks,
        "reused": evaluation.reused,
        "cost": dict(evaluation.cost),
        "seconds": evaluation.seconds,
        "notices": dict(evaluation.notices),
    }
    if evaluation.verdicts is not None:
        record.scalars["verdicts"] = evaluation.verdicts.as_record()
    record.arrays = {
        "positions": np.array(evaluation.positions),
        **{f"scores/{name}": table for name, table in evaluation.tables.items()},
    }
    return record


def finished_evaluation(
    responder: Responder, task: LanguageTask, options: EvaluateOptions, **beside: Any
) -> Record | None:
    """The record of just this evaluation if `options` name a directory that holds it finished, and resume it.

    Arguments as of `evaluate_responder`, without a single request; `beside`: what else the record depends on.
    """

    def settings() -> dict[str, Any]:
        samples = list(samples_of(task, responder.tokenizer, options))
        return {"evaluation": _fingerprint(_settings(task, options, responder.describe()), samples, options), **beside}

    return finished_run(options.directory, settings, resume=options.resume)


@checked
def write_outputs(evaluation: Evaluation, directory: Path) -> Path:
    """`Evaluation.outputs`, one JSON object per line."""
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
    return read_record(below if below.is_dir() else run)


@checked
def measured_use(run: Record | str | Path, *, measure: str | None = None) -> MeasuredUse:
    """The curve of a finished run, for placing passages.

    Args:
        run: An evaluation or an audit with behaviour: its record or directory.
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
    withheld = GENERATED if record.scalars.get("reading", {}).get("withheld") else ()
    there = [name for name in PLACEABLE if name not in withheld and not np.isnan(tables[name]).all()]
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
