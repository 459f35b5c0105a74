"""All that is known about one model in one state (as trained, at initialisation) or one architecture, and its record.

A `Subject` holds measured kinds, theories, mixing per layer, and a comparison for every pair of kind and theory; a
`ProfileRun` is what a record of subjects gives back. Curves are named by what differs between them: one that stands
alone goes by its theory or kind, several of one run, or of runs side by side, by their settings; predictions and
measurements are named apart, and neither is ever called the other.

Arrays (float64; SUBJECT is "trained", "initialised" ...; `low`, `high`, `per_prompt` only if they
exist):

    SUBJECT/measured/KIND/{influence,low,high}     [n_positions]
    SUBJECT/measured/KIND/per_prompt               [n_units n_positions]
    SUBJECT/measured/KIND/standard_errors          [n_units n_positions]
    SUBJECT/theories/NAME/{influence,low,high}     [n_positions]             SUBJECT/theories/NAME/per_prompt
    SUBJECT/mixing/DEFINITION/{value,low,high}     [n_layers]
    SUBJECT/depth/jacobian/layers                  [n_layers] int64          SUBJECT/depth/jacobian/{influence,low,high}

Scalars: `subjects`: {SUBJECT: {measured: [KIND], theories: [NAME], mixing: [DEFINITION], summaries: {KIND: {STATISTIC:
interval}}, comparisons: [{kind, theory, metrics, flat, prompts}]}}, `contrasts`: {KIND: {...}}, `left_out`: [sentence],
`details`: {KIND: {NAME: [one per prompt]}}. An interval is {value, low, high}, None if infinite or undefined.
`resolved` may hold `title`, `command` and the tables `model`, `prompts`, and `curves`: {GROUP/NAME: settings}, what
each curve of several was computed for, by which they are named. Records of predictions have
no `subjects`: `profile/influence`, or `theories/NAME/influence`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, ClassVar, TypeVar

import numpy as np
from jaxtyping import Float64, Int64
from pydantic import BeforeValidator, ConfigDict

from posbias.comparison.distances import (
    Contrast,
    PromptComparison,
    Sample,
    beside_flat,
    compare_with_prompts,
    distances,
    point_statistics,
    statistic_differences,
    summarise,
)
from posbias.errors import UsageError
from posbias.profiles import Profile
from posbias.results.naming import (
    KINDS,
    SUBJECTS,
    Settings,
    curve_names,
    differing,
    label,
    names_beside,
    numbered,
    worded,
)
from posbias.results.naming import THEORIES as THEORY_NAMES
from posbias.results.records import REPORT_FILE, Record
from posbias.results.result import RESULTS, Result, as_stored, from_stored
from posbias.results.showing import Shown
from posbias.results.tables import number_text
from posbias.runs.parts import flat, nested
from posbias.statistics import Interval, StoredInterval, StoredNumber

Rows = Float64[np.ndarray, "_ n_positions"]
"""A row for every unit; a run is read whole, and its subjects have numbers of units of their own."""


@dataclass(frozen=True, eq=False)
class SubjectProfile:
    """One kind of influence that was measured, or a theory's prediction, with the units behind it."""

    profile: Profile
    """Average over units, with its pointwise interval if there is one."""
    per_prompt: Rows | None = None
    """Influence per unit, raw or normalised; without it a measurement gets no interval and no claim is made. Of a
    theory that reads the prompt: a prediction for each unit of the measurement, in the same order."""
    standard_errors: Rows | None = None
    """Errors of raw influence, if it was estimated by random covectors."""
    apart: Sample | None = None
    """Units of a prediction that were drawn independently of the measurement's: they are resampled on their own."""

    @property
    def sample(self) -> Sample | None:
        """The units as normalised profiles."""
        return None if self.per_prompt is None else Sample.of(self.per_prompt)

    @property
    def n_independent(self) -> int:
        """Independently drawn units; 0 if no units are known."""
        return 0 if self.per_prompt is None else len(self.per_prompt)


