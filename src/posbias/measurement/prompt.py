"""Everything measured on one prompt, as arrays: what is stored, resumed from and resampled.

It depends on the model, the prompt's tokens, the kinds, the options and (seed, index) alone, so prompts may be
measured in any order, on any day, and combined afterwards; prompts that share a batch change one another's rounding
and nothing else. Beside the influence on the output and the mixing: the influence on the stream after each layer, and
the same again in float32 for models below it.
"""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, field, fields, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from jaxtyping import Float64, Int64

from posbias.comparison.metrics import wasserstein
from posbias.errors import UsageError
from posbias.measurement.blocks import checkpointed
from posbias.measurement.influence import chosen_layers, influence_of_positions, of_layer
from posbias.measurement.kinds import Kind, Pullback
from posbias.measurement.outputs import Key, PassOptions, TokenIds
from posbias.models.attention import BranchWatch, watch_branches
from posbias.models.devices import in_float64
from posbias.models.hugging_face import HuggingFaceModel
from posbias.models.model import BranchNorms, Model
from posbias.models.weights import REDUCED, converted, not_convertible
from posbias.prompts.prompts import Prompts

SeveralTokenIds = Int64[np.ndarray, "prompts n_positions"]


@dataclass(frozen=True, eq=False)
class DepthInfluence:
    """Influence ||dh_l/dx_j||_F on the stream after every chosen layer, on one prompt, not normalised."""

    layers: Sequence[int]
    norms: Float64[np.ndarray, "layers n_positions"]
    standard_errors: Float64[np.ndarray, "layers n_positions"] | None
    """Errors of the norms, from the spread over probes; None if nothing was drawn."""


@dataclass(frozen=True, eq=False)
class PrecisionLoss:
    """One kind's profiles in the precision the model runs in, against float32, on the prompts that were checked."""

    wasserstein: Float64[np.ndarray, "checked"]
    """W1 between the two profiles, on positions / (N - 1)."""
    median_relative: Float64[np.ndarray, "checked"]
    """Median over positions of |p_j - q_j| / q_j, q in float32."""
    largest_relative: Float64[np.ndarray, "checked"]
    """Largest over positions; infinite if only q_j is zero somewhere."""

    @classmethod
    def between(
        cls, reduced: Float64[np.ndarray, "checked n_positions"], full: Float64[np.ndarray, "checked n_positions"]
    ) -> "PrecisionLoss":
        """The loss from raw norms, of which no prompt is all zero."""
        rounded, exact = (norms / norms.sum(axis=1, keepdims=True) for norms in (reduced, full))
        with np.errstate(divide="ignore", invalid="ignore"):
            relative = np.where(rounded == exact, 0.0, np.abs(rounded - exact) / exact)
        return cls(
            wasserstein=wasserstein(rounded, exact),
            median_relative=np.median(relative, axis=1),
            largest_relative=relative.max(axis=1),
        )


def norms_in_full_precision(
    model: Model, token_ids: TokenIds, *, kinds: Sequence[Kind], key: Key, options: PassOptions
) -> tuple[dict[str, Float64[np.ndarray, "n_positions"]], str | None]:
    """Raw norms by a float32 copy of the model with the same random draws, or the reason why no copy can be made.

    Neither if the model is not below float32 or the prompt is not among those to check. The copy takes 4 bytes per
    weight while the prompt is measured, and the time of a float32 measurement.
    """
    if model.dtype not in REDUCED or key[1] >= options.precision_prompts:
        return {}, None
    reason = not_convertible(model)
    if reason is not None:
        return {}, f"precision check: {reason}"
    full = converted(model, torch.float32)
    with checkpointed(full.network, enabled=options.checkpointing):
        alone = replace(options, layers=None)
        (influences,) = influence_of_positions(full, token_ids[None], kinds=kinds, keys=[key], options=alone)
    return {kind: influence.norms for kind, influence in influences.items()}, None


@dataclass(frozen=True, eq=False)
class Mixing:
    """Size of every layer's attention branch a beside the stream x it is added to, on one prompt, in [0, 1].

    Two definitions are in use (arXiv 2602.16837), that of the code and that of the paper. a is what the branch really
    adds, after any post-norm.
    """

    tokens: Float64[np.ndarray, "layers"]
    """Mean over tokens of |a| / (|x| + |a|)."""
    frobenius: Float64[np.ndarray, "layers"]
    """||a||_F / (||x||_F + ||a||_F)."""
    by_position: Float64[np.ndarray, "layers n_positions"]
    """|a| / (|x| + |a|) of every token."""


def mixing_of_layers(model: Model, token_ids: TokenIds, *, prompt: int) -> Mixing:
    """Both mixings of every layer on one prompt, whose index is for messages, by one forward pass without gradients."""
    return mixing_from_norms(model.branch_norms(model.token_tensor([token_ids.tolist()])), prompt=prompt)


def mixing_from_norms(norms: BranchNorms, *, prompt: int) -> Mixing:
    """Both mixings of every layer, from the norms of a forward pass of a single prompt; its index is for messages."""
    share = norms.share(f" on prompt {prompt}")
    stream, branch = (
        np.linalg.norm(in_float64(values[:, 0]).numpy(force=True), axis=1) for values in (norms.stream, norms.branch)
    )
    return Mixing(share.mean(axis=1), branch / (stream + branch), share)


