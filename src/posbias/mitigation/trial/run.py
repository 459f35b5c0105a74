"""`mitigate`: the unchanged model and every method on the same samples, judged, with side effects and one verdict each.

The first samples of a task are for calibration: methods with parameters are fitted to them. The samples after them are
the test, which no fit sees. Every arm (the model as it is, then one per method) is an evaluation with a record of its
own below the run's directory; ordinary text and short forms of the task are put to the same method. A killed run goes
on from the samples, texts and fits that are there.

The record has the verb "mitigate" (`posbias.report.mitigate` draws it). Arrays: `positions`; `scores/MEASURE/ARM`
[n_samples n_positions]; `text/ARM` [n_documents], nats per token; ARM counts from 0, the unchanged model. Scalars:
`arms` [name], `judgement` (`Judgement.as_record`), `curves` {measure: [[interval]]} by arm, `effort` [{seconds,
requests, tokens, peak_bytes}] by arm (`effort.py` says which tokens), `endings` [`Endings.as_record`] by arm,
`text_not_judged` {arm: why}, `fits` {name: how}, `left_out` [text], `requirement`, `cost`, `notices` (as of an
evaluation); where influence was measured `influence` (`influence_scalars`), beside arrays `influence/NAME` [n_samples
n_positions].
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float64

from posbias.checks import checked
from posbias.errors import UsageError
from posbias.evaluation import (
    EvaluateOptions,
    evaluate_responder,
    finished_evaluation,
    write_outputs,
)
from posbias.evaluation.curve import SAMPLES_FOR_CLAIM, Scores, position_means
from posbias.evaluation.endings import why_undecided
from posbias.evaluation.evaluation import GENERATED, measures_of
from posbias.evaluation.responders import LocalResponder, Responder
from posbias.evaluation.run import DECIDING, NothingAnsweredError
from posbias.evaluation.samples import Pieces, Sample, requests_of
from posbias.mitigation.fitting.fit import reads_text
from posbias.mitigation.judging.judge import SideEffect, Tried, choose_measure, judge, levels_of
from posbias.mitigation.judging.requirements import Requirement
from posbias.mitigation.judging.verdicts import label_of
from posbias.mitigation.methods.question import question_text
from posbias.mitigation.methods.recipe import write_recipe
from posbias.mitigation.trial.arms import (
    UNCHANGED,
    Arm,
    MitigateOptions,
    answering_arms,
    arms_of,
    check_unseen,
    fitted_arms,
    given_methods,
    slug_of,
    split_samples,
)
from posbias.mitigation.trial.effort import effort_of, peaks_of
from posbias.mitigation.trial.files import check_files, contents_sha256
from posbias.mitigation.trial.influence import influence_scalars, preflight_influence, shares_of
from posbias.mitigation.trial.ordinary_text import ORDINARY_TEXT, texts_of, windows_of
from posbias.mitigation.trial.preflight import announce_arms, short_options
from posbias.mitigation.trial.workers import answers_of, work_of
from posbias.models.hugging_face import HuggingFaceModel
from posbias.runs.parts import PartStore, below, clear_parts, clear_unfinished, fingerprint, finished_run, made_by
from posbias.runs.records import Record, run_directory
from posbias.statistics import Interval
from posbias.tasks.language import LANGUAGE_TASKS, LanguageTask

ARMS = "arms"
"""Where the arms' evaluations lie, below the run's directory, and pieces that a finished run keeps: fits, and what
ordinary text, memory and influence are under a method, which another call may take over."""
CUT_MATTERS = ("accuracy", "values_found")
"""Measures of answers that may be right anywhere, so that one that was cut off might have become right."""
RECIPE = "recipe.json"
"""A fitted method, in its arm's directory."""


