"""A measurement as a record, in the layout that reports read (report/layout.py)."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from posbias.comparison import Depth, MeasuredKind, Mixing, Subject, TheoryProfile, compare_subject, finite
from posbias.measurement import DepthProfiles, Measurement
from posbias.models.model import Model
from posbias.prompts import Prompts
from posbias.records import Record
from posbias.report.layout import store_subjects


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
