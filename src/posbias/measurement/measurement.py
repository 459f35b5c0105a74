"""`measure`: influence profiles and mixing of a model over many prompts, with intervals over prompts.

Averaging `profiles` normalises every prompt and then averages, so that prompts count equally; `norms` averages the raw
norms and normalises once (arXiv 2602.16837's code), so that prompts with large gradients dominate.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Annotated, Any, cast

import numpy as np
from annotated_types import Lt
from jaxtyping import Float64
from torch import nn

from posbias.checks import Natural, OneOf, checked, checked_value
from posbias.comparison import Depth, MeasuredKind, Mixing, Subject, compare_subject
from posbias.comparison.stored import ProfileRun, shared_settings, store_subjects
from posbias.display.naming import Settings, names_beside
from posbias.display.showing import Shown
from posbias.display.wording import KINDS, THEORIES, label
from posbias.errors import RunError, UsageError
from posbias.measurement.kinds import Kind, resolve_kinds
from posbias.measurement.prompt import PrecisionLoss, PromptMeasurement, check_prompts
from posbias.measurement.room import check_passes, halving, prompts_together
from posbias.measurement.tokens import TokenMap, token_texts
from posbias.measurement.units import MeasureOptions, Unit, UnitWork, settings_of_units
from posbias.models.loading import as_model, named
from posbias.models.model import Model
from posbias.models.weights import network_sha256
from posbias.profiles import Profile
from posbias.prompts.prompts import Prompts
from posbias.runs.parts import PartStore, fingerprint, finished_run
from posbias.runs.records import Record
from posbias.runs.results import RESULTS, Result, as_stored
from posbias.runs.running import run_directory
from posbias.statistics import estimate, mean_ends

DEFAULT_KINDS = ("jacobian", "probability")
RECORDED = ("averaging", "confidence", "together")
"""Settings that decide a record, beside those of the passes."""


@RESULTS.register("measure")
@dataclass(frozen=True, eq=False, repr=False)
class Measurement(Result):
    """A model's influence profiles and mixing, with pointwise intervals over prompts."""

    kinds: tuple[Kind, ...]
    measured: Subject
    """What was measured of the model in its state, not compared yet; the properties below read it."""
    left_out: tuple[str, ...]
    """What the model does not allow, and limits of the kinds."""
    seeds: dict[str, int]
    options: MeasureOptions
    details: dict[str, dict[str, Float64[np.ndarray, "count"]]] = field(default_factory=dict)
    """Further numbers of the kinds on every prompt: {kind: {"completeness_gap": ...}}."""
    precision: dict[str, PrecisionLoss] = field(default_factory=dict)
    """Profiles of the first prompts against those of a float32 copy, by kind, for models below float32."""
    model: dict[str, Any] | None = None
    """Description of the model before the first prompt, hashes of the weights included; None, like the two below, if
    single prompts were combined."""
    prompts: Prompts | None = None
    """Prompts that were read; in memory alone, like the tokenizer that shows them as text."""
    tokenizer: Any = None

    @property
    def profiles(self) -> dict[str, Profile]:
        """Profiles by kind name; `.influence` sums to 1, `.low` and `.high` are the interval's ends."""
        return {kind: entry.profile for kind, entry in self.measured.measured.items()}

    @property
    def per_prompt(self) -> dict[str, Float64[np.ndarray, "count n_positions"]]:
        """Raw norms of every prompt by kind name, not normalised."""
        rows = {kind: entry.per_prompt for kind, entry in self.measured.measured.items()}
        return {kind: norms for kind, norms in rows.items() if norms is not None}

    @property
    def standard_errors(self) -> dict[str, Float64[np.ndarray, "count n_positions"]]:
        """Errors of the raw norms, for kinds estimated by random covectors."""
        rows = {kind: entry.standard_errors for kind, entry in self.measured.measured.items()}
        return {kind: errors for kind, errors in rows.items() if errors is not None}

    @property
    def mixing(self) -> Float64[np.ndarray, "layers"] | None:
        """Mean over tokens and prompts of |a| / (|x| + |a|), what the published rollout uses; None if left out.

        With its interval in `mixings["token_mean"]`, beside the published definition, ||a||_F / (||x||_F + ||a||_F) by
        prompt, in `mixings["frobenius"]`.
        """
        found = self.mixings.get("token_mean")
        return None if found is None else found.value

    @property
    def mixings(self) -> Mapping[str, Mixing]:
        """Both mixings of every layer; none if blocks add no branches of attention."""
        return self.measured.mixing

    @property
    def depth(self) -> Depth | None:
        """Profiles by depth: the influence on the stream after each chosen layer."""
        return self.measured.depth

    def shown(self) -> Shown:
        """The profile of every kind."""
        shared = shared_settings(
            {"model": self.model, "prompts": self.prompts and self.prompts.describe()}, self.n_positions
        )
        settings: list[Settings] = [{"kind": kind, **shared} for kind in self.profiles]
        curves = zip(self.profiles.values(), names_beside(settings), strict=True)
        series = tuple(profile.series(name) for profile, name in curves)
        kinds = ", ".join(label(KINDS, kind) for kind in self.profiles)
        title = f"{kinds} of {self._source} on {self.count} prompts of {self.n_positions} tokens"
        return Shown(title, series, facts={"left out": "; ".join(self.left_out)} if self.left_out else {})

    def tokens(self, prompt: int = 0, *, kind: str | None = None, theory: Any = None) -> TokenMap:
        """A prompt's text with every token's influence as a heat map, beside a theory's if one is given.

        Args:
            prompt: Index of the prompt, 0 ... count - 1.
            kind: By default the first that was measured.
            theory: A `Profile`, or a prediction; if it has a profile for every prompt, that of the same prompt is
                taken.

        Raises:
            UsageError: no such prompt or kind, a theory over other positions, or prompts that were not kept.
        """
        if self.prompts is None:
            raise UsageError(
                "this measurement was combined from single prompts and holds no text; take that of measure"
            )
        prompt = checked_value("prompt", prompt, Annotated[Natural, Lt(self.count)])
        name = next(iter(self.profiles)) if kind is None else kind
        checked_value("kind", name, Annotated[str, OneOf(*self.profiles)])
        norms, errors = self.per_prompt[name][prompt], self.standard_errors.get(name)
        curves = [Profile.normalised(norms).series(label(KINDS, name))]
        if theory is not None:
            profile: Any = getattr(theory, "profile", theory)
            rows: Any = getattr(theory, "per_prompt", None)
            if not isinstance(profile, Profile) or profile.n_positions != self.n_positions:
                raise UsageError(
                    f"theory must be a prediction or profile of {self.n_positions} positions, got {theory!r}"
                )
            paired = rows is not None and len(rows) == self.count
            predicted = Profile.normalised(rows[prompt]) if paired else profile
            curves.append(predicted.series(label(THEORIES, getattr(theory, "theory", "theory"))))
        texts = token_texts(self.prompts.token_ids[prompt], self.tokenizer)
        return TokenMap(prompt, texts, tuple(curves), None if errors is None else errors[prompt] / norms.sum())

    @cached_property
    def record(self) -> Record:  # type: ignore[override]  # made when it is asked for
        """The measurement with model, prompts, intervals and every prompt's own values."""
        described = self.model or {}
        record = Record(
            verb="measure",
            arguments={"kinds": [str(kind) for kind in self.kinds]},
            resolved={
                "title": self._source,
                "command": "",
                "model": described,
                "prompts": None if self.prompts is None else self.prompts.describe(),
                "measurement": self.describe(),
            },
            seeds=dict(self.seeds),
        )
        generator = np.random.default_rng(self.seeds.get("measure", 0))
        subject = compare_subject(self.measured, generator=generator)
        record.scalars |= {"details": as_stored(self.details), "precision": as_stored(self.precision)}
        return store_subjects(record, [subject], left_out=self.left_out)

    @classmethod
    def from_record(cls, record: Record) -> Result:
        """The measurement that a record holds, without prompts; or its profiles alone."""
        run = ProfileRun.from_record(record)
        if "measurement" not in record.resolved:
            return run
        described = record.resolved["measurement"]
        return cls(
            kinds=resolve_kinds(described["kinds"]),
            measured=run.subject,
            left_out=run.left_out,
            seeds=dict(record.seeds),
            options=MeasureOptions(**described["passes"], **{name: described[name] for name in RECORDED}),
            details={kind: _arrays(numbers) for kind, numbers in run.details.items()},
            precision={kind: PrecisionLoss(**_arrays(numbers)) for kind, numbers in run.precision.items()},
            model=record.resolved["model"],
        ).with_record(record)

    @property
    def _source(self) -> str:
        return str((self.model or {}).get("source", "a model"))

    @property
    def count(self) -> int:
        """Prompts measured."""
        if not self.per_prompt:  # an older record may hold means alone
            return int(self.record.resolved["measurement"]["count"])
        return len(next(iter(self.per_prompt.values())))

    @property
    def n_positions(self) -> int:
        """Positions of every prompt."""
        return next(iter(self.profiles.values())).n_positions

    def describe(self) -> dict[str, Any]:
        """Plain values for a record: what was measured and how."""
        return {
            "kinds": [str(kind) for kind in self.kinds],
            "count": self.count,
            "n_positions": self.n_positions,
            "seeds": dict(self.seeds),
            "left_out": list(self.left_out),
            **self.options.describe(),
        }