@checked
def mitigate(
    task: str | LanguageTask,
    responder: Responder,
    options: MitigateOptions | None = None,
    *,
    directory: Path | None = None,
    arguments: Mapping[str, Any] | None = None,
    command: str = "",
) -> Record:
    """Try methods against position bias on one model and task, and judge each.

    Args:
        task: An object or its literal spelling.
        responder: A local model, or a server, which takes methods around the model only.
        options: Methods, samples, and what they are judged by.
        directory: The run's, held by the caller; with `options.evaluation.resume` what is finished there is taken over.
        arguments, command: As the user passed them, for the record.

    Returns:
        The record, as made now or found finished in the directory; `posbias.report.verdict` says it in three sentences.

    Raises:
        UsageError: an unknown method or one that does not fit the model, too few samples, calibration samples that
            occur in the test again, or prompts that do not fit into memory.
        RunError: the model fails, or its server cannot be reached; what is finished is kept.
    """
    options = options or MitigateOptions()
    task = LANGUAGE_TASKS.parse(task) if isinstance(task, str) else task
    _check_asked(options, responder)
    calibration, test = split_samples(task, responder, options)
    settings = _settings(task, options, responder, [*calibration, *test])
    finished = finished_run(directory, lambda: settings, resume=options.evaluation.resume)
    if finished is not None:
        return finished
    store, kept = _stores(directory, settings, options)
    arms, left_out = arms_of(responder, options, task, test[0])
    check_unseen(options, test)
    cost, arms, too_large = announce_arms(task, test, options, arms)
    arms, refused = answering_arms(arms, options, task, test[0])
    if options.influence and arms[0].model is not None:
        preflight_influence(task, options.weighed, arms[0].model, len(arms))
    fits_read = any(arm.method is None and reads_text(arm.name, options.fitting) for arm in arms[1:])
    text, windows = windows_of(responder, options, fits_read=fits_read)
    arms, fits, unfitted = fitted_arms(task, arms, calibration, options, windows, kept, going=store)
    found, silent = _answers(task, arms, test, options, directory, cost=cost, store=store)
    arms = [arm for arm in arms if arm.name not in silent]
    texts, not_judged = texts_of(arms, text, kept)
    short, not_short = _short_forms(task, arms, options, directory)
    record = _record(task, options, arms, found, texts, short)
    peaks = peaks_of(arms, requests_of(test, task, options.test), kept)
    for effort, peak in zip(record.scalars["effort"], peaks, strict=True):
        effort["peak_bytes"] = peak
    record.arguments = dict(arguments or {"task": str(task), "methods": [arm.name for arm in arms[1:]]})
    question = question_text([example for sample in test for example in sample.examples])
    record.resolved |= {"question": question, "command": command, "fingerprint": fingerprint(settings)}
    not_weighed = _weigh(task, options, arms, record, kept) if options.influence else []
    left_out = [*left_out, *record.scalars["left_out"], *too_large, *refused, *unfitted]
    left_out = [*left_out, *silent.values(), *not_short, *not_weighed]
    record.scalars |= {"fits": fits, "left_out": left_out, "cost": cost, "text_not_judged": not_judged}
    for arm in arms:
        if directory is not None and arm.name in fits and isinstance(arm.model, HuggingFaceModel) and arm.method:
            write_recipe(directory / ARMS / arm.slug / RECIPE, arm.method, arm.model, fits[arm.name])
    return record


def _stores(
    directory: Path | None, settings: Mapping[str, Any], options: MitigateOptions
) -> tuple[PartStore, PartStore]:
    """Of pieces that go when the record is saved, and of those that stay for another call."""
    own = _of_one_method(settings, options)
    kept = {"resume": options.evaluation.resume, "overwrite": options.evaluation.overwrite}
    lasting = None if directory is None else directory / ARMS
    if lasting is not None:
        clear_unfinished(lasting)
    return PartStore(directory, own, **kept), PartStore(lasting, own, **kept)


def _check_asked(options: MitigateOptions, responder: Responder) -> None:
    """Refuse, before any work, what this responder cannot do, and files that are not there."""
    if not options.engine.in_process and not isinstance(responder, LocalResponder):
        raise UsageError("workers load the model themselves, so they go with a local one, not with --server")
    if options.by == "logprob" and getattr(responder, "scores", None) is False:
        raise UsageError("mitigate: by logprob needs scores, which this server does not give; allowed is accuracy")
    check_files(given_methods(options), options.fitting.begin)


