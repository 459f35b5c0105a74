"""`decompose`: what each ingredient does to a model's profile, measured and according to theory, and its result.

One ingredient at a time is replaced, in the model where it allows that and in every theory that knows the ingredient;
what cannot be done is kept with its reason. Nothing here says what a model trained without the ingredient would do.
Shifts are those of the first, middle and last mass, which are linear in a profile: a shift is the mean over prompts of
the shift of each, with and without the ingredient, and so is a theory's.

Sources of a profile are the model itself and `power_rollout_rerun`, which reads the activations of the changed model,
for the first kind alone. Both give one profile per prompt. Each is a piece that is computed once and found again on
resuming; a source that does not apply leaves its reason.

The record, of verb "decompose" (`posbias.decomposition.page` draws it). Scalars: `count`, `kinds` (names),
`sources`, `left_out` {source: why}, `interventions` [{name, ingredient, reasons, divergence}], `shifts`
[{intervention, source, kind, mass, before, after, shift, gap}], `scores` [{source, kind, error, no_shift, difference,
interventions, n_units, decides}]. An interval is {value, low, high}, None if infinite. Arrays [count n_positions],
one profile per prompt: `baseline/SOURCE/KIND` and `changed/INTERVENTION/SOURCE/KIND`; and `divergence/INTERVENTION`
[count], in nats.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from jaxtyping import Float64, Int64
from pydantic import InstanceOf
from torch import nn

from posbias.checks import checked
from posbias.comparison.distances import decided
from posbias.comparison.metrics import STATISTICS
from posbias.decomposition.options import DecomposeOptions
from posbias.errors import RunError, UsageError
from posbias.interventions import Intervention, check_model, resolve_interventions
from posbias.measurement.kinds import Kind, resolve_kinds
from posbias.measurement.prompt import check_prompts, measure_prompt
from posbias.measurement.units import check_passes
from posbias.models.devices import in_float64
from posbias.models.hugging_face import HuggingFaceModel
from posbias.models.loading import as_model, named
from posbias.models.model import Model
from posbias.profiles import Profile
from posbias.progress import track
from posbias.prompts import Prompts
from posbias.results.records import Record, plain
from posbias.results.result import RESULTS, Result, as_stored, from_stored
from posbias.results.showing import Shown
from posbias.runs.parts import PartStore, clear_parts, fingerprint, finished_run, made_by, packed, unpacked
from posbias.runs.running import run_directory
from posbias.statistics import Interval, jackknife, leave_one_out, mean_of
from posbias.theory.power_rollout import PowerRollout, power_rollout_prompt
from posbias.theory.power_rollout.rollout import TARGETS

MEASURED = "measured"

Row = Float64[np.ndarray, "n_positions"]
"""One prompt's profile."""
Profiles = Float64[np.ndarray, "count n_positions"]
"""One profile per prompt; rows sum to 1."""
Series = tuple[str, str]
"""(source, kind of influence)."""
Arrays = dict[str, np.ndarray]


