"""Two runs compared, as a record: the predictions of one beside the measurements of the other.

A run may hold several subjects (an audit: the model as trained and re-initialised), each with several profiles; one
subject of each run is compared, and `Chosen` says which, and which of its profiles.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from posbias.comparison.names import state_of, told_apart
from posbias.comparison.stored import (
    MEASURED,
    THEORIES,
    AuditRun,
    MeasurementRun,
    PredictionRun,
    ProfileRun,
    store_subjects,
)
from posbias.comparison.subject import MeasuredKind, Sample, Subject, TheoryProfile, compare_subject
from posbias.display.naming import Settings
from posbias.display.showing import Showing
from posbias.errors import UsageError
from posbias.profiles import Profile
from posbias.runs.records import Record
from posbias.runs.results import RESULTS, result_of

Entry = TypeVar("Entry", MeasuredKind, TheoryProfile)
PREFERRED = "trained"
"""The subject that is taken of a run with several, where nothing else decides."""


@dataclass(frozen=True)
class Chosen:
    """Which profiles of two runs are compared."""

    theory: str | None = None
    """This prediction of the first run only, or this kind measured there; by default all its theories, or, where it
    has none, all its kinds."""
    kind: str | None = None
    """This measured kind of the second run only; all by default."""
    subject: str | None = None
    """Of a run that holds several: "trained" or "initialised". By default the one that the other run holds alone, else
    as trained."""


def comparison_record(
    predicted: Showing | Record,
    measured: Showing | Record,
    chosen: Chosen | None = None,
    *,
    command: str = "",
    seed: int = 0,
) -> Record:
    """Every theory of the first run beside what was measured in the second.

    The prompts of both runs are resampled: together where both read the same ones, else independently, and the smaller
    number of them decides whether a claim is made. A prediction that read no prompts is taken as it is. Where the first
    run has no predictions its measured kinds are taken, where the second has no measured kinds its predictions.
    """
    chosen = chosen or Chosen()
    one, other = told_apart([_with_profiles(run) for run in (predicted, measured)])
    first, second = _subjects((one, other), chosen.subject)
    kinds = dict(second.measured) or {name: MeasuredKind(entry.profile) for name, entry in second.theories.items()}
    if chosen.kind is not None:
        kinds = _only(kinds, chosen.kind, run="second")
    theories = _predictions(first, chosen.theory, shared=_shared_units(one, other, kinds))
    subject = Subject(name="comparison", measured=kinds, theories=theories)
    compared = compare_subject(subject, generator=np.random.default_rng(seed))
    record = Record(
        verb="compare",
        arguments={**vars(chosen), "seed": seed},
        resolved={
            "title": f"{state_of(one, first)} beside {state_of(other, second)}",
            "command": command,
            "predicted_run": one.record.run_id,
            "measured_run": other.record.run_id,
            "subjects": {"predicted": first.name, "measured": second.name},
            "curves": {
                **{THEORIES + name: _settings(one, first, name) for name in theories},
                **{MEASURED + name: _settings(other, second, name) for name in kinds},
            },
        },
        seeds={"bootstrap": seed},
    )
    return store_subjects(record, [compared])


def _with_profiles(given: Showing | Record) -> ProfileRun:
    """The run as stored; refused if its verb measures or predicts no profiles of influence."""
    record: Record = given.as_run()
    run = result_of(record) if record.verb in RESULTS else None
    if not isinstance(run, PredictionRun | MeasurementRun | AuditRun):
        raise UsageError(f"a run of {record.verb} cannot be compared; allowed are runs of predict, measure, audit")
    return run


def _subjects(views: tuple[ProfileRun, ProfileRun], asked: str | None) -> tuple[Subject, Subject]:
    """The subject of either run that is compared: its only one, the one asked for, the other run's, or as trained."""
    held = [{subject.name: subject for subject in view.subjects} for view in views]
    known = list(dict.fromkeys(name for subjects in held if len(subjects) > 1 for name in subjects))
    if asked is not None and asked not in known:
        allowed = f"of {', '.join(known)}" if known else "where a run holds several subjects; each of these holds one"
        raise UsageError(f"subject {asked!r}: allowed is one {allowed}")
    alone = [name for subjects in held if len(subjects) == 1 for name in subjects]
    wanted = [asked] if asked else [*alone, PREFERRED]
    first, second = (
        next((subjects[name] for name in wanted if name in subjects), view.subjects[0])
        for view, subjects in zip(views, held, strict=True)
    )
    return first, second


def _settings(view: ProfileRun, subject: Subject, name: str) -> Settings:
    """What a profile was computed or measured for: as its run says, or its theory or kind and the run."""
    known = view.curves.get(THEORIES + name) or view.curves.get(MEASURED + name)
    return known or {"theory" if name in subject.theories else "kind": name, "model": state_of(view, subject)}


def _predictions(subject: Subject, wanted: str | None, *, shared: int) -> dict[str, TheoryProfile]:
    """The subject's theories, or what was measured, taken as predictions; only the wanted one, where there is one.

    Units are paired with the measurement's where these are the same `shared` prompts, else resampled on their own. A
    measurement of which only the mean was kept is one unit: no interval, no claim.
    """

    def prediction(profile: Profile, sample: Sample | None) -> TheoryProfile:
        if sample is not None and 1 < shared == len(sample.units) and sample.scales is None:
            return TheoryProfile(profile, sample.units)
        return TheoryProfile(profile, sample=sample)

    theories = {
        name: prediction(entry.profile, None if entry.per_prompt is None else Sample.of(entry.per_prompt))
        for name, entry in subject.theories.items()
    }
    measured = {
        name: prediction(entry.profile, entry.sample or Sample(entry.profile.influence[None]))
        for name, entry in subject.measured.items()
    }
    if wanted is None:
        return theories or measured
    return _only({**measured, **theories}, wanted, run="first")


def _only(profiles: Mapping[str, Entry], wanted: str, *, run: str) -> dict[str, Entry]:
    if wanted not in profiles:
        raise UsageError(f"the {run} run holds no profile {wanted!r}; it holds: {', '.join(profiles)}")
    return {wanted: profiles[wanted]}


def _shared_units(predicted: ProfileRun, measured: ProfileRun, kinds: Mapping[str, MeasuredKind]) -> int:
    """How many prompts both runs read, the same ones in the same order and one unit each; 0 where they differ."""
    first, second = (run.record.prompts or {} for run in (predicted, measured))
    units = {len(entry.per_prompt) for entry in kinds.values() if entry.per_prompt is not None}
    same = first.get("sha256") is not None and first["sha256"] == second.get("sha256")
    return int(first["count"]) if same and units == {first["count"]} else 0