@checked
def measure(
    model: Model | str | Path | nn.Module,
    prompts: Prompts,
    *,
    kinds: Sequence[str | Kind] | str | Kind = DEFAULT_KINDS,
    seed: Natural = 0,
    options: MeasureOptions | None = None,
) -> Measurement:
    """Measure how much every input position influences the output, and how strongly each layer mixes.

    Per prompt: one forward pass without gradients (mixing), one with, and one backward pass for every covector (4 for
    the default `jacobian`, 1 for `probability`), each 2 P N flops for P weights outside the embedding table. Memory
    beyond the weights is one prompt's saved activations, of order L N d numbers, whatever the number of prompts (on an
    accelerator those of as many short prompts as fill it); nothing of size N x vocabulary is formed.

    Args:
        model: A loaded model, or what `load_model` takes: a hub id, a path, "demo" or a model of transformers.
        prompts: Equally long prompts, at least 1.
        kinds: Kinds of influence, objects or literals such as `"jacobian(probes=8)"`, each at most once.
        seed: Seed of the random probes, >= 0.
        options: The output (the last position's by default), averaging, memory, where the work is done and kept ...

    Returns:
        Profiles by kind name, raw norms per prompt, mixing; `left_out` lists what the model does not allow.

    Raises:
        UsageError: an unknown kind, one that cannot be measured on the output, or prompts the model cannot take.
        RunError: a gradient is not finite, or a prompt has no influence at all.
    """
    resolved, options = resolve_kinds(kinds), options or MeasureOptions()
    for kind in resolved:
        kind.check_output(options.read_output)
    arguments = {"model": named(model), "kinds": [str(kind) for kind in resolved], "seed": seed}
    with run_directory(
        options.directory, verb="measure", arguments=arguments, resume=options.resume, overwrite=options.overwrite
    ) as run:
        model = as_model(model)
        check_prompts(model, prompts)
        of_units = {"kinds": [str(kind) for kind in resolved], "seed": seed, "passes": vars(options.passes)}
        settings = settings_of_units(model, prompts, of_units, engine=options.engine)
        of_record = {"verb": "measure", **settings, **{name: getattr(options, name) for name in RECORDED}}
        finished = finished_run(run.directory, lambda: of_record, resume=options.resume)
        if finished is not None:
            stored = cast(Measurement, Measurement.from_record(finished))
            measurement = replace(stored, options=options, prompts=prompts, tokenizer=model.tokenizer)
            measurement.with_record(finished)
        else:
            measurement = _halved(model, prompts, resolved, options, settings)
            if run.directory is not None:
                measurement.record.resolved["fingerprint"] = fingerprint(of_record)
        run.finish(measurement.record)
    return measurement