@dataclass(frozen=True, eq=False)
class Examiner:
    """One model on one set of prompts: what every source reads, and what is finished."""

    model: HuggingFaceModel
    prompts: Prompts
    kinds: tuple[Kind, ...]
    seed: int
    store: PartStore

    @contextmanager
    def changed(self, intervention: Intervention | None) -> Iterator[HuggingFaceModel]:
        """The model under the intervention, or as it is."""
        if intervention is None:
            yield self.model
            return
        with intervention.change(self.model):
            yield intervention.description(self.model)

    def profiles(
        self, intervention: Intervention | None, names: Sequence[str]
    ) -> tuple[dict[Series, Profiles], dict[str, str]]:
        """Profiles of every source that applies, by (source, kind), and the others' reasons; None replaces nothing."""
        profiles: dict[Series, Profiles] = {}
        reasons: dict[str, str] = {}
        for name in names:
            piece = self._kept(intervention, name, partial(self._compute, intervention, name))
            profiles |= {(name, kind): rows for kind, rows in piece["profiles"].items()}
            if piece["reason"] is not None:
                reasons[name] = piece["reason"]
        return profiles, reasons

    def divergence(self, intervention: Intervention) -> Float64[np.ndarray, "count"]:
        """sum_t p_t (log p_t - log q_t), p unchanged and q changed, of every prompt."""

        def diverge() -> dict[str, Any]:
            unchanged = self._unchanged  # read before anything is changed
            with intervention.change(self.model):
                after = [next_token_logs(self.model, token_ids) for token_ids in self.prompts.token_ids]
            # Equal distributions may come out below zero by rounding; no divergence is.
            pairs = zip(unchanged, after, strict=True)
            divergences = [max(0.0, float(np.exp(log_p) @ (log_p - log_q))) for log_p, log_q in pairs]
            return {"divergence": np.array(divergences)}

        found: np.ndarray = self._kept(intervention, "divergence", diverge)["divergence"]
        return found

    def _kept(self, intervention: Intervention | None, name: str, compute: Callable[[], Any]) -> dict[str, Any]:
        """A piece under a name that files may have; spellings hold brackets."""
        spelled = "unchanged" if intervention is None else fingerprint({"intervention": str(intervention)})[:16]
        piece: dict[str, Any] = unpacked(self.store.get(f"{spelled}-{name}", lambda: packed(compute())))
        return piece

    def _compute(self, intervention: Intervention | None, name: str) -> dict[str, Any]:
        try:
            return {"profiles": SOURCES[name](self, intervention), "reason": None}
        except (UsageError, RunError) as error:
            return {"profiles": {}, "reason": str(error)}

    @cached_property
    def _unchanged(self) -> list[Float64[np.ndarray, "vocabulary"]]:
        return [next_token_logs(self.model, token_ids) for token_ids in self.prompts.token_ids]


def measured_profiles(case: Examiner, intervention: Intervention | None) -> dict[str, Profiles]:
    """Influence of every prompt by kind, with the network changed; the same random probes as on the unchanged one."""
    rows: dict[str, list[Row]] = {kind.name: [] for kind in case.kinds}
    with case.changed(intervention) as model:
        for index, token_ids in enumerate(case.prompts.token_ids):
            measured = measure_prompt(model, token_ids, kinds=case.kinds, key=(case.seed, index))
            for kind, norms in measured.norms.items():
                if not norms.sum() > 0:
                    raise RunError(f"{kind}: every position of prompt {index} has zero influence, so it has no profile")
                rows[kind].append(norms / norms.sum())
    return {kind: np.stack(profiles) for kind, profiles in rows.items()}


def power_profiles(case: Examiner, intervention: Intervention | None) -> dict[str, Profiles]:
    """The power rollout of the changed model, for the first kind alone: a pull costs as much as the measurement."""
    kind = case.kinds[0].name
    if kind not in TARGETS:
        raise UsageError(f"the power rollout speaks of {', '.join(TARGETS)}, and the first kind measured is {kind}")
    with case.changed(intervention) as model:
        theory = PowerRollout(target=kind)
        return {kind: np.stack([power_rollout_prompt(model, ids, theory) for ids in case.prompts.token_ids])}


Source = Callable[[Examiner, Intervention | None], dict[str, Profiles]]
SOURCES: dict[str, Source] = {
    MEASURED: measured_profiles,
    "power_rollout_rerun": power_profiles,
}
"""By name, the measurement first."""


@torch.no_grad()
def next_token_logs(
    model: HuggingFaceModel, token_ids: Int64[np.ndarray, "n_positions"]
) -> Float64[np.ndarray, "vocabulary"]:
    """Log-probabilities of the next token."""
    logits = model.last(model.embed(model.token_tensor([token_ids.tolist()]))).logits[0]
    return np.asarray(in_float64(logits).log_softmax(-1).cpu().numpy())


MASSES = ("first_tenth", "middle_tenth", "last_tenth")
"""Shares of the first tenth, of the tenth around the centre and of the last tenth; a flat line has .1 in each."""


@dataclass(frozen=True)
class Shift:
    """The change that one intervention makes to one mass, according to one source."""

    intervention: str
    source: str
    """"measured", or a theory's name."""
    kind: str
    mass: str
    before: Interval
    after: Interval
    shift: Interval
    """`after` less `before`, prompt by prompt."""
    gap: Interval | None
    """A theory's shift less the measured one, prompt by prompt; None for the measurement, or if there is none."""


