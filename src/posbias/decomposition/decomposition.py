"""`counterfactuals`: what each ingredient does to a model's profile, measured and according to theory, as a record.

One ingredient at a time is replaced, in the model where it allows that and in every theory that knows the ingredient;
what cannot be done is kept with its reason. Nothing here says what a model trained without the ingredient would do.
Shifts are those of the first, middle and last mass, which are linear in a profile: a shift is the mean over prompts of
the shift of each, with and without the ingredient, and so is a theory's.

The record, of verb "decompose" (`posbias.report.decompose` draws it). Scalars: `count`, `kinds` (names),
`sources`, `left_out` {source: reason}, `interventions` [{name, ingredient, reasons, divergence}], `shifts`
[{intervention, source, kind, mass, before, after, shift, gap}], `scores` [{source, kind, error, no_shift, difference,
interventions, n_units, decides}]. An interval is {value, low, high}, None where infinite. Arrays [count n_positions],
one profile per prompt: `baseline/SOURCE/KIND` and `changed/INTERVENTION/SOURCE/KIND`; and `divergence/INTERVENTION`
[count], in nats.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float64, Int64

from posbias.checks import check_seed, checked
from posbias.comparison import STATISTICS
from posbias.comparison.subject import decided
from posbias.decomposition.sources import MEASURED, SOURCES, Profiles, Series, examiner_of
from posbias.display.showing import Showing, Shown
from posbias.errors import RunError, UsageError
from posbias.interventions import Intervention, check_model, resolve_interventions
from posbias.measurement.cost import calibrate, report_cost, without_passes
from posbias.measurement.kinds import Kind, resolve_kinds
from posbias.measurement.prompt import check_prompts
from posbias.models.model import Model
from posbias.profiles import Profile
from posbias.progress import track
from posbias.prompts.prompts import Prompts
from posbias.runs.parts import PartStore, fingerprint, finished_run, made_by
from posbias.runs.records import Record, plain
from posbias.statistics import Interval, jackknife, leave_one_out, mean_of

DEFAULT_INTERVENTIONS = (
    "bidirectional",
    "attention_scaled(factor=0.5)",
    "no_residual",
    "no_rope",
    "no_content",
    "sink_masked",
)
"""One or two per ingredient: causal mask, residual strength, encoding, content, sinks."""
DEFAULT_KINDS = ("jacobian(probes=2)", "probability")
MASSES = ("first_tenth", "middle_tenth", "last_tenth")
"""Shares of the first tenth, of the tenth around the centre and of the last tenth; a flat line has .1 in each."""


@checked
@dataclass(frozen=True)
class DecompositionOptions:
    """What is measured, and where finished pieces are kept."""

    kinds: tuple[str | Kind, ...] = DEFAULT_KINDS
    """Kinds of influence; the power rollout is set beside the first, if that is jacobian, probability or logprob."""
    seed: int = 0
    directory: Path | None = None
    """Run directory in which every finished piece is kept until the record is saved; None keeps nothing."""
    resume: bool = False
    overwrite: bool = False
    """Whether finished pieces in the directory are removed; they are refused otherwise."""


@dataclass(frozen=True)
class Shift:
    """What one intervention does to one mass, according to one source."""

    intervention: str
    source: str
    """"measured", or a theory's name."""
    kind: str
    mass: str
    before: Interval
    after: Interval
    shift: Interval
    """With it less without it, prompt by prompt."""
    gap: Interval | None
    """A theory's shift less the measured one, prompt by prompt; None for the measurement, or where there is none."""

    def as_record(self) -> dict[str, Any]:
        """Plain values."""
        return {name: held.as_record() if isinstance(held, Interval) else held for name, held in vars(self).items()}


