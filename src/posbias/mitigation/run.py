"""`mitigate`: the unchanged model and every method on the same samples, judged, with side effects and one verdict each.

A plan is resolved once: task, samples, arms and settings. An arm is the unchanged model, or the model under one method.
Then every arm takes the same steps: try, fit, answer, read ordinary text; arms whose methods do not apply are left out.
Every arm is an evaluation with a record of its own below the run's directory; fits and what ordinary text is under a
method are pieces beside it. A killed run goes on from the samples, texts and fits that are there.

Text has no passages and no question: what acts from the question on, what moves or reads passages, and what changes
requests is not judged by it.
"""

import hashlib
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float64, Int64

from posbias.checks import checked
from posbias.errors import UsageError
from posbias.evaluation.curve import ALPHA, SAMPLES_FOR_CLAIM, contrast_of, position_means
from posbias.evaluation.evaluation import GENERATED, Evaluation, measures_of
from posbias.evaluation.options import EvaluateOptions
from posbias.evaluation.responders import LocalResponder, Responder
from posbias.evaluation.responders.local import score_answer
from posbias.evaluation.run import DECIDING, NothingAnsweredError, evaluate_responder, opened
from posbias.evaluation.samples import Sample, requests_of, samples_of, task_for
from posbias.mitigation.fits import Calibration, Fit, Windows
from posbias.mitigation.fitting import JUDGED_TEXT, LEAST_SAMPLES, contents, fit_of, fitting_text, run_fit
from posbias.mitigation.judging import ArmScores, SideEffect, choose_measure, judge
from posbias.mitigation.methods.adapter import Adapter
from posbias.mitigation.methods.applying import answering_under, mitigated, resolve_method
from posbias.mitigation.methods.base import MITIGATIONS, Method, Mitigation, Spans
from posbias.mitigation.methods.recipe import Recipe, check_files, is_recipe, write_recipe
from posbias.mitigation.options import ALL, DEFAULT, MitigateOptions
from posbias.mitigation.result import ORDINARY_TEXT, ArmResult, Effort, MitigationTrial
from posbias.models.hugging_face import HuggingFaceModel
from posbias.progress import report, track
from posbias.prompts.loading import load_prompts
from posbias.results.records import Record
from posbias.results.result import as_stored
from posbias.runs.parts import PartStore, fingerprint, finished_run, made_by, packed, unpacked
from posbias.runs.running import directory_names, run_directory
from posbias.tasks.language import LANGUAGE_TASKS, LanguageTask

UNCHANGED = "unchanged"
"""Name of the arm without a method."""
ARMS = "arms"
"""Directory below the run's, of the arms' evaluations and of pieces that a finished run keeps: fits, and what ordinary
text is under a method, which another call may take over."""
RECIPE = "recipe.json"
"""Name of a fitted method's file, in its arm's directory."""
OF_THE_WHOLE = ("methods", "recipes", "require", "by", "tolerance")
"""Settings that the fit and the side effects of one method do not depend on: a run, interrupted or finished, goes on
with more methods, or fewer, without fitting again."""
SERVER, UNASKED = "not judged: the model is behind a server", "not judged: no windows were asked for"
ELSEWHERE = "unchanged: acts where passages or a question stand, and text has none"
"""Why ordinary text says nothing about a method."""


@checked
def mitigate(
    model: Any,
    task: str | LanguageTask,
    *,
    options: MitigateOptions | None = None,
    directory: Path | None = None,
) -> MitigationTrial:
    """Try methods against position bias on one model and task, and judge each.

    Args:
        model: A hub id, a directory, "demo", a loaded model, or a responder such as `ServerResponder`, which takes
            methods around the model only.
        task: An object or its literal spelling.
        options: Methods, samples, and what they are judged by.
        directory: Directory of the run and its record; with `options.evaluation.resume` finished work in it is reused.

    Returns:
        The trial, as made now or found finished in the directory.

    Raises:
        UsageError: an unknown method or one that does not fit the model, too few samples, calibration samples that
            occur in the test again, or prompts that do not fit into memory.
        RunError: the model fails, or its server cannot be reached; finished work is kept.
    """
    options = options or MitigateOptions()
    evaluation, arguments = options.evaluation, {"model": str(model), "task": str(task)}
    with run_directory(
        directory, verb="mitigate", arguments=arguments, resume=evaluation.resume, overwrite=evaluation.overwrite
    ) as run:
        task = LANGUAGE_TASKS.parse(task) if isinstance(task, str) else task
        options = options.following(task)  # wrong files are refused before a model is loaded
        check_files(options.entries)
        plan = plan_trial(opened(model), task, options)
        record = finished_run(run.directory, lambda: plan.settings, resume=evaluation.resume)
        if record is None:
            record = tried(plan, run.directory)
        run.finish(record)
    return MitigationTrial.from_record(record)