@dataclass(frozen=True)
class Score:
    """Distance of a theory's shifts from the measured ones, beside a theory that says nothing changes."""

    source: str
    kind: str
    error: Interval
    """Mean over interventions and masses of |theory's shift - measured shift|."""
    no_shift: Interval
    """Errors of a prediction of zero shifts, over the same interventions: the flat line of this comparison."""
    difference: Interval
    """`error` less `no_shift` on the same draws: below zero, the theory is closer."""
    interventions: tuple[str, ...]
    """Interventions that both speak of."""
    n_units: int

    @property
    def decides(self) -> int:
        """-1: closer than "nothing changes"; 1: farther; 0: the data do not decide."""
        return decided(self.difference, self.n_units)


@dataclass(frozen=True, eq=False)
class Counterfactual:
    """One ingredient replaced."""

    name: str
    """Literal spelling of the intervention."""
    ingredient: str
    profiles: Mapping[Series, InstanceOf[Profiles]]
    """One profile per prompt by (source, kind); the source "measured" is the changed model."""
    reasons: Mapping[str, str]
    """Why a source has no profile, by source."""
    divergence: InstanceOf[Float64[np.ndarray, "count"]] | None
    """KL divergence of the changed next-token distribution from the unchanged one on every prompt, in nats, >= 0: how
    far the intervention drives the model from what it was trained to be. None if the model does not allow it."""

    @property
    def mean_divergence(self) -> Interval | None:
        """Mean of the divergence over prompts, with its interval."""
        return None if self.divergence is None else mean_of(self.divergence).interval(least=0.0)


@RESULTS.register("decompose")
@dataclass(frozen=True, eq=False, repr=False)
class Decomposition(Result):
    """A model's profile with its ingredients replaced one at a time."""

    drawn_by: ClassVar = "posbias.decomposition.page:decomposition_report"
    record: InstanceOf[Record]
    baseline: Mapping[Series, InstanceOf[Profiles]]
    """One profile per prompt by (source, kind), nothing replaced."""
    counterfactuals: tuple[Counterfactual, ...]
    left_out: Mapping[str, str]
    """Why a source does not apply to this model at all, by source."""
    kinds: tuple[str, ...]
    """Names of the kinds of influence."""

    @classmethod
    def from_record(cls, record: Record) -> "Decomposition":
        """The decomposition that a record holds."""
        scalars, arrays = record.scalars, record.arrays
        names = [(source, kind) for source in scalars["sources"] for kind in scalars["kinds"]]

        def profiles(stem: str) -> dict[Series, Profiles]:
            stored = {(source, kind): arrays.get(f"{stem}/{source}/{kind}") for source, kind in names}
            return {series: rows for series, rows in stored.items() if rows is not None}

        counterfactuals = [
            {
                **entry,
                "profiles": profiles(f"changed/{entry['name']}"),
                "divergence": arrays.get(f"divergence/{entry['name']}"),
            }
            for entry in scalars["interventions"]
        ]
        parts = {"record": record, "baseline": profiles("baseline"), "counterfactuals": counterfactuals}
        if not parts["baseline"]:
            raise KeyError("baseline")
        return from_stored(cls, {**scalars, **parts})

    def shown(self) -> Shown:
        """The measured profile as it is and with every ingredient replaced, of the first kind."""
        measured = MEASURED, self.kinds[0]
        cases = {"as it is": self.baseline, **{item.name: item.profiles for item in self.counterfactuals}}
        curves = {name: Profile.mean_of(profiles[measured]) for name, profiles in cases.items() if measured in profiles}
        title = f"{measured[1]} of {self.count} prompts under {', '.join(item.name for item in self.counterfactuals)}"
        return Shown(title, tuple(profile.curve(name) for name, profile in curves.items()))

    @cached_property
    def shifts(self) -> tuple[Shift, ...]:
        """Every mass of every source under every intervention."""
        return tuple(
            shift for item in self.counterfactuals for shift in shifts_of(item.name, self.baseline, item.profiles)
        )

    @cached_property
    def scores(self) -> tuple[Score, ...]:
        """Distance of each theory's shifts from the measured ones, beside "nothing changes"."""
        return tuple(scores_of(self.baseline, {item.name: item.profiles for item in self.counterfactuals}))

    @property
    def divergences(self) -> dict[str, Interval]:
        """Mean over prompts of the KL divergence by intervention, with its interval."""
        means = {item.name: item.mean_divergence for item in self.counterfactuals}
        return {name: mean for name, mean in means.items() if mean is not None}

    @property
    def sources(self) -> tuple[str, ...]:
        """Names of the sources that apply to this model, the measurement first."""
        return tuple(dict.fromkeys(source for source, _ in self.baseline))

    @property
    def count(self) -> int:
        """Prompts."""
        return len(next(iter(self.baseline.values()), ()))

    @property
    def title(self) -> str:
        """Name of the model."""
        return self.record.title


