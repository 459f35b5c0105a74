"""`evaluate`: how well a model answers, by the position of the answer in its context.

Samples, replies, tables: every sample is requested once per position; what a model replies is kept as it comes, so that
a killed run or one whose server went away goes on from there; the task's rule makes score[sample, position] of it, and
paired statistics make curves of the scores. At several lengths, or of several subjects, that is done for each in a
directory of its own, which is written as soon as it is done. Subjects are opened one after another, so that of local
models one is in memory at a time.
"""

import json
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from posbias.checks import checked
from posbias.errors import RunError, UsageError
from posbias.evaluation.comparison import EvaluationComparison, compare_evaluations
from posbias.evaluation.curve import PerSample, Scores, position_curve
from posbias.evaluation.evaluation import (
    GENERATED,
    MEASURES,
    SCORES,
    Evaluation,
    judge_verdicts,
    measures_of,
    reading_of,
    write_outputs,
)
from posbias.evaluation.forms import (
    OrdersEvaluation,
    TurnsEvaluation,
    broken_when_told,
    compare_orders,
    compare_turns,
    orders_of,
)
from posbias.evaluation.lengths import LengthEvaluation, depths_of
from posbias.evaluation.levels import RequirementCheck
from posbias.evaluation.options import EvaluateOptions
from posbias.evaluation.recovery import ALONE, BARE, recovery_of
from posbias.evaluation.responders import LocalResponder, ServerResponder
from posbias.evaluation.responders.base import CLOSED, CUT_OFF, REFUSED, STOPPED, UNFINISHED, Reply, Responder
from posbias.evaluation.samples import (
    HISTORIES,
    Sample,
    notices_of,
    requests_of,
    samples_of,
    stripped_samples,
    tables_of,
    task_for,
)
from posbias.files import write_file
from posbias.measurement.units import check_passes
from posbias.models.model import Model
from posbias.progress import report, track
from posbias.results.records import REPORT_FILE, Record, plain
from posbias.results.result import as_stored, from_stored
from posbias.runs.parts import PartStore, clear_parts, fingerprint, finished_run, made_by, packed, unpacked
from posbias.runs.running import OpenRun, directory_names, run_directory
from posbias.tasks.language import LANGUAGE_TASKS, LanguageTask, file_sha256
from posbias.tasks.language.adherence import TRANSCRIPT, RulesAtTurns, Told, history_of
from posbias.tasks.language.calls import call_mark

DECIDING = ("kind", "model", "address", "body", "template_options", "structured", "tokenizer", "method")
"""Parts of a responder's description that a piece depends on; the rest says how the responses were made, at what cost.
"""
REFUSED_SHARE = 0.1
"""Share of all examples: a server that refuses more of them, and at least REFUSED_LEAST, ends the run."""
REFUSED_LEAST = 3
JUST_TOLD = "just-told"
"""Directory of the replies to a question alone with the rule behind it."""

Together = TypeVar("Together", bound=EvaluationComparison)
Concluded = TypeVar("Concluded", bound=Evaluation | LengthEvaluation | EvaluationComparison)


class NothingAnsweredError(RunError):
    """Every example was too long for the model, or refused."""


@dataclass(frozen=True)
class Unopened:
    """A model that is loaded when its turn comes."""

    name: str
    open: Callable[[], Responder]


