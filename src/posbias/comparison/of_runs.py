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
"""The subject that is taken of a run with several if nothing else decides."""


@dataclass(frozen=True)
class Chosen:
    """Choice of the profiles of two runs that are compared."""

    theory: str | None = None
    """This prediction of the first run only, or this kind measured there; by default all its theories, or all its
    kinds if it has none."""
    kind: str | None = None
    """This measured kind of the second run only; all by default."""
    subject: str | None = None
    """Subject of a run that holds several: "trained" or "initialised". By default the one that the other run holds
    alone, else as trained."""


def comparison_record(
    predicted: Showing | Record,
    measured: Showing | Record,
    chosen: Chosen | None = None,
    *,
    command: str = "",
    seed: int = 0,
) -> Record:
    """Every theory of the first run beside what was measured in the second.

    The prompts of both runs are resampled: together if both read the same ones, otherwise independently; the smaller
    number of them decides whether a claim is made. A prediction that read no prompts is taken as it is. If the first
    run has no predictions, its measured kinds are taken; if the second has no measured kinds, its predictions.
    """
    chosen = chosen or Chosen()
    predicted_run, measured_run = told_apart([_with_profiles(run) for run in (predicted, measured)])
    first, second = _subjects((predicted_run, measured_run), chosen.subject)
    kinds = dict(second.measured) or {name: MeasuredKind(entry.profile) for name, entry in second.theories.items()}
    if chosen.kind is not None:
        kinds = _only(kinds, chosen.kind, run="second")
    theories = _predictions(first, chosen.theory, shared=_shared_units(predicted_run, measured_run, kinds))
    subject = Subject(name="comparison", measured=kinds, theories=theories)
    compared = compare_subject(subject, generator=np.random.default_rng(seed))
    record = Record(
        verb="compare",
        arguments={**vars(chosen), "seed": seed},
        resolved={
            "title": f"{state_of(predicted_run, first)} beside {state_of(measured_run, second)}",
            "command": command,
            "predicted_run": predicted_run.record.run_id,
            "measured_run": measured_run.record.run_id,
            "subjects": {"predicted": first.name, "measured": second.name},
            "curves": {
                **{THEORIES + name: _settings(predicted_run, first, name) for name in theories},
                **{MEASURED + name: _settings(measured_run, second, name) for name in kinds},
            },
        },
        seeds={"bootstrap": seed},
    )
    return store_subjects(record, [compared])


def _with_profiles(source: Showing | Record) -> ProfileRun:
    """The run as stored; refused if its verb measures or predicts no profiles of influence."""
    record: Record = source.as_run()
    run = result_of(record) if record.verb in RESULTS else None
    if not isinstance(run, PredictionRun | MeasurementRun | AuditRun):
        raise UsageError(f"a run of {record.verb} cannot be compared; runs of predict, measure and audit can")
    return run


def _subjects(views: tuple[ProfileRun, ProfileRun], requested: str | None) -> tuple[Subject, Subject]:
    """The subject of either run that is compared: its only one, the one asked for, the other run's, or as trained."""
    by_name = [{subject.name: subject for subject in view.subjects} for view in views]
    names = list(dict.fromkeys(name for subjects in by_name if len(subjects) > 1 for name in subjects))
    if requested is not None and requested not in names:
        allowed = f"choose one of {', '.join(names)}" if names else "neither run holds several subjects to choose from"
        raise UsageError(f"subject {requested!r}: {allowed}")
    alone = [name for subjects in by_name if len(subjects) == 1 for name in subjects]
    preferred = [requested] if requested else [*alone, PREFERRED]
    first, second = (
        next((subjects[name] for name in preferred if name in subjects), view.subjects[0])
        for view, subjects in zip(views, by_name, strict=True)
    )
    return first, second


def _settings(view: ProfileRun, subject: Subject, name: str) -> Settings:
    """Settings that a profile was computed or measured for: those of its run, or its theory or kind and the run."""
    settings = view.curves.get(THEORIES + name) or view.curves.get(MEASURED + name)
    return settings or {"theory" if name in subject.theories else "kind": name, "model": state_of(view, subject)}


def _predictions(subject: Subject, only: str | None, *, shared: int) -> dict[str, TheoryProfile]:
    """The subject's theories, or what was measured, taken as predictions; of several `only` one, if it is named.

    Units are paired with the measurement's if these are the same `shared` prompts, otherwise resampled on their own. A
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
    if only is None:
        return theories or measured
    return _only({**measured, **theories}, only, run="first")


def _only(profiles: Mapping[str, Entry], name: str, *, run: str) -> dict[str, Entry]:
    if name not in profiles:
        raise UsageError(f"the {run} run holds no profile {name!r}; it holds: {', '.join(profiles)}")
    return {name: profiles[name]}


def _shared_units(predicted: ProfileRun, measured: ProfileRun, kinds: Mapping[str, MeasuredKind]) -> int:
    """Number of prompts that both runs read, the same in the same order and one unit each; 0 if they differ."""
    first, second = (run.record.prompts or {} for run in (predicted, measured))
    units = {len(entry.per_prompt) for entry in kinds.values() if entry.per_prompt is not None}
    same_prompts = first.get("sha256") is not None and first["sha256"] == second.get("sha256")
    return int(first["count"]) if same_prompts and units == {first["count"]} else 0