@dataclass(frozen=True)
class Score:
    """How far a theory's shifts are from the measured ones, beside a theory that says nothing changes."""

    source: str
    kind: str
    error: Interval
    """Mean over interventions and masses of |theory's shift - measured shift|."""
    no_shift: Interval
    """The same for shifts of zero, over the same interventions: the flat line of this comparison."""
    difference: Interval
    """`error` less `no_shift` on the same draws: below zero, the theory is closer."""
    interventions: tuple[str, ...]
    """Which interventions both speak of."""
    n_units: int

    @property
    def decides(self) -> int:
        """-1: closer than "nothing changes"; 1: farther; 0: the data do not decide."""
        return decided(self.difference, self.n_units)

    def as_record(self) -> dict[str, Any]:
        """Plain values."""
        numbers = {name: getattr(self, name).as_record() for name in ("error", "no_shift", "difference")}
        return {**vars(self), **numbers, "interventions": list(self.interventions), "decides": self.decides}


@dataclass(frozen=True, eq=False)
class Counterfactual:
    """One ingredient replaced."""

    intervention: Intervention
    profiles: Mapping[Series, Profiles]
    """One profile per prompt by (source, kind); the source "measured" is the changed model."""
    reasons: Mapping[str, str]
    """By source, why it has no profile."""
    divergence: Float64[np.ndarray, "count"] | None
    """KL divergence of the changed next-token distribution from the unchanged one on every prompt, in nats, >= 0: how
    far the intervention drives the model from what it was trained to be. None where the model does not allow it."""

    @property
    def name(self) -> str:
        """The intervention's spelling."""
        return str(self.intervention)


@dataclass(frozen=True, eq=False, repr=False)
class Decomposition(Showing):
    """A model's profile with its ingredients replaced one at a time."""

    baseline: Mapping[Series, Profiles]
    """One profile per prompt by (source, kind), nothing replaced."""
    counterfactuals: tuple[Counterfactual, ...]
    left_out: Mapping[str, str]
    """By source, why it does not apply to this model at all."""
    kinds: tuple[Kind, ...]
    seed: int
    describes: Mapping[str, Any] = field(default_factory=dict)
    """Model, prompts and the fingerprint of the run, plain, for a record."""

    def shown(self) -> Shown:
        """The measured profile as it is and with every ingredient replaced, of the first kind."""
        measured = MEASURED, self.kinds[0].name
        found = {"as it is": self.baseline, **{item.name: item.profiles for item in self.counterfactuals}}
        curves = {name: Profile.mean_of(profiles[measured]) for name, profiles in found.items() if measured in profiles}
        title = f"{measured[1]} of {self.count} prompts under {', '.join(item.name for item in self.counterfactuals)}"
        return Shown(title, tuple(profile.series(name) for name, profile in curves.items()))

    def as_run(self) -> Record:
        """As `record`, of no arguments."""
        return self.record({})

    @cached_property
    def shifts(self) -> tuple[Shift, ...]:
        """Every mass of every source under every intervention."""
        found = []
        for item in self.counterfactuals:
            found += shifts_of(item.name, self.baseline, item.profiles)
        return tuple(found)

    @cached_property
    def scores(self) -> tuple[Score, ...]:
        """How far each theory's shifts are from the measured ones, beside "nothing changes"."""
        after = {item.name: item.profiles for item in self.counterfactuals}
        return tuple(scores_of(self.baseline, after))

    @property
    def divergences(self) -> dict[str, Interval]:
        """Mean over prompts of the KL divergence by intervention, with its interval."""
        return {
            item.name: mean_of(item.divergence).interval(least=0.0)
            for item in self.counterfactuals
            if item.divergence is not None
        }

    @property
    def count(self) -> int:
        """Prompts."""
        return len(next(iter(self.baseline.values())))

    def record(self, arguments: Mapping[str, Any], *, command: str = "") -> Record:
        """The decomposition with every prompt's profile; the command is what repeats it in a shell."""
        resolved = {
            "title": str(self.describes.get("model", {}).get("source", "model")),
            "command": command,
            "interventions": [item.name for item in self.counterfactuals],
            "kinds": [str(kind) for kind in self.kinds],
            **plain(dict(self.describes)),
        }
        record = Record("decompose", dict(arguments), resolved, seeds={"measure": self.seed})
        record.arrays |= {f"baseline/{source}/{kind}": rows for (source, kind), rows in self.baseline.items()}
        for item in self.counterfactuals:
            stem = f"changed/{item.name}"
            record.arrays |= {f"{stem}/{source}/{kind}": rows for (source, kind), rows in item.profiles.items()}
            if item.divergence is not None:
                record.arrays[f"divergence/{item.name}"] = item.divergence
        divergences = {name: interval.as_record() for name, interval in self.divergences.items()}
        record.scalars = {
            "count": self.count,
            "kinds": [kind.name for kind in self.kinds],
            "sources": list(dict.fromkeys(source for source, _ in self.baseline)),
            "left_out": dict(self.left_out),
            "interventions": [
                {
                    "name": item.name,
                    "ingredient": item.intervention.ingredient,
                    "reasons": dict(item.reasons),
                    "divergence": divergences.get(item.name),
                }
                for item in self.counterfactuals
            ],
            "shifts": [shift.as_record() for shift in self.shifts],
            "scores": [score.as_record() for score in self.scores],
        }
        return record


