"""The fit of `temperature`: the candidate under which the calibration answers are most probable."""

from posbias.mitigation.fitting.base import FITS, Calibration, Fit, FitOptions, Fitted
from posbias.mitigation.fitting.calibration import best_of
from posbias.mitigation.methods.temperature import Temperature

SCALES = (0.12, 0.14, 0.16, 0.18, 0.2, 0.25)
"""Scales that are tried."""


@FITS.register(Temperature.name)
class TemperatureFit(Fit):
    """All scales, one after another."""

    method = Temperature
    required = False

    def fit(self, calibration: Calibration, *, options: FitOptions) -> Fitted:
        """Score the answers under every candidate."""
        counts, candidates = calibration.count(), [Temperature(scale) for scale in SCALES]
        best, scores = best_of(candidates, calibration.network, calibration.examples)
        return Fitted(best, {"candidates": scores, **counts})
