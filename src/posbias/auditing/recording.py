"""Single results as records, in the layout that reports read (report/layout.py): a measurement, a comparison of
two runs.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from posbias.comparison import Depth, MeasuredKind, Mixing, Sample, Subject, TheoryProfile, compare_subject, finite
from posbias.errors import UsageError
from posbias.measurement import DepthProfiles, Measurement
from posbias.models.model import Model
from posbias.profiles import Profile
from posbias.prompts import Prompts
from posbias.records import Record
from posbias.report.layout import store_subjects, view_of

COMPARED = ("predict", "measure", "audit")
"""Verbs whose runs hold profiles of influence."""


def measurement_record(
    measurement: Measurement, model: Model, prompts: Prompts, arguments: Mapping[str, Any], *, command: str = ""
) -> Record:
    """A measurement with model, prompts, intervals and, unless only means are kept, every prompt's own values."""
    described = measurement.model or model.describe()  # it reads all weights: once is enough
    state = "trained" if described.get("init_seed") is None else "initialised"
    record = Record(
        verb="measure",
        arguments=dict(arguments),
        resolved={
            "title": str(described.get("source", "model")),
            "command": command,
            "model": described,
            "prompts": prompts.describe(),
            "measurement": measurement.describe(),
        },
        seeds=dict(measurement.seeds),
    )
    generator = np.random.default_rng(measurement.seeds.get("measure", 0))
    subject = compare_subject(measured_subject(state, measurement), generator=generator)
    if measurement.options.keep == "mean":
        averages = {kind: MeasuredKind(entry.profile) for kind, entry in subject.measured.items()}
        subject = replace(subject, measured=averages)
    record.scalars["details"] = {
        kind: {name: values.tolist() for name, values in found.items()} for kind, found in measurement.details.items()
    }
    record.scalars["precision"] = {
        kind: {name: [finite(value) for value in values] for name, values in vars(loss).items()}
        for kind, loss in measurement.precision.items()
    }
    return store_subjects(record, [subject], left_out=measurement.left_out)


def measured_subject(
    name: str, measurement: Measurement, theories: Mapping[str, TheoryProfile] | None = None
) -> Subject:
    """What was measured on one state of a model, with the theories set beside it; not compared yet."""
    # An average of raw norms weighs prompts by their totals, and so must every draw of its intervals.
    by_norm = measurement.options.averaging == "norms"
    return Subject(
        name=name,
        measured={
            kind: MeasuredKind(profile, norms, scales=norms.sum(axis=1) if by_norm else None)
            for kind, profile in measurement.profiles.items()
            for norms in [measurement.per_prompt[kind]]
        },
        theories=dict(theories or {}),
        mixing=measured_mixing(measurement),
        depth=None if measurement.depth is None else measured_depth(measurement.depth),
    )


def measured_depth(depth: DepthProfiles) -> Depth:
    """The profiles of the layers' outputs as arrays; no intervals where a single prompt gives none."""
    bounded = len(depth.per_prompt) > 1
    return Depth(
        layers=np.array(depth.layers),
        influence=np.stack([profile.influence for profile in depth.profiles]),
        low=np.stack([profile.low for profile in depth.profiles if profile.low is not None]) if bounded else None,
        high=np.stack([profile.high for profile in depth.profiles if profile.high is not None]) if bounded else None,
    )


def measured_mixing(measurement: Measurement) -> dict[str, Mixing]:
    """Mixing per layer by both definitions; nothing where the model's family has no description."""
    if measurement.mixing is None or measurement.mixing_frobenius is None:
        return {}
    return {
        "token_mean": Mixing(measurement.mixing, measurement.mixing_low, measurement.mixing_high),
        "frobenius": Mixing(
            measurement.mixing_frobenius, measurement.mixing_frobenius_low, measurement.mixing_frobenius_high
        ),
    }


