"""`compare`: the profiles of one run beside those of another, every distance beside the flat line's.

A run may hold several subjects (an audit: the model as trained and re-initialised), each with several profiles; one
subject of each run is compared, and `CompareOptions` says which, and which of its profiles.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from posbias.checks import checked
from posbias.comparison.distances import Contrast, PromptComparison, Sample, statistic_differences, undecided
from posbias.comparison.options import CompareOptions
from posbias.comparison.stored import (
    MEASURED,
    THEORIES,
    KindComparison,
    MeasuredKind,
    ProfileRun,
    Subject,
    TheoryProfile,
    compare_subject,
    state_of,
    store_subjects,
    told_apart,
)
from posbias.errors import UsageError
from posbias.profiles import Profile
from posbias.results.naming import Settings, names_beside
from posbias.results.records import ARRAYS_FILE, Record, read_record
from posbias.results.result import COMPARISONS, RESULTS, Result, result_of
from posbias.results.showing import Showing, Shown

Entry = TypeVar("Entry", MeasuredKind, TheoryProfile)
PREFERRED = "trained"
"""The subject that is taken of a run with several if nothing else decides."""


@RESULTS.register("compare")
class ComparisonRun(ProfileRun):
    """The profiles of one run beside those of another, with every distance; one pair of them stands for the others."""

    @cached_property
    def pair(self) -> KindComparison:
        """The first comparison of one kind in both runs, else the first of all."""
        return next((block for block in self.comparisons if block.theory == block.kind), self.comparisons[0])

    @property
    def comparisons(self) -> tuple[KindComparison, ...]:
        """Every pair: its kind, theory, distances, those of the flat line, and intervals over prompts."""
        return self.subject.comparisons

    @property
    def wasserstein(self) -> float:
        """The pair's W1."""
        return self.metrics["wasserstein"]

    @property
    def metrics(self) -> Mapping[str, float]:
        """The pair's distances by name: W1 and every other metric."""
        return self.pair.metrics

    @property
    def flat(self) -> Mapping[str, float]:
        """The same of the flat line."""
        return self.pair.flat

    @property
    def intervals(self) -> PromptComparison | None:
        """The pair's W1 with intervals over prompts; None if the second profile has none."""
        return self.pair.prompts

    @property
    def statistics(self) -> Mapping[str, Any]:
        """Every statistic of the first profile less that of the second, if the pair is one kind measured in both.

        Prompts that both read are resampled together.
        """
        contrast = self.contrasts.get(self.pair.kind) if self.pair.theory == self.pair.kind else None
        return {} if contrast is None else contrast.statistics

    @property
    def profiles(self) -> dict[str, Profile]:
        """Every profile by the settings in which it differs from the others."""
        return {name: self._entries[key].profile for key, name in self._names.items()}

    def shown(self) -> Shown:
        """The profiles, those of the pair drawn; W1 beside the flat line's, and the differences of shares."""
        pair, intervals = self.pair, self.intervals
        names = self._names[THEORIES + pair.theory], self._names[MEASURED + pair.kind]
        first, second = names
        distance, flat = (f"{metrics['wasserstein']:.3f}" for metrics in (pair.metrics, pair.flat))
        facts = {}
        if intervals is not None:
            distance, flat = str(intervals.distance), str(intervals.flat)
            words = {-1: "closer than the flat line", 1: "farther than the flat line"}
            decision = words.get(intervals.decides) or undecided(intervals.difference, intervals.n_units)
            facts["W1 less the flat line's"] = f"{intervals.difference}: {decision}"
        for name in ("first_tenth", "middle_tenth", "last_tenth") if self.statistics else ():
            facts[f"{name.replace('_', ' ')}, {first} less {second}"] = str(self.statistics[name])
        facts = {f"W1 of {first} to {second}": distance, f"W1 of the flat line to {second}": flat, **facts}
        for block in self.comparisons:
            others = f"W1 of {self._names[THEORIES + block.theory]} to {self._names[MEASURED + block.kind]}"
            facts.setdefault(others, str(block.prompts.distance if block.prompts else block.metrics["wasserstein"]))
        curves = tuple(profile.curve(name, drawn=name in names) for name, profile in self.profiles.items())
        return Shown(f"{first} beside {second}: W1 {distance}, of the flat line {flat}", curves, facts=facts)

    def facts(self) -> Mapping[str, str]:
        """The verdict, then every distance and the differences of shares."""
        return {**super().facts(), **self.shown().facts}

    @property
    def _entries(self) -> dict[str, MeasuredKind | TheoryProfile]:
        return {
            **{THEORIES + name: entry for name, entry in self.subject.theories.items()},
            **{MEASURED + name: entry for name, entry in self.subject.measured.items()},
        }

    @cached_property
    def _names(self) -> dict[str, str]:
        return dict(zip(self._entries, names_beside([self.curves[key] for key in self._entries]), strict=True))


