"""`compare`: the profiles of one run beside those of another, every distance beside the flat line's.

A run may hold several subjects (an audit: the model as trained and re-initialised), each with several profiles; one
subject of each run is compared, and `CompareOptions` says which, and which of its profiles.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from posbias.checks import checked
from posbias.comparison.distances import PromptComparison, Sample
from posbias.comparison.options import CompareOptions
from posbias.comparison.stored import (
    MEASURED,
    THEORIES,
    KindComparison,
    ProfileRun,
    Subject,
    SubjectProfile,
    compare_subject,
    contrast_subjects,
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
from posbias.results.tables import number_text


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
        groups = {THEORIES: self.subject.theories, MEASURED: self.subject.measured}
        return {
            self._names[group + name]: entry.profile for group, found in groups.items() for name, entry in found.items()
        }

    def shown(self) -> Shown:
        """The profiles, those of the pair drawn; W1 beside the flat line's, and the differences of shares."""
        pair, intervals = self.pair, self.intervals
        names = self._names[THEORIES + pair.theory], self._names[MEASURED + pair.kind]
        first, second = names
        flat = number_text(self.flat["wasserstein"]) if intervals is None else str(intervals.flat)
        facts = {f"W1 of {first} to {second}": pair.distance_text, f"W1 of the flat line to {second}": flat}
        if intervals is not None:
            facts["W1 less the flat line's"] = f"{intervals.difference}: {intervals.said}"
        for name in ("first_tenth", "middle_tenth", "last_tenth") if self.statistics else ():
            facts[f"{name.replace('_', ' ')}, {first} less {second}"] = str(self.statistics[name])
        for block in self.comparisons:
            others = f"W1 of {self._names[THEORIES + block.theory]} to {self._names[MEASURED + block.kind]}"
            facts.setdefault(others, block.distance_text)
        curves = tuple(profile.curve(name, drawn=name in names) for name, profile in self.profiles.items())
        return Shown(f"{first} beside {second}: W1 {pair.distance_text}, of the flat line {flat}", curves, facts=facts)

    def facts(self) -> Mapping[str, str]:
        """The verdict, then every distance and the differences of shares."""
        return {**super().facts(), **self.shown().facts}

    @cached_property
    def _names(self) -> dict[str, str]:
        return dict(zip(self.curves, names_beside(list(self.curves.values())), strict=True))


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
    opened = [_opened(source) for source in (first, second)]
    verbs = [run.record.verb for run in opened]
    if alone := [verb for verb in verbs if verb in COMPARISONS]:
        if verbs != [alone[0]] * 2 or options != CompareOptions(seed=options.seed):
            raise UsageError(f"a run of {alone[0]} is compared to another one, without theory, kind and subject")
        return COMPARISONS[alone[0]](*opened)
    runs = told_apart([run for run in opened if isinstance(run, ProfileRun)])
    one, other = subjects = _subjects(runs, options.subject)
    kinds = other.measured or {name: SubjectProfile(entry.profile) for name, entry in other.theories.items()}
    kinds = _only(kinds, options.kind, run="second")
    shared = _shared_units(runs, kinds)
    theories = _predictions(one, options.theory, shared=shared)
    generator = np.random.default_rng(options.seed)
    # One kind says nothing of another, which may be nearer by chance.
    alike = any(name in one.measured and name in kinds for name in theories)
    pair = Subject("comparison", measured=kinds, theories=theories)
    compared = compare_subject(pair, generator=generator, alike=alike)
    near = {block.kind: block.prompts for block in compared.comparisons if block.prompts and block.theory == block.kind}
    contrasts = contrast_subjects(one, compared, generator=generator, near=near, paired=shared > 1)
    record = Record(
        verb="compare",
        arguments=dict(vars(options)),
        resolved={
            "title": " beside ".join(map(state_of, runs, subjects)),
            "predicted_run": runs[0].record.run_id,
            "measured_run": runs[1].record.run_id,
            "subjects": {"predicted": one.name, "measured": other.name},
            "curves": {
                **{THEORIES + name: _settings(runs[0], one, name) for name in theories},
                **{MEASURED + name: _settings(runs[1], other, name) for name in kinds},
            },
        },
        seeds={"bootstrap": options.seed},
    )
    stored = ComparisonRun.from_record(store_subjects(record, [compared], contrasts=contrasts))
    return replace(stored, subjects=(compared,))  # a record knows no infinite distance