@dataclass(frozen=True, eq=False)
class PromptMeasurement:
    """Everything measured on one prompt."""

    norms: dict[str, Float64[np.ndarray, "n_positions"]]
    """Influence of every position by kind name, not normalised."""
    standard_errors: dict[str, Float64[np.ndarray, "n_positions"]] = field(default_factory=dict)
    """Errors of the norms, for sampled kinds only."""
    mixing: dict[str, Float64[np.ndarray, "layers"]] = field(default_factory=dict)
    """By definition: "token_mean", the mean over tokens of |a| / (|x| + |a|), and "frobenius"; none if blocks add
    no branches of attention."""
    details: dict[str, dict[str, float]] = field(default_factory=dict)
    depth: DepthInfluence | None = None
    full_precision: dict[str, Float64[np.ndarray, "n_positions"]] = field(default_factory=dict)
    """The norms again, by a float32 copy of the model; only for models below float32, on the first prompts."""
    left_out: Sequence[str] = ()
    """Limits of the numbers, and what the model does not allow."""

    @classmethod
    def of_piece(cls, piece: Mapping[str, Any]) -> "PromptMeasurement":
        """The measurement from a piece of `posbias.runs.parts.unpacked`, which may hold more."""
        values = {entry.name: piece[entry.name] for entry in fields(cls)}
        return cls(**{**values, "depth": values["depth"] and DepthInfluence(**values["depth"])})


def measure_prompt(
    model: Model, token_ids: TokenIds, *, kinds: Sequence[Kind], key: Key, options: PassOptions | None = None
) -> PromptMeasurement:
    """Measure one prompt: every kind of influence, and the mixing where blocks add branches of attention.

    Kinds are distinct, as `resolve_kinds` returns them; the key is all that random probes depend on, both numbers >= 0.

    Raises:
        RunError: a value is not finite.
        UsageError: a network without blocks for checkpointing or layers, or an output that a kind does not take.
    """
    (measured,) = measure_together(model, token_ids[None], kinds=kinds, keys=[key], options=options)
    return measured


def measure_together(
    model: Model,
    token_ids: SeveralTokenIds,
    *,
    kinds: Sequence[Kind],
    keys: Sequence[Key],
    options: PassOptions | None = None,
) -> list[PromptMeasurement]:
    """Measure prompts in one batch, each as `measure_prompt` does; only covectors share passes."""
    options = options or PassOptions()
    if len(keys) > 1 and not shares_passes(kinds):
        alone = partial(measure_prompt, model, kinds=kinds, options=options)
        return [alone(tokens, key=key) for tokens, key in zip(token_ids, keys, strict=True)]
    watching: AbstractContextManager[BranchWatch | None] = nullcontext()
    if isinstance(model, HuggingFaceModel):  # the first pass gives the mixing, too
        watching = watch_branches(model.network, once=True)
    with watching as watch, checkpointed(model.network, enabled=options.checkpointing):
        influences = influence_of_positions(model, token_ids, kinds=kinds, keys=keys, options=options)
    layers = () if options.layers is None else chosen_layers(model, options.layers)
    mixings: list[Mixing | None] = [None for _ in keys]
    with suppress(UsageError):  # blocks that add no branches of attention
        norms = watch.norms() if watch is not None and watch.stream else None
        if norms is None or norms.stream.shape[2] != token_ids.shape[1]:  # a target stands behind the prompts
            norms = model.branch_norms(model.token_tensor(token_ids.tolist()))
        rows = norms.stream.shape[1] // len(keys)  # equally many of each prompt
        streams, branches = (torch.split(values[:, ::rows], 1, dim=1) for values in (norms.stream, norms.branch))
        mixings = [
            mixing_from_norms(BranchNorms(stream, branch), prompt=prompt)
            for stream, branch, (_, prompt) in zip(streams, branches, keys, strict=True)
        ]
    measured = []
    for tokens, key, influence, mixing in zip(token_ids, keys, influences, mixings, strict=True):
        by_depth = [influence.pop(of_layer(layer)) for layer in layers]
        depth_errors = [result.standard_errors for result in by_depth if result.standard_errors is not None]
        full, reason = norms_in_full_precision(model, tokens, kinds=kinds, key=key, options=options)
        reasons = [limit for result in influence.values() for limit in result.left_out]
        reasons += [] if reason is None else [reason]
        errors = {kind: result.standard_errors for kind, result in influence.items()}
        measured.append(
            PromptMeasurement(
                norms={kind: result.norms for kind, result in influence.items()},
                standard_errors={kind: values for kind, values in errors.items() if values is not None},
                mixing={} if mixing is None else {"token_mean": mixing.tokens, "frobenius": mixing.frobenius},
                details={kind: result.details for kind, result in influence.items() if result.details},
                depth=DepthInfluence(
                    layers,
                    np.stack([result.norms for result in by_depth]),
                    np.stack(depth_errors) if depth_errors else None,
                )
                if layers
                else None,
                full_precision=full,
                left_out=reasons,
            )
        )
    return measured


def shares_passes(kinds: Sequence[Kind]) -> bool:
    """Tell whether prompts of a batch share passes: those of covectors, not those of kinds with passes of their own."""
    return any(isinstance(kind, Pullback) for kind in kinds)


def check_prompts(model: Model, prompts: Prompts) -> None:
    """Refuse prompts that the model cannot take."""
    if model.max_positions is not None and prompts.n_positions > model.max_positions:
        raise UsageError(f"prompts have {prompts.n_positions} positions; the model takes at most {model.max_positions}")
    largest = int(prompts.token_ids.max())
    if largest >= model.vocabulary_size:
        raise UsageError(
            f"token id {largest} in the prompts; the model's vocabulary is 0 to {model.vocabulary_size - 1}"
        )
