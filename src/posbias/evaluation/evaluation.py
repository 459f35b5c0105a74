"""`evaluate`: how well a model answers, by where the answer stands in its context.

Every sample is requested once per position. Scores go into score[sample, position] and from there into curves with
paired statistics; finished samples are kept, so that a killed run or one whose server went away goes on from there.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np

from posbias.checks import checked
from posbias.errors import RunError
from posbias.evaluation.cost import preflight_answers
from posbias.evaluation.curve import PositionCurve, position_curve
from posbias.evaluation.responders.base import Responder
from posbias.evaluation.samples import (
    TEXTS,
    EvaluateOptions,
    Pieces,
    Sample,
    as_bytes,
    read_json,
    request_samples,
    samples_of,
)
from posbias.evaluation.statistics import Scores
from posbias.parts import PartStore, fingerprint, made_by
from posbias.progress import track
from posbias.tasks.language import LANGUAGE_TASKS, LanguageTask, file_sha256

DECIDING = ("kind", "model", "address", "body", "tokenizer")
"""What of a responder's description a piece depends on; the rest says how the responses were made, at what cost so far.
"""
EFFORT = "effort"
"""Name of a piece's array that tells what the responses took and were expected to take, as UTF-8 bytes of JSON."""


@dataclass(frozen=True, eq=False)
class Evaluation:
    """What a model did with one task."""

    task: LanguageTask
    positions: tuple[int, ...]
    """Of the moved item, ascending: the columns of every table."""
    tables: Mapping[str, Scores]
    """score[sample, position]: `correct` (1 or 0), `found`, `logprob` (nats, of the whole answer), `answer_tokens`,
    `first_rank` (of the answer's first token, 1 = the model's choice), `greedy`, `gold_token`, `prompt_tokens`,
    `too_long` (1 where skipped); NaN where there is none."""
    outputs: tuple[Mapping[str, Any], ...]
    """Every generated text with its sample, position and answers."""
    options: EvaluateOptions
    responder: Mapping[str, Any]
    """Who answered, plain; never a key."""
    reused: int
    """Samples found finished."""
    cost: Mapping[str, Any] = field(default_factory=dict)
    """What was expected before it began, as plain values; empty for a server."""
    file_sha256: str | None = None
    """Hash of the file that the samples were read from; None where the task makes its own."""
    fingerprint: str = ""
    """Of everything the evaluation depends on."""

    @property
    def n_items(self) -> int:
        """Positions that the moved item can take."""
        return self.task.n_items

    @property
    def skipped(self) -> dict[int, int]:
        """Examples that were too long, by position; only positions that lost some."""
        lost = self.tables["too_long"].sum(axis=0)
        return {position: int(count) for position, count in zip(self.positions, lost, strict=True) if count}

    @cached_property
    def measures(self) -> dict[str, Scores]:
        """What curves are drawn of: tables that hold anything, in units in which more is better."""
        return measures_of(self.tables)

    @cached_property
    def curves(self) -> dict[str, PositionCurve]:
        """A curve with its statistics for every measure: accuracy, log-probability per token, 1 / rank."""
        tokens = self.tables["gold_token"]
        gold = tokens.mean(axis=0).tolist() if not np.isnan(tokens).any() else None
        return {
            name: position_curve(table, positions=self.positions, gold_tokens=gold, seed=self.options.seed)
            for name, table in self.measures.items()
        }


def measures_of(tables: Mapping[str, Scores]) -> dict[str, Scores]:
    """Tables as `Evaluation.tables` in units in which more is better; those that hold nothing are left out."""
    with np.errstate(invalid="ignore", divide="ignore"):
        found = {
            "accuracy": tables["correct"],
            "values_found": tables["found"],
            "logprob": tables["logprob"] / tables["answer_tokens"],
            "reciprocal_rank": reciprocal_rank(tables["first_rank"], tables["logprob"]),
        }
    return {name: table for name, table in found.items() if not np.isnan(table).all()}


