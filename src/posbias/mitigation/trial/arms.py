"""Who is compared: the model as it is, and under one method each, resolved, tried and fitted before anything is judged.

The first samples of a task are for calibration: methods with parameters are fitted to them. The samples after them are
the test, which no fit sees.
"""

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from jaxtyping import Int64

from posbias.checks import check_number, check_size, checked
from posbias.errors import UsageError
from posbias.evaluation import EvaluateOptions, evaluate_responder, measured_use, place
from posbias.evaluation.curve import SAMPLES_FOR_CLAIM
from posbias.evaluation.responders import LocalResponder, Request, Responder
from posbias.evaluation.samples import Sample, as_bytes, read_json, requests_of, samples_of
from posbias.limits import EXAMPLES, TOKENS
from posbias.mitigation.fitting.calibration import LEAST_SAMPLES, contents
from posbias.mitigation.fitting.checkpoint import Checkpoint
from posbias.mitigation.fitting.cost import preflight_fit
from posbias.mitigation.fitting.fit import SEARCHED, FitOptions, fit
from posbias.mitigation.judging.requirements import Requirement
from posbias.mitigation.methods.applying import answering_under, resolve_method
from posbias.mitigation.methods.base import MITIGATIONS, Method, Mitigation
from posbias.mitigation.methods.recipe import samples_of_recipe
from posbias.mitigation.methods.rewriting import Ordered
from posbias.mitigation.trial.files import is_recipe, recipe_names, run_sha256
from posbias.models.hugging_face import HuggingFaceModel
from posbias.models.model import Model
from posbias.runs.engines import Engine, Local
from posbias.runs.parts import PartStore
from posbias.tasks.language import LanguageTask

UNCHANGED = "unchanged"
"""Name of the arm without a method."""
ALL, DEFAULT = "all", "default"
"""Words for several methods at once, of which those that do not apply are left out with the reason."""
DEFAULT_METHODS = ("context_bias", "self_consistency(draws=3)", "temperature")
"""Those that gained most often in nine places of studies/mitigation (9, 7 and 3), harmed there least (0, 1 and 0), and
are fitted in minutes. `key_bias` gained in all nine, too: its fit takes seven times as many passes."""


