"""The arms of a trial: the unchanged model, and the model under one method each, none asked for anything yet."""

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from posbias.errors import UsageError
from posbias.evaluation.responders import LocalResponder, Responder
from posbias.mitigation.fitting.base import Fit, fit_of
from posbias.mitigation.fitting.calibration import LEAST_SAMPLES
from posbias.mitigation.methods.applying import answering_under, resolve_method
from posbias.mitigation.methods.base import Method
from posbias.mitigation.trial.files import is_recipe, recipe_names
from posbias.models.hugging_face import HuggingFaceModel

UNCHANGED = "unchanged"
"""Name of the arm without a method."""


def slug_of(name: str, distinction: str = "") -> str:
    """A directory's name: the beginning of a name, and a hash of all of it with what else distinguishes it."""
    readable = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")[:40]
    return f"{readable}-{hashlib.sha256(f'{name}{distinction}'.encode()).hexdigest()[:8]}"


@dataclass(frozen=True, eq=False)
class Arm:
    """One arm of a trial: the unchanged model, or the model under one method."""

    name: str
    plain: Responder
    """The responder without a method."""
    method: Method | None = None
    """The method that answers; None: the unchanged model, or a method that is still to be fitted."""
    fit: Fit | None = None
    """The fit that finds the method; None if it has all its parameters."""
    fitted: dict[str, Any] | None = None
    """How the method was fitted; None if it was not."""
    path: str = ""
    """Path of the recipe that it was read from; empty if it was not."""

    @property
    def to_fit(self) -> Fit | None:
        """The fit that is still to be made."""
        return self.fit if self.method is None else None

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
        return _model_of(self.plain)


def _model_of(responder: Responder) -> HuggingFaceModel | None:
    return responder.model if isinstance(responder, LocalResponder) else None


def resolve_arms(
    entries: Sequence[Any], responder: Responder, *, calibration: int, unnamed: bool
) -> tuple[list[Arm], list[str]]:
    """The unchanged model and every method that can be read.

    A method that does not apply is refused if it was named, and left out with the reason otherwise.

    Args:
        calibration: Samples to fit to; a method whose parameters have defaults is fitted only if there are some.
    """
    arms, left_out = [Arm(UNCHANGED, responder)], []
    recipes = list(filter(is_recipe, entries))
    names = recipe_names(recipes, {UNCHANGED, *(str(entry) for entry in entries if entry not in recipes)})
    for entry in entries:
        try:
            fit = fit_of(entry) if isinstance(entry, str) and not is_recipe(entry) else None
            if fit is not None and (fit.required or calibration):
                _check_fit(fit, responder, calibration)
                arms.append(Arm(str(entry), responder, fit=fit))
            else:
                arms.append(_given_arm(entry, responder, name=names.get(str(entry), str(entry))))
        except UsageError as error:
            if not unnamed:
                raise
            left_out.append(f"{entry} was not tried: {error}")
    all_names = [arm.name for arm in arms]
    twice = [name for name in all_names if all_names.count(name) > 1]
    if twice:
        raise UsageError(f"mitigate: {twice[0]} is given twice; give each method once")
    return arms, left_out


def _check_fit(fit: Fit, responder: Responder, calibration: int) -> None:
    """Refuse, before any work, a method that cannot be fitted to what there is."""
    name = fit.method.name
    if _model_of(responder) is None:
        raise UsageError(f"{name} is fitted and needs the model itself, not one behind a server")
    if calibration < LEAST_SAMPLES:
        raise UsageError(f"{name} is fitted and needs calibration samples, at least {LEAST_SAMPLES}; got {calibration}")


def _given_arm(entry: Any, responder: Responder, *, name: str) -> Arm:
    """The arm of a method with all its parameters."""
    model = _model_of(responder)
    method = resolve_method(entry, model)
    if model is None and method.needs_model:
        raise UsageError(f"{method.name} needs the model itself, not one behind a server")
    return Arm(name, responder, method, path=entry if is_recipe(entry) else "")
