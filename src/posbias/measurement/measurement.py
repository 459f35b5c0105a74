"""`measure`: influence profiles and mixing of a model over many prompts, with intervals over prompts.

Averaging `profiles` normalises every prompt and then averages, so that prompts count equally; `norms` averages the raw
norms and normalises once (arXiv 2602.16837's code), so that prompts with large gradients dominate.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, cast

import numpy as np
from jaxtyping import Float64
from torch import nn

from posbias.checks import check_choice, check_seed, check_whole, checked
from posbias.comparison import Depth, MeasuredKind, Mixing, Subject, TheoryProfile, compare_subject, finite
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
from posbias.runs.results import RESULTS, FailedRun, Result
from posbias.runs.running import run_directory
from posbias.statistics import estimate, mean_ends

DEFAULT_KINDS = ("jacobian", "probability")
STORED = ("profile", "per_prompt", "standard_errors")
"""Arrays of a kind in a record."""
RECORDED = ("averaging", "confidence", "keep", "together")
"""Settings that decide a record, beside those of the passes."""


@dataclass(frozen=True, eq=False)
class DepthProfiles:
    """Profiles by depth: the influence on the stream after each chosen layer."""

    layers: tuple[int, ...]
    """Ascending; layer 0 is nearest the input."""
    profiles: tuple[Profile, ...]
    """One per layer, averaged over prompts, with intervals."""
    per_prompt: Float64[np.ndarray, "count layers n_positions"] | None = None
    """Raw norms of every prompt, not normalised; in memory alone."""
    standard_errors: Float64[np.ndarray, "count layers n_positions"] | None = None

    @classmethod
    def of(cls, stored: Depth) -> "DepthProfiles":
        """The profiles of a record."""
        ends = [[None] * len(stored.layers) if end is None else end for end in (stored.low, stored.high)]
        profiles = tuple(Profile(*rows) for rows in zip(stored.influence, *ends, strict=True))
        return cls(tuple(map(int, stored.layers)), profiles)


@RESULTS.register("measure")
@dataclass(frozen=True, eq=False, repr=False)
class Measurement(Result):
    """A model's influence profiles and mixing, with pointwise intervals over prompts."""

    kinds: tuple[Kind, ...]
    profiles: dict[str, Profile]
    """Profiles by kind name; `.influence` sums to 1, `.low` and `.high` are the interval's ends."""
    per_prompt: dict[str, Float64[np.ndarray, "count n_positions"]]
    """Raw norms of every prompt, not normalised."""
    standard_errors: dict[str, Float64[np.ndarray, "count n_positions"]]
    """Errors of the raw norms, for kinds estimated by random covectors."""
    mixing: Float64[np.ndarray, "layers"] | None
    """Mean over tokens and prompts of |a| / (|x| + |a|), what the published rollout uses; None if left out."""
    mixing_low: Float64[np.ndarray, "layers"] | None
    mixing_high: Float64[np.ndarray, "layers"] | None
    mixing_frobenius: Float64[np.ndarray, "layers"] | None
    """Mean over prompts of ||a||_F / (||x||_F + ||a||_F), the published definition; None if left out."""
    mixing_frobenius_low: Float64[np.ndarray, "layers"] | None
    mixing_frobenius_high: Float64[np.ndarray, "layers"] | None
    left_out: tuple[str, ...]
    """What the model does not allow, and limits of the kinds."""
    seeds: dict[str, int]
    options: MeasureOptions
    details: dict[str, dict[str, Float64[np.ndarray, "count"]]] = field(default_factory=dict)
    """Further numbers of the kinds on every prompt: {kind: {"completeness_gap": ...}}."""
    depth: DepthProfiles | None = None
    precision: dict[str, PrecisionLoss] = field(default_factory=dict)
    """Profiles of the first prompts against those of a float32 copy, by kind, for models below float32."""
    model: dict[str, Any] | None = None
    """Description of the model before the first prompt, hashes of the weights included; None, like the three below, if
    single prompts were combined."""
    python: str = ""
    """Python that measures the same again; a model in hand is `model` there, prompts in hand are `prompts`."""
    prompts: Prompts | None = None
    """Prompts that were read; in memory alone, like the tokenizer that shows them as text."""
    tokenizer: Any = None

    def shown(self) -> Shown:
        """The profile of every kind."""
        shared = shared_settings(
            {"model": self.model, "prompts": self.prompts and self.prompts.describe()}, self.n_positions
        )
        settings: list[Settings] = [{"kind": kind, **shared} for kind in self.profiles]
        curves = zip(self.profiles.values(), names_beside(settings), settings, strict=True)
        series = tuple(profile.series(name, of_curve) for profile, name, of_curve in curves)
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
        check_whole("prompt", prompt, least=0, below=self.count, numpy=True)
        name = next(iter(self.profiles)) if kind is None else kind
        check_choice("kind", name, tuple(self.profiles))
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
        """The measurement with model, prompts, intervals and, unless only means are kept, every prompt's own values."""
        described = self.model or {}
        record = Record(
            verb="measure",
            arguments={},
            resolved={
                "title": self._source,
                "command": self.python,
                "model": described,
                "prompts": None if self.prompts is None else self.prompts.describe(),
                "measurement": self.describe(),
            },
            seeds=dict(self.seeds),
        )
        generator = np.random.default_rng(self.seeds.get("measure", 0))
        subject = compare_subject(self.subject(), generator=generator)
        if self.options.keep == "mean":
            averages = {kind: MeasuredKind(entry.profile) for kind, entry in subject.measured.items()}
            subject = replace(subject, measured=averages)
        record.scalars["details"] = {
            kind: {name: values.tolist() for name, values in of_kind.items()} for kind, of_kind in self.details.items()
        }
        record.scalars["precision"] = {
            kind: {name: [finite(value) for value in values] for name, values in vars(loss).items()}
            for kind, loss in self.precision.items()
        }
        return store_subjects(record, [subject], left_out=self.left_out)

    def subject(self, name: str | None = None, theories: Mapping[str, TheoryProfile] | None = None) -> Subject:
        """Measurements of one state of a model, with the theories set beside it; not compared yet.

        Args:
            name: By default the state that the model was in, "trained" or "initialised".
            theories: By name.
        """
        # An average of raw norms weighs prompts by their totals, and so must every draw of its intervals.
        by_norm = self.options.averaging == "norms"
        mixing, depth = {}, None
        if self.mixing is not None and self.mixing_frobenius is not None:
            mixing = {
                "token_mean": Mixing(self.mixing, self.mixing_low, self.mixing_high),
                "frobenius": Mixing(self.mixing_frobenius, self.mixing_frobenius_low, self.mixing_frobenius_high),
            }
        if self.depth is not None:
            profiles = self.depth.profiles
            depth = Depth(np.array(self.depth.layers), np.stack([profile.influence for profile in profiles]))
            if self.count > 1:  # a single prompt gives no intervals
                low, high = ([getattr(profile, end) for profile in profiles] for end in ("low", "high"))
                depth = replace(depth, low=np.stack(low), high=np.stack(high))
        return Subject(
            name=name or ("trained" if (self.model or {}).get("init_seed") is None else "initialised"),
            measured={
                kind: MeasuredKind(
                    profile,
                    norms := self.per_prompt.get(kind),
                    norms.sum(axis=1) if by_norm and norms is not None else None,
                    self.standard_errors.get(kind),
                )
                for kind, profile in self.profiles.items()
            },
            theories=dict(theories or {}),
            mixing=mixing,
            depth=depth,
        )

    @classmethod
    def from_record(cls, record: Record) -> Result:
        """The measurement that a record holds, without prompts and what `keep` left out; or its profiles alone."""
        if record.status != "done":
            return FailedRun(record)
        run = ProfileRun.from_record(record)
        if "measurement" not in record.resolved:
            return run
        subject, described = run.subject, record.resolved["measurement"]
        arrays = {name: {kind: getattr(entry, name) for kind, entry in subject.measured.items()} for name in STORED}
        mixing = {name: subject.mixing.get(name) for name in ("token_mean", "frobenius")}
        return cls(
            kinds=resolve_kinds(described["kinds"]),
            profiles=arrays["profile"],
            per_prompt={kind: rows for kind, rows in arrays["per_prompt"].items() if rows is not None},
            standard_errors={kind: rows for kind, rows in arrays["standard_errors"].items() if rows is not None},
            mixing=getattr(mixing["token_mean"], "value", None),
            mixing_low=getattr(mixing["token_mean"], "low", None),
            mixing_high=getattr(mixing["token_mean"], "high", None),
            mixing_frobenius=getattr(mixing["frobenius"], "value", None),
            mixing_frobenius_low=getattr(mixing["frobenius"], "low", None),
            mixing_frobenius_high=getattr(mixing["frobenius"], "high", None),
            left_out=run.left_out,
            seeds=dict(record.seeds),
            options=MeasureOptions(**described["passes"], **{name: described[name] for name in RECORDED}),
            details={
                kind: {name: np.array(values, dtype=np.float64) for name, values in of_kind.items()}
                for kind, of_kind in run.details.items()
            },
            depth=None if subject.depth is None else DepthProfiles.of(subject.depth),
            precision={
                kind: PrecisionLoss(**{name: np.array(values, dtype=np.float64) for name, values in loss.items()})
                for kind, loss in run.precision.items()
            },
            model=record.resolved["model"],
            python=record.command,
        ).with_record(record)

    @property
    def _source(self) -> str:
        return str((self.model or {}).get("source", "a model"))

    @property
    def count(self) -> int:
        """Prompts measured."""
        if not self.per_prompt:  # read back, and only means were kept
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
    seed: int = 0,
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
    check_seed(seed)
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
            check_passes(model, prompts.n_positions, checkpointing=options.checkpointing)
            together = prompts_together(model, prompts, kinds=resolved, options=options)

            def measured(together: int, *, checkpointing: bool = options.checkpointing) -> Measurement:
                how = replace(options, together=together, checkpointing=checkpointing)
                return _measured(model, prompts, resolved, how, settings)

            measurement = halving(measured, together, at_last=partial(measured, 1, checkpointing=True))
            spelled = [prompts.python, f"kinds={settings['kinds']}", f"seed={seed}", *options.python]
            measurement = replace(measurement, python=model.in_call("posbias.measure", spelled))
            if run.directory is not None:
                measurement.record.resolved["fingerprint"] = fingerprint(of_record)
        run.finish(measurement.record)
    return measurement