@dataclass(eq=False)
class Arm:
    """One arm of a trial, the unchanged model or the model under one method, and what is found of it."""

    name: str
    responder: Responder
    """What answers, under the method once that is known; one for all that it is asked: a cache is tried once."""
    given: Any = None
    """The method's spelling, object, or path of a recipe, as it was given."""
    method: Method | None = None
    """The method that answers; None: the unchanged model, or a method that is still to be fitted."""
    fit: Fit | None = None
    """The fit that finds the method; None if it has all its parameters."""
    fitted: dict[str, Any] | None = None
    """How the method was fitted; None if it was not."""
    evaluation: Evaluation | None = None
    """Its answers to the test."""
    short: dict[str, Evaluation] = field(default_factory=dict)
    """Its answers to short forms of the task that the method applies to, by their spelling."""
    nats: Float64[np.ndarray, "documents"] | None = None
    """Of every window of ordinary text, per token; None if it is not judged."""
    untold: str = ""
    """Why ordinary text is not judged."""

    @property
    def slug(self) -> str:
        """Name of its directory: readable, and different for different methods, recipes and runs that they follow."""
        return slug_of(self.name, str(self.method) if is_recipe(self.given) else "") if self.given else UNCHANGED


def slug_of(name: str, distinction: str = "") -> str:
    """A directory's name: the beginning of a name, and a hash of all of it with what else distinguishes it."""
    readable = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")[:40]
    return f"{readable}-{hashlib.sha256(f'{name}{distinction}'.encode()).hexdigest()[:8]}"


@dataclass(eq=False)
class TrialPlan:
    """Everything that a trial is to do."""

    options: MitigateOptions
    task: LanguageTask
    model: HuggingFaceModel | None
    """None if it is behind a server."""
    calibration: tuple[Sample, ...]
    test: tuple[Sample, ...]
    arms: list[Arm]
    """The unchanged model first."""
    short_forms: Sequence[LanguageTask] = ()
    """Short forms of the task that are asked, too."""
    text: Int64[np.ndarray, "documents token"] | None = None
    """Windows of ordinary text that judge; None without any, or if the model is behind a server."""
    fitting_text: Callable[[], Windows] = tuple
    """Reads windows of other text, as long, for fits."""
    left_out: list[str] = field(default_factory=list)
    """What was left out, and why."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Everything that the record depends on."""

    @property
    def asked(self) -> EvaluateOptions:
        """The settings of the test, which follows the samples for calibration."""
        evaluation = self.options.evaluation
        return replace(evaluation, skip=evaluation.skip + len(self.calibration))

    def each(self, step: Callable[[Arm], None]) -> None:
        """Take a step with every arm.

        A method that does not apply is refused if it was named, and left out with the reason otherwise; one under which
        nothing is answered is left out.
        """
        arms = []
        for arm in self.arms:
            try:
                step(arm)
                arms.append(arm)
            except (UsageError, NothingAnsweredError) as error:
                named = isinstance(error, UsageError) and self.options.methods not in (ALL, DEFAULT)
                if named or arm is self.arms[0]:
                    raise
                self.left_out.append(f"{arm.name} was not tried: {error}")
        self.arms = arms
        if len(arms) == 1:  # without a method there is nothing to try
            raise UsageError(f"mitigate: no method to try ({'; '.join(self.left_out) or 'none is given'})")