@checked
@dataclass(frozen=True)
class MitigateOptions:
    """What is tried, and what it is judged by."""

    methods: str | Sequence[Any] = DEFAULT
    """Spellings, objects or paths of recipes; `all`: every registered method that applies; `default`: those of
    `DEFAULT_METHODS` that do. A method with parameters to
    fit that is named without any is fitted to the calibration samples; `ordered` follows the unchanged model's curve
    on them."""
    calibration: int = 12
    """Samples that come first, for fitting, >= 0."""
    evaluation: EvaluateOptions = field(default_factory=lambda: EvaluateOptions(count=40))
    """The test: as many samples after those, at the same positions. Its directory is set by the run."""
    by: str | None = None
    """Measure that decides: `accuracy` (the task's rule, such as that the right answer occurs), `starts` (that answers
    begin with it) or `logprob`; None: accuracy, unless it is near its floor or ceiling, or answers were cut off."""
    documents: int = 16
    """Windows of ordinary text on which perplexity is compared (local models), >= 0; 0: none."""
    text: str = "default"
    """Where they come from, a source of `load_prompts`; of "default" two files of the corpus judge. Fits read the files
    of the corpus that do not judge."""
    length: int = 256
    """Of each window in tokens, >= 2."""
    tolerance: float = 0.02
    """Nats per token of ordinary text that a method may cost, >= 0."""
    short: bool = True
    """Whether the task's short forms are requested, where it has any."""
    fitting: FitOptions = field(default_factory=FitOptions)
    """Of a key bias, and the strengths from which fits choose."""
    influence: int = 0
    """Test samples on which influence is measured before and after every method inside the model, >= 0; 0: none."""
    engine: Engine = field(default_factory=Local)
    """Which processes or machines answer; fits, texts, short forms and influence stay in this one."""
    require: Requirement | None = None
    """Of the recommended model, or of the unchanged one where no method is."""

    def __post_init__(self) -> None:
        check_size("mitigate: influence", self.influence, EXAMPLES, least=0)
        check_size("mitigate: calibration", self.calibration, EXAMPLES, least=0)
        check_size("mitigate: documents", self.documents, EXAMPLES, least=0)
        check_size("mitigate: length", self.length, TOKENS, least=2)
        check_number("mitigate: tolerance", self.tolerance)
        made = dict.fromkeys(("accuracy", "starts"), self.evaluation.generate) | {"logprob": self.evaluation.score}
        if self.by is not None and self.by not in made:
            raise UsageError(f"mitigate: by must be accuracy, starts or logprob, got {self.by!r}")
        if self.by is not None and not made[self.by]:
            needed = "generated answers (generate)" if self.by != "logprob" else "scores of right answers (score)"
            raise UsageError(
                f"mitigate: by {self.by} needs {needed}, which are switched off; allow them or leave by out"
            )
        if self.require is not None and not self.require.possible and not self.evaluation.generate:
            raise UsageError(
                f"require {self.require}: without generated answers it is about log-probabilities, which are below 0"
            )

    @property
    def unnamed(self) -> bool:
        """Whether methods were not named one by one, so that those which do not apply are left out, not refused."""
        return self.methods in (ALL, DEFAULT)

    @property
    def test(self) -> EvaluateOptions:
        """The test samples: those after the calibration samples."""
        return replace(self.evaluation, skip=self.evaluation.skip + self.calibration)

    @property
    def weighed(self) -> EvaluateOptions:
        """The test samples on which influence is measured; there must be some."""
        return replace(self.test, count=min(self.influence, self.evaluation.count))


def slug_of(name: str, told: str = "") -> str:
    """Name of a directory: the beginning of a name, and a hash of all of it with what else tells it from others."""
    readable = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")[:40]
    return f"{readable}-{hashlib.sha256(f'{name}{told}'.encode()).hexdigest()[:8]}"


@dataclass(frozen=True, eq=False)
class Arm:
    """The model as it is, or under one method."""

    name: str
    responder: Responder
    """The one without a method."""
    method: Method | None = None
    """None: the unchanged model, or a method that is still to be fitted."""
    follows: str = ""
    """Hash of the run that the method follows, which its spelling only names; empty where it follows none."""
    path: str = ""
    """Of the recipe that it was read from; empty where it was not."""

    @property
    def slug(self) -> str:
        """Name of its directory: readable, and different for different methods, recipes and runs that they follow."""
        if self.name == UNCHANGED:
            return UNCHANGED
        return slug_of(self.name, f"{self.follows}{self.method if self.path else ''}")

    @property
    def answering(self) -> Responder:
        """Who answers in it."""
        return self.responder if self.method is None else answering_under(self.method, self.responder)

    @property
    def model(self) -> Model | None:
        """The model itself; None where it is behind a server."""
        return self.responder.model if isinstance(self.responder, LocalResponder) else None


def split_samples(
    task: LanguageTask, responder: Responder, options: MitigateOptions
) -> tuple[list[Sample], list[Sample]]:
    """Calibration samples, and the test samples after them; none of the first may occur among the second again."""
    together = replace(options.evaluation, count=options.calibration + options.evaluation.count)
    try:
        samples = list(samples_of(task, responder.tokenizer, together))
    except UsageError as error:  # a file with too few lines
        asked = f"{options.evaluation.count} to judge and {options.calibration} for calibration asked"
        raise UsageError(str(error).replace(f"{together.count} asked", asked)) from None
    calibration, test = samples[: options.calibration], samples[options.calibration :]
    seen = {content: sample.name for sample in calibration for content in contents(sample.examples)}
    for sample in test:
        again = next((seen[content] for content in contents(sample.examples) if content in seen), None)
        if again is not None:
            raise UsageError(
                f"test sample {sample.name} is calibration sample {again} again, but the two must not overlap; does "
                "the file hold a line twice?"
            )
    return calibration, test