def _weigh(
    task: LanguageTask, options: MitigateOptions, arms: Sequence[Arm], record: Record, store: PartStore
) -> list[str]:
    """Put influence before and after into the record; returned is what was not measured, with the reason."""
    shares, left_out = shares_of(task, options.weighed, arms, store)
    if shares:
        scores = {
            arm.name: {
                name.split("/")[1]: table[: options.weighed.count]
                for name, table in record.arrays.items()
                if name.startswith("scores/") and name.endswith(f"/{number}")
            }
            for number, arm in enumerate(arms)
        }
        record.scalars["influence"] = influence_scalars(task, options.weighed, shares, scores)
        record.arrays |= {f"influence/{name}": table for name, table in shares.items()}
    return left_out


def _settings(
    task: LanguageTask, options: MitigateOptions, responder: Responder, samples: Sequence[Sample]
) -> dict[str, Any]:
    """Everything that the record depends on."""
    asked = {
        name: value
        for name, value in vars(options).items()
        if name not in ("evaluation", "require", "methods", "fitting", "engine")
    }
    evaluated = ("seed", "generate", "score", "max_tokens", "thinking_tokens", "answer_pattern")
    evaluation = {name: getattr(options.evaluation, name) for name in evaluated}
    described = {name: value for name, value in responder.describe().items() if name in DECIDING}
    return {
        "verb": "mitigate",
        "task": str(task),
        "methods": [str(entry) for entry in given_methods(options)],
        "files": contents_sha256(given_methods(options), begin=options.fitting.begin, text=options.text),
        "require": str(options.require),
        "fitting": vars(options.fitting),
        **asked,
        **evaluation,
        "samples": [sample.piece for sample in samples],
        "responder": described,
        "made_by": made_by(),
    }


def _of_one_method(settings: Mapping[str, Any], options: MitigateOptions) -> dict[str, Any]:
    """What the fit and the side effects of one method depend on beside its arm: not on what else is tried and decides.

    So a run, interrupted or finished, goes on with more methods, or fewer, without fitting again.
    """
    others = ("methods", "require", "by", "tolerance", "influence")
    read = (options.fitting.begin, options.text)
    own = {name: value for name, value in settings.items() if name not in others}
    return own | {"files": {name: digest for name, digest in settings["files"].items() if name in read}}


def _answers(
    task: LanguageTask,
    arms: Sequence[Arm],
    test: Sequence[Sample],
    options: MitigateOptions,
    directory: Path | None,
    *,
    cost: Mapping[str, Any],
    store: PartStore,
) -> tuple[list[Record], dict[str, str]]:
    """The evaluation of every arm, whose samples workers may have answered; and why methods answered nothing."""
    pieces: Sequence[Mapping[str, Pieces]] = [{}] * len(arms)
    if not options.engine.in_process:
        work = work_of(arms, task, test, options.test, cost=cost)
        pieces = answers_of(arms, work, engine=options.engine, store=store)
    found, silent = [], {}
    for arm, own in zip(arms, pieces, strict=True):
        try:
            found.append(_answered(task, arm, options.test, directory, cost=cost, answered=own))
        except NothingAnsweredError as error:
            if arm.method is None:
                raise
            silent[arm.name] = f"{arm.name}: {error}"
    return found, silent


def _answered(
    task: LanguageTask,
    arm: Arm,
    options: EvaluateOptions,
    directory: Path | None,
    *,
    within: str = "",
    cost: Mapping[str, Any] | None = None,
    answered: Mapping[str, Pieces] | None = None,
) -> Record:
    """The evaluation of one arm, in a directory of its own; a finished one is taken over."""
    own = None if directory is None else directory / ARMS / arm.slug / within
    arguments = {"task": str(task), "method": arm.name}
    # What the whole run may replace is checked once, for the directory of the whole.
    with run_directory(own, verb="evaluate", arguments=arguments, resume=options.resume, overwrite=True) as held:
        options, responder = replace(options, directory=held), arm.answering
        evaluation = finished_evaluation(responder, task, options)
        if evaluation is None:
            evaluation = evaluate_responder(responder, task, options, cost=cost, answered=answered)
            evaluation.record.called(arguments, "")
            evaluation.record.resolved["title"] += "" if arm.method is None else f", {arm.name}"
            if held is not None:
                write_outputs(evaluation, held)
                evaluation.record.write_run(held)
        if held is not None:
            clear_parts(held)  # a kill may have left them beside the record
    return evaluation.record


