"""`compare`: two profiles, however they are given, beside each other and the flat line, with intervals over prompts."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from posbias.checks import checked
from posbias.comparison.stored import profile_stems
from posbias.comparison.subject import BesideFlat, Comparison, Sample, compare_with_prompts, contrast, distances
from posbias.display.naming import numbered
from posbias.display.showing import Showing
from posbias.errors import UsageError
from posbias.profiles import Profile
from posbias.runs.records import ARRAYS_FILE, MEASURED_PART, Record, read_record


@dataclass(frozen=True, eq=False)
class _Side:
    """One profile, with measurements of single prompts, if there are any."""

    name: str
    profile: Profile
    sample: Sample | None = None
    measured: bool = False
    prompts: str | None = None
    """Hash of the prompts that were read."""
    kinds: tuple[str, ...] = ()
    """Its kind or theory, then the others beside it; none for a bare profile."""


@checked
def compare(first: Any, second: Any, *, kind: str | None = None, seed: int = 0) -> Comparison:
    """Every registered distance of the first profile to the second, beside the flat line's.

    Args:
        first: A `Profile`, a prediction, a measurement, an audit, a loaded run or a run's directory.
        second: The same; distances are to it.
        kind: The measured kind, or the theory of a run that has several; by default the first that both have, else the
            first of either. If a run holds two states of a model, the trained one is taken.
        seed: Of resamples.

    Returns:
        The distances, both profiles, which `kinds` they are of and, if the second was measured on prompts,
        `intervals`: over prompts, a `Contrast` if the first has prompts too. A theory that read the same ones is
        compared on each; two measurements are taken for independent, so that on the same prompts their intervals are
        wider than need be.

    Raises:
        UsageError: something else, profiles over different numbers of positions, or a kind that neither has.
    """
    choices = [_profiles_of(subject) for subject in (first, second)]
    sides = [_chosen(sides, beside, kind) for sides, beside in zip(choices, reversed(choices), strict=True)]
    names = numbered([side.name for side in sides])
    predicted, reference = (replace(side, name=name) for side, name in zip(sides, names, strict=True))
    return replace(
        distances(predicted.profile, reference.profile),
        profiles={predicted.name: predicted.profile, reference.name: reference.profile},
        intervals=_intervals(predicted, reference, np.random.default_rng(seed)),
        kinds={side.name: side.kinds for side in (predicted, reference) if side.kinds},
    )


def _profiles_of(subject: Any) -> Mapping[str, _Side]:
    """A subject's profiles by kind or theory, those as trained before others, measured before predicted."""
    if isinstance(subject, Profile):
        return {"": _Side("profile", subject)}
    if isinstance(subject, str | Path) and (Path(subject) / ARRAYS_FILE).is_file():
        subject = read_record(subject)
    record = subject.as_run() if isinstance(subject, Record | Showing) else None
    if record is None:
        raise UsageError(
            "compare takes profiles, predictions, measurements and runs; a model is measured first, as in "
            f"posbias.measure(model, prompts); got {subject!r:.80}"
        )
    arrays, resolved = record.arrays, record.resolved
    title, prompts = _title(record), (resolved.get("prompts") or {}).get("sha256")
    sides: dict[str, _Side] = {}
    for stem in sorted(
        profile_stems(record), key=lambda stem: (MEASURED_PART not in stem.split("/"), "initialised/" in stem)
    ):
        low, high, units, scales = (arrays.get(f"{stem}/{part}") for part in ("low", "high", "per_prompt", "scales"))
        profile = Profile(arrays[f"{stem}/influence"], low, high)
        sample = None if units is None else Sample.of(units, scales)
        name = str(resolved.get("theory", stem)) if stem == "profile" else stem.split("/")[-1]
        sides.setdefault(name, _Side(title, profile, sample, MEASURED_PART in stem.split("/"), prompts))
    if not sides:
        raise UsageError(f"a run of {record.verb} holds no profile to compare")
    return sides


def _title(record: Record) -> str:
    """A run's title with the state that its model was in: at initialisation, or with an ingredient replaced."""
    model = record.resolved.get("model") or {}
    state = "" if model.get("init_seed") is None else "initialised"
    title = str(record.resolved.get("title") or record.verb)
    return ", ".join(filter(None, (title, state, model.get("intervention"))))


def _chosen(sides: Mapping[str, _Side], beside: Mapping[str, _Side], kind: str | None) -> _Side:
    """The profile of that kind, or one that the run beside it has, too."""
    kinds = list(dict.fromkeys([*sides, *beside]))
    if kind is not None and kind.partition("(")[0] not in kinds:
        raise UsageError(f"neither side has kind {kind!r}; known: {', '.join(filter(None, kinds))}")
    preferred = [] if kind is None else [kind.partition("(")[0]]
    chosen = next(name for name in [*preferred, *(name for name in sides if name in beside), *sides] if name in sides)
    side, further = sides[chosen], [name for name in sides if name != chosen]
    named = side.name if not chosen or side.name.startswith(f"{chosen} of ") else f"{chosen} of {side.name}"
    return replace(side, name=named, kinds=tuple(filter(None, (chosen, *further))))


def _intervals(predicted: _Side, reference: _Side, generator: np.random.Generator) -> BesideFlat | None:
    if reference.sample is None:
        return None
    if predicted.sample is None:
        return compare_with_prompts(predicted.profile, reference.sample, generator=generator)
    if not predicted.measured and predicted.prompts is not None and predicted.prompts == reference.prompts:
        return compare_with_prompts(predicted.sample.units, reference.sample, generator=generator)
    return contrast(predicted.sample, reference.sample, generator=generator)
