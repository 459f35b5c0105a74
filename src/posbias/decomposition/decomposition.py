"""`decompose`: what each ingredient does to a model's measured profile, and its result.

One ingredient at a time is replaced in the model; what the model does not allow is kept with its reason. Nothing here
says what a model trained without the ingredient would do. Shifts are those of the first, middle and last mass, which
are linear in a profile: a shift is the mean over prompts of the shift of each, with and without the ingredient. Each
intervention is a piece that is computed once and found again on resuming.

The record, of verb "decompose" (`posbias.decomposition.page` draws it). Scalars: `count`, `kinds` (names),
`interventions` [{name, ingredient, reason, divergence}], `shifts` [{intervention, kind, mass, before, after, shift}].
An interval is {value, low, high}, None if infinite. Arrays [count n_positions], one profile per prompt:
`baseline/measured/KIND` and `changed/INTERVENTION/measured/KIND`; and `divergence/INTERVENTION` [count], in nats.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property, partial
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from jaxtyping import Float64, Int64
from pydantic import InstanceOf
from torch import nn

from posbias.checks import checked, checked_value
from posbias.comparison.metrics import STATISTICS
from posbias.decomposition.options import DecomposeOptions
from posbias.errors import RunError, UsageError
from posbias.interventions import Intervention, intervened, resolve_interventions
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
from posbias.runs.parts import PartStore, below, clear_parts, fingerprint, finished_run, made_by, packed, unpacked
from posbias.runs.running import run_directory
from posbias.statistics import Interval, mean_of

BASELINE = "baseline/measured/"
"""The arrays of the model as it is, by kind."""
Profiles = Float64[np.ndarray, "count n_positions"]
"""One profile per prompt; rows sum to 1."""
MASSES = ("first_tenth", "middle_tenth", "last_tenth")
"""Shares of the first tenth, of the tenth around the centre and of the last tenth; a flat line has .1 in each."""


@dataclass(frozen=True)
class Shift:
    """The change that one intervention makes to one mass."""

    intervention: str
    kind: str
    mass: str
    before: Interval
    after: Interval
    shift: Interval
    """`after` less `before`, prompt by prompt."""


@dataclass(frozen=True, eq=False)
class Counterfactual:
    """One ingredient replaced."""

    name: str
    """Literal spelling of the intervention."""
    ingredient: str
    profiles: Mapping[str, InstanceOf[Profiles]] = field(default_factory=dict)
    """One profile per prompt of the changed model by kind; none if it does not allow the change."""
    reason: str | None = None
    """Why it does not; None if it does."""
    divergence: InstanceOf[Float64[np.ndarray, "count"]] | None = None
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
    baseline: Mapping[str, InstanceOf[Profiles]]
    """One profile per prompt by kind, nothing replaced."""
    counterfactuals: tuple[Counterfactual, ...]

    @classmethod
    def from_record(cls, record: Record) -> "Decomposition":
        """The decomposition that a record holds."""
        arrays, kinds, baseline = record.arrays, record.scalars["kinds"], below(record.arrays, BASELINE)
        items = []
        for entry in record.scalars["interventions"]:
            changed = below(arrays, f"changed/{entry['name']}/measured/")
            profiles = {kind: changed[kind] for kind in kinds if kind in changed}  # a file sorts names
            items.append({**entry, "divergence": arrays.get(f"divergence/{entry['name']}"), "profiles": profiles})
        unchanged = {kind: baseline[kind] for kind in kinds}
        return from_stored(cls, {"record": record, "baseline": unchanged, "counterfactuals": items})

    def shown(self) -> Shown:
        """The measured profile as it is and with every ingredient replaced, of the first kind."""
        kind = self.kinds[0]
        cases = {"as it is": self.baseline, **{item.name: item.profiles for item in self.counterfactuals}}
        curves = {name: Profile.mean_of(profiles[kind]) for name, profiles in cases.items() if kind in profiles}
        title = f"{kind} of {self.count} prompts under {', '.join(item.name for item in self.counterfactuals)}"
        return Shown(title, tuple(profile.curve(name) for name, profile in curves.items()))

    @cached_property
    def shifts(self) -> tuple[Shift, ...]:
        """Every mass of every kind under every intervention."""
        return tuple(shift for item in self.counterfactuals for shift in shifts_of(item, self.baseline))

    @property
    def divergences(self) -> dict[str, Interval]:
        """Mean over prompts of the KL divergence by intervention, with its interval."""
        means = {item.name: item.mean_divergence for item in self.counterfactuals}
        return {name: mean for name, mean in means.items() if mean is not None}

    @property
    def kinds(self) -> tuple[str, ...]:
        """Names of the kinds of influence."""
        return tuple(self.baseline)

    @property
    def count(self) -> int:
        """Prompts."""
        return len(next(iter(self.baseline.values())))


def masses(profiles: Profiles) -> dict[str, Float64[np.ndarray, "count"]]:
    """First, middle and last mass of every prompt's profile."""
    return {name: np.asarray(STATISTICS[name](profiles)) for name in MASSES}


def shifts_of(item: Counterfactual, baseline: Mapping[str, Profiles]) -> list[Shift]:
    """Every mass of every kind under one intervention; none if the model does not allow it."""
    shifts = []
    for kind, profiles in item.profiles.items():
        after = masses(profiles)
        for mass, before in masses(baseline[kind]).items():
            start, end = (mean_of(values).interval(least=0.0, most=1.0) for values in (before, after[mass]))
            moved = mean_of(after[mass] - before).interval(least=-1.0, most=1.0)
            shifts.append(Shift(item.name, kind, mass, start, end, moved))
    return shifts


