"""`fit`: a method with the parameters that suit one model, from calibration samples alone. No weight is touched."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from posbias.checks import checked
from posbias.errors import UsageError
from posbias.interventions.base import check_model
from posbias.mitigation.fitting.base import FITS, Calibration, Fit, FitOptions, Fitted, Windows, fit_of
from posbias.mitigation.fitting.calibration import DEFAULT, JUDGED_FILES, LEAST_SAMPLES, contents, text_beside
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
        options: Settings of a fit by gradient.

    Raises:
        UsageError: a method without parameters to fit, or too few samples.
    """
    how = fit_of(method)
    if how is None:
        raise UsageError(f"{method} has no parameters to fit; allowed: {', '.join(FITS)}")
    loaded, options = check_model(model), options or FitOptions()
    length, source = min(WINDOW, loaded.max_positions or WINDOW), f"{DEFAULT}#{JUDGED_FILES}"
    given = partial(text_beside, source, loaded, length=length, seed=options.seed) if text is None else lambda: text
    return run_fit(how, Calibration(loaded, calibration, given), options=options)


def run_fit(how: Fit, calibration: Calibration, *, options: FitOptions) -> Fitted:
    """The method of a fit, with the samples that it has seen."""
    examples = calibration.examples
    samples = len({example.sample for example in examples})
    if samples < LEAST_SAMPLES:
        raise UsageError(f"fit: {samples} calibration samples given; at least {LEAST_SAMPLES} are needed")
    method, found = how(calibration, options)
    facts = {
        **found,
        "calibration_samples": samples,
        "calibration_prompts": len(examples),
        "samples": sorted(contents(examples)),
    }
    assert isinstance(method, Mitigation)  # those that are fitted
    return Fitted(replace(method, fitted_to=identity(calibration.model)), facts)
