"""The plan of a trial: task, samples, requests, arms and settings, resolved once, before any work.

The first samples of a task are for calibration: methods with parameters are fitted to them. The samples after them are
the test, which no fit sees. The phases of a trial take the plan, and leave out arms whose methods do not apply.
"""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Int64

from posbias.errors import UsageError
from posbias.evaluation import EvaluateOptions
from posbias.evaluation.responders import Request, Responder
from posbias.evaluation.run import DECIDING
from posbias.evaluation.samples import Sample, requests_of, samples_of
from posbias.mitigation.fitting.calibration import DEFAULT, JUDGED_FILES, contents
from posbias.mitigation.methods.recipe import Recipe, check_files, is_recipe
from posbias.mitigation.trial.arms import UNCHANGED, Arm, arm_of, recipe_names
from posbias.mitigation.trial.options import MitigateOptions
from posbias.models.hugging_face import HuggingFaceModel
from posbias.prompts.loading import load_prompts
from posbias.runs.parts import PartStore, made_by
from posbias.tasks.language import Example, LanguageTask

ARMS = "arms"
"""Directory below the run's, of the arms' evaluations and of pieces that a finished run keeps: fits, and what ordinary
text is under a method, which another call may take over."""
EVALUATED = ("seed", "generate", "score", "max_tokens", "thinking_tokens", "answer_pattern")
"""Settings of the evaluation that a record depends on."""
OF_THE_WHOLE = ("methods", "recipes", "require", "by", "tolerance")
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


@dataclass(eq=False)
class TrialPlan:
    """Everything that a trial is to do."""

    options: MitigateOptions
    calibration: Questions
    test: Questions
    short_forms: tuple[Questions, ...]
    text: Int64[np.ndarray, "documents token"] | None
    """Windows of ordinary text that judge; None without any, or if the model is behind a server."""
    arms: list[Arm]
    """The unchanged model first."""
    left_out: list[str] = field(default_factory=list)
    """What was left out, and why."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Everything that the record depends on."""
    directory: Path | None = None
    """The run's directory; None keeps nothing."""
    store: PartStore = field(default_factory=lambda: PartStore(None, {}))
    """Fits, and what ordinary text is under a method; they stay for another call."""

    @property
    def model(self) -> HuggingFaceModel | None:
        """The model itself; None if it is behind a server."""
        return self.arms[0].model

    def each(self, step: Callable[[Arm], Arm]) -> None:
        """Put what a step makes of it in place of every arm.

        A method that does not apply is refused if it was named, and left out with the reason otherwise.
        """
        arms = []
        for arm in self.arms:
            try:
                arms.append(step(arm))
            except UsageError as error:
                if not self.options.unnamed:
                    raise
                self.left_out.append(f"{arm.name} was not tried: {error}")
        self.keep(arms)

    def keep(self, arms: Sequence[Arm]) -> None:
        """Go on with these arms alone; without a method there is nothing to try."""
        self.arms = list(arms)
        if len(arms) == 1:
            raise UsageError(f"mitigate: no method to try ({'; '.join(self.left_out) or 'none is given'})")

    def open(self, directory: Path | None) -> None:
        """Take the directory of the run, where pieces are kept."""
        of_one_method = {name: value for name, value in self.settings.items() if name not in OF_THE_WHOLE}
        self.directory = directory
        self.store = PartStore(None if directory is None else directory / ARMS, of_one_method)