def store_decomposition(decomposition: Decomposition) -> Decomposition:
    """Write the profiles and all that follows from them into the decomposition's record (in place), and return it."""
    record, items = decomposition.record, decomposition.counterfactuals
    record.arrays |= {BASELINE + kind: rows for kind, rows in decomposition.baseline.items()}
    for item in items:
        record.arrays |= {f"changed/{item.name}/measured/{kind}": rows for kind, rows in item.profiles.items()}
        if item.divergence is not None:
            record.arrays[f"divergence/{item.name}"] = item.divergence
    record.scalars |= {
        "count": decomposition.count,
        "kinds": list(decomposition.kinds),
        "interventions": [
            {
                "name": item.name,
                "ingredient": item.ingredient,
                "reason": item.reason,
                "divergence": as_stored(item.mean_divergence),
            }
            for item in items
        ],
        "shifts": as_stored(decomposition.shifts),
    }
    return decomposition


def measured_profiles(
    model: HuggingFaceModel, prompts: Prompts, kinds: Sequence[Kind], seed: int
) -> dict[str, Profiles]:
    """Influence of every prompt by kind; with the same random probes whatever is changed."""
    rows: dict[str, list[np.ndarray]] = {kind.name: [] for kind in kinds}
    for index, token_ids in enumerate(prompts.token_ids):
        for kind, norms in measure_prompt(model, token_ids, kinds=kinds, key=(seed, index)).norms.items():
            if not norms.sum() > 0:
                raise RunError(f"{kind}: every position of prompt {index} has zero influence, so it has no profile")
            rows[kind].append(norms / norms.sum())
    return {kind: np.stack(profiles) for kind, profiles in rows.items()}


@torch.no_grad()
def next_token_logs(
    model: HuggingFaceModel, token_ids: Int64[np.ndarray, "n_positions"]
) -> Float64[np.ndarray, "vocabulary"]:
    """Log-probabilities of the next token."""
    logits = model.last(model.embed(model.token_tensor([token_ids.tolist()]))).logits[0]
    return np.asarray(in_float64(logits).log_softmax(-1).cpu().numpy())


@checked
def decompose(
    model: Model | str | Path | nn.Module, prompts: Prompts, *, options: DecomposeOptions | None = None
) -> Decomposition:
    """Replace one ingredient of a model at a time, and keep every prompt's profile.

    Per prompt and intervention: one measurement (a forward pass and as many backward passes as the kinds have
    covectors). Memory is that of a measurement, plus, if masks change, one N x N mask for each sort of layer.

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
        subject = checked_value("decompose: model", as_model(model), HuggingFaceModel)
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
            resolved = {"title": title, "interventions": changes, **described}
            resolved["fingerprint"] = fingerprint(settings)
            record = Record("decompose", {}, plain(resolved), seeds={"measure": options.seed})
            measured = partial(measured_profiles, prompts=prompts, kinds=kinds, seed=options.seed)
            store = PartStore(options.directory, of_pieces)
            baseline = unpacked(store.get("unchanged", lambda: packed(measured(subject))))
            items = _counterfactuals(subject, prompts, interventions, measured, store)
            decomposition = store_decomposition(Decomposition(record, baseline, items))
            _check_possible(decomposition, options)
        run.finish(decomposition.record)
    return decomposition


def _counterfactuals(
    model: HuggingFaceModel,
    prompts: Prompts,
    interventions: Sequence[Intervention],
    measured: Callable[[HuggingFaceModel], dict[str, Profiles]],
    store: PartStore,
) -> tuple[Counterfactual, ...]:
    """The profiles under every intervention, and sum_t p_t (log p_t - log q_t), p unchanged and q changed."""

    def logs(of: HuggingFaceModel) -> list[Float64[np.ndarray, "vocabulary"]]:
        return [next_token_logs(of, token_ids) for token_ids in prompts.token_ids]

    unchanged = cache(lambda: logs(model))  # not needed where all pieces are there

    def examined(intervention: Intervention) -> dict[str, Any]:
        before = unchanged()
        try:
            with intervened(model, intervention) as changed:
                profiles, after = measured(changed), logs(changed)
        except (UsageError, RunError) as error:
            return {"profiles": {}, "reason": str(error), "divergence": None}
        # Equal distributions may come out below zero by rounding; no divergence is.
        pairs = zip(before, after, strict=True)
        divergence = np.array([max(0.0, float(np.exp(log_p) @ (log_p - log_q))) for log_p, log_q in pairs])
        return {"profiles": profiles, "reason": None, "divergence": divergence}

    items = []
    for intervention in track(interventions, "counterfactuals"):
        name = fingerprint({"intervention": str(intervention)})[:16]  # one that files may have; spellings hold brackets
        piece = unpacked(store.get(name, lambda chosen=intervention: packed(examined(chosen))))  # type: ignore[misc]
        items.append(Counterfactual(str(intervention), intervention.ingredient, **piece))
    return tuple(items)


def _check_possible(decomposition: Decomposition, options: DecomposeOptions) -> None:
    """Refuse a decomposition of nothing."""
    if any(item.profiles for item in decomposition.counterfactuals):
        return
    if options.directory is not None and not options.resume:  # resumed, earlier pieces may be there
        clear_parts(options.directory)
    reasons = [f"{item.name}: {item.reason}" for item in decomposition.counterfactuals]
    raise UsageError(f"none of the interventions is possible here ({'; '.join(reasons)})")