@checked
def evaluate(subject: Any, task: str | LanguageTask, *, options: EvaluateOptions | None = None) -> Any:
    """Put every sample of a task, at every position, to one model, and judge its answers.

    Args:
        subject: The model: a hub id, a directory, "demo", a loaded model, or a responder such as
            `ServerResponder`. With its own tokenizer, lengths and places in tokens are exact. A list of subjects is
            evaluated on the same samples, and compared.
        task: An object or its literal spelling, such as `"key_value(pairs=20)"`.
        options: Count, positions, seed, and the directory in which an interrupted run continues.

    Returns:
        The `Evaluation`; at several lengths a `LengthEvaluation`, which has one of each; of a list the
        `EvaluationComparison` with the first one, which has them in `evaluations`, as of rules at turns the
        `TurnsEvaluation`, and in several orders the `OrdersEvaluation`.

    Raises:
        UsageError: an unknown model or task, a wrong line of a file (its number is named), an impossible position, a
            conversation for a model without a chat template, or prompts that do not fit into memory.
        RunError: the model fails, its server cannot be reached or refuses more than a tenth of all examples, at least 3
            (finished samples are kept in the directory), or nothing is generated and the server gives no scores. Fewer
            refused examples are left out of the curves and counted.
    """
    task = LANGUAGE_TASKS.parse(task) if isinstance(task, str) else task
    options = (options or EvaluateOptions()).following(task)  # wrong files are refused before a model is loaded
    ordered = orders_of(task, options.orders) if options.orders else {}
    several = isinstance(subject, list | tuple)
    names = [_name(*entry) for entry in enumerate(subject if several else [subject])]
    arguments = {"model": names if several else names[0], "task": str(task), "count": options.count}
    arguments["seed"] = options.seed
    place, resume, overwrite = options.directory, options.resume, options.overwrite
    with run_directory(place, verb="evaluate", arguments=arguments, resume=resume, overwrite=overwrite) as run:
        if several:
            return _compared(subject, names, task, options, run)
        responder = opened(subject)
        asked = responder, task, options
        if isinstance(task, RulesAtTurns) and not options.lengths:
            return _at_turns(responder, task, options, run)
        if ordered:
            return _in_orders(responder, ordered, options, run)
        found = _at_lengths(*asked, run) if options.lengths else evaluate_responder(*asked)
        return _concluded(found, options.require and found.check(options.require), run)


def _below(options: EvaluateOptions, name: str, **chosen: Any) -> EvaluateOptions:
    """Settings of a part of a run, which has a directory of its own."""
    return replace(options, directory=None if options.directory is None else options.directory / name, **chosen)


def opened(subject: Any) -> Responder:
    """The responder of a subject: itself, or of a model, which is loaded now; of one that waited for its turn, too."""
    if isinstance(subject, Unopened):
        return subject.open()
    return subject if isinstance(subject, Responder) else LocalResponder(subject)


def _name(number: int, subject: Any) -> str:
    """What a subject is called: as it is given, or by its server, or by its number."""
    if isinstance(subject, str | Path | Unopened):
        return subject.name if isinstance(subject, Unopened) else str(subject)
    if isinstance(subject, ServerResponder):
        described = subject.describe()
        return f"{described['address'].partition('//')[2]}/{described['model']}"
    return f"subject-{number + 1}"


def _at_lengths(responder: Responder, task: LanguageTask, options: EvaluateOptions, run: OpenRun) -> LengthEvaluation:
    """An evaluation at every length, up to the first that is too long throughout."""
    from posbias.evaluation import page  # drawn here alone

    following, most = options.tokens_of(task), responder.max_positions
    for length in options.lengths:
        if most is not None and length + following > most:
            raise UsageError(
                f"evaluate: prompts of {length} tokens and {following} of an answer do not fit into the model's "
                f"{most}; lengths up to {most - following} do"
            )
    task = task_for(responder, task)
    tasks = {length: task.at_length(length, responder.tokenizer, seed=options.seed) for length in options.lengths}
    depths = depths_of(tasks, options)
    at: dict[int, Evaluation] = {}
    for length, lengthened in tasks.items():
        below = f"length-{length}"
        try:
            evaluation = evaluate_responder(responder, lengthened, _below(options, below, lengths=(), require=None))
        except NothingAnsweredError:
            if not at:
                raise
            break
        at[length] = _concluded(evaluation, None, run, below=below)
    told = dict.fromkeys(notice for evaluation in at.values() for notice in page.notices_of(evaluation))
    return LengthEvaluation.of(at, task=str(task), options=options, depths=depths, notices=list(told))


