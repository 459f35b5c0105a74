"""The plan of a trial: task, samples, requests, arms and settings, resolved once, before any work, and frozen.

The first samples of a task are for calibration: methods with parameters are fitted to them. The samples after them are
the test, which no fit sees. All phases of a trial take the plan and the results of earlier phases.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Int64

from posbias.errors import UsageError
from posbias.evaluation import EvaluateOptions
from posbias.evaluation.responders import LocalResponder, Request, Responder
from posbias.evaluation.run import DECIDING
from posbias.evaluation.samples import Sample, requests_of, samples_of
from posbias.mitigation.fitting.calibration import contents
from posbias.mitigation.methods.recipe import samples_of_recipe
from posbias.mitigation.trial.arms import Arm, resolve_arms
from posbias.mitigation.trial.files import check_files, contents_sha256, is_recipe
from posbias.mitigation.trial.options import MitigateOptions
from posbias.models.hugging_face import HuggingFaceModel
from posbias.runs.parts import PartStore, clear_unfinished, made_by
from posbias.tasks.language import Example, LanguageTask

ARMS = "arms"
"""Directory below the run's, of the arms' evaluations and of pieces that a finished run keeps: fits, and what ordinary
text is under a method, which another call may take over."""
EVALUATED = ("seed", "generate", "score", "max_tokens", "thinking_tokens", "answer_pattern")
"""Settings of the evaluation that a record depends on."""
OF_THE_WHOLE = ("methods", "require", "by", "tolerance")
"""Settings that the fit and the side effects of one method do not depend on: a run, interrupted or finished, goes on
with more methods, or fewer, without fitting again."""


@dataclass(frozen=True, eq=False)
class Questions:
    """One task as it is put to an arm."""

    task: LanguageTask
    options: EvaluateOptions
    samples: tuple[Sample, ...]

    @cached_property
    def requests(self) -> list[Request]:
        """One request for each sample and position."""
        return requests_of(self.samples, self.task, self.options)

    @property
    def examples(self) -> list[Example]:
        """All examples of the samples."""
        return [example for sample in self.samples for example in sample.examples]


@dataclass(frozen=True, eq=False)
class TrialPlan:
    """Everything that a trial is to do."""

    options: MitigateOptions
    calibration: Questions
    test: Questions
    short_forms: tuple[Questions, ...]
    settings: Mapping[str, Any]
    """Everything that the record depends on."""
    arms: tuple[Arm, ...]
    """The unchanged model first."""
    left_out: tuple[str, ...] = ()
    text: Int64[np.ndarray, "documents token"] | None = None
    """Windows of ordinary text that judge; None before the run begins, and if there are none."""
    directory: Path | None = None
    """The run's directory; None keeps nothing."""
    unfinished: PartStore = field(default_factory=lambda: PartStore(None, {}, resume=False))
    """Pieces that go when the record is saved."""
    lasting: PartStore = field(default_factory=lambda: PartStore(None, {}, resume=False))
    """Pieces that stay for another call."""

    @property
    def responder(self) -> Responder:
        """The responder of the unchanged model."""
        return self.arms[0].plain

    @property
    def model(self) -> HuggingFaceModel | None:
        """The model itself; None if it is behind a server."""
        return self.arms[0].model

    def with_arms(self, arms: Sequence[Arm], left_out: Sequence[str]) -> "TrialPlan":
        """The plan with fewer, or fitted, arms and with what was left out for it."""
        if len(arms) == 1:
            reasons = "; ".join([*self.left_out, *left_out])
            raise UsageError(f"mitigate: no method to try ({reasons or 'none is given'})")
        return replace(self, arms=tuple(arms), left_out=(*self.left_out, *left_out))

    def opened(self, directory: Path | None) -> "TrialPlan":
        """The plan with the directory of the run, where its pieces are kept."""
        files = {name: self.settings["files"].get(name) for name in (self.options.fitting.begin, self.options.text)}
        of_one_method = {name: value for name, value in self.settings.items() if name not in OF_THE_WHOLE}
        of_one_method["files"] = {name: digest for name, digest in files.items() if digest}
        evaluation = self.options.evaluation
        how = {"resume": evaluation.resume, "overwrite": evaluation.overwrite}
        lasting = None if directory is None else directory / ARMS
        if lasting is not None:
            clear_unfinished(lasting)
        unfinished, staying = PartStore(directory, of_one_method, **how), PartStore(lasting, of_one_method, **how)
        return replace(self, directory=directory, unfinished=unfinished, lasting=staying)