def _halved(
    model: Model, prompts: Prompts, kinds: tuple[Kind, ...], options: MeasureOptions, settings: Mapping[str, Any]
) -> Measurement:
    """A measurement in batches that are as large as the device's memory allows."""
    check_passes(model, prompts.n_positions, checkpointing=options.checkpointing)
    together = prompts_together(model, prompts, kinds=kinds, options=options)

    def measured(together: int, *, checkpointing: bool = options.checkpointing) -> Measurement:
        how = replace(options, together=together, checkpointing=checkpointing)
        return _measured(model, prompts, kinds, how, settings)

    return halving(measured, together, at_last=partial(measured, 1, checkpointing=True))


def _measured(
    model: Model, prompts: Prompts, kinds: tuple[Kind, ...], options: MeasureOptions, settings: Mapping[str, Any]
) -> Measurement:
    """A measurement by these settings, in batches that are kept in the directory and taken from there."""
    together = options.together or 1
    pieces_of = {**settings, "together": together}
    store = PartStore(options.directory, pieces_of)
    work = UnitWork(
        request=model.reload_request,
        network_sha256=None if options.engine.in_process else network_sha256(model.network, settings["model"]),
        token_ids=prompts.token_ids,
        units=tuple(map(Unit, range(prompts.count))),
        kinds=kinds,
        seed=settings["seed"],
        passes=options.passes,
        together=together,
    )
    pieces = work.collected("prompt", engine=options.engine, store=store, model=model)
    measured = [PromptMeasurement.of_piece(piece) for piece in pieces]
    measurement = combine(measured, kinds=kinds, seed=settings["seed"], options=options)
    described = settings["model"]
    subject = replace(measurement.measured, name="trained" if described.get("init_seed") is None else "initialised")
    return replace(measurement, measured=subject, model=described, prompts=prompts, tokenizer=model.tokenizer)


