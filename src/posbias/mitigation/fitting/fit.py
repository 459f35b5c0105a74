"""`fit`: a method with the parameters that suit one model, from calibration samples alone. No weight is touched."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from posbias.checks import checked
from posbias.errors import UsageError
from posbias.interventions.base import check_model
from posbias.mitigation.fitting.base import FILES, Calibration, Fit, FitOptions, Fitted, Windows, fit_of
from posbias.mitigation.fitting.calibration import DEFAULT, JUDGED_FILES, best_of, contents, text_beside
from posbias.mitigation.methods.base import Mitigation, identity
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
) -> Fitted:
    """Fit a method's parameters to a model, from calibration samples alone.

    Args:
        method: "adapter", "adapter(rank=2)", "key_bias", "context_bias", "positional_channel" or "temperature", of
            which the candidate with the most probable right answers is chosen (per token, averaged over samples and
            positions).
        model: What `load_model` returns.
        calibration: Examples with their answers, of at least 4 samples; all positions that matter among them.
        text: Token ids of windows of ordinary text, for fits that read some; None: windows of the default corpus, from
            files on which `mitigate` does not judge.
        options: Settings of a fit by gradient; for all others, the strengths to choose from.

    Raises:
        UsageError: a method without parameters to fit, or too few samples.
    """
    how = fit_of(method)
    if how is None:
        raise UsageError(f"{method} has no parameters to fit; allowed: {', '.join(FILES)}")
    loaded, options = check_model(model), options or FitOptions()
    if text is None and how.reads_text(options):
        length = min(WINDOW, loaded.max_positions or WINDOW)
        text = text_beside(f"{DEFAULT}#{JUDGED_FILES}", loaded, length=length, seed=options.seed)
    return run_fit(how, Calibration(loaded, calibration, text or ()), options=options)


def run_fit(how: Fit, calibration: Calibration, *, options: FitOptions) -> Fitted:
    """The method of a fit, at the strength that the calibration samples choose, with the samples that it has seen."""
    fitted = how.fit(calibration, options=options)
    method, facts = fitted.method, {**fitted.how, "samples": sorted(contents(calibration.examples))}
    if not isinstance(method, Mitigation):
        return Fitted(method, facts)
    if options.strengths:
        candidates = [replace(method, strength=strength) for strength in options.strengths]
        method, scores = best_of(candidates, calibration.network, calibration.examples)
        facts["strengths"] = dict(zip(map(str, options.strengths), scores.values(), strict=True))
    return Fitted(replace(method, fitted_to=identity(calibration.network)), facts)