def plan_trial(responder: Responder, task: LanguageTask, options: MitigateOptions) -> TrialPlan:
    """Resolve everything that a trial is to do.

    Raises:
        UsageError: an unknown method or one that does not fit the model, too few samples, calibration samples that
            occur in the test again, recipes that were fitted to test samples, or files that are not there.
    """
    if not options.engine.in_process and not isinstance(responder, LocalResponder):
        raise UsageError("workers load the model themselves, so they go with a local one, not with --server")
    if options.by == "logprob" and getattr(responder, "scores", None) is False:
        raise UsageError("mitigate: by logprob needs scores, which this server does not give; allowed is accuracy")
    entries, evaluation = options.entries, options.evaluation
    check_files(entries, options.fitting.begin)
    calibration, test = _split_samples(responder, task, options)
    short_options = replace(test.options, positions="spread")
    short_forms = tuple(
        Questions(form, short_options, tuple(samples_of(form, responder.tokenizer, short_options)))
        for form in (task.short_forms if options.short else ())
    )
    arms, left_out = resolve_arms(
        entries,
        responder,
        calibration=options.calibration,
        unnamed=options.unnamed,
    )
    _check_unseen([*filter(is_recipe, entries), *filter(None, [options.fitting.begin])], test.samples)
    set_options = {name: value for name, value in vars(options).items() if name not in ("evaluation", "engine")}
    settings = {
        **set_options,
        "verb": "mitigate",
        "task": str(task),
        "methods": [str(entry) for entry in entries],
        "files": contents_sha256(entries, begin=options.fitting.begin, text=options.text),
        "require": str(options.require),
        "fitting": vars(options.fitting),
        **{name: getattr(evaluation, name) for name in EVALUATED},
        "samples": [sample.piece for sample in (*calibration.samples, *test.samples)],
        "responder": {name: value for name, value in responder.describe().items() if name in DECIDING},
        "made_by": made_by(),
    }
    plan = TrialPlan(options, calibration, test, short_forms, settings, (arms[0],))
    return plan.with_arms(arms, left_out)


def _split_samples(responder: Responder, task: LanguageTask, options: MitigateOptions) -> tuple[Questions, Questions]:
    """Calibration samples, and the test samples after them; none of the first may occur among the second again."""
    evaluation, count = options.evaluation, options.calibration
    together = replace(evaluation, count=count + evaluation.count)
    try:
        samples = tuple(samples_of(task, responder.tokenizer, together))
    except UsageError as error:  # a file with too few lines
        requested = f"{evaluation.count} to judge and {count} for calibration asked"
        raise UsageError(str(error).replace(f"{together.count} asked", requested)) from None
    calibrated = {content: sample.name for sample in samples[:count] for content in contents(sample.examples)}
    for sample in samples[count:]:
        again = next((calibrated[content] for content in contents(sample.examples) if content in calibrated), None)
        if again is not None:
            raise UsageError(
                f"test sample {sample.name} is calibration sample {again} again, but the two must not overlap; does "
                "the file hold a line twice?"
            )
    # Nothing is counted for the calibration alone, so its count may be any.
    measured = replace(evaluation, count=max(count, 1), directory=None, resume=False)
    return (
        Questions(task, measured, samples[:count]),
        Questions(task, replace(evaluation, skip=evaluation.skip + count), samples[count:]),
    )


def _check_unseen(recipes: Sequence[str], test: Sequence[Sample]) -> None:
    """Refuse recipes, to try or to begin a fit at, that were fitted to test samples."""
    for path in recipes:
        fitted_to = samples_of_recipe(path)
        again = [sample.name for sample in test if fitted_to & contents(sample.examples)]
        if again:
            raise UsageError(
                f"{path!r} was fitted to {len(again)} of the {len(test)} test samples ({again[0]} first); take "
                "others, by another --seed, or those that follow them in a file (--calibration)"
            )
