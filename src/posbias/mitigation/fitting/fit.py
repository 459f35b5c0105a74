"""`fit`: a method with the parameters that suit one model, from calibration samples alone. No weight is touched."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, ClassVar

from posbias.checks import checked
from posbias.errors import UsageError
from posbias.evaluation import place
from posbias.evaluation.curve import SAMPLES_FOR_CLAIM
from posbias.evaluation.responders import Request, Responder
from posbias.interventions.base import check_model

# These register their fits.
from posbias.mitigation.fitting import adapter, bias, channel_search, head_scales  # noqa: F401
from posbias.mitigation.fitting.base import (
    FITS,
    Calibration,
    Checkpoint,
    Fit,
    FitOptions,
    Fitted,
    Windows,
    fit_of,
)
from posbias.mitigation.fitting.calibration import (
    DEFAULT,
    JUDGED_FILES,
    best_of,
    contents,
    conversations_beside,
    text_beside,
)
from posbias.mitigation.methods.base import MITIGATIONS, Mitigation, identity
from posbias.mitigation.methods.prompt_changes import Ordered
from posbias.mitigation.methods.recipe import samples_of_recipe
from posbias.runs.caveats import refusal
from posbias.tasks.language import Example

WINDOW = 256
"""Tokens of a window of ordinary text."""


@checked
def fit(
    method: str,
    model: Any,
    calibration: Sequence[Example],
    *,
    text: Windows | None = None,
    options: FitOptions | None = None,
    checkpoint: Checkpoint | None = None,
) -> Fitted:
    """Fit a method's parameters to a model, from calibration samples alone.

    Args:
        method: "adapter", "adapter(rank=2)", "key_bias", "context_bias", "positional_channel" (`fit_channel`), or a
            method with a grid of parameters, of which the candidate with the most probable right answers is chosen (per
            token, averaged over samples and positions).
        model: What `load_model` returns.
        calibration: Examples with their answers, of at least 4 samples; all positions that matter among them.
        text: Token ids of windows of ordinary text, for fits that read some; None: windows of the default corpus, from
            files on which `mitigate` does not judge, and everyday conversations if the examples are conversations.
        options: Settings of a fit by gradient; for all others, the strengths to choose from.
        checkpoint: Place where a fit by gradient saves its progress, and resumes.

    Raises:
        UsageError: a method without parameters to fit, or too few samples.
    """
    how = fit_of(method)
    if how is None or not how.needs_model:
        names = [name for name in MITIGATIONS if (candidate := fit_of(name)) is not None and candidate.needs_model]
        raise UsageError(f"{method} has no parameters to fit; allowed: {', '.join(names)}")
    loaded, options = check_model(model), options or FitOptions()
    conversations: Windows = ()
    if text is None and how.reads_text(options):
        length = min(WINDOW, loaded.max_positions or WINDOW)
        text = text_beside(f"{DEFAULT}#{JUDGED_FILES}", loaded, length=length, seed=options.seed)
        conversations = conversations_beside(loaded, calibration)
    material = Calibration(loaded, calibration, text or (), conversations)
    return run_fit(how, material, options=options, checkpoint=checkpoint)


def run_fit(how: Fit, calibration: Calibration, *, options: FitOptions, checkpoint: Checkpoint | None = None) -> Fitted:
    """The method of a fit, at the strength that the calibration samples choose, with the samples that it has seen."""
    fitted = how.fit(calibration, options=options, checkpoint=checkpoint)
    used = contents(calibration.examples) | (samples_of_recipe(options.begin) if options.begin else set())
    method, facts = fitted.method, {**fitted.how, "samples": sorted(used)}
    if not isinstance(method, Mitigation):
        return Fitted(method, facts)
    if options.strengths:
        candidates = [replace(method, strength=strength) for strength in options.strengths]
        method, scores = best_of(candidates, calibration.network, calibration.examples)
        facts["strengths"] = dict(zip(map(str, options.strengths), scores.values(), strict=True))
    return Fitted(replace(method, fitted_to=identity(calibration.network)), facts)


@FITS.register(Ordered.name)
class OrderFit(Fit):
    """The order of passages that the unchanged model's curve on the calibration samples asks for."""

    method = Ordered
    needs_model: ClassVar[bool] = False
    required: ClassVar[bool] = False

    def fit(self, calibration: Calibration, *, options: FitOptions, checkpoint: Checkpoint | None) -> Fitted:
        """Measure the curve, and place passages by it."""
        assert calibration.curve is not None  # `fit` refuses the method, and trials give it
        use = calibration.curve()
        n_items = len(calibration.examples[0].passages)
        placed = place([1 / rank for rank in range(1, n_items + 1)], use)
        samples = len({example.sample for example in calibration.examples})
        how = {"calibration_samples": samples, "p_flat": placed.p_flat, "measure": use.measure}
        return Fitted(Ordered(order=placed.order), how)

    def check(self, n_samples: int, request: Request, responder: Responder) -> None:
        """The request must list passages that may change places, and the samples must allow a claim."""
        Ordered(order=range(len(request.passages) or 1)).asked(request, responder)
        if n_samples < SAMPLES_FOR_CLAIM:
            raise refusal("few_samples_for_curve", least=SAMPLES_FOR_CLAIM, given=n_samples)