def store_decomposition(decomposition: Decomposition) -> Decomposition:
    """Write the profiles and all that follows from them into the decomposition's record (in place), and return it."""
    record = decomposition.record
    record.arrays |= {f"baseline/{source}/{kind}": rows for (source, kind), rows in decomposition.baseline.items()}
    for item in decomposition.counterfactuals:
        stem = f"changed/{item.name}"
        record.arrays |= {f"{stem}/{source}/{kind}": rows for (source, kind), rows in item.profiles.items()}
        if item.divergence is not None:
            record.arrays[f"divergence/{item.name}"] = item.divergence
    record.scalars |= {
        "count": decomposition.count,
        "kinds": list(decomposition.kinds),
        "sources": list(decomposition.sources),
        "left_out": dict(decomposition.left_out),
        "interventions": [
            {
                "name": item.name,
                "ingredient": item.ingredient,
                "reasons": dict(item.reasons),
                "divergence": as_stored(item.mean_divergence),
            }
            for item in decomposition.counterfactuals
        ],
        "shifts": as_stored(decomposition.shifts),
        "scores": as_stored(decomposition.scores),
    }
    return decomposition


def masses(profiles: Profiles) -> Float64[np.ndarray, "count 3"]:
    """First, middle and last mass of every prompt's profile."""
    return np.stack([np.asarray(STATISTICS[name](profiles)) for name in MASSES], axis=-1)


def shifts_of(intervention: str, before: Mapping[Series, Profiles], after: Mapping[Series, Profiles]) -> list[Shift]:
    """Every mass of every source under one intervention; sources that it does not apply to are missing in `after`."""
    shifts = []
    for series in after:
        source, kind = series
        without, replaced = masses(before[series]), masses(after[series])
        gaps: list[Interval] | None = None
        if source != MEASURED and (MEASURED, kind) in after:
            truth = masses(after[MEASURED, kind]) - masses(before[MEASURED, kind])
            gaps = mean_intervals(replaced - without - truth, least=-2.0)
        sides = (mean_intervals(values, least=0.0) for values in (without, replaced))
        parts = zip(*sides, mean_intervals(replaced - without), strict=True)
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
        shared = tuple(name for name, case in after.items() if {(source, kind), (MEASURED, kind)} <= set(case))
        if source == MEASURED or not shared:
            continue
        truth = _stacked(before, (after[name] for name in shared), (MEASURED, kind))
        theory = _stacked(before, (after[name] for name in shared), (source, kind))
        weights = leave_one_out(len(truth))
        error = np.abs(weights @ (theory - truth)).mean(axis=1)
        nothing = np.abs(weights @ truth).mean(axis=1)
        score = Score(
            source=source,
            kind=kind,
            error=jackknife(error).interval(least=0.0),
            no_shift=jackknife(nothing).interval(least=0.0),
            difference=jackknife(error - nothing).interval(),
            interventions=shared,
            n_units=len(truth),
        )
        scores.append(score)
    return scores


def _stacked(
    before: Mapping[Series, Profiles], after: Iterable[Mapping[Series, Profiles]], series: Series
) -> Float64[np.ndarray, "count cells"]:
    """Shifts of every prompt, all interventions and masses side by side."""
    start = masses(before[series])
    return np.concatenate([masses(profiles[series]) - start for profiles in after], axis=1)