def _opened(source: Any) -> Result:
    """The typed result behind what is compared: a run with profiles, or one that is compared in its own way."""
    if isinstance(source, Profile):
        arrays = {f"profile/{name}": array for name, array in vars(source).items() if array is not None}
        source = Record("predict", {}, {"title": "profile", "theory": "profile"}, arrays=arrays)
    elif isinstance(source, str | Path) and (Path(source) / ARRAYS_FILE).is_file():
        source = read_record(source)
    record = source.as_run() if isinstance(source, Showing) else None
    if not isinstance(record, Record):
        raise UsageError(
            "compare takes profiles, predictions, measurements and runs; a model is measured first, as in "
            f"posbias.measure(model, prompts); got {source!r:.80}"
        )
    if record.verb in COMPARISONS:
        return source if isinstance(source, Result) else result_of(record)
    if record.verb not in COMPARED:
        raise UsageError(f"a run of {record.verb} cannot be compared; runs of predict, measure and audit can")
    if record.status == "failed":
        raise UsageError(f"a run that failed cannot be compared: {record.error}")
    return result_of(record, ProfileRun)


def _subjects(runs: Sequence[ProfileRun], requested: str | None) -> list[Subject]:
    """The subject of either run that is compared: the one asked for, the other run's only one, or as trained."""
    alone = [run.subject.name for run in runs if len(run.subjects) == 1]
    names = dict.fromkeys(subject.name for run in runs for subject in run.subjects if len(run.subjects) > 1)
    if requested is not None and requested not in names:
        allowed = f"choose one of {', '.join(names)}" if names else "neither run holds several subjects to choose from"
        raise UsageError(f"subject {requested!r}: {allowed}")
    preferred = [requested] if requested else [*alone, "trained"]
    by_name = ({subject.name: subject for subject in run.subjects} for run in runs)
    return [next((of[name] for name in preferred if name in of), next(iter(of.values()))) for of in by_name]


def _settings(run: ProfileRun, subject: Subject, name: str) -> Settings:
    """Settings that a profile was computed or measured for: those of its run, or its theory or kind and the run."""
    settings = run.curves.get(THEORIES + name) or run.curves.get(MEASURED + name)
    return settings or {"theory" if name in subject.theories else "kind": name, "model": state_of(run, subject)}


def _only(profiles: Mapping[str, SubjectProfile], name: str | None, *, run: str) -> Mapping[str, SubjectProfile]:
    """The profile of that name alone, or all if none is named."""
    if name is not None and name not in profiles:
        raise UsageError(f"the {run} run holds no profile {name!r}; it holds: {', '.join(profiles)}")
    return profiles if name is None else {name: profiles[name]}


def _predictions(subject: Subject, only: str | None, *, shared: int) -> Mapping[str, SubjectProfile]:
    """The subject's theories, or what was measured if it has none, taken as predictions; or `only` one of either.

    Units are paired with the measurement's if these are the same `shared` prompts, else resampled on their own; a
    measurement of which only the mean was kept is one unit: no claim.
    """
    judged = {}
    for name, entry in {**subject.measured, **subject.theories}.items():
        alone = None if name in subject.theories else Sample(entry.profile.influence[None])
        sample = entry.sample or alone
        judged[name] = SubjectProfile(entry.profile, apart=sample)
        if sample is not None and 1 < shared == len(sample.units):
            judged[name] = SubjectProfile(entry.profile, sample.units)
    usual = {name: judged[name] for name in subject.theories or subject.measured}
    return usual if only is None else _only(judged, only, run="first")


def _shared_units(runs: Sequence[ProfileRun], kinds: Mapping[str, SubjectProfile]) -> int:
    """Number of prompts that both runs read, the same in the same order and one unit each; 0 if they differ."""
    first, second = (run.record.prompts or {} for run in runs)
    units = {entry.n_independent for entry in kinds.values()} - {0}
    same_prompts = first.get("sha256") is not None and first["sha256"] == second.get("sha256")
    return int(first["count"]) if same_prompts and units == {first["count"]} else 0