def masses(profiles: Profiles) -> Float64[np.ndarray, "count 3"]:
    """First, middle and last mass of every prompt's profile."""
    return np.stack([np.asarray(STATISTICS[name](profiles)) for name in MASSES], axis=-1)


def shifts_of(intervention: str, before: Mapping[Series, Profiles], after: Mapping[Series, Profiles]) -> list[Shift]:
    """Every mass of every source under one intervention; sources that it does not apply to are missing in `after`."""
    shifts = []
    for series in after:
        source, kind = series
        without, own = masses(before[series]), masses(after[series])
        gaps: list[Interval] | None = None
        if source != MEASURED and (MEASURED, kind) in after:
            truth = masses(after[MEASURED, kind]) - masses(before[MEASURED, kind])
            gaps = mean_intervals(own - without - truth, least=-2.0)
        sides = (mean_intervals(values, least=0.0) for values in (without, own))
        parts = zip(*sides, mean_intervals(own - without), strict=True)
        for index, (mass, (start, end, shift)) in enumerate(zip(MASSES, parts, strict=True)):
            gap = None if gaps is None else gaps[index]
            shifts.append(Shift(intervention, source, kind, mass, before=start, after=end, shift=shift, gap=gap))
    return shifts


def mean_intervals(units: Float64[np.ndarray, "count values"], *, least: float = -1.0) -> list[Interval]:
    """Mean over prompts of every value with its 95 % interval, in [least, 1]; infinite with a single prompt."""
    return [mean_of(values).interval(least=least, most=1.0) for values in units.T]


def scores_of(before: Mapping[Series, Profiles], after: Mapping[str, Mapping[Series, Profiles]]) -> list[Score]:
    """One score per theory and kind, over all interventions (keys of `after`) that both it and the measurement have."""
    scores = []
    for source, kind in before:
        shared = tuple(name for name, found in after.items() if {(source, kind), (MEASURED, kind)} <= set(found))
        if source == MEASURED or not shared:
            continue
        truth = _stacked(before, (after[name] for name in shared), (MEASURED, kind))
        theory = _stacked(before, (after[name] for name in shared), (source, kind))
        weights = leave_one_out(len(truth))
        error = np.abs(weights @ (theory - truth)).mean(axis=1)
        nothing = np.abs(weights @ truth).mean(axis=1)
        found = Score(
            source=source,
            kind=kind,
            error=jackknife(error).interval(least=0.0),
            no_shift=jackknife(nothing).interval(least=0.0),
            difference=jackknife(error - nothing).interval(),
            interventions=shared,
            n_units=len(truth),
        )
        scores.append(found)
    return scores


def _stacked(
    before: Mapping[Series, Profiles], after: Iterable[Mapping[Series, Profiles]], series: Series
) -> Float64[np.ndarray, "count cells"]:
    """Shifts of every prompt, all interventions and masses side by side."""
    start = masses(before[series])
    return np.concatenate([masses(found[series]) - start for found in after], axis=1)


