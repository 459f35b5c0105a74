"""`measure`: influence profiles and mixing of a model over many prompts, with intervals over prompts.

Every prompt is normalised and then averaged, so that prompts count equally; averages of raw norms (arXiv 2602.16837's
code) are dominated by prompts with large gradients.

`measure_models` measures several, one after another, each into a directory of its own: a finished model is known again
by its record, an unfinished one continues from its finished prompts (docs/measure).
"""

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from html import escape
from pathlib import Path
from typing import Annotated, Any, ClassVar, cast

import numpy as np
import torch
from annotated_types import Lt
from jaxtyping import Float64, Int64
from torch import nn

from posbias.checks import Natural, OneOf, checked, checked_value
from posbias.comparison.metrics import wasserstein
from posbias.comparison.stored import (
    Depth,
    MeasuredKind,
    Mixing,
    ProfileRun,
    Subject,
    compare_subject,
    shared_settings,
    store_subjects,
)
from posbias.errors import RunError, UsageError
from posbias.measurement.kinds import Kind, resolve_kinds
from posbias.measurement.options import MeasureOptions, PassOptions
from posbias.measurement.prompt import PromptMeasurement, check_prompts, measure_prompt
from posbias.measurement.units import Unit, measure_units, settings_of_units
from posbias.models.devices import free_bytes
from posbias.models.loading import as_model, named
from posbias.models.model import Model
from posbias.models.weights import REDUCED, converted, dispatched, quantised
from posbias.profiles import Profile
from posbias.prompts import Prompts
from posbias.results.naming import KINDS, THEORIES, Settings, label, names_beside
from posbias.results.records import Record
from posbias.results.result import RESULTS, Result, as_stored
from posbias.results.showing import Series, Showing, Shown
from posbias.runs.parts import fingerprint, finished_run
from posbias.runs.running import run_directory
from posbias.statistics import mean_ends

SATURATED = 8.0
"""Times the uniform share, or a fraction of it, at which a colour is full."""
MORE, LESS = "213,94,0", "0,114,178"
"""Red, green and blue of tokens above and below the uniform share, told apart by the colour-blind."""


@dataclass(frozen=True, eq=False, repr=False)
class TokenMap(Showing):
    """The tokens of one prompt with their measured influence, beside a theory's if one is given."""

    prompt: int
    texts: tuple[str, ...]
    """Text of every token as it stands in the prompt; "#7" for token 7 of a model without a tokenizer."""
    series: tuple[Series, ...]
    """The measurement, then the theory."""
    errors: Float64[np.ndarray, "n_positions"] | None = None
    """Standard error of every token's measured share from random probes, if these were drawn."""

    def shown(self) -> Shown:
        """The curves of the one prompt; without intervals, which are over prompts."""
        names = " beside ".join(series.name for series in self.series)
        return Shown(f"prompt {self.prompt}, {len(self.texts)} tokens: {names}", self.series)

    def _repr_html_(self) -> str:
        scale = (
            f"Orange: above the uniform share 1/{len(self.texts)}, blue: below; full colour at {SATURATED:g} times or "
            f"1/{SATURATED:g} of it. Point at a token for its number."
        )
        texts = map(self._text_of, self.series)
        columns = "".join(f'<div style="flex:1;min-width:18em">{text}</div>' for text in texts)
        row = f'<div style="display:flex;flex-wrap:wrap;gap:1.5em">{columns}</div>'
        return f"<div><p><b>{escape(self.shown().title)}</b><br>{scale}</p>{row}</div>"

    def _text_of(self, series: Series) -> str:
        spans = []
        for place, (text, times) in enumerate(zip(self.texts, series.values * len(self.texts), strict=True)):
            hint = f"position {place}: {times:.3g} x uniform"
            if self.errors is not None and series is self.series[0]:
                hint += f", standard error of the probes {self.errors[place] * len(self.texts):.2g}"
            strength = 1.0 if times <= 0 else min(1.0, abs(math.log(times)) / math.log(SATURATED))
            colour = f"rgba({MORE if times > 1 else LESS},{strength:.2f})"
            spans.append(f'<span style="background:{colour}" title="{hint}">{escape(text)}</span>')
        style = "white-space:pre-wrap;overflow-wrap:anywhere;font-family:monospace;line-height:1.6"
        return f'<p>{escape(series.name)}</p><div style="{style}">{"".join(spans)}</div>'


