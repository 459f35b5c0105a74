"""The record layout that reports read: how subjects go into a `Record`, and how any record becomes a `RunView`.

Arrays (float64; SUBJECT is "trained", "initialised" ...; `low`, `high`, `per_prompt`, `scales` only where they
exist):

    SUBJECT/measured/KIND/{influence,low,high}     [n_positions]
    SUBJECT/measured/KIND/per_prompt               [n_units n_positions]
    SUBJECT/measured/KIND/scales                   [n_units] how much each unit counts, where not all the same
    SUBJECT/theories/NAME/{influence,low,high}     [n_positions]             SUBJECT/theories/NAME/per_prompt
    SUBJECT/mixing/DEFINITION/{value,low,high}     [n_layers]
    SUBJECT/depth/jacobian/layers                  [n_layers] int64          SUBJECT/depth/jacobian/{influence,low,high}

Scalars: `subjects`: {SUBJECT: {measured: [KIND], theories: [NAME], mixing: [DEFINITION], summaries: {KIND: {STATISTIC:
interval}}, comparisons: [{kind, theory, metrics, flat, prompts}]}}, `contrasts`: {KIND: {...}}, `left_out`: [text],
`precision`: {KIND: {LOSS: [one per checked prompt]}}, `details`: {KIND: {NAME: [one per prompt]}}, `found`: {NAME:
interval}, what a theory finds beside its profile, `ingredients`: {KIND: {flat, left_out: {NAME: {distance, cost}}}}.
An interval is {value, low, high}, None where infinite or undefined. `resolved` may hold `title`, `command` and the
tables `model`, `prompts`. Records without `subjects` are read too: `profile/influence` (predict), `measured/...`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from posbias.comparison import (
    Contrast,
    Depth,
    KindComparison,
    Mixing,
    PromptComparison,
    SplitHalf,
    Subject,
)
from posbias.comparison.metrics import finite
from posbias.comparison.subject import Comparison, Distances, MeasuredKind, TheoryProfile
from posbias.errors import UsageError
from posbias.profiles import Profile
from posbias.records import Record
from posbias.statistics import Interval

DEPTH_KIND = "jacobian"
"""The kind that is measured by depth: hidden states have no tokens to score."""
_INTERVALS = ("distance", "flat", "difference", "per_prompt", "per_prompt_flat")


@dataclass(frozen=True, eq=False)
class RunView:
    """One run as a report shows it."""

    verb: str
    title: str
    """What the run is about: the model, or the architecture."""
    subjects: tuple[Subject, ...]
    contrasts: Mapping[str, Contrast] = field(default_factory=dict)
    """Per kind, the first subject (trained) against the second (at initialisation)."""
    left_out: tuple[str, ...] = ()
    caveats: tuple[str, ...] = ()
    """What a reader must know of the model and of the theories, one sentence each."""
    command: str = ""
    """What reproduces the run, to be pasted into a shell or into Python."""
    conditions: Mapping[str, str] = field(default_factory=dict)
    """How it was measured: model, prompts, seeds, versions; label to text."""
    precision: Mapping[str, Mapping[str, Sequence[float | None]]] = field(default_factory=dict)
    """Per kind, the loss of half precision on every prompt that was checked."""
    details: Mapping[str, Mapping[str, Sequence[float]]] = field(default_factory=dict)
    """Per kind, what else it found on every prompt."""
    found: Mapping[str, Mapping[str, float | None]] = field(default_factory=dict)
    """What a theory found beside its profile, by name: {value, low, high}."""
    ingredients: Mapping[str, Any] = field(default_factory=dict)
    """Per kind, what leaving out each ingredient of a theory costs."""


def store_subjects(
    record: Record,
    subjects: Sequence[Subject],
    *,
    contrasts: Mapping[str, Contrast] | None = None,
    left_out: Sequence[str] = (),
) -> Record:
    """Write compared subjects into `record` (in place) in the layout above, and return it.

    Args:
        record: The run's record; its arrays and the scalars `subjects`, `contrasts`, `left_out` are set.
        subjects: Results of `compare_subject`, the trained model first.
        contrasts: Result of `contrast_subjects`.
        left_out: What was not measured or does not apply, one sentence each.

    Raises:
        UsageError: a name contains a slash.
    """
    for subject in subjects:
        record.arrays.update(_subject_arrays(subject))
    record.scalars["subjects"] = {subject.name: _subject_scalars(subject) for subject in subjects}
    record.scalars["contrasts"] = {kind: _contrast_scalars(entry) for kind, entry in (contrasts or {}).items()}
    record.scalars["left_out"] = list(left_out)
    return record


def view_of(record: Record) -> RunView:
    """What a report shows of a run, from its record alone.

    Raises:
        UsageError: the run failed, or its record holds no profile.
    """
    from posbias.report.conditions import caveats_of, command_of, conditions_of, title_of

    if record.status != "done":
        raise UsageError(f"the run {record.run_id} did not finish ({record.error}); only finished runs can be drawn")
    stored = record.scalars.get("subjects")
    try:
        subjects = tuple(_subject(record, name, scalars) for name, scalars in (stored or {}).items())
        contrasts = {kind: _contrast(entry) for kind, entry in record.scalars.get("contrasts", {}).items()}
    except (AttributeError, KeyError, TypeError) as error:
        raise UsageError(f"the record of run {record.run_id} is damaged: {type(error).__name__} {error}") from None
    subjects = subjects or (_bare_subject(record),)
    if not any(subject.n_positions for subject in subjects):
        raise UsageError(f"the {record.verb} run {record.run_id} holds no profile to draw")
    return RunView(
        verb=record.verb,
        title=title_of(record),
        subjects=subjects,
        contrasts=contrasts,
        left_out=tuple(record.scalars.get("left_out", ())),
        caveats=caveats_of(record),
        command=command_of(record),
        conditions=conditions_of(record),
        precision=record.scalars.get("precision", {}),
        details=record.scalars.get("details", {}),
        found=record.scalars.get("found", {}),
        ingredients=record.scalars.get("ingredients", {}),
    )


def _subject_arrays(subject: Subject) -> dict[str, np.ndarray]:
    groups: list[tuple[str, Mapping[str, Any]]] = [
        ("measured", {name: _profile_arrays(entry) for name, entry in subject.measured.items()}),
        ("theories", {name: _profile_arrays(entry) for name, entry in subject.theories.items()}),
        ("mixing", {name: vars(entry) for name, entry in subject.mixing.items()}),
        ("depth", {} if subject.depth is None else {DEPTH_KIND: vars(subject.depth)}),
    ]
    arrays: dict[str, np.ndarray] = {}
    for group, entries in groups:
        for name, parts in entries.items():
            if "/" in name or "/" in subject.name:
                raise UsageError(f"names in a record must not contain a slash: {subject.name!r}, {name!r}")
            stem = f"{subject.name}/{group}/{name}"
            arrays.update({f"{stem}/{part}": array for part, array in parts.items() if array is not None})
    return arrays


def _profile_arrays(entry: MeasuredKind | TheoryProfile) -> dict[str, np.ndarray | None]:
    units = {"scales": entry.scales} if isinstance(entry, MeasuredKind) else {}
    return {**vars(entry.profile), "per_prompt": entry.per_prompt, **units}


def _subject_scalars(subject: Subject) -> dict[str, Any]:
    return {
        "measured": list(subject.measured),
        "theories": list(subject.theories),
        "mixing": list(subject.mixing),
        "summaries": {
            kind: {name: interval.as_record() for name, interval in summary.items()}
            for kind, summary in subject.summaries.items()
        },
        "comparisons": [
            {
                "kind": block.kind,
                "theory": block.theory,
                "metrics": block.comparison.as_record(),
                "flat": block.comparison.flat.as_record(),
                "prompts": None if block.prompts is None else _prompts_scalars(block.prompts),
            }
            for block in subject.comparisons
        ],
    }


def _prompts_scalars(prompts: PromptComparison) -> dict[str, Any]:
    noise = {name: finite(value) for name, value in vars(prompts.noise).items()}
    intervals = {name: getattr(prompts, name).as_record() for name in _INTERVALS}
    return {**intervals, "noise": noise, "n_units": prompts.n_units, "decides": prompts.decides}


def _contrast_scalars(entry: Contrast) -> dict[str, Any]:
    return {
        "statistics": {name: interval.as_record() for name, interval in entry.statistics.items()},
        **{name: getattr(entry, name).as_record() for name in ("distance", "flat", "difference")},
        "n_units": entry.n_units,
        "decides": entry.decides,
    }


def _number(value: float | None) -> float:
    return float("nan") if value is None else float(value)


def _distances(stored: Mapping[str, float | None]) -> dict[str, float]:
    return {name: _number(value) for name, value in stored.items()}


def _contrast(stored: Mapping[str, Any]) -> Contrast:
    return Contrast(
        statistics={name: Interval.of_record(value) for name, value in stored["statistics"].items()},
        distance=Interval.of_record(stored["distance"]),
        flat=Interval.of_record(stored["flat"]),
        difference=Interval.of_record(stored["difference"]),
        n_units=stored["n_units"],
    )


def _comparison(stored: Mapping[str, Any]) -> KindComparison:
    prompts = None
    if stored["prompts"] is not None:
        intervals = {name: Interval.of_record(stored["prompts"][name]) for name in _INTERVALS}
        noise = SplitHalf(**{name: _number(value) for name, value in stored["prompts"]["noise"].items()})
        prompts = PromptComparison(**intervals, noise=noise, n_units=stored["prompts"]["n_units"])
    comparison = Comparison(_distances(stored["metrics"]), Distances(_distances(stored["flat"])))
    return KindComparison(stored["kind"], stored["theory"], comparison, prompts)


def _subject(record: Record, name: str, scalars: Mapping[str, Any]) -> Subject:
    return Subject(
        name=name,
        measured={kind: _measured(record, f"{name}/measured/{kind}") for kind in scalars["measured"]},
        theories={theory: _theory(record, f"{name}/theories/{theory}") for theory in scalars["theories"]},
        mixing={definition: _mixing(record, f"{name}/mixing/{definition}") for definition in scalars["mixing"]},
        depth=_depth(record, f"{name}/depth/{DEPTH_KIND}"),
        summaries={
            kind: {statistic: Interval.of_record(value) for statistic, value in summary.items()}
            for kind, summary in scalars["summaries"].items()
        },
        comparisons=tuple(_comparison(block) for block in scalars["comparisons"]),
    )


def _bare_subject(record: Record) -> Subject:
    """Records that hold profiles only: one prediction, or measured kinds without comparisons."""

    def names(group: str) -> list[str]:
        return list(dict.fromkeys(key.split("/")[1] for key in record.arrays if key.startswith(f"{group}/")))

    theories = {name: _theory(record, f"theories/{name}") for name in names("theories")}
    if "profile/influence" in record.arrays:
        named = record.resolved.get("theory") or record.arguments.get("theory") or "prediction"
        theories[str(named)] = _theory(record, "profile")
    return Subject(
        name=record.verb,
        measured={kind: _measured(record, f"measured/{kind}") for kind in names("measured")},
        theories=theories,
        mixing={definition: _mixing(record, f"mixing/{definition}") for definition in names("mixing")},
    )


def _profile(record: Record, stem: str) -> Profile:
    arrays = record.arrays
    if f"{stem}/influence" not in arrays:
        raise UsageError(f"the {record.verb} run {record.run_id} has no array {stem}/influence")
    return Profile(arrays[f"{stem}/influence"], low=arrays.get(f"{stem}/low"), high=arrays.get(f"{stem}/high"))


def _measured(record: Record, stem: str) -> MeasuredKind:
    arrays = record.arrays
    units = {name: arrays.get(f"{stem}/{name}") for name in ("per_prompt", "scales")}
    return MeasuredKind(_profile(record, stem), **units)


def _theory(record: Record, stem: str) -> TheoryProfile:
    return TheoryProfile(_profile(record, stem), record.arrays.get(f"{stem}/per_prompt"))


def _depth(record: Record, stem: str) -> Depth | None:
    parts = {name: record.arrays.get(f"{stem}/{name}") for name in ("layers", "influence", "low", "high")}
    if parts["layers"] is None or parts["influence"] is None:
        return None
    return Depth(parts["layers"], parts["influence"], parts["low"], parts["high"])


def _mixing(record: Record, stem: str) -> Mixing:
    arrays = record.arrays
    if f"{stem}/value" not in arrays:
        raise UsageError(f"the {record.verb} run {record.run_id} has no array {stem}/value")
    return Mixing(arrays[f"{stem}/value"], arrays.get(f"{stem}/low"), arrays.get(f"{stem}/high"))