COMPARED = ("predict", "measure", "audit")
"""Verbs whose runs hold profiles to compare."""


@checked
def compare(first: Any, second: Any, *, options: CompareOptions | None = None) -> Any:
    """Compare two profiles by every registered distance, beside the flat line's.

    Every theory of the first is compared to every kind measured in the second. If the first has no predictions, its
    measured kinds are taken, each beside the same kind of the second, if both have one; if the second has no measured
    kinds, its predictions. The prompts of both are resampled:
    together if both read the same ones, otherwise independently; the smaller number of them decides whether a claim is
    made. A prediction that read no prompts is taken as it is.

    Args:
        first: A `Profile`, a prediction, a measurement, an audit, or a finished run of these or its directory; or an
            evaluation, which is compared to another of the same samples.
        second: Likewise; distances are measured from it.
        options: Which profiles are compared, and the seed of resamples.

    Returns:
        For evaluations, an `EvaluationComparison`: the second less the first. For profiles, a `ComparisonRun`, with
        intervals if the second was measured on prompts; its `wasserstein`, `flat` and `intervals` belong to one pair,
        the first kind that both have if there is one.

    Raises:
        UsageError: something else, profiles over different numbers of positions, or a profile that a run lacks.
    """
    options = options or CompareOptions()
    first, second = (_finished(source) for source in (first, second))
    verbs = [source.record.verb for source in (first, second) if isinstance(source, Result)]
    if alone := [verb for verb in verbs if verb in COMPARISONS]:
        if verbs != [alone[0]] * 2 or options != CompareOptions(seed=options.seed):
            raise UsageError(f"a run of {alone[0]} is compared to another one, without theory, kind and subject")
        return COMPARISONS[alone[0]](first, second)
    predicted_run, measured_run = told_apart([_with_profiles(source) for source in (first, second)])
    predicted, measured = _subjects((predicted_run, measured_run), options.subject)
    kinds = dict(measured.measured) or {name: MeasuredKind(entry.profile) for name, entry in measured.theories.items()}
    if options.kind is not None:
        kinds = _only(kinds, options.kind, run="second")
    shared = _shared_units(predicted_run, measured_run, kinds)
    theories = _predictions(predicted, options.theory, shared=shared)
    generator = np.random.default_rng(options.seed)
    compared = compare_subject(Subject("comparison", measured=kinds, theories=theories), generator=generator)
    compared, contrasts = _like_to_like(predicted, compared, generator=generator, paired=shared > 1)
    record = Record(
        verb="compare",
        arguments=dict(vars(options)),
        resolved={
            "title": f"{state_of(predicted_run, predicted)} beside {state_of(measured_run, measured)}",
            "predicted_run": predicted_run.record.run_id,
            "measured_run": measured_run.record.run_id,
            "subjects": {"predicted": predicted.name, "measured": measured.name},
            "curves": {
                **{THEORIES + name: _settings(predicted_run, predicted, name) for name in theories},
                **{MEASURED + name: _settings(measured_run, measured, name) for name in kinds},
            },
        },
        seeds={"bootstrap": options.seed},
    )
    stored = ComparisonRun.from_record(store_subjects(record, [compared], contrasts=contrasts))
    assert isinstance(stored, ComparisonRun)
    return replace(stored, subjects=(compared,))  # a record knows no infinite distance