def _short_forms(
    task: LanguageTask, arms: Sequence[Arm], options: MitigateOptions, directory: Path | None
) -> tuple[dict[str, list[Record | None]], list[str]]:
    """The short forms of the task in every arm; None where a method does not apply to them."""
    found: dict[str, list[Record | None]] = {}
    left_out = []
    for short in task.short_forms if options.short else ():
        records: list[Record | None] = []
        for arm in arms:
            try:
                within = slug_of(str(short))
                records.append(_answered(short, arm, short_options(options), directory, within=within, cost={}))
            except UsageError as error:
                if arm.name == UNCHANGED:
                    raise
                records.append(None)
                left_out.append(f"{short} was not put to {arm.name}: {error}")
        found[str(short)] = records
    return found, left_out


def _measures(record: Record) -> dict[str, Scores]:
    """Of one arm; those of generated answers only where enough of them could be read."""
    withheld = GENERATED if record.scalars["reading"]["withheld"] else ()
    found = measures_of(below(record.arrays, "scores/"))
    return {name: table for name, table in found.items() if name not in withheld}


def _side_effects(
    number: int,
    measure: str,
    texts: Sequence[Float64[np.ndarray, "documents"] | None],
    short: Mapping[str, Sequence[Record | None]],
    options: MitigateOptions,
) -> tuple[tuple[SideEffect, ...], dict[str, str]]:
    """Ordinary text and short forms of the task, unchanged and in one arm; of forms that decide nothing, why."""
    side, undecided = [], {}
    before, after = texts[0], texts[number]
    if before is not None and after is not None:
        side.append(SideEffect(ORDINARY_TEXT, before, after, 1, options.tolerance, "nats per token"))
    for name, records in short.items():
        old, new = records[0], records[number]
        if old is None or new is None or measure not in _measures(old) or measure not in _measures(new):
            continue
        before, after = (_measures(each)[measure].mean(axis=1) for each in (old, new))
        why = why_undecided(*(below(each.arrays, "scores/") for each in (old, new)))
        if why and measure in CUT_MATTERS:
            undecided[name] = why
        else:
            side.append(SideEffect(name, before, after, unit=label_of(measure)))
    return tuple(side), undecided