def token_texts(token_ids: Int64[np.ndarray, "n_positions"], tokenizer: Any) -> tuple[str, ...]:
    """The text that each token adds, spaces included; bytes that are no whole character show as "�"."""
    ids: Sequence[int] = token_ids.tolist()
    if tokenizer is None:
        return tuple(f"#{token} " for token in ids)

    def decoded(tokens: Sequence[int]) -> str:
        text: str = tokenizer.decode(tokens, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return text

    pairs = itertools.pairwise(ids)
    return (decoded(ids[:1]), *(decoded(pair)[len(decoded(pair[:1])) :] or decoded(pair[1:]) for pair in pairs))


DEFAULT_KINDS = ("jacobian", "probability")


@RESULTS.register("measure")
@dataclass(frozen=True, eq=False, repr=False)
class Measurement(Result):
    """A model's influence profiles and mixing, with pointwise intervals over prompts."""

    drawn_by: ClassVar = "posbias.comparison.page:profiles_report"
    drawn_together: ClassVar = True
    kinds: tuple[Kind, ...]
    measured: Subject
    """What was measured of the model in its state, not compared yet; the properties below read it."""
    left_out: tuple[str, ...]
    """What the model does not allow, and limits of the kinds."""
    seeds: dict[str, int]
    options: MeasureOptions
    details: dict[str, dict[str, Float64[np.ndarray, "count"]]] = field(default_factory=dict)
    """Further numbers of the kinds on every prompt: {kind: {"completeness_gap": ...}}; of a model below float32, what
    rounding costs on the prompts that were measured again."""
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
        record.scalars["details"] = as_stored(self.details)
        return store_subjects(record, [subject], left_out=self.left_out)

    @classmethod
    def from_record(cls, record: Record) -> Result:  # type: ignore[override]
        """The measurement that a record holds, without prompts; or its profiles alone."""
        run = ProfileRun.from_record(record)
        if "measurement" not in record.resolved:
            return run
        described = record.resolved["measurement"]
        known = {setting.name for setting in fields(PassOptions)}  # older records hold settings that left
        passes = {name: value for name, value in described["passes"].items() if name in known}
        return cls(
            kinds=resolve_kinds(described["kinds"]),
            measured=run.subject,
            left_out=run.left_out,
            seeds=dict(record.seeds),
            options=MeasureOptions(**passes, together=described["together"]),
            details={kind: _arrays(numbers) for kind, numbers in run.details.items()},
            model=record.resolved["model"],
        ).with_record(record)

    @property
    def _source(self) -> str:
        return str((self.model or {}).get("source", "a model"))

    @property
    def count(self) -> int:
        """Prompts measured."""
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
        options: The output (the last position's by default), memory, where the work is done and kept ...

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
        if len(model.places) > 1:  # else every weight would stay in place from the forward to the backward pass
            options = replace(options, checkpointing=True)
        check_prompts(model, prompts)
        of_units = {"kinds": [str(kind) for kind in resolved], "seed": seed, "passes": vars(options.passes)}
        settings = settings_of_units(model, prompts, of_units, engine=options.engine)
        of_whole = {"together": options.together, "precision_prompts": options.precision_prompts}
        of_record = {"verb": "measure", **settings, **of_whole}
        finished = finished_run(run.directory, lambda: of_record, resume=options.resume)
        if finished is not None:
            stored = cast(Measurement, Measurement.from_record(finished))
            measurement = replace(stored, options=options, prompts=prompts, tokenizer=model.tokenizer)
            measurement.with_record(finished)
        else:
            state = "trained" if settings["model"].get("init_seed") is None else "initialised"
            found, used = measure_units(
                model,
                prompts,
                {state: [Unit(index) for index in range(prompts.count)]},
                kinds=resolved,
                seed=seed,
                options=options,
                settings=settings,
            )
            measurement = combine(found[state], kinds=resolved, seed=seed, options=used, state=state)
            measurement = replace(measurement, model=settings["model"], prompts=prompts, tokenizer=model.tokenizer)
            if model.dtype in REDUCED:
                measurement = _beside_float32(measurement, model, prompts)
            if run.directory is not None:
                measurement.record.resolved["fingerprint"] = fingerprint(of_record)
        run.finish(measurement.record)
    return measurement


def _beside_float32(measurement: Measurement, model: Model, prompts: Prompts) -> Measurement:
    """The measurement with what its precision costs: the first prompts' profiles beside those of a float32 copy.

    Its random draws are the same, so only rounding differs. In `details`, one number for each of these prompts: W1, and
    the median and largest over positions of |p_j - q_j| / q_j, q in float32.
    """
    options, seed = measurement.options, measurement.seeds["measure"]
    count = min(options.precision_prompts, len(prompts.token_ids))
    if not count:
        return measurement
    needed, free = 4 * sum(weight.numel() for weight in model.network.parameters()), free_bytes(model.device)
    if quantised(model.network) or dispatched(model.network) or (free is not None and needed > free):
        why = "what half precision costs: weights that are quantised, spread or too large have no copy in float32"
        return replace(measurement, left_out=(*measurement.left_out, why))
    full, found = converted(model, torch.float32), dict(measurement.details)
    alone = replace(options.passes, layers=None)
    exact = [
        measure_prompt(full, tokens, kinds=measurement.kinds, key=(seed, index), options=alone).norms
        for index, tokens in enumerate(prompts.token_ids[:count])
    ]
    for kind, rounded in measurement.per_prompt.items():
        norms = np.stack([of_prompt[kind] for of_prompt in exact])
        ours, theirs = (rows / rows.sum(axis=1, keepdims=True) for rows in (rounded[:count], norms))
        with np.errstate(divide="ignore", invalid="ignore"):
            change = np.where(ours == theirs, 0.0, np.abs(ours - theirs) / theirs)
        found[kind] = found.get(kind, {}) | {
            "W1_to_float32": wasserstein(ours, theirs),
            "median_change_to_float32": np.median(change, axis=1),
            "largest_change_to_float32": change.max(axis=1),
        }
    return replace(measurement, details=found)


@checked
def combine(
    measured: Sequence[PromptMeasurement],
    *,
    kinds: Sequence[str | Kind] | str | Kind = DEFAULT_KINDS,
    seed: Natural = 0,
    options: MeasureOptions | None = None,
    state: str = "trained",
) -> Measurement:
    """Combine prompts that were measured one by one, with these kinds and seed, into a measurement of a model's state.

    `measure` is `measure_prompt` and then this, with the prompts in their order.

    There is at least one prompt, and all of them have the kinds.

    Raises:
        RunError: a prompt has no influence at all.
    """
    resolved, options = resolve_kinds(kinds), options or MeasureOptions()
    subject: dict[str, MeasuredKind] = {}
    for kind in resolved:
        norms = np.stack([prompt.norms[kind.name] for prompt in measured])
        for index in np.flatnonzero(norms.sum(axis=1) == 0):
            raise RunError(f"{kind}: every position of prompt {int(index)} has zero influence, so it has no profile")
        errors = [prompt.standard_errors[kind.name] for prompt in measured if kind.sampled]
        subject[kind.name] = MeasuredKind(_profile(norms), norms, np.stack(errors) if errors else None)
    none = "mixing: the model's blocks do not add a branch of attention to their input"
    missing = [] if measured[0].mixing else [none]
    return Measurement(
        kinds=resolved,
        measured=Subject(
            state,
            measured=subject,
            mixing={
                name: Mixing(units.mean(axis=0), *mean_ends(units, least=0.0, most=1.0))
                for name in measured[0].mixing
                for units in [np.stack([prompt.mixing[name] for prompt in measured])]
            },
            depth=_depth(measured),
        ),
        left_out=tuple(dict.fromkeys([*missing, *(reason for prompt in measured for reason in prompt.left_out)])),
        seeds={"measure": seed},
        options=options,
        details={
            kind: {name: np.array([prompt.details[kind][name] for prompt in measured]) for name in names}
            for kind, names in measured[0].details.items()
        },
    )


def _profile(norms: Float64[np.ndarray, "count n_positions"]) -> Profile:
    """The mean of the prompts' profiles with its pointwise interval, (-inf, inf) with a single prompt."""
    return Profile.mean_of(norms / norms.sum(axis=1, keepdims=True))


def _depth(measured: Sequence[PromptMeasurement]) -> Depth | None:
    layers = measured[0].layers
    if not layers:
        return None
    per_prompt = np.stack([prompt.depth for prompt in measured if prompt.depth is not None])
    profiles = [_profile(norms) for norms in per_prompt.swapaxes(0, 1)]
    ends = []
    if len(measured) > 1:  # a single prompt gives no intervals
        ends = [np.stack([getattr(profile, end) for profile in profiles]) for end in ("low", "high")]
    return Depth(np.array(layers), np.stack([profile.influence for profile in profiles]), *ends)


def _arrays(numbers: Mapping[str, Sequence[float | None]]) -> dict[str, Float64[np.ndarray, "count"]]:
    """Numbers of a record, NaN where it holds none."""
    return {name: np.array(values, dtype=np.float64) for name, values in numbers.items()}
