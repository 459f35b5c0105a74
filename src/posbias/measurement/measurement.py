"""`measure`: influence profiles and mixing of a model over many prompts, with intervals over prompts.

Every prompt is normalised and then averaged, so that prompts count equally; averages of raw norms (arXiv 2602.16837's
code) are dominated by prompts with large gradients.
"""

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from html import escape
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
from annotated_types import Lt
from jaxtyping import Float64
from torch import nn

from posbias.checks import Natural, OneOf, checked, checked_value
from posbias.comparison.distances import Sample
from posbias.comparison.metrics import wasserstein
from posbias.comparison.stored import (
    Depth,
    Mixing,
    ProfileRun,
    Subject,
    SubjectProfile,
    compare_subject,
    store_subjects,
)
from posbias.errors import RunError, UsageError
from posbias.measurement.kinds import Kind, resolve_kinds
from posbias.measurement.options import MeasureOptions
from posbias.measurement.prompt import PromptMeasurement, check_prompts, measure_prompt
from posbias.measurement.units import Unit, measure_units, settings_of_units
from posbias.models.devices import free_bytes
from posbias.models.loading import as_model, named
from posbias.models.model import Model
from posbias.models.weights import REDUCED, converted, dispatched, quantised
from posbias.profiles import Profile
from posbias.prompts import Prompts
from posbias.results.naming import KINDS, label
from posbias.results.records import Record
from posbias.results.result import RESULTS, as_stored
from posbias.results.showing import Shown
from posbias.runs.parts import fingerprint, finished_run
from posbias.runs.running import run_directory
from posbias.statistics import mean_ends

SATURATED = 8.0
"""Times the uniform share, or a fraction of it, at which a colour is full."""


@dataclass(frozen=True, eq=False, repr=False)
class TokenMap:
    """The tokens of one prompt on the colours of their influence, for a notebook."""

    title: str
    texts: tuple[str, ...]
    """Text of every token as it stands in the prompt; "#7" for token 7 of a model without a tokenizer."""
    times: Float64[np.ndarray, "n_positions"]
    """Influence of every token in multiples of the uniform share."""

    def __repr__(self) -> str:
        return f"TokenMap({self.title}, {len(self.texts)} tokens)"

    def _repr_html_(self) -> str:
        spans = []
        for place, (text, times) in enumerate(zip(self.texts, self.times, strict=True)):
            strength = 1.0 if times <= 0 else min(1.0, abs(math.log(times)) / math.log(SATURATED))
            tone = "213,94,0" if times > 1 else "0,114,178"  # told apart by the colour-blind
            colour = f"rgba({tone},{strength:.2f})"
            hint = f"position {place}: {times:.3g} x uniform"
            spans.append(f'<span style="background:{colour}" title="{hint}">{escape(text)}</span>')
        share = f"Orange: above the uniform share 1/{len(spans)}, blue: below"
        scale = f"{share}; full colour at {SATURATED:g} times or an eighth."
        text = f'<div style="white-space:pre-wrap;font-family:monospace;line-height:1.6">{"".join(spans)}</div>'
        return f"<div><p><b>{escape(self.title)}</b><br>{scale}</p>{text}</div>"


DEFAULT_KINDS = ("jacobian", "probability")


