"""Runs that hold profiles of influence: how their subjects go into a `Record`, and the typed result that comes back.

Arrays (float64; SUBJECT is "trained", "initialised" ...; `low`, `high`, `per_prompt`, `scales` only if they
exist):

    SUBJECT/measured/KIND/{influence,low,high}     [n_positions]
    SUBJECT/measured/KIND/per_prompt               [n_units n_positions]
    SUBJECT/measured/KIND/standard_errors          [n_units n_positions]
    SUBJECT/measured/KIND/scales                   [n_units] how much each unit counts, if not all the same
    SUBJECT/theories/NAME/{influence,low,high}     [n_positions]             SUBJECT/theories/NAME/per_prompt
    SUBJECT/mixing/DEFINITION/{value,low,high}     [n_layers]
    SUBJECT/depth/jacobian/layers                  [n_layers] int64          SUBJECT/depth/jacobian/{influence,low,high}

Scalars: `subjects`: {SUBJECT: {measured: [KIND], theories: [NAME], mixing: [DEFINITION], summaries: {KIND: {STATISTIC:
interval}}, comparisons: [{kind, theory, metrics, flat, prompts}]}}, `contrasts`: {KIND: {...}}, `left_out`: [sentence],
`precision`: {KIND: {LOSS: [one per checked prompt]}}, `details`: {KIND: {NAME: [one per prompt]}}, `found`: {NAME:
interval}, what a theory finds beside its profile. An interval is {value, low, high}, None if infinite or undefined.
`resolved` may hold `title`, `command` and the tables `model`, `prompts`, and `curves`: {GROUP/NAME: settings}, what
each curve of several was computed for, by which they are named. Records without `subjects` are read too:
`profile/influence` (predict), `measured/...`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from posbias.comparison.contrasts import Contrast
from posbias.comparison.model_profiles import Depth, KindComparison, MeasuredKind, Mixing, Subject, TheoryProfile
from posbias.display.naming import Settings, names_beside
from posbias.display.showing import INFLUENCE, Shown
from posbias.errors import UsageError
from posbias.profiles import Profile
from posbias.runs.records import MEASURED_PART, REPORT_FILE, Record
from posbias.runs.results import RESULTS, Result, as_stored, from_stored
from posbias.statistics import Interval

DEPTH_KIND = "jacobian"
"""The kind that is measured by depth: hidden states have no tokens to score."""
THEORIES, MEASURED = "theories/", "measured/"
"""What the names of a run's curves begin with: predictions, and what they are compared to."""
Entry = TypeVar("Entry", MeasuredKind, TheoryProfile, Mixing, Depth, Profile)


@dataclass(frozen=True, eq=False, repr=False)
class ProfileRun(Result):
    """A run that holds profiles of influence, measured or predicted, as it was stored."""

    record: Record
    label: str
    """Name of the model or the architecture; beside other runs, one that tells it apart from them."""
    subjects: tuple[Subject, ...]
    contrasts: Mapping[str, Contrast] = field(default_factory=dict)
    """Per kind, the first subject (trained) against the second (at initialisation)."""
    curves: Mapping[str, Settings] = field(default_factory=dict)
    """Settings behind each profile, by group and name ("theories/rollout"); empty for audits."""
    left_out: tuple[str, ...] = ()
    """Measurements and theories that are missing or do not apply."""
    precision: Mapping[str, Mapping[str, Sequence[float | None]]] = field(default_factory=dict)
    """Losses by kind and name, one number for each prompt that was checked against float32."""
    details: Mapping[str, Mapping[str, Sequence[float | None]]] = field(default_factory=dict)
    """Further numbers by kind and name, one for each prompt."""
    found: Mapping[str, Interval] = field(default_factory=dict)
    """Numbers that a theory gives beside its profile."""

    @classmethod
    def from_record(cls, record: Record) -> "ProfileRun":
        """The profiles of a run; none if it failed. One that finished without any is refused."""
        if record.status != "done":
            return cls(record, record.title, ())
        scalars = record.scalars
        subjects = tuple(_subject(record, name, stored) for name, stored in (scalars.get("subjects") or {}).items())
        subjects = subjects or (_bare_subject(record),)
        if not any(subject.n_positions for subject in subjects):
            raise UsageError(f"the {record.verb} run {record.run_id} holds no profile to draw")
        return cls(
            record,
            record.title,
            subjects,
            contrasts={kind: from_stored(Contrast, entry) for kind, entry in scalars.get("contrasts", {}).items()},
            curves=_curves(record, subjects[0]),
            left_out=tuple(map(str, scalars.get("left_out", ()))),
            precision=scalars.get("precision", {}),
            details=scalars.get("details", {}),
            found=_intervals(scalars.get("found", {})),
        )

    @property
    def subject(self) -> Subject:
        """The model as trained, or what else the run is about."""
        return self.subjects[0]

    @property
    def n_positions(self) -> int:
        """Positions of the profiles."""
        return self.subject.n_positions

    def shown(self) -> Shown:
        """The longest profiles; in the picture each subject's first measured kind stands for the others, if any has."""
        entries: list[tuple[Settings, Profile, bool]] = []
        only_measured = any(subject.measured for subject in self.subjects)
        for subject in self.subjects:
            about = {"model": self.label, "state": subject.name}
            for kind, measured in subject.measured.items():
                settings = self.curves.get(MEASURED + kind, {"kind": kind, **about})
                entries.append((settings, measured.profile, kind == next(iter(subject.measured))))
            for name, theory in subject.theories.items():
                settings = self.curves.get(THEORIES + name, {"theory": name, **about})
                entries.append((settings, theory.profile, not only_measured))
        longest = max((profile.n_positions for _, profile, _ in entries), default=0)
        entries = [entry for entry in entries if entry[1].n_positions == longest]
        names = names_beside([settings for settings, _, _ in entries])
        curves = zip(names, entries, strict=True)
        series = [profile.series(name, drawn=drawn) for name, (_, profile, drawn) in curves]
        return Shown(self.record.line, tuple(series))