@dataclass(frozen=True, eq=False)
class Mixing:
    """Mixing coefficient per layer, by one definition ("frobenius" over the sequence, or "token_mean")."""

    value: Float64[np.ndarray, "n_layers"]
    """Coefficients in [0, 1]; layer 0 is nearest the input."""
    low: Float64[np.ndarray, "n_layers"] | None = None
    high: Float64[np.ndarray, "n_layers"] | None = None


@dataclass(frozen=True, eq=False)
class Depth:
    """How the measured profile forms: one profile per layer's output."""

    layers: Int64[np.ndarray, "n_chosen"]
    influence: Float64[np.ndarray, "n_chosen n_positions"]
    """Rows sum to 1."""
    low: Float64[np.ndarray, "n_chosen n_positions"] | None = None
    high: Float64[np.ndarray, "n_chosen n_positions"] | None = None


@dataclass(frozen=True, eq=False)
class KindComparison:
    """One theory against one measured kind."""

    kind: str
    theory: str
    metrics: Mapping[str, StoredNumber]
    """Every registered distance of the theory to the measurement; NaN if undefined."""
    flat: Mapping[str, StoredNumber]
    """Those of the flat line."""
    prompts: PromptComparison | None
    """Intervals and noise; None if the measurement has no single units."""

    @property
    def sign(self) -> int:
        """-1: closer than a flat line; 1: farther; 0: not decided."""
        return 0 if self.prompts is None else self.prompts.decides

    @property
    def distance_text(self) -> str:
        """W1 in three decimals, with its interval if there is one."""
        return number_text(self.metrics["wasserstein"]) if self.prompts is None else str(self.prompts.distance)


@dataclass(frozen=True, eq=False)
class Subject:
    """A model in one state, or a bare architecture, with all that was measured and predicted for it."""

    name: str
    """"trained", "initialised", or what the run was about."""
    measured: Mapping[str, SubjectProfile] = field(default_factory=dict)
    theories: Mapping[str, SubjectProfile] = field(default_factory=dict)
    mixing: Mapping[str, Mixing] = field(default_factory=dict)
    depth: Depth | None = None
    summaries: Mapping[str, Mapping[str, StoredInterval]] = field(default_factory=dict)
    """Per measured kind, every statistic (shares, minimum ...) with its interval."""
    comparisons: tuple[KindComparison, ...] = ()

    __pydantic_config__: ClassVar = ConfigDict(arbitrary_types_allowed=True)

    @property
    def n_positions(self) -> int:
        """Positions of the profiles; 0 for a subject without any."""
        return next((entry.profile.n_positions for entry in (*self.measured.values(), *self.theories.values())), 0)

    def summary(self, kind: str) -> Mapping[str, Interval]:
        """Every statistic of a measured kind, without intervals if no units are known."""
        return self.summaries.get(kind) or point_statistics(self.measured[kind].profile)


def compare_subject(subject: Subject, *, generator: np.random.Generator, alike: bool = False) -> Subject:
    """The subject with its summaries and with every applicable theory compared to every measured kind.

    The generator is the source of all resamples; the theories of one kind see the same ones. `alike`: each kind is
    compared to what has its own name alone.
    """
    summaries: dict[str, Mapping[str, Interval]] = {}
    comparisons: list[KindComparison] = []
    for kind, measured in subject.measured.items():
        sample, prompts = measured.sample, None
        if sample is not None:
            summaries[kind] = summarise(sample, generator=generator)
        seed = int(generator.integers(2**63))
        for name, theory in subject.theories.items():
            if alike and name != kind:
                continue
            if sample is not None:
                known = theory.profile if theory.per_prompt is None else theory.per_prompt
                predicted = known if theory.apart is None else theory.apart
                prompts = compare_with_prompts(predicted, sample, generator=np.random.default_rng(seed))
            comparisons.append(KindComparison(kind, name, *distances(theory.profile, measured.profile), prompts))
    return replace(subject, summaries=summaries, comparisons=tuple(comparisons))