def plan_trial(responder: Responder, task: LanguageTask, options: MitigateOptions) -> TrialPlan:
    """Resolve everything that a trial is to do.

    Raises:
        UsageError: an unknown method or one that does not fit the model, too few samples, calibration samples that
            occur in the test again, recipes that were fitted to test samples, or files that are not there.
    """
    if options.by == "logprob" and getattr(responder, "scores", None) is False:
        raise UsageError("mitigate: by logprob needs scores, which this server does not give; allowed is accuracy")
    entries = options.entries
    check_files(entries)
    calibration, test = _split_samples(responder, task, options)
    short = replace(test.options, positions="spread")
    forms = tuple(
        Questions(form, short, tuple(samples_of(form, responder.tokenizer, short)))
        for form in (task.short_forms if options.short else ())
    )
    unchanged = Arm(UNCHANGED, responder)
    plan = TrialPlan(options, calibration, test, forms, _judged_windows(unchanged.model, options), [unchanged])
    recipes = {entry: Recipe.read(entry) for entry in filter(is_recipe, entries)}
    _resolve(plan, entries, recipes)
    _check_unseen(recipes, test.samples)
    plan.settings = {
        **{name: value for name, value in vars(options).items() if name != "evaluation"},
        "verb": "mitigate",
        "task": str(task),
        "methods": [str(entry) for entry in entries],
        "recipes": {path: recipe.model_dump() for path, recipe in recipes.items()},
        "windows": None if plan.text is None else hashlib.sha256(plan.text.tobytes()).hexdigest(),
        "require": str(options.require),
        "fitting": vars(options.fitting),
        **{name: getattr(options.evaluation, name) for name in EVALUATED},
        "samples": [sample.piece for sample in (*calibration.samples, *test.samples)],
        "responder": {name: value for name, value in responder.describe().items() if name in DECIDING},
        "made_by": made_by(),
    }
    return plan


def _resolve(plan: TrialPlan, entries: Sequence[Any], recipes: Mapping[str, Recipe]) -> None:
    """Give the plan an arm for every method, once each."""
    unchanged, options = plan.arms[0], plan.options
    names = recipe_names(list(recipes), {UNCHANGED, *(str(entry) for entry in entries if entry not in recipes)})
    arms = [Arm(names.get(str(entry), str(entry)), unchanged.plain, given=entry) for entry in entries]
    plan.arms = [unchanged, *arms]
    plan.each(lambda arm: arm if arm is unchanged else arm_of(arm, calibration=options.calibration or 0))
    all_names = [arm.name for arm in plan.arms]
    twice = [name for name in all_names if all_names.count(name) > 1]
    if twice:
        raise UsageError(f"mitigate: {twice[0]} is given twice; give each method once")


def text_source(options: MitigateOptions) -> str:
    """The ordinary text that judges."""
    return f"{DEFAULT}#{JUDGED_FILES}" if options.text == DEFAULT else options.text


def window_length(model: HuggingFaceModel, options: MitigateOptions) -> int:
    """Tokens of each window of ordinary text."""
    return options.length if model.max_positions is None else min(options.length, model.max_positions)


def _judged_windows(
    model: HuggingFaceModel | None, options: MitigateOptions
) -> Int64[np.ndarray, "documents token"] | None:
    """Windows of ordinary text that judge; None if none were asked for, or the model is behind a server."""
    if model is None or not options.documents:
        return None
    length, seed = window_length(model, options), options.evaluation.seed
    source = text_source(options)
    return load_prompts(source, model=model, n_positions=length, seed=seed, count=options.documents).token_ids


def _split_samples(responder: Responder, task: LanguageTask, options: MitigateOptions) -> tuple[Questions, Questions]:
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
    # Nothing is counted for the calibration alone, so its count may be any.
    measured = replace(evaluation, count=max(count, 1), directory=None, resume=False)
    return (
        Questions(task, measured, samples[:count]),
        Questions(task, replace(evaluation, skip=evaluation.skip + count), samples[count:]),
    )


def _check_unseen(recipes: Mapping[str, Recipe], test: Sequence[Sample]) -> None:
    """Refuse recipes that were fitted to test samples."""
    for path, recipe in recipes.items():
        again = [sample.name for sample in test if contents(sample.examples).intersection(recipe.fitted.samples)]
        if again:
            raise UsageError(
                f"{path!r} was fitted to {len(again)} of the {len(test)} test samples ({again[0]} first); take "
                "others, by another --seed, or those that follow them in a file (--calibration)"
            )
