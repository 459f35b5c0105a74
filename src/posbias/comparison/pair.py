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
    """One profile, with what was measured on single prompts, where anything was."""

    name: str
    profile: Profile
    sample: Sample | None = None
    measured: bool = False
    prompts: str | None = None
    """Hash of the prompts that were read."""
    kinds: tuple[str, ...] = ()
    """Which kind or theory it is, then the others beside it; none of a bare profile."""


@checked
def compare(first: Any, second: Any, *, kind: str | None = None, seed: int = 0) -> Comparison:
    """Every registered distance of the first profile to the second, beside the flat line's.

    Args:
        first: A `Profile`, a prediction, a measurement, an audit, a loaded run or a run's directory.
        second: The same; distances are to it.
        kind: The measured kind, or the theory of a run that has several; by default the first that both have, else the
            first of either. Where a run holds two states of a model, that as trained is taken.
        seed: Of resamples.

    Returns:
        The distances, both profiles, which `kinds` they are of, and, where the second was measured on prompts,
        `intervals`: over prompts, a `Contrast` where the first has prompts too. A theory that read the same ones is
        compared on each; two measurements are taken for independent, so that on the same prompts their intervals are
        wider than need be.

    Raises:
        UsageError: something else, profiles over different numbers of positions, or a kind that neither has.
    """
    held = [_held(given) for given in (first, second)]
    sides = [_chosen(own, other, kind) for own, other in zip(held, reversed(held), strict=True)]
    names = numbered([side.name for side in sides])
    one, other = (replace(side, name=name) for side, name in zip(sides, names, strict=True))
    found = distances(one.profile, other.profile)
    profiles = {one.name: one.profile, other.name: other.profile}
    kinds = {side.name: side.kinds for side in (one, other) if side.kinds}
    intervals = _intervals(one, other, np.random.default_rng(seed))
    return replace(found, profiles=profiles, intervals=intervals, kinds=kinds)


def _held(given: Any) -> Mapping[str, _Side]:
    """The profiles of what is given, by kind or theory, those as trained before others, measured before predicted."""
    if isinstance(given, Profile):
        return {"": _Side("profile", given)}
    if isinstance(given, str | Path) and (Path(given) / ARRAYS_FILE).is_file():
        given = read_record(given)
    record = given.as_run() if isinstance(given, Record | Showing) else None
    if record is None:
        raise UsageError(
            "compare takes profiles, predictions, measurements and runs; a model is measured first, as in "
            f"posbias.measure(model, prompts); got {given!r:.80}"
        )
    arrays, resolved = record.arrays, record.resolved
    title, prompts = _title(record), (resolved.get("prompts") or {}).get("sha256")
    found: dict[str, _Side] = {}
    for stem in sorted(
        profile_stems(record), key=lambda stem: (MEASURED_PART not in stem.split("/"), "initialised/" in stem)
    ):
        low, high, units, scales = (arrays.get(f"{stem}/{part}") for part in ("low", "high", "per_prompt", "scales"))
        profile = Profile(arrays[f"{stem}/influence"], low, high)
        sample = None if units is None else Sample.of(units, scales)
        name = str(resolved.get("theory", stem)) if stem == "profile" else stem.split("/")[-1]
        found.setdefault(name, _Side(title, profile, sample, MEASURED_PART in stem.split("/"), prompts))
    if not found:
        raise UsageError(f"a run of {record.verb} holds no profile to compare")
    return found


def _title(record: Record) -> str:
    """What a run is about, with the state that its model was in: at initialisation, or with an ingredient replaced."""
    model = record.resolved.get("model") or {}
    state = "" if model.get("init_seed") is None else "initialised"
    title = str(record.resolved.get("title") or record.verb)
    return ", ".join(filter(None, (title, state, model.get("intervention"))))


def _chosen(own: Mapping[str, _Side], other: Mapping[str, _Side], kind: str | None) -> _Side:
    """The profile of that kind, or one that the other side has, too."""
    known = list(dict.fromkeys([*own, *other]))
    if kind is not None and kind.partition("(")[0] not in known:
        raise UsageError(f"kind {kind!r} is in neither; known: {', '.join(filter(None, known))}")
    wanted = [] if kind is None else [kind.partition("(")[0]]
    chosen = next(name for name in [*wanted, *(name for name in own if name in other), *own] if name in own)
    side, others = own[chosen], [name for name in own if name != chosen]
    named = side.name if not chosen or side.name.startswith(f"{chosen} of ") else f"{chosen} of {side.name}"
    return replace(side, name=named, kinds=tuple(filter(None, (chosen, *others))))


def _intervals(one: _Side, other: _Side, generator: np.random.Generator) -> BesideFlat | None:
    if one.sample is not None and other.sample is not None:
        if not one.measured and one.prompts is not None and one.prompts == other.prompts:
            return compare_with_prompts(one.sample.units, other.sample, generator=generator)
        return contrast(one.sample, other.sample, generator=generator)
    if other.sample is not None:
        return compare_with_prompts(one.profile, other.sample, generator=generator)
    return None