def contrast_subjects(
    first: Subject,
    second: Subject,
    *,
    generator: np.random.Generator,
    near: Mapping[str, PromptComparison] | None = None,
    paired: bool = False,
) -> dict[str, Contrast]:
    """By kind that both subjects share: the first (trained) less the second (at initialisation), and their distance.

    `near`: the distances by kind, if they are known; by default those of the second to the first, independent of it.
    """
    contrasts = {}
    for kind in (kind for kind in first.measured if kind in (second.measured if near is None else near)):
        one, other = first.measured[kind].sample, second.measured[kind].sample
        if one is not None and other is not None:
            beside = beside_flat(other.average[None], one, apart=other) if near is None else near[kind]
            statistics = statistic_differences(one, other, generator=generator, paired=paired)
            contrasts[kind] = Contrast(beside.distance, beside.flat, beside.difference, beside.n_units, statistics)
    return contrasts


DEPTH_KIND = "jacobian"
"""The kind that is measured by depth: hidden states have no tokens to score."""
THEORIES, MEASURED = "theories/", "measured/"
"""What the names of a run's curves begin with: predictions, and what they are compared to."""
WORDS = {**THEORY_NAMES, **KINDS}
"""What a curve that stands alone is called; a kind may be compared like a theory."""
GROUPS = ("measured", "theories", "mixing")
"""Fields of a subject whose entries a record lists, and holds as arrays."""
PerPrompt = Annotated[Float64[np.ndarray, "_"], BeforeValidator(lambda stored: np.array(stored, dtype=np.float64))]
Run = TypeVar("Run", bound="ProfileRun")


@dataclass(frozen=True, eq=False, repr=False)
class ProfileRun(Result):
    """A run that holds profiles of influence, measured or predicted, as it was stored."""

    drawn_by: ClassVar = "posbias.comparison.page:profiles_report"
    drawn_together: ClassVar = True
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
    details: Mapping[str, Mapping[str, PerPrompt]] = field(default_factory=dict)
    """Further numbers of the kinds on every prompt: {kind: {"completeness_gap": ...}}; of a model below float32, what
    rounding costs on the prompts that were measured again."""

    __pydantic_config__: ClassVar = ConfigDict(arbitrary_types_allowed=True)

    @classmethod
    def from_record(cls: type[Run], record: Record) -> Run:
        """The profiles of a run; one without any is refused."""
        arrays, of_subjects = nested(record.arrays), record.scalars.get("subjects")
        if not of_subjects:  # predictions alone
            theories = [str(name).removeprefix(THEORIES) for name in record.resolved.get("curves") or ()]
            if "profile" in arrays:
                theories = [str(record.resolved.get("theory") or "prediction")]
                arrays["theories"] = {theories[0]: arrays["profile"]}
            arrays, of_subjects = {record.verb: arrays}, {record.verb: {"theories": theories}}
        subjects = tuple(_subject(name, parts, arrays.get(name, {})) for name, parts in of_subjects.items())
        if not any(subject.n_positions for subject in subjects):
            raise UsageError(f"the {record.verb} run {record.run_id} holds no profile to draw")
        curves = _curves(record, subjects[0])
        stored = {"record": record, "label": record.title, "subjects": subjects, "curves": curves}
        return from_stored(cls, {**record.scalars, **stored})

    @property
    def subject(self) -> Subject:
        """The model as trained, or what else the run is about."""
        return self.subjects[0]

    @property
    def n_positions(self) -> int:
        """Positions of the profiles."""
        return self.subject.n_positions

    @cached_property
    def names(self) -> dict[str, str]:
        """Names of the predictions if there are several, and of the measurements likewise, by group and name."""
        names: dict[str, str] = {}
        for predicted in (True, False):
            keys = [key for key, settings in self.curves.items() if ("theory" in settings) == predicted]
            if len(keys) > 1:
                names |= zip(keys, names_beside([self.curves[key] for key in keys]), strict=True)
        return names

    def called(self, group: str, name: str) -> str:
        """What a report of the run calls a curve of the group "theories" or "measured" (what those are compared to)."""
        return self.names.get(f"{group}/{name}") or label(WORDS, name)

    def shown(self) -> Shown:
        """The longest profiles; in the picture each subject's first measured kind stands for the others, if any has."""
        curves, measured = [], any(subject.measured for subject in self.subjects)
        for subject in self.subjects:
            state = f", {label(SUBJECTS, subject.name)}" if len(self.subjects) > 1 else ""
            groups = {"measured": list(subject.measured)[:1], "theories": [] if measured else [*subject.theories]}
            for group, drawn in groups.items():
                for name, entry in vars(subject)[group].items():
                    curves.append(entry.profile.curve(self.called(group, name) + state, drawn=name in drawn))
        longest = max((curve.y.size for curve in curves), default=0)
        return Shown(self.record.line, tuple(curve for curve in curves if curve.y.size == longest))