def comparison_record(
    predicted: Record,
    measured: Record,
    arguments: Mapping[str, Any],
    *,
    command: str = "",
    kind: str | None = None,
    seed: int = 0,
) -> Record:
    """Every theory of the first run beside what was measured in the second.

    The prompts of both runs are resampled: together where both read the same ones, else independently, and the smaller
    number of them decides whether a claim is made. A prediction that read no prompts is taken as it is.

    Args:
        predicted: A run with predictions; where it has none, its measured kinds are taken in their place.
        measured: A run with measured kinds; where it has none, its predictions are taken in their place.
        arguments: What the user passed.
        command: What repeats the comparison in a shell.
        kind: Compare to this measured kind only; all by default.
        seed: Of the resamples.

    Raises:
        UsageError: nothing to compare, an unknown kind, or profiles of different lengths.
    """
    for record in (predicted, measured):
        if record.verb not in COMPARED:
            raise UsageError(f"a run of {record.verb} cannot be compared; allowed are runs of {', '.join(COMPARED)}")
    kinds = _measurements(measured)
    if kind is not None:
        if kind not in kinds:
            raise UsageError(f"the second run holds no profile {kind!r}; it holds: {', '.join(kinds)}")
        kinds = {kind: kinds[kind]}
    theories = _predictions(predicted, shared=_shared_units(predicted, measured, kinds))
    subject = Subject(name="comparison", measured=kinds, theories=theories)
    compared = compare_subject(subject, generator=np.random.default_rng(seed))
    record = Record(
        verb="compare",
        arguments=dict(arguments),
        resolved={
            "title": f"{view_of(predicted).title} beside {view_of(measured).title}",
            "command": command,
            "predicted_run": predicted.run_id,
            "measured_run": measured.run_id,
        },
        seeds={"bootstrap": seed},
    )
    return store_subjects(record, [compared])


def _predictions(record: Record, *, shared: int) -> dict[str, TheoryProfile]:
    """The run's theories, or what it measured, taken as predictions; named by subject where there are several.

    Args:
        record: The run.
        shared: How many prompts it read that are those of the measurement; 0: its own are resampled on their own.
    """
    subjects = view_of(record).subjects
    if any(subject.theories for subject in subjects):
        return {
            _named(name, subject, subjects): _prediction(entry.profile, _theory_sample(entry, subject), shared=shared)
            for subject in subjects
            for name, entry in subject.theories.items()
        }
    return {
        _named(name, subject, subjects): _prediction(
            entry.profile, entry.sample or Sample(entry.profile.influence[None]), shared=shared
        )
        for subject in subjects
        for name, entry in subject.measured.items()
    }


def _shared_units(predicted: Record, measured: Record, kinds: Mapping[str, MeasuredKind]) -> int:
    """How many prompts both runs read, the same ones in the same order and one unit each; 0 where they differ."""
    first, second = (record.resolved.get("prompts") or {} for record in (predicted, measured))
    units = {len(entry.per_prompt) for entry in kinds.values() if entry.per_prompt is not None}
    same = first.get("sha256") is not None and first["sha256"] == second.get("sha256")
    return int(first["count"]) if same and units == {first["count"]} else 0


def _theory_sample(theory: TheoryProfile, subject: Subject) -> Sample | None:
    """A theory's own units, grouped as the subject's measured units are; None where it read no prompts."""
    if theory.per_prompt is None:
        return None
    groups = [entry.groups for entry in subject.measured.values() if entry.groups is not None]
    return Sample.of(theory.per_prompt, next((own for own in groups if len(own) == len(theory.per_prompt)), None))


def _prediction(profile: Profile, sample: Sample | None, *, shared: int) -> TheoryProfile:
    """With its units paired with the measurement's where these are the same prompts, else resampled on their own.

    A measurement of which only the mean was kept is one unit: no interval, no claim.
    """
    if sample is None:
        return TheoryProfile(profile)
    if 1 < shared == len(sample.units) and sample.groups is None and sample.scales is None:
        return TheoryProfile(profile, sample.units)
    return TheoryProfile(profile, sample=sample)


def _measurements(record: Record) -> dict[str, MeasuredKind]:
    """What the run measured, or its theories, taken as given."""
    subjects = view_of(record).subjects
    if any(subject.measured for subject in subjects):
        return {
            _named(name, subject, subjects): entry for subject in subjects for name, entry in subject.measured.items()
        }
    return {
        _named(name, subject, subjects): MeasuredKind(entry.profile)
        for subject in subjects
        for name, entry in subject.theories.items()
    }


def _named(name: str, subject: Subject, subjects: tuple[Subject, ...]) -> str:
    return name if len(subjects) == 1 else f"{subject.name}: {name}"