def _record(
    task: LanguageTask,
    options: MitigateOptions,
    arms: Sequence[Arm],
    found: Sequence[Record],
    texts: Sequence[Float64[np.ndarray, "documents"] | None],
    short: Mapping[str, Sequence[Record | None]],
) -> Record:
    """All arms judged."""
    measures = [_measures(record) for record in found]
    tables = [below(record.arrays, "scores/") for record in found]
    if options.by is not None and options.by not in measures[0]:
        unread = "".join(f"; {text}" for text in _unread_answers(arms[:1], found[:1]))
        raise UsageError(f"--by {options.by}: measured are {', '.join(measures[0])}{unread}")
    asked = measures[0] if options.by is None else {options.by: measures[0][options.by]}
    measure, warnings = choose_measure(asked, undecided=why_undecided(tables[0], tables[0]))
    positions = tuple(int(position) for position in found[0].arrays["positions"])

    blank = np.full_like(measures[0][measure], np.nan)
    tried, left_out = [], []
    for number, arm in enumerate(arms[1:], start=1):
        effects, undecided = _side_effects(number, measure, texts, short, options)
        why = why_undecided(tables[0], tables[number]) if measure in CUT_MATTERS else ""
        tried.append(Tried(arm.name, measures[number].get(measure, blank), effects, withheld=why))
        left_out += [f"{form} under {arm.name} was not judged: {reason}" for form, reason in undecided.items()]
    warnings = (*warnings, *_unread_answers(arms, found), *_empty_answers(arms, found))
    judgement = judge(measures[0][measure], tried, positions=positions, measure=measure, warnings=warnings)
    described = found[0].resolved["responder"]
    names = [arm.name for arm in arms]
    record = Record(verb="mitigate", arguments={}, seeds={"samples": options.evaluation.seed})
    record.resolved = {
        "title": str(found[0].resolved["title"]),
        "task": str(task),
        "n_items": task.n_items,
        "positions": list(positions),
        "calibration": options.calibration,
        "count": options.evaluation.count,
        "tolerance": options.tolerance,
        "text": options.text,
        "methods": {arm.name: str(arm.method)[:200] for arm in arms[1:]},
        "needing_passages": [arm.name for arm in arms[1:] if getattr(arm.method, "needs_passages", False)],
        "responder": described,
        "recipes": {arm.name: arm.path for arm in arms if arm.path},
        "directories": {arm.name: f"{ARMS}/{arm.slug}" for arm in arms},
    }
    record.scalars = {
        "arms": names,
        "judgement": judgement.as_record(),
        "curves": {
            name: [[mean.as_record() for mean in position_means(each[name])] for each in measures if name in each]
            for name in measures[0]
            if all(name in each for each in measures)
        },
        "effort": [effort_of(each) for each in found],
        "endings": [each.scalars["endings"] for each in found],
        "left_out": left_out,
        "requirement": _required(options.require, names, judgement.recommended, measures, tables),
        "notices": found[0].scalars.get("notices", {}),
    }
    record.arrays = {
        "positions": np.array(positions),
        **{f"scores/{name}/{number}": each[name] for number, each in enumerate(measures) for name in each},
        **{f"text/{number}": nats for number, nats in enumerate(texts) if nats is not None},
    }
    return record


def _unread_answers(arms: Sequence[Arm], found: Sequence[Record]) -> list[str]:
    """Which arms' generated answers are not judged, since too many could not be read: no verdict, unended thoughts."""
    return [
        f"{arm.name}: {reading['unread']} of {reading['answers']} generated answers could not be read, so none counts"
        for arm, reading in zip(arms, (each.scalars["reading"] for each in found), strict=True)
        if reading["withheld"]
    ]


def _empty_answers(arms: Sequence[Arm], found: Sequence[Record]) -> list[str]:
    """Which methods leave most answers empty that are not so without: a misread prompt, more than a matter of place."""
    unchanged = found[0].scalars
    before, total = unchanged.get("empty", 0), unchanged["examples"] - sum(unchanged["skipped"].values())
    counts = {arm.name: each.scalars.get("empty", 0) for arm, each in zip(arms[1:], found[1:], strict=True)}
    return [
        f"{name}: {count} of {total} generated answers are empty ({before} without it)"
        for name, count in counts.items()
        if count > total / 2 > before
    ]


def _required(
    require: Requirement | None,
    names: Sequence[str],
    recommended: str | None,
    measures: Sequence[Mapping[str, Scores]],
    tables: Sequence[Mapping[str, Scores]],
) -> dict[str, Any] | None:
    """Whether what is recommended meets the requirement: in accuracy, or in log-probability where none was judged.

    It is not met by answers too many of which were cut off, which the entry `withheld` then says.
    """
    if require is None:
        return None
    number = 0 if recommended is None else names.index(recommended)
    measure = "accuracy" if "accuracy" in measures[number] else "logprob"
    scores = measures[number][measure]
    if (~np.isnan(scores).any(axis=1)).sum() < SAMPLES_FOR_CLAIM:
        value, met = Interval(np.nan, -np.inf, np.inf), False
    else:
        levels = levels_of(scores)
        value, met = require.value(levels), require.met(levels)
    withheld = why_undecided(tables[number], tables[number]) if measure in CUT_MATTERS else ""
    return {
        "required": str(require),
        "arm": names[number],
        "measure": measure,
        "value": value.as_record(),
        "met": met and not withheld,
        "withheld": withheld,
    }
