"""`evaluate`: how well a model answers, by where the answer stands in its context.

Every content is asked once per position. Scores go into score[content, position] and from there into curves with
paired statistics; finished contents are kept, so that a killed run or one whose server went away goes on from there.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from posbias.checks import check_seed, check_whole, checked
from posbias.errors import RunError, UsageError
from posbias.evaluation.asking import TEXTS, Asking, Content, Pieces, as_bytes, ask, contents_of, read_json
from posbias.evaluation.cost import preflight_answers
from posbias.evaluation.curve import CurveOptions, PositionCurve, position_curve
from posbias.evaluation.responders.base import Responder
from posbias.evaluation.statistics import Scores
from posbias.parts import PartStore, fingerprint, made_by
from posbias.progress import track
from posbias.tasks.language import LANGUAGE_TASKS, LanguageTask
from posbias.tasks.language.published import file_sha256

DECIDING = ("kind", "model", "address", "body", "tokenizer")
"""What of a responder's description a piece depends on; the rest says how it was asked, and what that took so far."""
EFFORT = "effort"
"""Name of a piece's array that tells what asking took and was expected to take, as UTF-8 bytes of JSON."""
SPREAD_POSITIONS = 9
"""Positions that are asked by default: enough to see a bend, few enough to be quick."""


@checked
@dataclass(frozen=True)
class EvaluateOptions:
    """What is asked, and where finished contents are kept."""

    count: int = 50
    """Contents, each asked at every position, >= 1."""
    positions: Sequence[int] | None = None
    """Places of the moved item; None: at most SPREAD_POSITIONS, evenly spread, both ends among them."""
    seed: int = 0
    """Of contents and folds, >= 0."""
    generate: bool = True
    """Whether answers are generated and judged by the task's published rule."""
    score: bool = True
    """Whether the right answer is scored by teacher forcing, which also ranks models too weak to generate it."""
    max_tokens: int | None = None
    """Generated at most, >= 1; None: the task's own."""
    together: int = 8
    """Contents asked at a time, >= 1: what an interruption costs at most."""
    directory: Path | None = None
    """Run directory in which finished contents are kept until the record is saved; None keeps nothing."""
    resume: bool = False
    """Whether to continue from the contents that are there."""
    max_memory: int | None = None
    """Bytes that the weights of a local model and its passes may take, >= 1; None: what is free."""

    def __post_init__(self) -> None:
        check_whole("evaluate: count", self.count, least=1)
        check_whole("evaluate: together", self.together, least=1)
        check_seed(self.seed)
        for name in ("max_tokens", "max_memory"):
            if getattr(self, name) is not None:
                check_whole(f"evaluate: {name}", getattr(self, name), least=1)
        if not (self.generate or self.score):
            raise UsageError("nothing to do: neither answers are generated nor the right one scored; allow one of both")