@RESULTS.register("audit")
@dataclass(frozen=True, eq=False, repr=False)
class Audit(ProfileRun):
    """A finished audit: the model as trained (if it was), then at initialisation."""

    report: Path | None = None
    """Its HTML page; None if it was kept in memory alone."""

    def in_directory(self, directory: Path) -> "Audit":
        """The audit with its page, if one lies in the directory from which it was read."""
        page = directory / REPORT_FILE
        return replace(self, report=page if page.is_file() else None)

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

    `left_out` says what was not measured or does not apply.
    """
    for subject in subjects:
        profiles = {
            group: {
                name: {**vars(entry.profile), "per_prompt": entry.per_prompt, "standard_errors": entry.standard_errors}
                for name, entry in entries.items()
            }
            for group, entries in (("measured", subject.measured), ("theories", subject.theories))
        }
        record.arrays |= flat(
            {subject.name: {**profiles, "mixing": subject.mixing, "depth": {DEPTH_KIND: subject.depth}}}
        )
    record.scalars |= {
        "subjects": {
            subject.name: {
                **{group: list(vars(subject)[group]) for group in GROUPS},
                "summaries": as_stored(subject.summaries),
                "comparisons": as_stored(subject.comparisons),
            }
            for subject in subjects
        },
        "contrasts": as_stored(contrasts or {}),
        "left_out": list(left_out),
    }
    return record


def shared_settings(resolved: Mapping[str, Any], n_positions: int) -> dict[str, Any]:
    """The settings that all curves of a run share: of its model and prompts, or of its architecture if it has none."""
    model, prompts, architecture = ({**(resolved.get(name) or {})} for name in ("model", "prompts", "architecture"))
    of_model = {"model": model.get("source"), "init_seed": model.get("init_seed"), "dtype": model.get("dtype")}
    of_prompts = {"prompts": prompts.get("source"), "seed": prompts.get("seed")}
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


def _subject(name: str, stored: Mapping[str, Any], arrays: Mapping[str, Any]) -> Subject:
    """A subject from what its record lists of it, and its arrays as mappings within mappings."""
    groups = {
        group: {key: {**(parts := arrays[group][key]), "profile": parts} for key in stored.get(group, ())}
        for group in GROUPS
    }
    depth = arrays.get("depth", {}).get(DEPTH_KIND)
    return from_stored(Subject, {**stored, **groups, "name": name, "depth": depth})


def state_of(view: ProfileRun, subject: Subject) -> str:
    """The run and the state its model is in."""
    return f"{view.label} {label(SUBJECTS, subject.name)}" if subject.name in SUBJECTS else view.label


def is_measured(view: ProfileRun, kind: str) -> bool:
    """True if the curve that others are compared to was measured; a comparison of predictions has none that was."""
    return "theory" not in view.curves.get(MEASURED + kind, ())


def told_apart(views: Sequence[ProfileRun]) -> list[ProfileRun]:
    """The runs with titles that each name one of them: what differs is added to titles that do not."""
    titles = [view.label for view in views]
    for title in {title for title in titles if titles.count(title) > 1}:
        places = [place for place, view in enumerate(views) if view.label == title]
        shared = []
        for curves in (list(views[place].curves.values()) for place in places):
            own = {*differing(curves), "kind"}  # the settings of single curves, and not of the run
            shared.append(worded({name: value for each in curves for name, value in each.items() if name not in own}))
        if differing(shared):
            for place, name in zip(places, curve_names(shared), strict=True):
                titles[place] = f"{title}: {name}"
    return [replace(view, label=title) for view, title in zip(views, numbered(titles), strict=True)]