def _like_to_like(
    first: Subject, compared: Subject, *, generator: np.random.Generator, paired: bool
) -> tuple[Subject, dict[str, Contrast]]:
    """Comparisons, those of one kind alone if both runs measured it, and what differs, by kind, at that distance."""
    pairs = {block.kind: block for block in compared.comparisons if block.theory == block.kind}
    shared = [kind for kind in first.measured if kind in pairs]
    if shared:  # one kind says nothing of another, which may be nearer by chance
        compared = replace(compared, comparisons=tuple(pairs.values()))
    contrasts = {}
    for kind in shared:
        near, one, other = pairs[kind].prompts, first.measured[kind].sample, compared.measured[kind].sample
        if near and one and other:
            statistics = statistic_differences(one, other, generator=generator, paired=paired)
            contrasts[kind] = Contrast(near.distance, near.flat, near.difference, near.n_units, statistics)
    return compared, contrasts


def _finished(source: Any) -> Any:
    """The typed result, if a directory or a record holds one that is compared in its own way."""
    if isinstance(source, str | Path) and (Path(source) / ARRAYS_FILE).is_file():
        source = read_record(source)
    return result_of(source) if isinstance(source, Record) and source.verb in COMPARISONS else source


def _with_profiles(source: Any) -> ProfileRun:
    """The run as stored; refused if its verb measures or predicts no profiles of influence."""
    if isinstance(source, Profile):
        arrays = {f"profile/{name}": array for name, array in vars(source).items() if array is not None}
        source = Record("predict", {}, {"title": "profile", "theory": "profile"}, arrays=arrays)
    record = source.as_run() if isinstance(source, Record | Showing) else None
    if not isinstance(record, Record):
        raise UsageError(
            "compare takes profiles, predictions, measurements and runs; a model is measured first, as in "
            f"posbias.measure(model, prompts); got {source!r:.80}"
        )
    if record.verb not in COMPARED:
        raise UsageError(f"a run of {record.verb} cannot be compared; runs of predict, measure and audit can")
    if record.status == "failed":
        raise UsageError(f"a run that failed cannot be compared: {record.error}")
    run = result_of(record, ProfileRun)
    assert isinstance(run, ProfileRun)
    return run


def _subjects(runs: Sequence[ProfileRun], requested: str | None) -> list[Subject]:
    """The subject of either run that is compared: the one asked for, the other run's only one, or as trained."""
    alone = [run.subject.name for run in runs if len(run.subjects) == 1]
    names = dict.fromkeys(subject.name for run in runs for subject in run.subjects if len(run.subjects) > 1)
    if requested is not None and requested not in names:
        allowed = f"choose one of {', '.join(names)}" if names else "neither run holds several subjects to choose from"
        raise UsageError(f"subject {requested!r}: {allowed}")
    preferred = [requested] if requested else [*alone, PREFERRED]
    by_name = ({subject.name: subject for subject in run.subjects} for run in runs)
    return [next((of[name] for name in preferred if name in of), next(iter(of.values()))) for of in by_name]


def _settings(view: ProfileRun, subject: Subject, name: str) -> Settings:
    """Settings that a profile was computed or measured for: those of its run, or its theory or kind and the run."""
    settings = view.curves.get(THEORIES + name) or view.curves.get(MEASURED + name)
    return settings or {"theory" if name in subject.theories else "kind": name, "model": state_of(view, subject)}


def _predictions(subject: Subject, only: str | None, *, shared: int) -> dict[str, TheoryProfile]:
    """The subject's theories, or what was measured, taken as predictions; of several `only` one, if it is named.

    Units are paired with the measurement's if these are the same `shared` prompts, otherwise resampled on their own. A
    measurement of which only the mean was kept is one unit: no interval, no claim.
    """

    def prediction(entry: MeasuredKind | TheoryProfile, otherwise: Sample | None) -> TheoryProfile:
        sample = otherwise if entry.per_prompt is None else Sample.of(entry.per_prompt)
        if sample is not None and 1 < shared == len(sample.units):
            return TheoryProfile(entry.profile, sample.units)
        return TheoryProfile(entry.profile, sample=sample)

    theories = {name: prediction(entry, None) for name, entry in subject.theories.items()}
    measured = {
        name: prediction(entry, Sample(entry.profile.influence[None])) for name, entry in subject.measured.items()
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