@RESULTS.register("measure")
@dataclass(frozen=True, eq=False, repr=False)
class Measurement(ProfileRun):
    """A model's influence profiles and mixing, with pointwise intervals over prompts."""

    prompts: Prompts | None = None
    """Prompts that were read; in memory alone, like the tokenizer that shows them as text."""
    tokenizer: Any = None

    @property
    def profiles(self) -> dict[str, Profile]:
        """Profiles by kind name; `.influence` sums to 1, `.low` and `.high` are the interval's ends."""
        return {kind: entry.profile for kind, entry in self.subject.measured.items()}

    @property
    def per_prompt(self) -> dict[str, Float64[np.ndarray, "count n_positions"]]:
        """Raw norms of every prompt by kind name, not normalised."""
        rows = {kind: entry.per_prompt for kind, entry in self.subject.measured.items()}
        return {kind: norms for kind, norms in rows.items() if norms is not None}

    @property
    def standard_errors(self) -> dict[str, Float64[np.ndarray, "count n_positions"]]:
        """Errors of the raw norms, for kinds estimated by random covectors."""
        rows = {kind: entry.standard_errors for kind, entry in self.subject.measured.items()}
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
        return self.subject.mixing

    @property
    def depth(self) -> Depth | None:
        """Profiles by depth: the influence on the stream after each chosen layer."""
        return self.subject.depth

    @property
    def count(self) -> int:
        """Prompts measured."""
        return len(next(iter(self.per_prompt.values())))

    def shown(self) -> Shown:
        """The profile of every kind."""
        kinds = ", ".join(label(KINDS, kind) for kind in self.profiles)
        title = f"{kinds} of {self.label} on {self.count} prompts of {self.n_positions} tokens"
        curves = tuple(replace(each, drawn=True) for each in super().shown().curves)
        return Shown(title, curves)

    def tokens(self, prompt: int = 0, *, kind: str | None = None) -> TokenMap:
        """A prompt's text with every token's influence as a heat map.

        Args:
            prompt: Index of the prompt, 0 ... count - 1.
            kind: By default the first that was measured.

        Raises:
            UsageError: no such prompt or kind, or prompts that were not kept.
        """
        if self.prompts is None:
            raise UsageError("a measurement that was read from a record holds no text; take that of measure")
        prompt = checked_value("prompt", prompt, Annotated[Natural, Lt(self.count)])
        name = next(iter(self.profiles)) if kind is None else kind
        checked_value("kind", name, Annotated[str, OneOf(*self.profiles)])
        times = Profile.normalised(self.per_prompt[name][prompt]).influence * self.n_positions
        ids: list[int] = self.prompts.token_ids[prompt].tolist()
        texts = [f"#{token} " for token in ids]
        if self.tokenizer is not None:
            # The text that each token adds, spaces included; bytes that are no whole character show as "�".
            decoded = partial(self.tokenizer.decode, skip_special_tokens=False, clean_up_tokenization_spaces=False)
            pairs = itertools.pairwise(ids)
            added = [decoded(pair)[len(decoded(pair[:1])) :] or decoded(pair[1:]) for pair in pairs]
            texts = [decoded(ids[:1]), *added]
        return TokenMap(f"{label(KINDS, name)} on prompt {prompt}", tuple(texts), times)


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

    Per prompt: one forward pass, which gives the mixing, too, and one backward pass for every covector (4 for
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
        record = finished_run(run.directory, lambda: of_record, resume=options.resume)
        if record is None:
            record = _record(model, prompts, resolved, seed, options, settings)
            if run.directory is not None:
                record.resolved["fingerprint"] = fingerprint(of_record)
        run.finish(record)
    return replace(Measurement.from_record(record), prompts=prompts, tokenizer=model.tokenizer)


def _record(
    model: Model,
    prompts: Prompts,
    kinds: tuple[Kind, ...],
    seed: int,
    options: MeasureOptions,
    settings: Mapping[str, Any],
) -> Record:
    """The record of a measurement that is made now."""
    state = "trained" if settings["model"].get("init_seed") is None else "initialised"
    units = {state: [Unit(index) for index in range(prompts.count)]}
    found, used = measure_units(model, prompts, units, kinds=kinds, seed=seed, options=options, settings=settings)
    measured = found[state]
    subject, left_out = combine(measured, state=state)
    details = {
        kind: {name: np.array([prompt.details[kind][name] for prompt in measured]) for name in names}
        for kind, names in measured[0].details.items()
    }
    if model.dtype in REDUCED and options.precision_prompts:
        lost = _precision_loss(measured, model, prompts, kinds, seed, used)
        if not lost:
            left_out += (
                "what half precision costs: weights that are quantised, spread or too large have no copy in float32",
            )
        details |= {kind: details.get(kind, {}) | numbers for kind, numbers in lost.items()}
    resolved = {
        "title": str(settings["model"].get("source", "a model")),
        "model": settings["model"],
        "prompts": settings["prompts"],
        "measurement": {
            "kinds": settings["kinds"],
            "together": used.together,
            "passes": vars(used.passes),
            "engine": used.engine.describe(),
        },
    }
    record = Record("measure", {}, resolved, {"details": as_stored(details)}, seeds={"measure": seed})
    compared = compare_subject(subject, generator=np.random.default_rng(seed))
    return store_subjects(record, [compared], left_out=left_out)


def _precision_loss(
    measured: Sequence[PromptMeasurement],
    model: Model,
    prompts: Prompts,
    kinds: Sequence[Kind],
    seed: int,
    options: MeasureOptions,
) -> dict[str, dict[str, Float64[np.ndarray, "count"]]]:
    """What its precision costs: the first prompts' profiles beside those of a float32 copy; empty if it has none.

    Random draws are the same, so only rounding differs. By kind, one number for each of these prompts: W1, and the
    median and largest over positions of |p_j - q_j| / q_j, q in float32.
    """
    needed, free = 4 * sum(weight.numel() for weight in model.network.parameters()), free_bytes(model.device)
    if quantised(model.network) or dispatched(model.network) or (free is not None and needed > free):
        return {}
    full, alone = converted(model, torch.float32), replace(options.passes, layers=None)
    exact = [
        measure_prompt(full, tokens, kinds=kinds, key=(seed, index), options=alone).norms
        for index, tokens in enumerate(prompts.token_ids[: options.precision_prompts])
    ]
    found = {}
    rounded = [prompt.norms for prompt in measured[: len(exact)]]
    for kind in measured[0].norms:
        ours, theirs = (Sample.of(np.stack([norms[kind] for norms in rows])).units for rows in (rounded, exact))
        with np.errstate(divide="ignore", invalid="ignore"):
            change = np.where(ours == theirs, 0.0, np.abs(ours - theirs) / theirs)
        found[kind] = {
            "W1_to_float32": wasserstein(ours, theirs),
            "median_change_to_float32": np.median(change, axis=1),
            "largest_change_to_float32": change.max(axis=1),
        }
    return found


@checked
def combine(measured: Sequence[PromptMeasurement], *, state: str = "trained") -> tuple[Subject, tuple[str, ...]]:
    """A model's state from its prompts, which were measured one by one and alike, and what was left out of it.

    `measure` is `measure_prompt` for every prompt, and then this. There is at least one.

    Raises:
        RunError: a prompt has no influence at all.
    """
    subject: dict[str, SubjectProfile] = {}
    for kind in measured[0].norms:
        norms = np.stack([prompt.norms[kind] for prompt in measured])
        for index in np.flatnonzero(norms.sum(axis=1) == 0):
            raise RunError(f"{kind}: every position of prompt {int(index)} has zero influence, so it has no profile")
        errors = [prompt.standard_errors[kind] for prompt in measured if kind in prompt.standard_errors]
        profile = Profile.mean_of(norms / norms.sum(axis=1, keepdims=True))
        subject[kind] = SubjectProfile(profile, norms, np.stack(errors) if errors else None)
    mixing = {}
    for name in measured[0].mixing:
        units = np.stack([prompt.mixing[name] for prompt in measured])
        mixing[name] = Mixing(units.mean(axis=0), *mean_ends(units, least=0.0, most=1.0))
    left_out = [] if mixing else ["mixing: the model's blocks do not add a branch of attention to their input"]
    left_out += [reason for prompt in measured for reason in prompt.left_out]
    depth = None
    if layers := measured[0].layers:
        units = np.stack([prompt.depth for prompt in measured if prompt.depth is not None])
        units /= units.sum(axis=2, keepdims=True)
        # A single prompt gives no intervals.
        ends = mean_ends(units, least=0.0, most=1.0) if len(units) > 1 else ()
        depth = Depth(np.array(layers), units.mean(axis=0), *ends)
    return Subject(state, subject, mixing=mixing, depth=depth), tuple(dict.fromkeys(left_out))
