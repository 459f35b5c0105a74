"""Single results as records, in the layout that reports read (report/layout.py): a measurement, a comparison of
two runs.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from posbias.comparison import Depth, MeasuredKind, Mixing, Subject, TheoryProfile, compare_subject, finite
from posbias.errors import UsageError
from posbias.measurement import DepthProfiles, Measurement
from posbias.models.model import Model
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
    subject = compare_subject(measured_subject(state, measurement), generator=np.random.default_rng(0))
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
    predicted: Record, measured: Record, arguments: Mapping[str, Any], *, command: str = "", kind: str | None = None
) -> Record:
    """Every theory of the first run beside what was measured in the second.

    Args:
        predicted: A run with predictions; where it has none, its measured kinds are taken in their place.
        measured: A run with measured kinds; where it has none, its predictions are taken in their place.
        arguments: What the user passed.
        command: What repeats the comparison in a shell.
        kind: Compare to this measured kind only; all by default.

    Raises:
        UsageError: nothing to compare, an unknown kind, or profiles of different lengths.
    """
    for record in (predicted, measured):
        if record.verb not in COMPARED:
            raise UsageError(f"a run of {record.verb} cannot be compared; allowed are runs of {', '.join(COMPARED)}")
    theories = _predictions(predicted)
    kinds = _measurements(measured)
    if kind is not None:
        if kind not in kinds:
            raise UsageError(f"the second run holds no profile {kind!r}; it holds: {', '.join(kinds)}")
        kinds = {kind: kinds[kind]}
    subject = Subject(name="comparison", measured=kinds, theories=theories)
    compared = compare_subject(subject, generator=np.random.default_rng(0))
    record = Record(
        verb="compare",
        arguments=dict(arguments),
        resolved={
            "title": f"{view_of(predicted).title} beside {view_of(measured).title}",
            "command": command,
            "predicted_run": predicted.run_id,
            "measured_run": measured.run_id,
        },
        seeds={"bootstrap": 0},
    )
    return store_subjects(record, [compared])


def _predictions(record: Record) -> dict[str, TheoryProfile]:
    """The run's theories, or what it measured, taken as predictions; named by subject where there are several."""
    subjects = view_of(record).subjects
    if any(subject.theories for subject in subjects):
        # Predictions for single prompts belong to the other run's prompts: only the average is compared.
        return {
            _named(name, subject, subjects): TheoryProfile(entry.profile)
            for subject in subjects
            for name, entry in subject.theories.items()
        }
    return {
        _named(name, subject, subjects): TheoryProfile(entry.profile)
        for subject in subjects
        for name, entry in subject.measured.items()
    }


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