def plan_trial(responder: Responder, task: LanguageTask, options: MitigateOptions) -> TrialPlan:
    """Resolve everything that a trial is to do.

    Raises:
        UsageError: an unknown method or one that does not fit the model, too few samples, calibration samples that
            occur in the test again, recipes that were fitted to test samples, or files that are not there.
    """
    if options.by == "logprob" and getattr(responder, "scores", None) is False:
        raise UsageError("mitigate: by logprob needs scores, which this server does not give; allowed is accuracy")
    entries = options.entries
    task = task_for(responder, task)
    calibration, test = _split_samples(responder, task, options)
    recipes = {entry: Recipe.read(entry) for entry in filter(is_recipe, entries)}
    names = {path: name for name, path in directory_names(list(recipes)).items()} if recipes else {}
    arms = [Arm(names.get(str(entry), str(entry)), responder, given=entry) for entry in entries]
    model = responder.model if isinstance(responder, LocalResponder) else None
    forms = task.short_forms if options.short else ()
    plan = TrialPlan(options, task, model, calibration, test, [Arm(UNCHANGED, responder), *arms], forms)
    for form in plan.short_forms:
        list(samples_of(form, responder.tokenizer, replace(plan.asked, positions="spread")))  # refused now if at all
    if model is not None:
        source = JUDGED_TEXT if options.text == DEFAULT else options.text
        length, seed = min(options.length, model.max_positions or options.length), options.evaluation.seed
        if options.documents:
            plan.text = load_prompts(source, model, n_positions=length, count=options.documents, seed=seed).token_ids
        plan.fitting_text = partial(fitting_text, model, length=length, seed=seed)
    plan.each(partial(_resolve, plan))
    all_names = [arm.name for arm in plan.arms]
    if twice := [name for name in all_names if all_names.count(name) > 1]:
        raise UsageError(f"mitigate: {twice[0]} is given twice; give each method once")
    for path, recipe in recipes.items():
        if again := [one.name for one in test if contents(one.examples).intersection(recipe.fitted.samples)]:
            raise UsageError(
                f"{path!r} was fitted to {len(again)} of the {len(test)} test samples ({again[0]} first); take "
                "others, by another --seed, or those that follow them in a file (--calibration)"
            )
    evaluated = ("seed", "generate", "score", "max_tokens", "thinking_tokens", "answer_pattern")
    plan.settings = {
        **{name: value for name, value in vars(options).items() if name != "evaluation"},
        "verb": "mitigate",
        "task": str(task),
        "methods": [str(entry) for entry in entries],
        "recipes": {path: recipe.model_dump() for path, recipe in recipes.items()},
        "windows": None if plan.text is None else hashlib.sha256(plan.text.tobytes()).hexdigest(),
        "require": str(options.require),
        "fitting": vars(options.fitting),
        **{name: getattr(options.evaluation, name) for name in evaluated},
        "samples": [sample.piece for sample in (*calibration, *test)],
        "responder": {name: value for name, value in responder.describe().items() if name in DECIDING},
        "made_by": made_by(),
    }
    return plan


def _split_samples(
    responder: Responder, task: LanguageTask, options: MitigateOptions
) -> tuple[tuple[Sample, ...], tuple[Sample, ...]]:
    """Calibration samples, and the test samples after them; none of the first may occur among the second again."""
    evaluation, count = options.evaluation, options.calibration or 0
    together = replace(evaluation, count=count + (evaluation.count or 0))
    samples = tuple(samples_of(task, responder.tokenizer, together))
    calibrated = {content: sample.name for sample in samples[:count] for content in contents(sample.examples)}
    for sample in samples[count:]:
        again = next((calibrated[content] for content in contents(sample.examples) if content in calibrated), None)
        if again is not None:
            raise UsageError(
                f"test sample {sample.name} is calibration sample {again} again, but the two must not overlap; does "
                "the file hold a line twice?"
            )
    return samples[:count], samples[count:]


def _resolve(plan: TrialPlan, arm: Arm) -> None:
    """Find the method of an arm, or the fit that is to find it.

    Raises:
        UsageError: an unknown method, one that needs a model at hand, or too few samples for a fit.
    """
    if arm.given is None:
        return
    arm.fit = fit_of(arm.given) if isinstance(arm.given, str) and not is_recipe(arm.given) else None
    if arm.fit is None:
        arm.method = resolve_method(arm.given, plan.model)
    if plan.model is None and (arm.fit is not None or isinstance(arm.method, Mitigation)):
        raise UsageError(f"{arm.name} needs the model itself, not one behind a server")
    if arm.fit is not None and (got := len(plan.calibration)) < LEAST_SAMPLES:
        raise UsageError(f"{arm.name} is fitted and needs calibration samples, at least {LEAST_SAMPLES}; got {got}")
    if arm.method is not None:
        arm.responder = answering_under(arm.method, arm.responder)


def tried(plan: TrialPlan, directory: Path | None) -> Record:
    """The steps of a trial, one after another, and the record of what they find."""
    of_one_method = {name: value for name, value in plan.settings.items() if name not in OF_THE_WHOLE}
    arms = None if directory is None else directory / ARMS
    store = PartStore(arms, of_one_method)
    requests = requests_of(plan.test, plan.task, plan.asked)
    n_requests, n_methods = len(requests) * len(plan.arms), len(plan.arms) - 1
    report(f"{n_requests} requests without and with {n_methods} methods, before those that methods add")

    def answers(arm: Arm) -> None:
        """Have a method that needs no fit answer one request; a server is asked for nothing that is not kept."""
        if arm.method is not None and plan.model is not None:
            one = replace(requests[0], max_tokens=1)
            arm.responder.respond([one], generate=plan.asked.generate, score=plan.asked.score)

    plan.each(answers)
    plan.each(partial(fit_arm, plan, store))
    plan.each(partial(answer, plan, arms))
    plan.each(partial(read_text, plan, store))
    record = judge_trial(plan)
    for arm in plan.arms:
        if arms is not None and plan.model is not None and arm.fitted is not None and arm.method is not None:
            write_recipe(arms / arm.slug / RECIPE, arm.method, plan.model, arm.fitted)
    return record


