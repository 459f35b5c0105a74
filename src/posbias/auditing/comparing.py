"""Two runs compared, as a record: the predictions of one beside the measurements of the other.

A run may hold several subjects (an audit: the model as trained and re-initialised), each with several profiles; one
subject of each run is compared, and `Chosen` says which, and which of its profiles.

`ingredient_record`: what every ingredient of the power rollout costs, its distance to a measurement with one of them
left out at a time; both read the same prompts, so they are resampled together (docs/theory, section 5).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
from jaxtyping import Float64

from posbias.auditing.measuring import MeasurePlan, measured_subject, state_name
from posbias.comparison import MeasuredKind, Sample, Subject, TheoryProfile, compare_subject
from posbias.comparison.metrics import wasserstein
from posbias.display.naming import Settings
from posbias.errors import UsageError
from posbias.measurement.cost import preflight
from posbias.measurement.kinds import resolve_kinds
from posbias.measurement.measurement import measure
from posbias.profiles import Profile
from posbias.report.layout import MEASURED, THEORIES, RunView, store_subjects, view_of
from posbias.report.names import state_of, told_apart
from posbias.runs.records import Record
from posbias.statistics import Interval, blocks, jackknife, leave_one_out
from posbias.theory.power_rollout import INGREDIENTS, WHOLE, PowerRollout, ingredients
from posbias.theory.predict import parse_theory

Entry = TypeVar("Entry", MeasuredKind, TheoryProfile)
COMPARED = ("predict", "measure", "audit")
"""Verbs whose runs hold profiles of influence."""
Table = Mapping[str, Float64[np.ndarray, "count n_positions"]]
"""Every prompt's profile by what was left out."""
WHOLE_THEORY = "power_rollout"
"""What the prediction with nothing left out is called among the theories of the record."""
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
    predicted: Record,
    measured: Record,
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
    for record in (predicted, measured):
        if record.verb not in COMPARED:
            raise UsageError(f"a run of {record.verb} cannot be compared; allowed are runs of {', '.join(COMPARED)}")
    chosen = chosen or Chosen()
    one, other = told_apart([view_of(predicted), view_of(measured)])
    first, second = _subjects((one, other), chosen.subject)
    kinds = dict(second.measured) or {name: MeasuredKind(entry.profile) for name, entry in second.theories.items()}
    if chosen.kind is not None:
        kinds = _only(kinds, chosen.kind, run="second")
    theories = _predictions(first, chosen.theory, shared=_shared_units(predicted, measured, kinds))
    subject = Subject(name="comparison", measured=kinds, theories=theories)
    compared = compare_subject(subject, generator=np.random.default_rng(seed))
    record = Record(
        verb="compare",
        arguments={**vars(chosen), "seed": seed},
        resolved={
            "title": f"{state_of(one, first)} beside {state_of(other, second)}",
            "command": command,
            "predicted_run": predicted.run_id,
            "measured_run": measured.run_id,
            "subjects": {"predicted": first.name, "measured": second.name},
            "curves": {
                **{THEORIES + name: _settings(one, first, name) for name in theories},
                **{MEASURED + name: _settings(other, second, name) for name in kinds},
            },
        },
        seeds={"bootstrap": seed},
    )
    return store_subjects(record, [compared])


def _subjects(views: tuple[RunView, RunView], asked: str | None) -> tuple[Subject, Subject]:
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


def _settings(view: RunView, subject: Subject, name: str) -> Settings:
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


def _shared_units(predicted: Record, measured: Record, kinds: Mapping[str, MeasuredKind]) -> int:
    """How many prompts both runs read, the same ones in the same order and one unit each; 0 where they differ."""
    first, second = (record.resolved.get("prompts") or {} for record in (predicted, measured))
    units = {len(entry.per_prompt) for entry in kinds.values() if entry.per_prompt is not None}
    same = first.get("sha256") is not None and first["sha256"] == second.get("sha256")
    return int(first["count"]) if same and units == {first["count"]} else 0


