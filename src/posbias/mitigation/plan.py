"""The options of a trial, and its plan: task, samples, requests, arms and settings, resolved once, before any work.

The first samples of a task are for calibration: methods with parameters are fitted to them. The samples after them are
the test, which no fit sees. An arm is the unchanged model, or the model under one method; the phases of a trial take
the plan, and leave out arms whose methods do not apply.
"""

import hashlib
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from annotated_types import Ge
from jaxtyping import Int64

from posbias.checks import CountOrZero, NonNegative, OneOf, Steps, checked
from posbias.errors import UsageError
from posbias.evaluation import EvaluateOptions
from posbias.evaluation.levels import Requirement
from posbias.evaluation.responders import LocalResponder, Responder
from posbias.evaluation.run import DECIDING
from posbias.evaluation.samples import CALIBRATED, Sample, calibrating, samples_of
from posbias.measurement.measurement import directory_names
from posbias.mitigation.fitting import (
    JUDGED_TEXT,
    LEAST_SAMPLES,
    Fit,
    FitOptions,
    Windows,
    contents,
    fit_of,
    text_beside,
)
from posbias.mitigation.methods.applying import answering_under, resolve_method
from posbias.mitigation.methods.base import MITIGATIONS, Method, Mitigation
from posbias.mitigation.methods.recipe import Recipe, check_files, is_recipe
from posbias.mitigation.methods.temperature import Temperature
from posbias.models.hugging_face import HuggingFaceModel
from posbias.prompts.loading import load_prompts
from posbias.registry import split_literals
from posbias.runs.parts import PartStore, made_by
from posbias.tasks.language import Example, LanguageTask

ALL, DEFAULT = "all", "default"
"""Words for several methods at once; those that do not apply are left out with the reason."""
DEFAULT_METHODS = ("context_bias", "self_consistency(draws=3)", "temperature")
"""The methods that gained most often in nine places of studies/mitigation (9, 7 and 3), harmed there least (0, 1 and
0), and are fitted in minutes. `key_bias` gained in all nine, too: its fit takes seven times as many passes."""
JUDGING = 40
"""Samples that judge, if no number is given."""


@checked
@dataclass(frozen=True)
class MitigateOptions:
    """Methods that are tried, the samples that judge them, and the measure that decides."""

    methods: str | Sequence[Any] = DEFAULT
    """Spellings, objects or paths of recipes, listed or with commas between them; `all`: every registered method that
    applies; `default`: those of `DEFAULT_METHODS` that apply. A method with parameters to fit that is named without any
    is fitted to the calibration samples."""
    calibration: CountOrZero | None = None
    """Number of samples for fitting, which come first, >= 0; None: CALIBRATED, or a third of a file that has
    fewer than three times as many."""
    evaluation: EvaluateOptions = field(default_factory=EvaluateOptions)
    """Settings of the test, whose samples follow those for fitting: JUDGING, or what is left of a file; the run
    sets the directory."""
    by: Annotated[str, OneOf("accuracy", "starts", "logprob")] | None = None
    """Measure that decides: `accuracy` (the task's rule, such as that the right answer occurs), `starts` (that answers
    begin with it) or `logprob`; None: accuracy, unless it is near its floor or ceiling, or answers were cut off."""
    documents: CountOrZero = 16
    """Windows of ordinary text on which loss (nats per token) is compared (local models), >= 0; 0: none."""
    text: str = "default"
    """Source of that text, as for `load_prompts`; of the default corpus, two files judge and fits read the others."""
    length: Annotated[Steps, Ge(2)] = 256
    """Tokens of each window, >= 2."""
    tolerance: NonNegative = 0.02
    """Largest acceptable loss increase on ordinary text (nats per token), >= 0."""
    short: bool = True
    """Request the task's short forms, too, if it has any."""
    fitting: FitOptions = field(default_factory=FitOptions)
    """Settings of fits by gradient."""
    require: Requirement | None = None
    """A bound on the recommended model's curve, or on the unchanged one's if none is recommended."""

    def __post_init__(self) -> None:
        if isinstance(self.methods, str):
            methods = split_literals(self.methods)
            object.__setattr__(self, "methods", methods[0] if methods in ([ALL], [DEFAULT]) else methods)
        needed = "score" if self.by == "logprob" else "generate"
        if self.by is not None and not getattr(self.evaluation, needed):
            raise UsageError(f"mitigate: by {self.by} needs {needed}, which is switched off; leave out one of the two")
        self.evaluation.check_plain("mitigate")
        if self.evaluation.directory is not None:
            raise UsageError("mitigate: evaluation.directory is not read; give mitigate the directory of the run")
        if self.require is not None:
            self.evaluation.check_requirement(self.require)

    def following(self, task: LanguageTask) -> "MitigateOptions":
        """These settings for one task, as `EvaluateOptions.following`."""
        fitted = self.calibration
        if fitted is None:
            there = task.samples_there
            fitted = CALIBRATED if there is None else calibrating(there - self.evaluation.skip)
        ahead = replace(self.evaluation, skip=self.evaluation.skip + fitted)
        count = ahead.count_of(task, usual=JUDGING)
        replace(ahead, count=count).following(task)  # refuses a file with too few lines
        return replace(self, calibration=fitted, evaluation=replace(self.evaluation, count=count))

    @property
    def entries(self) -> list[Any]:
        """Spellings, objects and paths one by one, those of `all` and `default` among them."""
        if isinstance(self.methods, str):
            return list(MITIGATIONS if self.methods == ALL else DEFAULT_METHODS)
        return list(self.methods)