def fit_arm(plan: TrialPlan, store: PartStore, arm: Arm) -> None:
    """Fit a method without parameters to the calibration samples; an interrupted fit starts anew."""
    fit, model = arm.fit, plan.model
    if fit is None or model is None:
        return

    def fitted() -> dict[str, np.ndarray]:
        examples = [example for sample in plan.calibration for example in sample.examples]
        found = run_fit(fit, Calibration(model, examples, plan.fitting_text), options=plan.options.fitting)
        updates = found.method.updates if isinstance(found.method, Adapter) else {}
        return packed({"method": str(found.method), "how": found.how, "updates": updates})

    found = unpacked(store.get(f"fit-{arm.slug}", fitted))
    arm.fitted, arm.method = found["how"], MITIGATIONS.parse(found["method"])
    if isinstance(arm.method, Adapter):
        arm.method = replace(arm.method, updates=found["updates"])
    arm.responder = answering_under(arm.method, arm.responder)


def answer(plan: TrialPlan, directory: Path | None, arm: Arm) -> None:
    """Evaluate an arm in a directory of its own, and on short forms below; finished evaluations are taken over."""

    def evaluated(task: LanguageTask, options: EvaluateOptions, within: str = "") -> Evaluation:
        place = None if directory is None else directory / arm.slug / within
        arguments = {"task": str(task), "method": arm.name}
        # What the whole run may replace is checked once, for the directory of the whole.
        with run_directory(place, verb="evaluate", arguments=arguments, resume=options.resume, overwrite=True) as run:
            evaluation = evaluate_responder(arm.responder, task, replace(options, directory=run.directory))
            run.finish(evaluation.record)
        return evaluation

    arm.evaluation = evaluated(plan.task, plan.asked)
    for form in plan.short_forms:
        try:
            arm.short[str(form)] = evaluated(form, replace(plan.asked, positions="spread"), slug_of(str(form)))
        except UsageError as error:
            if arm.given is None:
                raise
            plan.left_out.append(f"{form} was not put to {arm.name}: {error}")


def read_text(plan: TrialPlan, store: PartStore, arm: Arm) -> None:
    """Find the nats per token of every window of ordinary text in an arm, or say why it is not judged by them."""
    text, model, method = plan.text, plan.model, arm.method
    passages: Spans | None = () if method is None else None
    if isinstance(method, Mitigation):
        passages = method.in_text(0 if text is None else text.shape[1])
    if model is None:
        arm.untold = SERVER
    elif passages is None:
        arm.untold = ELSEWHERE
    elif text is None:
        arm.untold = UNASKED
    else:
        arm.nats = store.get(f"text-{arm.slug}", lambda: {"nats": _nats(model, method, text, passages)})["nats"]


@torch.no_grad()
def _nats(
    model: HuggingFaceModel, method: Method | None, windows: Int64[np.ndarray, "documents token"], passages: Spans
) -> Float64[np.ndarray, "documents"]:
    """Mean negative log-likelihood of every token but the first of each window."""
    rows = list(range(windows.shape[1] - 1))  # each token is read from the one before it
    found = []
    with nullcontext(model) if method is None else mitigated(model, method, passages=passages) as read:
        for window in track(windows, ORDINARY_TEXT):
            logits = read.outputs(read.embed(read.token_tensor([window.tolist()])), rows).logits[0]
            found.append(-score_answer(logits, window[1:]).logprob / len(rows))
    return np.array(found)