def check_unseen(options: MitigateOptions, test: Sequence[Sample]) -> None:
    """Refuse recipes that were fitted to test samples, and fits that go on from one."""
    begun = [options.fitting.begin] if options.fitting.begin else []
    for entry in [*filter(is_recipe, given_methods(options)), *begun]:
        seen = samples_of_recipe(entry)
        again = [sample.name for sample in test if seen & contents(sample.examples)]
        if again:
            raise UsageError(
                f"{entry!r} was fitted to {len(again)} of the {len(test)} test samples ({again[0]} first); take "
                "others, by another --seed, or those that follow them in a file (--calibration)"
            )


def given_methods(options: MitigateOptions) -> list[Any]:
    """The entries of `MitigateOptions.methods`, all names for `all`."""
    if isinstance(options.methods, str):
        several = {ALL: list(MITIGATIONS), DEFAULT: list(DEFAULT_METHODS)}
        return several.get(options.methods, [options.methods])
    return list(options.methods)


def is_fitted(entry: Any, options: MitigateOptions) -> bool:
    """Whether an entry names a method alone that has parameters to fit, and there are samples to fit them to."""
    if not isinstance(entry, str) or entry not in MITIGATIONS:
        return False
    kind = MITIGATIONS[entry]
    if kind is Ordered:
        return options.calibration > 0
    return entry in SEARCHED or (bool(getattr(kind, "grid", None)) and options.calibration > 0)


def arms_of(
    responder: Responder, options: MitigateOptions, task: LanguageTask, sample: Sample
) -> tuple[list[Arm], list[str]]:
    """The unchanged model and every method that could be read, none asked for anything yet.

    A method that does not apply is refused where it was named, and else left out, with the reason.
    """
    request = replace(requests_of([sample], task, options.test)[0], max_tokens=1)
    arms, left_out, given = [Arm(UNCHANGED, responder)], [], given_methods(options)
    recipes = list(filter(is_recipe, given))
    names = recipe_names(recipes, {UNCHANGED, *(str(entry) for entry in given if entry not in recipes)})
    for entry in given:
        try:
            if is_fitted(entry, options):
                _check_fit(entry, responder, options, task, request)
                arms.append(Arm(str(entry), responder))
            else:
                arms.append(_arm(entry, responder, name=names.get(str(entry), str(entry))))
        except UsageError as error:
            if not options.unnamed:
                raise
            left_out.append(f"{entry} was not tried: {error}")
    called = [arm.name for arm in arms]
    twice = [name for name in called if called.count(name) > 1]
    if twice:
        raise UsageError(f"mitigate: {twice[0]} is given twice; give each method once")
    if len(arms) == 1:
        raise UsageError(f"mitigate: no method to try ({'; '.join(left_out) or 'none is given'})")
    return arms, left_out


def _check_fit(
    entry: str, responder: Responder, options: MitigateOptions, task: LanguageTask, request: Request
) -> None:
    """Refuse, before any work, a method that cannot be fitted to what there is."""
    local = isinstance(responder, LocalResponder)
    if (not local and entry != Ordered.name) or not options.calibration:
        missing = "the model itself, not one behind a server" if not local else "calibration samples; got 0"
        raise UsageError(f"{entry} is fitted and needs {missing}")
    if entry == Ordered.name:
        Ordered(order=range(task.n_items)).asked(request, responder)
        if options.calibration < SAMPLES_FOR_CLAIM:
            raise UsageError(
                f"ordered follows a measured curve, which takes {SAMPLES_FOR_CLAIM} calibration samples; "
                f"got {options.calibration}"
            )
    elif options.calibration < LEAST_SAMPLES:
        raise UsageError(
            f"{entry} is fitted: {options.calibration} calibration samples given; at least {LEAST_SAMPLES} are needed"
        )