def _measured(
    model: Model, prompts: Prompts, kinds: tuple[Kind, ...], options: MeasureOptions, settings: Mapping[str, Any]
) -> Measurement:
    """A measurement by these settings, in batches that are kept in the directory and taken from there."""
    together = options.together or 1
    pieces_of = {**settings, "together": together}
    store = PartStore(options.directory, pieces_of, resume=options.resume, overwrite=options.overwrite)
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
    measured = [PromptMeasurement.from_arrays(piece) for piece in pieces]
    measurement = combine(measured, kinds=kinds, seed=settings["seed"], options=options)
    return replace(measurement, model=settings["model"], prompts=prompts, tokenizer=model.tokenizer)


def combine(
    measured: Sequence[PromptMeasurement],
    *,
    kinds: Sequence[str | Kind] | str | Kind = DEFAULT_KINDS,
    seed: int = 0,
    options: MeasureOptions | None = None,
) -> Measurement:
    """Combine prompts that were measured one by one, with these kinds and seed, into a measurement.

    `measure` is `measure_prompt` and then this, with the prompts in their order.

    Raises:
        UsageError: no prompt, or one without a kind asked for.
        RunError: a prompt has no influence at all.
    """
    resolved, options = resolve_kinds(kinds), options or MeasureOptions()
    check_seed(seed)
    if not measured:
        raise UsageError("no measured prompt to combine; give at least 1")
    per_prompt = {kind.name: _stack([prompt.norms.get(kind.name) for prompt in measured], kind) for kind in resolved}
    for kind in resolved:
        for index in np.flatnonzero(per_prompt[kind.name].sum(axis=1) == 0):
            raise RunError(f"{kind}: every position of prompt {int(index)} has zero influence, so it has no profile")
    errors = {
        kind.name: _stack([prompt.standard_errors.get(kind.name) for prompt in measured], kind)
        for kind in resolved
        if kind.sampled
    }
    missing = [] if measured[0].mixing is not None else ["mixing: the model's family has no description"]
    reasons = [*missing, *(reason for prompt in measured for reason in prompt.left_out)]
    twice = [prompt for prompt in measured if prompt.full_precision]
    tokens = _mean_with_interval([prompt.mixing for prompt in measured], options)
    frobenius = _mean_with_interval([prompt.mixing_frobenius for prompt in measured], options)
    return Measurement(
        kinds=resolved,
        profiles={name: _profile(norms, options) for name, norms in per_prompt.items()},
        per_prompt=per_prompt,
        standard_errors=errors,
        mixing=tokens[0],
        mixing_low=tokens[1],
        mixing_high=tokens[2],
        mixing_frobenius=frobenius[0],
        mixing_frobenius_low=frobenius[1],
        mixing_frobenius_high=frobenius[2],
        left_out=tuple(dict.fromkeys(reasons)),
        seeds={"measure": seed},
        options=options,
        details={
            kind: {name: np.array([prompt.details[kind][name] for prompt in measured]) for name in names}
            for kind, names in measured[0].details.items()
        },
        depth=_depth(measured, options),
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


def _depth(measured: Sequence[PromptMeasurement], options: MeasureOptions) -> DepthProfiles | None:
    depths = [prompt.depth for prompt in measured if prompt.depth is not None]
    if len(depths) < len(measured):
        return None
    layers = depths[0].layers
    per_prompt = np.stack([depth.norms for depth in depths])
    for row, layer in enumerate(layers):
        for index in np.flatnonzero(per_prompt[:, row].sum(axis=1) == 0):
            raise RunError(f"layers: layer {layer} on prompt {index} depends on no position, so it has no profile")
    errors = [depth.standard_errors for depth in depths if depth.standard_errors is not None]
    return DepthProfiles(
        layers=layers,
        profiles=tuple(_profile(per_prompt[:, row], options) for row in range(len(layers))),
        per_prompt=per_prompt,
        standard_errors=np.stack(errors) if errors else None,
    )


def _stack(
    rows: Sequence[Float64[np.ndarray, "n_positions"] | None], kind: Kind
) -> Float64[np.ndarray, "count n_positions"]:
    present = [row for row in rows if row is not None]
    if len(present) < len(rows):
        raise UsageError(f"{len(rows) - len(present)} of {len(rows)} prompts were measured without kind {kind}")
    if len({row.size for row in present}) > 1:
        raise UsageError(f"prompts of {sorted({row.size for row in present})} positions; all must be equally long")
    return np.stack(present)


def _mean_with_interval(
    rows: Sequence[Float64[np.ndarray, "layers"] | None], options: MeasureOptions
) -> tuple[Float64[np.ndarray, "layers"] | None, ...]:
    """Mean over prompts with the ends of its interval; three times None unless every prompt has a value."""
    present = [row for row in rows if row is not None]
    if len(present) < len(rows):
        return None, None, None
    units = np.stack(present)
    return units.mean(axis=0), *mean_ends(units, confidence=options.confidence, least=0.0, most=1.0)