def _at_turns(responder: Responder, task: RulesAtTurns, options: EvaluateOptions, run: OpenRun) -> TurnsEvaluation:
    """A rule at all placements, compared on the same replies."""
    if len(task.placements) < 2:
        raise UsageError(f"rules: placements are compared with the first; give at least 2, got {task.placements}")
    task = replace(task, chat=task_for(responder, task).chat)
    told = list(task.draw(None, count=options.skip + options.count_of(task), seed=options.seed))[options.skip :]

    def placed(placement: str, name: str, turns: Sequence[int], left_out: Sequence[str] = ()) -> Evaluation:
        asked = replace(task, placements=(placement,), alone=name == JUST_TOLD)
        chosen = _below(options, name, turns=turns, prices=(), score=False)
        samples = zip(samples_of(asked, responder.tokenizer, chosen), told, strict=True)
        kept = [sample for sample, conversation in samples if conversation.say not in left_out]
        return evaluate_responder(responder, asked, chosen, samples=kept)

    # Not the first question, by which the rules are judged, too: rules that are kept there by chance would be chosen.
    just_told = placed("last", JUST_TOLD, (min(2, task.n_items - 1),))
    left_out = broken_when_told(_concluded(just_told, None, run, below=JUST_TOLD), told)
    task = replace(task, histories=_rolled_out(responder, task, told, options))
    found, names = {}, directory_names(task.placements)
    for name, placement in names.items():
        evaluation = placed(placement, name, options.positions_of(task), left_out)
        check = options.require and evaluation.check(options.require, arm=placement)
        found[name] = _concluded(evaluation, check, run, below=name)
    judged = {placement: found[name] for name, placement in names.items()}
    comparison = compare_turns(judged, left_out, task, told, options=options, tokenizer=responder.tokenizer)
    return _together(comparison, found, run)


def _in_orders(
    responder: Responder, ordered: Mapping[str, LanguageTask], options: EvaluateOptions, run: OpenRun
) -> OrdersEvaluation:
    """The passages in all orders, compared on the same samples."""
    chat = task_for(responder, next(iter(ordered.values()))).chat
    found, parts, sent = {}, {}, {}
    for below, name in directory_names(list(ordered)).items():
        asked, chosen = replace(ordered[name], chat=chat), _below(options, below, orders=(), prices=())
        samples = list(samples_of(asked, responder.tokenizer, chosen))
        evaluation = evaluate_responder(responder, asked, chosen, samples=samples)
        check = options.require and evaluation.check(options.require, arm=name)
        found[name] = parts[below] = _concluded(evaluation, check, run, below=below)
        sent[name] = [example for sample in samples for example in sample.examples]
    return _together(compare_orders(found, sent, tokenizer=responder.tokenizer, prices=options.prices), parts, run)


def _rolled_out(
    responder: Responder, task: RulesAtTurns, told: Sequence[Told], options: EvaluateOptions
) -> dict[str, tuple[str, ...]]:
    """The model's replies to all turns but the last, with the rule at the first placement, kept as they come."""
    histories: dict[str, tuple[str, ...]] = {}
    if task.replies == TRANSCRIPT:
        return histories
    last = max(options.positions_of(task)) - 1
    for turn in range(1, last + 1):
        report(f"the model's own replies: turn {turn} of {last}")
        at = _below(options, "replies", turns=(turn,), score=False)
        continued = replace(task, histories=histories)
        samples = list(samples_of(continued, responder.tokenizer, at))
        store = PartStore(at.directory, _settings(responder, continued, at))
        replies, _, _ = _replies(samples, continued, at, responder, store)
        for conversation, reply in zip(told, replies, strict=True):
            if reply.response is None or reply.response.skipped is not None:
                why = "nothing is generated" if reply.response is None else reply.response.skipped
                raise RunError(f"{conversation.name} cannot go on behind turn {turn}: {why}")
            name = history_of(conversation)
            histories[name] = (*histories.get(name, ()), reply.response.text)
    if options.directory is not None:
        write_file(options.directory / HISTORIES, json.dumps(histories).encode())
    return histories