@checked
def decompose(
    model: Model | str | Path | nn.Module, prompts: Prompts, *, options: DecomposeOptions | None = None
) -> Decomposition:
    """Replace one ingredient at a time, in the model and in the theories, and keep every prompt's profile.

    Per prompt and intervention: one measurement (a forward pass and as many backward passes as the kinds have
    covectors) and one power rollout, as long as a few backward passes. Memory is that of a measurement, plus, if masks
    change, one N x N mask for each sort of layer.

    Args:
        model: A model of a described family, loaded; or a hub id, a path, "demo" or a model of transformers.
        prompts: Equally long prompts of at least 3 positions; with fewer than 2 intervals are infinite.
        options: Interventions, kinds, seed, and where an interrupted run continues.

    Returns:
        Shifts of first, middle and last mass with paired intervals; what is impossible is listed with its reason.

    Raises:
        UsageError: an unknown intervention or kind, another sort of model, or prompts that it cannot take.
        RunError: the unchanged model gives something that is not finite.
    """
    options = options or DecomposeOptions()
    interventions, kinds = resolve_interventions(options.interventions), resolve_kinds(options.kinds)
    arguments = {"model": named(model), "seed": options.seed}
    with run_directory(
        options.directory, verb="decompose", arguments=arguments, resume=options.resume, overwrite=options.overwrite
    ) as run:
        subject = check_model(as_model(model))
        check_prompts(subject, prompts)
        if prompts.n_positions < 3:
            raise UsageError(f"a decomposition needs prompts of at least 3 positions, got {prompts.n_positions}")
        described: dict[str, Any] = {
            "kinds": [str(kind) for kind in kinds],
            "model": subject.describe(),
            "prompts": prompts.describe(),
        }
        of_pieces: dict[str, Any] = {  # which interventions do not touch
            **described,
            "seed": options.seed,
            "verb": "decompose",
            "threads": torch.get_num_threads(),
            "made_by": made_by(),
        }
        settings = {**of_pieces, "interventions": [str(item) for item in interventions]}
        finished = finished_run(options.directory, lambda: settings, resume=options.resume)
        if finished is not None:
            decomposition = Decomposition.from_record(finished)
        else:
            check_passes(subject, prompts.n_positions)
            title, changes = str(described["model"].get("source", "model")), settings["interventions"]
            resolved = {"title": title, "command": "", "interventions": changes, **described}
            resolved["fingerprint"] = fingerprint(settings)
            record = Record("decompose", {}, plain(resolved), seeds={"measure": options.seed})
            examiner = Examiner(subject, prompts, kinds, options.seed, PartStore(options.directory, of_pieces))
            decomposition = store_decomposition(_decomposed(examiner, interventions, record))
            _check_possible(decomposition, options)
        run.finish(decomposition.record)
    return decomposition


def _check_possible(decomposition: Decomposition, options: DecomposeOptions) -> None:
    """Refuse a decomposition of nothing."""
    if any(item.profiles for item in decomposition.counterfactuals):
        return
    if options.directory is not None and not options.resume:  # resumed, earlier pieces may be there
        clear_parts(options.directory)
    reasons = [f"{item.name}: {next(iter(item.reasons.values()))}" for item in decomposition.counterfactuals]
    raise UsageError(f"none of the interventions is possible here ({'; '.join(reasons)})")


def _decomposed(examiner: Examiner, interventions: Sequence[Intervention], record: Record) -> Decomposition:
    """The profiles of every source, as the model is and under every intervention."""
    baseline, left_out = examiner.profiles(None, list(SOURCES))
    if MEASURED in left_out:
        raise RunError(left_out[MEASURED])
    present = [name for name in SOURCES if name not in left_out]
    counterfactuals = []
    for intervention in track(interventions, "counterfactuals"):
        profiles, reasons = examiner.profiles(intervention, present)
        divergence = None if MEASURED in reasons else examiner.divergence(intervention)
        item = Counterfactual(str(intervention), intervention.ingredient, profiles, reasons, divergence)
        counterfactuals.append(item)
    names = tuple(kind.name for kind in examiner.kinds)
    return Decomposition(record, baseline, tuple(counterfactuals), left_out, names)