def reciprocal_rank(first_rank: Scores, logprob: Scores) -> Scores:
    """1 / rank; NaN throughout where a scored answer's rank is not known, for then only good ranks would be counted."""
    unknown = np.isnan(first_rank) & ~np.isnan(logprob)
    found: Scores = np.full_like(first_rank, np.nan) if unknown.any() else 1 / first_rank
    return found


@checked
def evaluate(task: str | LanguageTask, responder: Responder, *, options: EvaluateOptions | None = None) -> Evaluation:
    """Put every sample at every position to one model, and judge its answers.

    Args:
        task: An object or its literal spelling, such as `"key_value(pairs=20)"`.
        responder: A local model or a server; with its own tokenizer, lengths and places in tokens are exact.
        options: Count, positions, seed, and where an interrupted run continues.

    Returns:
        Tables over samples and positions, and curves with paired statistics.

    Raises:
        UsageError: an unknown task, a wrong line of a file (its number is named), an impossible position, a
            conversation for a model without a chat template, or prompts that do not fit into memory.
        RunError: the model fails, its server cannot be reached (finished samples are kept in the directory), or
            nothing is generated and the server gives no scores.
    """
    options = options or EvaluateOptions()
    task = LANGUAGE_TASKS.parse(task) if isinstance(task, str) else task
    samples = list(samples_of(task, responder.tokenizer, options))
    described = responder.describe()
    settings = _settings(task, options, described)
    data = file_sha256(task)
    store = PartStore(options.directory, settings, resume=options.resume)
    finished = {sample.piece: piece for sample in samples if (piece := store.find(sample.piece)) is not None}
    waiting = [sample for sample in samples if sample.piece not in finished]
    cost = preflight_answers(waiting, task, options, responder)
    chunks = [waiting[start : start + options.together] for start in range(0, len(waiting), options.together)]
    for chunk in track(chunks, f"requests of {task}"):
        before = responder.counts()
        found = request_samples(chunk, task, options, responder)
        taken = {name: count - before.get(name, 0) for name, count in responder.counts().items()}
        for sample, piece in zip(chunk, found, strict=True):
            effort = {"counts": taken, "learnt": responder.learnt(), "cost": cost}
            finished[sample.piece] = store.keep(sample.piece, {**piece, EFFORT: as_bytes(effort)})
            taken = {}  # what the samples of a chunk took together is the first one's
    pieces = [finished[sample.piece] for sample in samples]
    efforts = [read_json(piece, EFFORT) for piece in pieces]
    total: Counter[str] = Counter()
    for effort in efforts:
        total.update(effort["counts"])
    described |= {**efforts[-1]["learnt"], **total}
    if not options.generate:
        _check_scored(pieces, described)
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
    )


def _check_scored(pieces: Sequence[Pieces], responder: Mapping[str, Any]) -> None:
    """Refuse samples that fit into the context and have no score, where nothing was generated either."""
    fitting = [piece["logprob"][piece["too_long"] == 0] for piece in pieces]
    if any(map(len, fitting)) and all(np.isnan(scores).all() for scores in fitting):
        why = responder.get("no_scores_because") or "none came back"
        raise RunError(f"no answer could be scored ({why}), and none was to be generated; allow generating")


def evaluation_fingerprint(task: str | LanguageTask, responder: Responder, options: EvaluateOptions) -> str:
    """The `Evaluation.fingerprint` that `evaluate` would give, without a single request. Errors as there."""
    task = LANGUAGE_TASKS.parse(task) if isinstance(task, str) else task
    samples = list(samples_of(task, responder.tokenizer, options))
    return _fingerprint(_settings(task, options, responder.describe()), samples, options)


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
        "generate": options.generate,
        "score": options.score,
        "responder": {name: value for name, value in responder.items() if name in DECIDING},
        "made_by": made_by(),
    }