def judge_trial(plan: TrialPlan) -> Record:
    """Judge every method by the measure that was asked for, or that the unchanged model's scores allow."""
    by, options, methods = plan.options.by, plan.options, plan.arms[1:]
    test = [arm.evaluation for arm in plan.arms if arm.evaluation is not None]
    first, measures = test[0], [measures_of(evaluation.tables) for evaluation in test]
    if by is not None and by not in measures[0]:
        raise UsageError(f"--by {by}: measured are {', '.join(measures[0])}")
    choice = choose_measure(measures[0] if by is None else {by: measures[0][by]}, undecided=first.withheld)
    scores = measures[0][choice.measure]
    scored = [
        ArmScores(
            arm.name,
            of.get(choice.measure, np.full_like(scores, np.nan)),
            _side_effects(plan, arm, choice.measure),
            _withheld(first, arm.evaluation, choice.measure),
        )
        for arm, of in zip(methods, measures[1:], strict=True)
    ]
    judgement = judge(scores, scored, positions=first.positions, measure=choice.measure)
    names = [arm.name for arm in plan.arms]
    chosen = 0 if judgement.recommended is None else names.index(judgement.recommended)
    requirement = options.require and test[chosen].check(options.require, arm=names[chosen])
    record = Record("mitigate", {"task": str(plan.task), "methods": names[1:]})
    record.seeds = {"samples": options.evaluation.seed}
    record.resolved = {
        "title": first.title,
        "positions": list(first.positions),
        "calibration": options.calibration,
        "count": options.evaluation.count,
        "text": options.text,
        "responder": first.record.resolved["responder"],
        "fingerprint": fingerprint(plan.settings),
    }
    record.scalars = {
        "task": str(plan.task),
        "n_items": plan.task.n_items,
        "model": str(first.source or "model"),
        "judgement": as_stored(judgement),
        "choice": as_stored(choice),
        "arms": [as_stored(_arm_result(arm)) for arm in plan.arms],
        "curves": {
            name: [as_stored(position_means(of[name])) for of in measures]
            for name in measures[0]
            if all(name in of for of in measures)
        },
        "left_out": plan.left_out,
        "requirement": as_stored(requirement),
        "tolerance": options.tolerance,
        "notices": first.notices,
    }
    record.arrays = {
        "positions": np.array(first.positions),
        **{f"scores/{name}/{arm}": table for arm, of in enumerate(measures) for name, table in of.items()},
        **{f"text/{number}": arm.nats for number, arm in enumerate(plan.arms) if arm.nats is not None},
    }
    return record


def _side_effects(plan: TrialPlan, arm: Arm, measure: str) -> tuple[SideEffect, ...]:
    """What a method changes beside the test; what cannot be judged is told among what the plan leaves out."""
    unchanged, effects = plan.arms[0], list[SideEffect]()
    if unchanged.nats is not None and arm.nats is not None:
        told = 1, plan.options.tolerance, "nats per token"
        effects.append(SideEffect(ORDINARY_TEXT, unchanged.nats, arm.nats, *told))
    for form, after in arm.short.items():
        before = unchanged.short[form]
        tables = [measures_of(one.tables).get(measure) for one in (before, after)]
        old, new = (None if table is None else table.mean(axis=1) for table in tables)
        if why := _withheld(before, after, measure):
            plan.left_out.append(f"{form} under {arm.name} was not judged: {why}")
        elif old is not None and new is not None:
            effects.append(SideEffect(form, old, new, unit=measure))
    return tuple(effects)


def _arm_result(arm: Arm) -> ArmResult:
    """What is told of one arm, beside its verdict."""
    of = arm.evaluation
    assert of is not None  # answered
    return ArmResult(
        name=arm.name,
        method="" if arm.method is None else str(arm.method)[:200],
        effort=Effort(of.seconds, of.examples),
        reading=of.reading,
        text_reason=arm.untold,
        fitted=arm.fitted,
        recipe=arm.given if is_recipe(arm.given) else "",
        directory=f"{ARMS}/{arm.slug}",
        needs_passages=arm.method is not None and arm.method.needs_passages,
    )


def _withheld(unchanged: Evaluation, arm: Evaluation | None, measure: str) -> str:
    """Why generated answers without a method and with it tell nothing of it; empty if they do, or none decides.

    Too many of either cannot be judged, or more were cut off with the method, or fewer, which shows as a difference.
    """
    if measure not in GENERATED or arm is None:
        return ""
    for evaluation, of in ((unchanged, "without it"), (arm, "with it")):
        if evaluation.withheld:
            return f"{of}, {evaluation.withheld}"
    shares = np.column_stack([evaluation.tables["cut"].mean(axis=1) for evaluation in (unchanged, arm)])
    shares = shares[~np.isnan(shares).any(axis=1)]
    if len(shares) < SAMPLES_FOR_CLAIM or not shares.any():
        return ""
    p = contrast_of(shares, np.array([-1.0, 1.0])).p
    before, after = shares.mean(axis=0)
    return f"{before:.0%} of the answers were cut off without it, {after:.0%} with it (p {p:.2g})" if p < ALPHA else ""