@RESULTS.register("audit")
@dataclass(frozen=True, eq=False, repr=False)
class Audit(ProfileRun):
    """A finished audit: the model as trained (if it was), then at initialisation."""

    directory: Path | None = None
    """Where it lies; None if it was kept in memory alone."""
    report: Path | None = None
    """The HTML page there."""

    def in_directory(self, directory: Path) -> "Audit":
        """The audit with its page, if one lies in the directory from which it was read."""
        page = directory / REPORT_FILE
        return replace(self, directory=directory, report=page if page.is_file() else None)

    def shown(self) -> Shown:
        """The profiles, with both states and the page named."""
        states = ", ".join(subject.name for subject in self.subjects)
        page = "" if self.report is None else f"; report: {self.report}"
        return replace(super().shown(), title=f"{self.label}: {states}{page}")


def store_subjects(
    record: Record,
    subjects: Sequence[Subject],
    *,
    contrasts: Mapping[str, Contrast] | None = None,
    left_out: Sequence[str] = (),
) -> Record:
    """Write compared subjects, the trained model first, into `record` (in place) in the layout above, and return it.

    `left_out` says what was not measured or does not apply. A name with a slash is refused.
    """
    record.scalars["subjects"] = {}
    for subject in subjects:
        _store_subject(record, subject)
    record.scalars["contrasts"] = as_stored(contrasts or {})
    record.scalars["left_out"] = list(left_out)
    return record


def profile_stems(record: Record) -> list[str]:
    """Beginnings of the names of a record's profiles, such as `trained/measured/jacobian`.

    Those as trained come before those at initialisation, and the measured ones before the theories.
    """
    parts = {name.rpartition("/"): array for name, array in record.arrays.items()}
    stems = [stem for (stem, _, part), array in parts.items() if part == INFLUENCE and array.ndim == 1]
    return sorted(stems, key=lambda stem: (stem.startswith("initialised/"), MEASURED_PART not in stem.split("/")))


def shared_settings(resolved: Mapping[str, Any], n_positions: int) -> dict[str, Any]:
    """The settings that all curves of a run share: of its model and prompts, or of its architecture if it has none."""
    model, prompts, architecture = ({**(resolved.get(name) or {})} for name in ("model", "prompts", "architecture"))
    of_model = {"model": model.get("source"), "init_seed": model.get("init_seed"), "dtype": model.get("dtype")}
    of_prompts = {"prompts": prompts.get("source"), "windows": prompts.get("windows"), "seed": prompts.get("seed")}
    sources = {name: value for name, value in {**of_model, **of_prompts}.items() if value is not None}
    shared = {**(sources or architecture), "positions": n_positions}
    if model:
        born = None if model.get("init_seed") is None else "initialised"
        shared["state"] = ", ".join(filter(None, (born, model.get("intervention")))) or "trained"
    return shared


