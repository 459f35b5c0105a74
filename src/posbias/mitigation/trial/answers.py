"""The phase *answer*: every arm answers the test and the short forms, each an evaluation with a record of its own.

With workers, one sample under one method is a unit of work, in whatever process. A worker loads the model once and
answers under every method. What it makes is what the arm's own evaluation would, to the rounding of prompts that share
other beginnings.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from posbias.errors import UsageError
from posbias.evaluation import (
    EvaluateOptions,
    evaluate_responder,
    finish_evaluation,
)
from posbias.evaluation.responders import LocalOptions, LocalResponder, Responder
from posbias.evaluation.run import NothingAnsweredError, answer_samples
from posbias.evaluation.samples import Pieces, Sample
from posbias.mitigation.methods.applying import answering_under
from posbias.mitigation.methods.base import Method
from posbias.mitigation.trial.arms import Arm, slug_of
from posbias.mitigation.trial.plan import ARMS, Questions, TrialPlan
from posbias.models.loading import load_same
from posbias.models.model import ModelRequest
from posbias.models.weights import network_sha256
from posbias.runs.engines import collect
from posbias.runs.records import Record
from posbias.runs.running import run_directory
from posbias.tasks.language import LanguageTask


@dataclass(frozen=True, eq=False)
class Answers:
    """The evaluations of all arms."""

    test: tuple[Record, ...]
    """One for each arm, the unchanged model first."""
    short: Mapping[str, tuple[Record | None, ...]]
    """One for each short form and arm; None if a method does not apply to the form."""


def answer(plan: TrialPlan) -> tuple[TrialPlan, Answers]:
    """The plan without methods that answered nothing, and the evaluations of the others."""
    pieces = [{}] * len(plan.arms) if plan.options.engine.in_process else _answers_of_workers(plan)
    arms, records, left_out = [], [], []
    for arm, answered in zip(plan.arms, pieces, strict=True):
        try:
            records.append(_evaluated(plan, arm, plan.test, answered=answered))
            arms.append(arm)
        except NothingAnsweredError as error:
            if arm is plan.arms[0]:
                raise
            left_out.append(f"{arm.name}: {error}")
    plan = plan.with_arms(arms, left_out)
    short: dict[str, tuple[Record | None, ...]] = {}
    left_out = []
    for form in plan.short_forms:
        by_arm: list[Record | None] = []
        for arm in plan.arms:
            try:
                by_arm.append(_evaluated(plan, arm, form, within=slug_of(str(form.task))))
            except UsageError as error:
                if arm is plan.arms[0]:
                    raise
                by_arm.append(None)
                left_out.append(f"{form.task} was not put to {arm.name}: {error}")
        short[str(form.task)] = tuple(by_arm)
    return plan.with_arms(plan.arms, left_out), Answers(tuple(records), short)


def _evaluated(
    plan: TrialPlan,
    arm: Arm,
    questions: Questions,
    *,
    within: str = "",
    answered: Mapping[str, Pieces] | None = None,
) -> Record:
    """The evaluation of one arm, in a directory of its own; a finished one is taken over."""
    place = None if plan.directory is None else plan.directory / ARMS / arm.slug / within
    arguments = {"task": str(questions.task), "method": arm.name}
    resume = questions.options.resume
    # What the whole run may replace is checked once, for the directory of the whole.
    with run_directory(place, verb="evaluate", arguments=arguments, resume=resume, overwrite=True) as run:
        options, responder = replace(questions.options, directory=run.directory), arm.answering
        evaluation = evaluate_responder(responder, questions.task, options, answered=answered)
        finish_evaluation(evaluation, run)
    return evaluation.record


@dataclass(frozen=True)
class AnswerWork:
    """The samples of every arm, arm by arm, as work for an engine."""

    request: ModelRequest | None
    network_sha256: str
    local: LocalOptions
    methods: tuple[Method | None, ...]
    """The method of every arm; None: the unchanged model."""
    task: LanguageTask
    samples: tuple[Sample, ...]
    options: EvaluateOptions
    description: str = "answers under all methods"

    def prepare(self) -> list[Responder]:
        """The responder of every arm."""
        plain = LocalResponder(load_same(self.request, self.network_sha256), self.local)
        return [plain if method is None else answering_under(method, plain) for method in self.methods]

    def compute(self, prepared: list[Responder], unit: int) -> Pieces:
        """One sample in one arm."""
        arm, sample = divmod(unit, len(self.samples))
        (piece,) = answer_samples([self.samples[sample]], self.task, self.options, prepared[arm])
        return piece


def _answers_of_workers(plan: TrialPlan) -> list[dict[str, Pieces]]:
    """The answers of every arm, by `Sample.piece`; each kept as soon as it is there. Errors as `Engine.run`."""
    responder, test = plan.responder, plan.test
    assert isinstance(responder, LocalResponder)  # as `plan_trial` has checked
    work = AnswerWork(
        request=responder.model.reload_request,
        network_sha256=network_sha256(responder.model.network),
        local=responder.options,
        methods=tuple(arm.method for arm in plan.arms),
        task=test.task,
        samples=test.samples,
        options=test.options,
    )
    names = [f"{arm.slug}-{sample.piece}" for arm in plan.arms for sample in test.samples]
    pieces = iter(collect(work, names, engine=plan.options.engine, store=plan.unfinished))
    return [{sample.piece: next(pieces) for sample in test.samples} for _ in plan.arms]