def ingredient_record(
    source: str, plan: MeasurePlan, *, theory: str, arguments: Mapping[str, Any], command: str = ""
) -> Record:
    """Measure a model, predict it with and without each ingredient, and report what leaving each out costs.

    The record holds the measured kinds beside all predictions, and `ingredient_scalars` as the scalar `ingredients`.

    Raises:
        UsageError: the theory is not the diagonal `power_rollout` with its key path, for any target.
    """
    _, given = parse_theory(theory)
    if not isinstance(given, PowerRollout) or given != PowerRollout(target=given.target):
        raise UsageError(
            f"ingredients are those of power_rollout, in its diagonal form with the key path, got theory {theory!r}; "
            "allowed: power_rollout or power_rollout(target=...)"
        )
    model = plan.load(source)
    prompts = plan.prompts(model)
    kinds = resolve_kinds(list(plan.kinds))
    cost = preflight(model, prompts, kinds=kinds, options=plan.options, max_memory=plan.max_memory)
    measurement = measure(model, prompts, kinds=kinds, seed=plan.seed, options=plan.options)
    table = ingredients(model, prompts, target=given.target)
    described = measurement.model or {}
    theories = {_theory_name(name): TheoryProfile(Profile.mean_of(rows), rows) for name, rows in table.items()}
    subject = measured_subject(state_name(described), measurement, theories)
    compared = compare_subject(subject, generator=np.random.default_rng(plan.seed))
    resolved = {
        "title": described.get("source", "a model"),
        "theory": WHOLE_THEORY,
        "parameters": {"target": given.target},
        "n_positions": prompts.n_positions,
        "model": described,
        "prompts": prompts.describe(),
        "measurement": measurement.describe(),
        "command": command,
    }
    record = Record("predict", dict(arguments), resolved, seeds=dict(measurement.seeds))
    record.scalars["cost"] = cost
    record.scalars["ingredients"] = ingredient_scalars(compared, table, seed=plan.seed)
    return store_subjects(record, [compared], left_out=measurement.left_out)


def ingredient_scalars(subject: Subject, table: Table, *, seed: int) -> dict[str, Any]:
    """By kind: the flat line's distance, and by what was left out `distance` (W1 to the measurement) and `cost`.

    All with intervals over the prompts measured.
    """
    prompts = {(block.kind, block.theory): block.prompts for block in subject.comparisons if block.prompts is not None}
    found: dict[str, Any] = {}
    for kind, measured in subject.measured.items():
        sample = measured.sample
        assert sample is not None  # every kind was measured prompt by prompt
        costs = costs_of(table, sample)
        whole = prompts[kind, WHOLE_THEORY]
        rows = {
            name: {
                "distance": prompts[kind, _theory_name(name)].distance.as_record(),
                "cost": costs[name].as_record() if name in costs else None,
            }
            for name in table
        }
        found[kind] = {"flat": whole.flat.as_record(), "left_out": rows, "count": whole.n_units}
    return found


def costs_of(table: Table, measured: Sample) -> dict[str, Interval]:
    """How much farther from the measurement the theory is without each ingredient; negative: nearer.

    W1(without, measured) - W1(whole, measured), all three averaged over the same prompts.
    """
    observed = measured.units
    weights = leave_one_out(len(observed))

    def distances(name: str) -> Float64[np.ndarray, "rows"]:
        parts = blocks(weights, observed.shape[1])
        return np.concatenate([wasserstein(rows @ table[name], rows @ observed) for rows in parts])

    whole = distances(WHOLE)
    differences = {name: distances(name) - whole for name in table if name in INGREDIENTS}
    return {name: jackknife(values).interval(least=-1.0, most=1.0) for name, values in differences.items()}


def _theory_name(left_out: str) -> str:
    return WHOLE_THEORY if left_out == WHOLE else f"without_{left_out}"