def _arm(entry: Any, responder: Responder, *, name: str) -> Arm:
    """The arm of a method with all its parameters."""
    local = isinstance(responder, LocalResponder)
    method = resolve_method(entry, responder.model if isinstance(responder, LocalResponder) else None)  # type: ignore[arg-type]
    if not local and (isinstance(method, Mitigation) or method.needs_attention):
        raise UsageError(f"{method.name} needs the model itself, not one behind a server")
    return Arm(name, responder, method, follows=run_sha256(method), path=entry if is_recipe(entry) else "")


def answering_arms(
    arms: Sequence[Arm], options: MitigateOptions, task: LanguageTask, sample: Sample
) -> tuple[list[Arm], list[str]]:
    """The arms whose methods answer one request, or are still to be fitted; and why others are left out, or refused.

    A server is asked for nothing that is not kept.
    """
    request = replace(requests_of([sample], task, options.test)[0], max_tokens=1)
    ready, left_out = [], []
    for arm in arms:
        try:
            if arm.method is not None and isinstance(arm.responder, LocalResponder):
                arm.answering.respond([request], generate=options.test.generate, score=options.test.score)
            ready.append(arm)
        except UsageError as error:
            if not options.unnamed:
                raise
            left_out.append(f"{arm.name} was not tried: {error}")
    if len(ready) == 1:
        raise UsageError(f"mitigate: no method to try ({'; '.join(left_out)})")
    return ready, left_out


def fitted_arms(
    task: LanguageTask,
    arms: Sequence[Arm],
    calibration: Sequence[Sample],
    options: MitigateOptions,
    windows: Sequence[Int64[np.ndarray, "token"]],
    store: PartStore,
    *,
    going: PartStore,
) -> tuple[list[Arm], dict[str, Any], list[str]]:
    """The arms with methods fitted to the calibration samples where they are to be; finished fits are taken over
    from the store, and those under way go on from the other, `going`."""
    ready, fits, left_out = [], {}, []
    examples = [example for sample in calibration for example in sample.examples]
    for arm in arms:
        if arm.method is not None or arm.name == UNCHANGED:
            ready.append(arm)
            continue

        def fitted(arm: Arm = arm) -> dict[str, np.ndarray]:
            if arm.name == Ordered.name:
                ordered = _measured_order(task, arm.responder, options)
                ordered["how"]["samples"] = sorted(contents(examples))
                return {"fit": as_bytes(ordered)}
            steps = Checkpoint(going, f"fit-{arm.slug}-steps")
            how = options.fitting
            if isinstance(arm.model, HuggingFaceModel):
                memory = options.evaluation.max_memory
                how = preflight_fit(arm.name, arm.model, examples, windows, options=how, max_memory=memory)
            found = fit(arm.name, arm.model, examples, text=windows, options=how, checkpoint=steps)
            return {"fit": as_bytes({"method": str(found.method), "how": found.how})}

        try:
            kept = read_json(store.get(f"fit-{arm.slug}", fitted), "fit")
        except UsageError as error:
            if not options.unnamed:
                raise
            left_out.append(f"{arm.name} was not tried: {error}")
            continue
        ready.append(replace(arm, method=MITIGATIONS.parse(kept["method"])))
        fits[arm.name] = kept["how"]
    return ready, fits, left_out


def _measured_order(task: LanguageTask, responder: Responder, options: MitigateOptions) -> dict[str, Any]:
    """The order of passages for the unchanged model's curve on the calibration samples, and how it came about."""
    chosen = replace(options.evaluation, count=options.calibration, directory=None, resume=False)
    found = evaluate_responder(responder, task, chosen, cost={})
    use = measured_use(found)
    placed = place([1 / rank for rank in range(1, task.n_items + 1)], use)
    how = {"calibration_samples": options.calibration, "p_flat": placed.p_flat, "measure": use.measure}
    return {"method": str(Ordered(order=placed.order)), "how": how}