def _compared(
    subjects: Sequence[Any], names: Sequence[str], task: LanguageTask, options: EvaluateOptions, run: OpenRun
) -> EvaluationComparison:
    """Evaluations of all subjects, compared with the first."""
    if len(subjects) < 2:
        raise UsageError("evaluate: a list is compared with its first; give at least 2 subjects")
    places = list(directory_names(names))
    if options.lengths or options.orders:
        raise UsageError(f"evaluate: lengths and orders take one subject, got {', '.join(places)}")
    evaluations: dict[str, Evaluation] = {}
    responder: Responder | None = None
    for name, subject in zip(places, subjects, strict=True):
        responder = None  # before the next is loaded
        responder = opened(subject)
        evaluation = evaluate_responder(responder, task, _below(options, name))
        check = options.require and evaluation.check(options.require)
        evaluations[name] = _concluded(evaluation, check, run, below=name)
    return _together(compare_evaluations(list(evaluations.values())), evaluations, run)


def _together(comparison: Together, evaluations: Mapping[str, Evaluation], run: OpenRun) -> Together:
    """Write a comparison of evaluations, each in a directory of its own."""
    if run.directory is not None:
        comparison.record.resolved["related"] = {name: f"{name}/{REPORT_FILE}" for name in evaluations}
    checks = [check for evaluation in evaluations.values() if (check := evaluation.requirement) is not None]
    failing = min(checks, key=lambda check: check.met, default=None)  # the first that fails stands for all
    return _concluded(replace(comparison, evaluations=evaluations), failing, run)


def _concluded(result: Concluded, check: RequirementCheck | None, run: OpenRun, *, below: str = "") -> Concluded:
    """Write a result with its verdict and the check of what is required, which of a found one may be new."""
    result.record.scalars |= {"verdict": list(result.verdict), "requirement": as_stored(check)}
    run.finish(result.record, below=below)
    return replace(result, requirement=check)


def evaluate_responder(
    responder: Responder,
    task: LanguageTask,
    options: EvaluateOptions,
    *,
    samples: Sequence[Sample] | None = None,
    beside: Mapping[str, Any] | None = None,
) -> Evaluation:
    """Put every sample of a task, at every position, to a responder, which `evaluate` opens; errors as there.

    If `options` resume a directory that holds just this evaluation finished, that one is taken, without a request; its
    texts are there. `samples` are those of the options, if they are drawn; `beside` is what else the record depends on.
    """
    task = task_for(responder, task)
    samples = list(samples_of(task, responder.tokenizer, options)) if samples is None else samples
    asked, described = _asked(task, options), responder.describe()
    positions = asked["positions"]
    settings = _settings(responder, task, options)
    short = [*stripped_samples(task, responder.tokenizer, options)] if options.recovery else []
    whole = {**settings, "samples": [sample.piece for sample in (*samples, *short)], "seed": options.seed}
    depends = {"evaluation": fingerprint(whole), **(beside or {})}
    if (record := finished_run(options.directory, lambda: depends, resume=options.resume)) is not None:
        evaluation = Evaluation.from_record(record)
        return replace(evaluation, reused=evaluation.count)
    data = file_sha256(task)
    if options.directory is not None and options.overwrite and not options.resume:
        clear_parts(options.directory)  # of one among several subjects, whose name the run's directory does not know
    store = PartStore(options.directory, settings)
    stripped = _stripped(short, task, options, responder) if short else {}  # a server without scores asks nothing more
    replies, learnt, seconds = _replies(samples, task, options, responder, store)
    described |= learnt
    tables, outputs = tables_of(task, samples, replies)
    tables |= {name: np.repeat(column[:, None], len(positions), axis=1) for name, column in stripped.items()}
    _check_scored(tables, outputs, options, described)
    model, method = described.get("model"), described.get("method") or ""
    source = (model.get("source") if isinstance(model, Mapping) else model) or "model"
    under = method if len(method) <= 40 else method.partition("(")[0]  # a title is a line
    resolved = {
        "title": f"{source}{f' under {under}' if under else ''}: {task}",
        **asked,
        "file_sha256": data,
        "scoring": task.answer_rule.name,
        "count": len(samples),
        **({"skip": options.skip} if options.skip else {}),
        "responder": described,
        "fingerprint": fingerprint(depends),
    }
    scalars = {**_scored(task, samples, replies, tables, outputs, options), "reused": store.reused, "seconds": seconds}
    seeds = {"samples": options.seed}
    if short:
        seeds["bootstrap"] = options.seed
        scalars["recovery"] = as_stored(recovery_of(tables, seed=options.seed))
    record = Record("evaluate", {}, resolved, scalars, seeds=seeds)
    record.arrays = {"positions": np.array(positions), **{SCORES + name: table for name, table in tables.items()}}
    if options.directory is not None:
        write_outputs(outputs, options.directory)
    return replace(Evaluation.from_record(record), outputs=tuple(outputs))