def _curves(record: Record, subject: Subject) -> dict[str, Settings]:
    """Settings that each profile of a run was computed or measured for, by group and name."""
    resolved = record.resolved
    if isinstance(resolved.get("curves"), Mapping):
        return {str(name): dict(settings) for name, settings in resolved["curves"].items()}
    if record.verb not in ("predict", "measure") or not subject.n_positions:
        return {}
    shared, parameters = shared_settings(resolved, subject.n_positions), resolved.get("parameters") or {}
    theories = {THEORIES + name: {"theory": name, **parameters, **shared} for name in subject.theories}
    return theories | {MEASURED + kind: {"kind": kind, **shared} for kind in subject.measured}


def _store_subject(record: Record, subject: Subject) -> None:
    groups: dict[str, Mapping[str, Any]] = {
        "measured": subject.measured,
        "theories": subject.theories,
        "mixing": subject.mixing,
        "depth": {} if subject.depth is None else {DEPTH_KIND: subject.depth},
    }
    for group, entries in groups.items():
        for name, entry in entries.items():
            if "/" in name or "/" in subject.name:
                raise UsageError(f"names in a record must not contain a slash: {subject.name!r}, {name!r}")
            parts = {**vars(getattr(entry, "profile", entry)), **vars(entry)}
            stem = f"{subject.name}/{group}/{name}"
            record.arrays |= {f"{stem}/{part}": array for part, array in parts.items() if isinstance(array, np.ndarray)}
    record.scalars["subjects"][subject.name] = {
        **{group: list(groups[group]) for group in ("measured", "theories", "mixing")},
        "summaries": as_stored(subject.summaries),
        "comparisons": as_stored(subject.comparisons),
    }


def _intervals(stored: Mapping[str, Any]) -> dict[str, Interval]:
    return {name: Interval.of_record(entry) for name, entry in stored.items()}


def _subject(record: Record, name: str, scalars: Mapping[str, Any]) -> Subject:
    def entries(group: str, sort: type[Entry]) -> dict[str, Entry]:
        return {key: _entry(record, f"{name}/{group}/{key}", sort) for key in scalars[group]}

    depth = f"{name}/depth/{DEPTH_KIND}"
    return Subject(
        name=name,
        measured=entries("measured", MeasuredKind),
        theories=entries("theories", TheoryProfile),
        mixing=entries("mixing", Mixing),
        depth=_entry(record, depth, Depth) if f"{depth}/layers" in record.arrays else None,
        summaries={kind: _intervals(entries) for kind, entries in scalars["summaries"].items()},
        comparisons=tuple(from_stored(KindComparison, block) for block in scalars["comparisons"]),
    )


def _bare_subject(record: Record) -> Subject:
    """Records that hold profiles only: one prediction, or measured kinds without comparisons."""

    def stems(group: str) -> dict[str, str]:
        names = [key.split("/")[1] for key in record.arrays if key.startswith(f"{group}/")]
        return {name: f"{group}/{name}" for name in names}

    theories = stems("theories")
    if "profile/influence" in record.arrays:
        theories[str(record.resolved.get("theory") or record.arguments.get("theory") or "prediction")] = "profile"
    order = [name.removeprefix(THEORIES) for name in record.resolved.get("curves") or ()]  # files sort their arrays
    theories = {name: theories[name] for name in sorted(theories, key=lambda name: [*order, name].index(name))}
    return Subject(
        name=record.verb,
        measured={kind: _entry(record, stem, MeasuredKind) for kind, stem in stems("measured").items()},
        theories={name: _entry(record, stem, TheoryProfile) for name, stem in theories.items()},
        mixing={definition: _entry(record, stem, Mixing) for definition, stem in stems("mixing").items()},
    )


def _entry(record: Record, stem: str, sort: type[Entry]) -> Entry:
    """A dataclass of the arrays below a stem, among them those of its profile; the first one is needed."""
    names = [field.name for field in fields(sort)]
    if "profile" not in names and f"{stem}/{names[0]}" not in record.arrays:
        raise UsageError(f"the {record.verb} run {record.run_id} has no array {stem}/{names[0]}")
    parts: dict[str, Any] = {name: record.arrays.get(f"{stem}/{name}") for name in names}
    if "profile" in names:
        parts["profile"] = _entry(record, stem, Profile)
    return sort(**parts)