@checked
def combine(
    measured: Sequence[PromptMeasurement],
    *,
    kinds: Sequence[str | Kind] | str | Kind = DEFAULT_KINDS,
    seed: Natural = 0,
    options: MeasureOptions | None = None,
) -> Measurement:
    """Combine prompts that were measured one by one, with these kinds and seed, into a measurement.

    `measure` is `measure_prompt` and then this, with the prompts in their order.

    Raises:
        UsageError: no prompt, or one without a kind asked for.
        RunError: a prompt has no influence at all.
    """
    resolved, options = resolve_kinds(kinds), options or MeasureOptions()
    if not measured:
        raise UsageError("no measured prompt to combine; give at least 1")
    subject: dict[str, MeasuredKind] = {}
    for kind in resolved:
        norms = _stack([prompt.norms.get(kind.name) for prompt in measured], kind)
        for index in np.flatnonzero(norms.sum(axis=1) == 0):
            raise RunError(f"{kind}: every position of prompt {int(index)} has zero influence, so it has no profile")
        subject[kind.name] = MeasuredKind(
            _profile(norms, options),
            norms,
            # An average of raw norms weighs prompts by their totals, and so must every draw of its intervals.
            norms.sum(axis=1) if options.averaging == "norms" else None,
            _stack([prompt.standard_errors.get(kind.name) for prompt in measured], kind) if kind.sampled else None,
        )
    none = "mixing: the model's blocks do not add a branch of attention to their input"
    missing = [] if measured[0].mixing else [none]
    twice = [prompt for prompt in measured if prompt.full_precision]
    return Measurement(
        kinds=resolved,
        measured=Subject(
            "trained",
            measured=subject,
            mixing={
                name: _layer_means(np.stack([prompt.mixing[name] for prompt in measured]), options)
                for name in measured[0].mixing
            },
            depth=_depth(measured, options),
        ),
        left_out=tuple(dict.fromkeys([*missing, *(reason for prompt in measured for reason in prompt.left_out)])),
        seeds={"measure": seed},
        options=options,
        details={
            kind: {name: np.array([prompt.details[kind][name] for prompt in measured]) for name in names}
            for kind, names in measured[0].details.items()
        },
        precision={
            kind.name: PrecisionLoss.between(
                np.stack([prompt.norms[kind.name] for prompt in twice]),
                np.stack([prompt.full_precision[kind.name] for prompt in twice]),
            )
            for kind in (resolved if twice else ())
        },
    )


def _profile(norms: Float64[np.ndarray, "count n_positions"], options: MeasureOptions) -> Profile:
    """The prompts' average with its pointwise interval, from the same statistic with each prompt left out.

    With a single prompt the interval is (-inf, inf).
    """
    units = norms / norms.sum(axis=1, keepdims=True) if options.averaging == "profiles" else norms
    count, total = len(units), units.sum(axis=0)
    profile = Profile.normalised(total)
    left_out = total - units if count > 1 else np.ones_like(units)
    influences = (1 - count) * left_out / left_out.sum(axis=1, keepdims=True)
    low, high = estimate(profile.influence, influences).ends(options.confidence, least=0.0, most=1.0)
    return Profile(profile.influence, low, high)


def _depth(measured: Sequence[PromptMeasurement], options: MeasureOptions) -> Depth | None:
    depths = [prompt.depth for prompt in measured if prompt.depth is not None]
    if len(depths) < len(measured):
        return None
    layers, per_prompt = depths[0].layers, np.stack([depth.norms for depth in depths])
    for row, layer in enumerate(layers):
        for index in np.flatnonzero(per_prompt[:, row].sum(axis=1) == 0):
            raise RunError(f"layers: layer {layer} on prompt {index} depends on no position, so it has no profile")
    profiles = [_profile(norms, options) for norms in per_prompt.swapaxes(0, 1)]
    ends = []
    if len(measured) > 1:  # a single prompt gives no intervals
        ends = [np.stack([getattr(profile, end) for profile in profiles]) for end in ("low", "high")]
    return Depth(np.array(layers), np.stack([profile.influence for profile in profiles]), *ends)


def _stack(
    rows: Sequence[Float64[np.ndarray, "n_positions"] | None], kind: Kind
) -> Float64[np.ndarray, "count n_positions"]:
    present = [row for row in rows if row is not None]
    if len(present) < len(rows):
        raise UsageError(f"{len(rows) - len(present)} of {len(rows)} prompts were measured without kind {kind}")
    if len({row.size for row in present}) > 1:
        raise UsageError(f"prompts of {sorted({row.size for row in present})} positions; all must be equally long")
    return np.stack(present)


def _layer_means(units: Float64[np.ndarray, "count layers"], options: MeasureOptions) -> Mixing:
    """Mean over prompts with the ends of its interval."""
    return Mixing(units.mean(axis=0), *mean_ends(units, confidence=options.confidence, least=0.0, most=1.0))


def _arrays(numbers: Mapping[str, Sequence[float | None]]) -> dict[str, Float64[np.ndarray, "count"]]:
    """Numbers of a record, NaN where it holds none."""
    return {name: np.array(values, dtype=np.float64) for name, values in numbers.items()}