def _stripped(
    samples: Sequence[Sample], task: LanguageTask, options: EvaluateOptions, responder: Responder
) -> dict[str, PerSample]:
    """Log-probabilities of the answers with the moved item alone, and without it.

    Raises:
        RunError: there is none.
    """
    store, scoring = PartStore(options.directory, _settings(responder, task, options)), replace(options, generate=False)
    replies, learnt, _ = _replies(samples, task, scoring, responder, store)
    logprobs = np.array([np.nan if reply.score is None else reply.score.logprob for reply in replies]).reshape(-1, 2)
    if np.isnan(logprobs).all():
        why = learnt.get("no_scores_because") or "no answer to the item alone, or without it, is scored"
        raise RunError(f"recovery needs log-probabilities of the right answers: {why}")
    return {ALONE: logprobs[:, 0], BARE: logprobs[:, 1]}


def _asked(task: LanguageTask, options: EvaluateOptions) -> dict[str, Any]:
    """What is asked, for a record."""
    return {
        "task": str(task),
        "positions": list(options.positions_of(task)),
        "max_tokens": options.max_tokens or task.max_tokens,
        "thinking_tokens": options.thinking_tokens,
        "answer_pattern": options.answer_pattern,
    }


def _settings(responder: Responder, task: LanguageTask, options: EvaluateOptions) -> dict[str, Any]:
    """What a reply depends on, beside the prompts that name it."""
    deciding = {name: value for name, value in responder.describe().items() if name in DECIDING}
    how = {"generate": options.generate, "score": options.score, **_asked(task, options)}
    return {"verb": "evaluate", **how, "responder": deciding, "made_by": made_by()}


def _replies(
    samples: Sequence[Sample], task: LanguageTask, options: EvaluateOptions, responder: Responder, store: PartStore
) -> tuple[list[Reply], dict[str, Any], float]:
    """The replies to all examples, in order, what they showed of the responder with its costs, and their seconds.

    What is not finished is asked now, and kept as soon as it is.

    Raises:
        UsageError: a request that the model cannot take, such as a conversation without a chat template.
        RunError: the model fails, or its server cannot be reached or refuses many prompts.
    """
    pieces: dict[str, Any] = {}
    for sample in samples:
        if (found := store.find(sample.piece)) is not None:
            pieces[sample.piece] = piece = unpacked(found)
            piece["replies"] = [from_stored(Reply, reply) for reply in piece["replies"]]
    waiting = [sample for sample in samples if sample.piece not in pieces]
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
        for sample in chunk:
            own = [next(replies) for _ in sample.examples]
            pieces[sample.piece] = {"replies": own, "learnt": responder.learnt(), "work": work}
            work = {}  # what the samples took together is stored with the first one
        _check_refused(samples, pieces)
        for sample in chunk:
            store.keep(sample.piece, packed(pieces[sample.piece]))
    total = Counter[str]()
    for sample in samples:
        total.update(pieces[sample.piece]["work"])
    every = [reply for sample in samples for reply in pieces[sample.piece]["replies"]]
    # Of a local model's prompts it is known whether they open thoughts.
    told = every if responder.renders else _with_unmarked_thoughts(every)
    learnt = pieces[samples[-1].piece]["learnt"] | {name: total[name] for name in responder.counts()}
    return told, learnt, total["seconds"]


