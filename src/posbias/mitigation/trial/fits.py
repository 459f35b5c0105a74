"""The phase *fit*: methods without parameters are fitted to the calibration samples; finished fits are taken over."""

from dataclasses import replace
from functools import partial

import numpy as np

from posbias.errors import UsageError
from posbias.evaluation.samples import as_bytes, read_json
from posbias.mitigation.fitting.base import Calibration
from posbias.mitigation.fitting.calibration import conversations_beside
from posbias.mitigation.fitting.fit import run_fit
from posbias.mitigation.methods.base import MITIGATIONS
from posbias.mitigation.trial.arms import Arm
from posbias.mitigation.trial.ordinary_text import windows_of_fits
from posbias.mitigation.trial.plan import TrialPlan
from posbias.runs.parts import below

TENSORS = "tensors/"
"""Stem of the names, in the piece of a fit, of what the method's spelling leaves out."""


def fit_arms(plan: TrialPlan) -> TrialPlan:
    """The plan with every method fitted; a fit that was interrupted starts anew."""
    examples, text = plan.calibration.examples, windows_of_fits(plan)
    conversations = conversations_beside(plan.model, examples) if text and plan.model is not None else ()
    calibration = Calibration(plan.model, examples, text, conversations)
    arms: list[Arm] = []
    left_out: list[str] = []
    for arm in plan.arms:
        if arm.to_fit is None:
            arms.append(arm)
            continue
        try:
            piece = plan.lasting.get(f"fit-{arm.slug}", partial(_fit, plan, arm, calibration))
        except UsageError as error:
            if not plan.options.unnamed:
                raise
            left_out.append(f"{arm.name} was not tried: {error}")
            continue
        fitted = read_json(piece, "fit")
        method = MITIGATIONS.parse(fitted["method"]).with_tensors(below(piece, TENSORS))
        arms.append(replace(arm, method=method, fitted=fitted["how"]))
    return plan.with_arms(arms, left_out)


def _fit(plan: TrialPlan, arm: Arm, calibration: Calibration) -> dict[str, np.ndarray]:
    """The fit of one arm as a piece to keep."""
    assert arm.fit is not None
    fitted = run_fit(arm.fit, calibration, options=plan.options.fitting)
    tensors = {f"{TENSORS}{name}": tensor for name, tensor in fitted.method.tensors.items()}
    return {"fit": as_bytes({"method": str(fitted.method), "how": fitted.how}), **tensors}