UNCHANGED = "unchanged"
"""Name of the arm without a method."""
ARMS = "arms"
"""Directory below the run's, of the arms' evaluations and of pieces that a finished run keeps: fits, and what ordinary
text is under a method, which another call may take over."""
EVALUATED = ("seed", "generate", "score", "max_tokens", "thinking_tokens", "answer_pattern")
"""Settings of the evaluation that a record depends on."""


@dataclass(frozen=True, eq=False)
class Arm:
    """One arm of a trial: the unchanged model, or the model under one method."""

    name: str
    plain: Responder
    """The responder without a method."""
    given: Any = None
    """The method's spelling, object, or path of a recipe, as it was given."""
    method: Method | None = None
    """The method that answers; None: the unchanged model, or a method that is still to be fitted."""
    fit: Fit | None = None
    """The fit that finds the method; None if it has all its parameters."""
    fitted: dict[str, Any] | None = None
    """How the method was fitted; None if it was not."""

    @property
    def path(self) -> str:
        """Path of the recipe that it was read from; empty if it was not."""
        return self.given if is_recipe(self.given) else ""

    @property
    def slug(self) -> str:
        """Name of its directory: readable, and different for different methods, recipes and runs that they follow."""
        if self.name == UNCHANGED:
            return UNCHANGED
        return slug_of(self.name, str(self.method) if self.path else "")

    @cached_property
    def answering(self) -> Responder:
        """The responder that answers in this arm, one for all that it is asked: caches and padding are tried once."""
        return self.plain if self.method is None else answering_under(self.method, self.plain)

    @property
    def model(self) -> HuggingFaceModel | None:
        """The model itself; None if it is behind a server."""
        return self.plain.model if isinstance(self.plain, LocalResponder) else None


def slug_of(name: str, distinction: str = "") -> str:
    """A directory's name: the beginning of a name, and a hash of all of it with what else distinguishes it."""
    readable = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")[:40]
    return f"{readable}-{hashlib.sha256(f'{name}{distinction}'.encode()).hexdigest()[:8]}"


@dataclass(frozen=True, eq=False)
class Questions:
    """One task as it is put to an arm."""

    task: LanguageTask
    options: EvaluateOptions
    samples: tuple[Sample, ...]

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
    arms: list[Arm]
    """The unchanged model first."""
    text: Int64[np.ndarray, "documents token"] | None = None
    """Windows of ordinary text that judge; None without any, or if the model is behind a server."""
    fitting_text: Callable[[], Windows] = tuple
    """Reads windows of other text, as long, for fits."""
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
                if self.options.methods not in (ALL, DEFAULT):
                    raise
                self.left_out.append(f"{arm.name} was not tried: {error}")
        self.keep(arms)

    def keep(self, arms: Sequence[Arm]) -> None:
        """Go on with these arms alone; without a method there is nothing to try."""
        self.arms = list(arms)
        if len(arms) == 1:
            raise UsageError(f"mitigate: no method to try ({'; '.join(self.left_out) or 'none is given'})")

    def with_method(self, arm: Arm) -> Arm:
        """The arm with its method, or with the fit that is to find it.

        Raises:
            UsageError: an unknown method, one that needs a model at hand, or too few samples for a fit.
        """
        given, samples = arm.given, self.options.calibration or 0
        if given is None:
            return arm
        fit = fit_of(given) if isinstance(given, str) and not arm.path else None
        name = str(given).partition("(")[0].strip()
        if fit is None or (name == Temperature.name and not samples):  # its scale has a default
            method = resolve_method(given, arm.model)
            if arm.model is None and isinstance(method, Mitigation):
                raise UsageError(f"{method.name} needs the model itself, not one behind a server")
            return replace(arm, method=method)
        if arm.model is None:
            raise UsageError(f"{name} is fitted and needs the model itself, not one behind a server")
        if samples < LEAST_SAMPLES:
            raise UsageError(f"{name} is fitted and needs calibration samples, at least {LEAST_SAMPLES}; got {samples}")
        return replace(arm, fit=fit)


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
    recipes = {entry: Recipe.read(entry) for entry in filter(is_recipe, entries)}
    names = {path: name for name, path in directory_names(list(recipes)).items()} if recipes else {}
    arms = [Arm(names.get(str(entry), str(entry)), responder, given=entry) for entry in entries]
    plan = TrialPlan(options, calibration, test, forms, [Arm(UNCHANGED, responder), *arms])
    if plan.model is not None:
        source = JUDGED_TEXT if options.text == DEFAULT else options.text
        length = min(options.length, plan.model.max_positions or options.length)
        windows: dict[str, Any] = {"model": plan.model, "seed": options.evaluation.seed}
        if options.documents:
            plan.text = load_prompts(source, n_positions=length, count=options.documents, **windows).token_ids
        plan.fitting_text = partial(text_beside, source, length=length, **windows)
    plan.each(plan.with_method)
    all_names = [arm.name for arm in plan.arms]
    twice = [name for name in all_names if all_names.count(name) > 1]
    if twice:
        raise UsageError(f"mitigate: {twice[0]} is given twice; give each method once")
    for path, recipe in recipes.items():
        again = [one.name for one in test.samples if contents(one.examples).intersection(recipe.fitted.samples)]
        if again:
            raise UsageError(
                f"{path!r} was fitted to {len(again)} of the {len(test.samples)} test samples ({again[0]} first); take "
                "others, by another --seed, or those that follow them in a file (--calibration)"
            )
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
