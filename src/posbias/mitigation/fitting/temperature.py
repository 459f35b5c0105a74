"""The fit of `temperature`: the candidate under which the calibration answers are most probable."""

from typing import Any

from posbias.mitigation.fitting.base import FITS, Calibration, FitOptions
from posbias.mitigation.fitting.calibration import best_of
from posbias.mitigation.methods.base import Method
from posbias.mitigation.methods.temperature import Temperature

SCALES = (0.12, 0.14, 0.16, 0.18, 0.2, 0.25)
"""Scales that are tried."""


@FITS.register(Temperature.name)
def fit_temperature(calibration: Calibration, options: FitOptions) -> tuple[Method, dict[str, Any]]:
    """Score the answers under all scales, one after another."""
    best, scores = best_of([Temperature(scale) for scale in SCALES], calibration.model, calibration.examples)
    return best, {"candidates": scores}
