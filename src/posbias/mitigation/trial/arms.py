"""The arms of a trial: the unchanged model, and the model under one method each, none asked for anything yet."""

import hashlib
import os
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from posbias.errors import UsageError
from posbias.evaluation.responders import LocalResponder, Responder
from posbias.mitigation.fitting.base import Fit, fit_of
from posbias.mitigation.fitting.calibration import LEAST_SAMPLES
from posbias.mitigation.methods.applying import answering_under, resolve_method
from posbias.mitigation.methods.base import Method, Mitigation
from posbias.mitigation.methods.recipe import is_recipe
from posbias.mitigation.methods.temperature import Temperature
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


def arm_of(arm: Arm, *, calibration: int) -> Arm:
    """The arm with its method, or with the fit that is to find it.

    Args:
        calibration: Samples to fit to; a method whose parameters have defaults is fitted only if there are some.

    Raises:
        UsageError: an unknown method, one that needs a model at hand, or too few samples for a fit.
    """
    given = arm.given
    fit = fit_of(given) if isinstance(given, str) and not arm.path else None
    name = str(given).partition("(")[0].strip()
    if fit is None or not (calibration or name != Temperature.name):
        method = resolve_method(given, arm.model)
        if arm.model is None and isinstance(method, Mitigation):
            raise UsageError(f"{method.name} needs the model itself, not one behind a server")
        return replace(arm, method=method)
    if arm.model is None:
        raise UsageError(f"{name} is fitted and needs the model itself, not one behind a server")
    if calibration < LEAST_SAMPLES:
        raise UsageError(f"{name} is fitted and needs calibration samples, at least {LEAST_SAMPLES}; got {calibration}")
    return replace(arm, fit=fit)


def recipe_names(paths: Sequence[str], taken: Collection[str] = ()) -> dict[str, str]:
    """A name for each recipe, by path: the file's without its ending, with as many of its directories as it takes to
    tell it from the other recipes and from the names that are taken."""
    parts_of = {path: Path(os.path.abspath(path)).with_suffix("").parts for path in paths}
    names = {}
    for path, parts in parts_of.items():
        different = [theirs for name, theirs in parts_of.items() if name != path]
        for count in range(1, len(parts)):
            names[path] = "/".join(parts[-count:])
            if names[path] not in taken and all(theirs[-count:] != parts[-count:] for theirs in different):
                break
    return names