def _check_refused(samples: Sequence[Sample], pieces: Mapping[str, Mapping[str, Any]]) -> None:
    """Refuse to go on with a server that refuses many of all examples; a few are left out."""
    refused = [
        (example, reply.response.skipped)
        for sample in samples
        if sample.piece in pieces
        for example, reply in zip(sample.examples, pieces[sample.piece]["replies"], strict=True)
        if reply.response is not None and reply.response.finish == REFUSED
    ]
    examples = sum(len(sample.examples) for sample in samples)
    if len(refused) >= REFUSED_LEAST and len(refused) > REFUSED_SHARE * examples:
        first, reason = refused[0]
        raise RunError(
            f"the server refuses {len(refused)} of {examples} prompts so far; at most {REFUSED_SHARE:.0%} are left "
            f"out, or {REFUSED_LEAST - 1}. The first: sample {first.sample!r}, position {first.gold_position}: {reason}"
        )


def _with_unmarked_thoughts(replies: Sequence[Reply]) -> list[Reply]:
    """Replies in which answers that are thoughts throughout are none, so far as other answers give them away.

    If most answers that ended by themselves hold only the mark that closes thoughts, the prompt opens them: then one
    that was cut off without any mark is still within them, though nothing in itself tells.
    """
    ended = Counter(reply.response.thinking for reply in replies if reply.response and reply.response.finish == STOPPED)
    if ended[CLOSED] <= ended[None]:
        return list(replies)
    return [
        replace(reply, response=replace(said, text="", thoughts=said.text, thinking=UNFINISHED))
        if (said := reply.response) is not None and said.thinking is None and said.finish == CUT_OFF
        else reply
        for reply in replies
    ]


def _scored(
    task: LanguageTask,
    samples: Sequence[Sample],
    replies: Sequence[Reply],
    tables: Mapping[str, Scores],
    outputs: Sequence[Mapping[str, Any]],
    options: EvaluateOptions,
) -> dict[str, Any]:
    """Counts and statistics of all answers, for a record."""
    reading, positions = reading_of(tables["correct"], outputs), options.positions_of(task)
    curves = {
        name: position_curve(table, positions=positions, quantity=MEASURES[name])
        for name, table in measures_of(tables).items()
        if not (reading.withheld and name in GENERATED)
    }
    lost = tables["too_long"].sum(axis=0).astype(int).tolist()
    unscored = sum(np.isnan(tables["logprob"].ravel()) & [row["skipped"] is None for row in outputs])
    scored = {
        "n_items": task.n_items,
        "skipped": {str(position): count for position, count in zip(positions, lost, strict=True) if count},
        "unjudged": [
            {
                **{name: row[name] for name in ("sample", "position")},
                "reason": row["unjudged"],
                "detail": row["skipped"] or (call_mark(row["text"]) if row["unjudged"] == "unread" else ""),
            }
            for row in outputs
            if row["unjudged"] is not None
        ],
        "measures": list(curves),
        "curves": {name: plain(asdict(curve)) for name, curve in curves.items()},
        "cut_off": sum(row["finish"] == CUT_OFF for row in outputs),
        "examples": len(outputs),
        "reading": as_stored(reading),
        "unscored": int(unscored) if options.score else 0,
        "moved_blanks": sum(example.moved_blanks > 0 for sample in samples for example in sample.examples),
        "notices": notices_of(task, samples, replies),
    }
    if "first_pick" in tables and len(positions) == task.n_items and options.generate:
        scored["verdicts"] = plain(asdict(judge_verdicts(tables)))
    return scored


def _check_scored(
    tables: Mapping[str, Scores],
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