def settings_of(
    model: Any, prompts: Prompts, options: DecompositionOptions, interventions: Sequence[Intervention] | None = None
) -> dict[str, Any]:
    """Everything a decomposition depends on; without interventions what a piece of it does."""
    named = None if interventions is None else [str(intervention) for intervention in interventions]
    return {
        "model": model.describe(),
        "prompts": prompts.describe(),
        "kinds": [str(kind) for kind in resolve_kinds(options.kinds)],
        "seed": options.seed,
        "verb": "decompose",
        "threads": torch.get_num_threads(),
        "made_by": made_by(),
        **({} if named is None else {"interventions": named}),
    }


def finished_decomposition(
    model: Any, prompts: Prompts, *, interventions: Sequence[Intervention], options: DecompositionOptions
) -> Record | None:
    """The record of just this decomposition where the directory holds it finished and `options.resume` asks for it."""
    settings = partial(settings_of, model, prompts, options, interventions)
    return finished_run(options.directory, settings, resume=options.resume)


@checked
def counterfactuals(
    model: Any,
    prompts: Prompts,
    *,
    interventions: Sequence[str | Intervention] | str | Intervention = DEFAULT_INTERVENTIONS,
    options: DecompositionOptions | None = None,
) -> Decomposition:
    """Replace one ingredient at a time, in the model and in the theories, and keep every prompt's profile.

    Per prompt and intervention: one measurement (a forward pass and as many backward passes as the kinds have
    covectors), one rollout of attention and two power rollouts, each as long as a few backward passes. Memory is that
    of a measurement, plus, where masks change, one N x N mask for each sort of layer.

    Args:
        model: What `load_model` returns: a Hugging Face model of a described family.
        prompts: Equally long prompts of at least 3 positions; with fewer than 2 intervals are infinite.
        interventions: Objects or literals, each at most once.
        options: Kinds, seed, and where an interrupted run continues.

    Returns:
        Shifts of first, middle and last mass with paired intervals; what is not possible has its reason.

    Raises:
        UsageError: an unknown intervention or kind, another sort of model, or prompts that it cannot take.
        RunError: the unchanged model gives something that is not finite.
    """
    options = options or DecompositionOptions()
    resolved, kinds = resolve_interventions(interventions), resolve_kinds(options.kinds)
    check_seed(options.seed)
    checked = check_model(model)
    check_prompts(checked, prompts)
    if prompts.n_positions < 3:
        raise UsageError(f"a decomposition needs prompts of at least 3 positions, got {prompts.n_positions}")
    settings = settings_of(checked, prompts, options)
    whole = fingerprint(settings_of(checked, prompts, options, resolved))
    describes = {"model": settings["model"], "prompts": settings["prompts"], "fingerprint": whole}
    store = PartStore(options.directory, settings, resume=options.resume, overwrite=options.overwrite)
    examiner = examiner_of(checked, prompts, kinds, seed=options.seed, store=store)
    baseline, left_out = examiner.profiles(None, list(SOURCES))
    if MEASURED in left_out:
        raise RunError(left_out[MEASURED])
    present = [name for name in SOURCES if name not in left_out]
    found = []
    for intervention in track(resolved, "counterfactuals"):
        profiles, reasons = examiner.profiles(intervention, present)
        divergence = None if MEASURED in reasons else examiner.divergence(intervention)
        found.append(Counterfactual(intervention, profiles, reasons, divergence))
    return Decomposition(baseline, tuple(found), left_out, kinds, options.seed, describes)


def preflight_decomposition(
    model: Model,
    prompts: Prompts,
    *,
    interventions: Sequence[Intervention],
    options: DecompositionOptions,
    max_memory: int | None = None,
) -> dict[str, Any]:
    """The expected cost for a record, from short runs of the first intervention; empty where these fail."""
    alone = replace(options, directory=None, resume=False)

    def run(token_ids: Int64[np.ndarray, "n"]) -> None:
        counterfactuals(model, Prompts(token_ids[None]), interventions=interventions[:1], options=alone)

    estimate = calibrate(model, prompts.n_positions, run) or without_passes(model, prompts.n_positions)
    # A short run is the unchanged model and one intervention.
    whole = replace(estimate, seconds=estimate.seconds * (1 + len(interventions)) / 2)
    return report_cost(model, whole, prompts.count, max_memory=max_memory)