@dataclass(frozen=True, eq=False)
class Evaluation:
    """What a model did with one task."""

    task: LanguageTask
    positions: tuple[int, ...]
    """Places of the moved item, ascending: the columns of every table."""
    tables: Mapping[str, Scores]
    """score[content, position]: `correct` (1 or 0), `found`, `logprob` (nats, of the whole answer), `answer_tokens`,
    `first_rank` (of the answer's first token, 1 = the model's choice), `greedy`, `gold_token`, `prompt_tokens`,
    `too_long` (1 where skipped); NaN where there is none."""
    outputs: tuple[Mapping[str, Any], ...]
    """Every generated text with its content, position and answers."""
    options: EvaluateOptions
    responder: Mapping[str, Any]
    """Who answered, plain; never a key."""
    reused: int
    """Contents found finished."""
    cost: Mapping[str, Any] = field(default_factory=dict)
    """What was expected before it began, as plain values; empty for a server."""
    file_sha256: str | None = None
    """Hash of the file that the contents were read from; None where the task makes its own."""
    fingerprint: str = ""
    """Of everything the evaluation depends on."""

    @property
    def n_items(self) -> int:
        """Places that the moved item can take."""
        return self.task.n_items

    @property
    def skipped(self) -> dict[int, int]:
        """Examples that were too long, by position; only positions that lost some."""
        lost = self.tables["too_long"].sum(axis=0)
        return {place: int(count) for place, count in zip(self.positions, lost, strict=True) if count}

    @cached_property
    def measures(self) -> dict[str, Scores]:
        """What curves are drawn of: tables that hold anything, in units in which more is better."""
        return measures_of(self.tables)

    @cached_property
    def curves(self) -> dict[str, PositionCurve]:
        """A curve with its statistics for every measure: accuracy, log-probability per token, 1 / rank."""
        places = self.tables["gold_token"]
        gold = places.mean(axis=0).tolist() if not np.isnan(places).any() else None
        options = CurveOptions(seed=self.options.seed)
        return {
            name: position_curve(table, positions=self.positions, gold_tokens=gold, options=options)
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
    """Ask one model every content at every position, and judge its answers.

    Args:
        task: An object or its literal spelling, such as `"key_value(pairs=20)"`.
        responder: A local model or a server; with its own tokenizer, lengths and places are exact.
        options: Count, positions, seed, and where an interrupted run continues.

    Returns:
        Tables over contents and positions, and curves with paired statistics.

    Raises:
        UsageError: an unknown task, a wrong line of a file (its number is named), an impossible position, a
            conversation for a model without a chat template, or prompts that do not fit into memory.
        RunError: the model fails, its server cannot be reached (finished contents are kept in the directory), or
            nothing is generated and the server gives no scores.
    """
    options = options or EvaluateOptions()
    asking, contents = _questions(task, responder, options)
    described = responder.describe()
    settings = _settings(asking, described)
    data = file_sha256(asking.task)
    store = PartStore(options.directory, settings, resume=options.resume)
    finished = {content.piece: store.find(content.piece) for content in contents}
    waiting = [content for content in contents if finished[content.piece] is None]
    cost = preflight_answers(waiting, asking, responder, max_memory=options.max_memory)

    def keep(content: Content, piece: Pieces, counts: Mapping[str, float]) -> Pieces:
        effort = {"counts": dict(counts), "learnt": responder.learnt(), "cost": cost}
        return store.keep(content.piece, {**piece, EFFORT: as_bytes(effort)})

    finished |= _asked(waiting, asking, responder=responder, keep=keep, together=options.together)
    pieces = [found for content in contents if (found := finished[content.piece]) is not None]
    efforts = [read_json(piece, EFFORT) for piece in pieces]
    described |= {**efforts[-1]["learnt"], **_total([effort["counts"] for effort in efforts])}
    fitting = [piece["logprob"][piece["too_long"] == 0] for piece in pieces]
    if not asking.generate and any(map(len, fitting)) and all(np.isnan(scores).all() for scores in fitting):
        why = described.get("no_scores_because") or "none came back"
        raise RunError(f"no answer could be scored ({why}), and none was to be generated; allow generating")
    names = [name for name in pieces[0] if name not in (TEXTS, EFFORT)]
    return Evaluation(
        task=asking.task,
        positions=asking.places,
        tables={name: np.stack([piece[name] for piece in pieces]) for name in names},
        outputs=tuple(row for piece in pieces for row in read_json(piece, TEXTS)),
        options=replace(options, max_tokens=asking.max_tokens),
        responder=described,
        reused=store.reused,
        # What the first sitting expected, which had most of it before it.
        cost=max([effort["cost"] for effort in efforts], key=lambda expected: expected.get("prompts", 0)),
        file_sha256=data,
        fingerprint=_fingerprint(settings, contents, seed=options.seed),
    )


def _questions(
    task: str | LanguageTask, responder: Responder, options: EvaluateOptions
) -> tuple[Asking, list[Content]]:
    """How a responder is asked, and what. Errors as `evaluate`."""
    asked = LANGUAGE_TASKS.parse(task) if isinstance(task, str) else task
    asking = Asking(
        task=asked,
        places=spread_positions(asked) if options.positions is None else asked.positions(list(options.positions)),
        max_tokens=options.max_tokens or asked.max_tokens,
        generate=options.generate,
        score=options.score,
    )
    return asking, list(contents_of(asking, responder.tokenizer, count=options.count, seed=options.seed))


def spread_positions(task: LanguageTask, most: int = SPREAD_POSITIONS) -> tuple[int, ...]:
    """At most so many places, evenly spread, the first and the last among them.

    Raises:
        UsageError: fewer than 1 place asked.
    """
    check_whole("positions: spread", most, least=1)
    places = np.linspace(0, task.n_items - 1, min(most, task.n_items))
    return tuple(sorted({int(place) for place in np.rint(places)}))


def _asked(
    waiting: Sequence[Content],
    asking: Asking,
    *,
    responder: Responder,
    keep: Callable[[Content, Pieces, Mapping[str, float]], Pieces],
    together: int,
) -> dict[str, Pieces]:
    """The pieces of contents, asked a few at a time; each is kept as soon as it is there, with its counts.

    The counts of what a few took together are the first one's.
    """
    found = {}
    chunks = [waiting[start : start + together] for start in range(0, len(waiting), together)]
    for chunk in track(chunks, f"asking {asking.task}"):
        before = responder.counts()
        pieces = ask(chunk, asking, responder)
        taken = {name: count - before.get(name, 0) for name, count in responder.counts().items()}
        for number, (content, piece) in enumerate(zip(chunk, pieces, strict=True)):
            found[content.piece] = keep(content, piece, {} if number else taken)
    return found


def _total(counts: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Counts added up."""
    total: Counter[str] = Counter()
    for each in counts:
        total.update(each)
    return dict(total)


def evaluation_fingerprint(task: str | LanguageTask, responder: Responder, options: EvaluateOptions) -> str:
    """The `Evaluation.fingerprint` that `evaluate` would give, without asking anything. Errors as there."""
    asking, contents = _questions(task, responder, options)
    return _fingerprint(_settings(asking, responder.describe()), contents, seed=options.seed)


def _fingerprint(settings: Mapping[str, Any], contents: Sequence[Content], *, seed: int) -> str:
    """Of everything an evaluation depends on; `seed`: of its intervals, too."""
    return fingerprint({**settings, "contents": [content.piece for content in contents], "seed": seed})


def _settings(asking: Asking, responder: Mapping[str, Any]) -> dict[str, Any]:
    """Everything a piece depends on beside its own prompts, which its name stands for."""
    described = {name: value for name, value in responder.items() if name in DECIDING}
    return {
        "verb": "evaluate",
        "task": str(asking.task),
        "places": list(asking.places),
        "max_tokens": asking.max_tokens,
        "generate": asking.generate,
        "score": asking.score,
        "responder": described,
        "made_by": made_by(),
    }
