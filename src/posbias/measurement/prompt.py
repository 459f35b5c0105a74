"""Everything measured on one prompt, as arrays: what is stored, resumed from and resampled.

It depends on the model, the prompt's tokens, the kinds, the options and (seed, index) alone, so prompts may be
measured in any order, on any day, and combined afterwards; prompts that share a batch change one another's rounding
and nothing else. Beside the influence on the output and the mixing: the influence on the stream after each layer, and
the same again in float32 for models below it.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import torch
from jaxtyping import Float64, Int64

from posbias.errors import RunError, UsageError
from posbias.measurement.blocks import block_outputs, checkpointed, first_in_forward, named_blocks
from posbias.measurement.influence import (
    Pulled,
    embedded_together,
    from_squares,
    influence_of_positions,
    pull_back,
)
from posbias.measurement.kinds import Jacobian, Kind, Pullback
from posbias.measurement.outputs import ALL_LAYERS, Influence, Key, PassOptions, Question, TokenIds
from posbias.models.branches import watch_branches
from posbias.models.devices import in_float64
from posbias.models.hugging_face import HuggingFaceModel
from posbias.models.model import BranchNorms, Model
from posbias.models.weights import REDUCED, converted, not_convertible
from posbias.prompts.prompts import Prompts
from posbias.runs.parts import below, named_texts

SeveralTokenIds = Int64[np.ndarray, "prompts n_positions"]


@dataclass(frozen=True, eq=False)
class DepthInfluence:
    """Influence ||dh_l/dx_j||_F on the stream after every chosen layer, on one prompt, not normalised."""

    layers: tuple[int, ...]
    norms: Float64[np.ndarray, "layers n_positions"]
    standard_errors: Float64[np.ndarray, "layers n_positions"] | None
    """Errors of the norms, from the spread over probes; None if nothing was drawn."""

    @classmethod
    def of_layers(cls, layers: tuple[int, ...], influences: Sequence[Influence]) -> "DepthInfluence":
        """The influences of the layers, side by side."""
        errors = [influence.standard_errors for influence in influences if influence.standard_errors is not None]
        norms = np.stack([influence.norms for influence in influences])
        return cls(layers, norms, np.stack(errors) if errors else None)


def influence_by_depth(
    model: Model, token_ids: SeveralTokenIds, *, kind: Jacobian, keys: Sequence[Key], options: PassOptions
) -> list[DepthInfluence]:
    """The Jacobian's profile for the output of every chosen layer, of each of some prompts in one batch.

    The probes are the same for every layer, so that differences between layers are not those of the probes.
    """
    layers = chosen_layers(model, options.layers)
    output = options.read_output
    if output.targeted:
        raise UsageError(f"layers: a hidden state looks at no given tokens, so output {output} cannot be read by depth")
    questions = [Question(model, output.read(model, tokens), key) for tokens, key in zip(token_ids, keys, strict=True)]
    reading = questions[0].reading
    inputs = embedded_together(questions, min(options.rows, kind.passes(model.width)))
    with block_outputs(model.network) as streams:
        questions[0].outputs(inputs)
    width = streams[layers[0]].shape[-1]
    vectors = [kind.vectors(width, question.generator(kind.name)) for question in questions]
    pulled: list[Pulled] = [
        ("hidden", torch.stack(of_prompts)[:, None].expand(-1, len(reading.positions), -1))
        for of_prompts in zip(*vectors, strict=True)
    ]
    influences: list[list[Influence]] = [[] for _ in questions]
    for layer in layers:
        stream = streams[layer][:, list(reading.positions)]
        squares = pull_back({"hidden": stream}, inputs, pulled, keep_graph=layer != layers[-1])
        for place, of_prompt in enumerate(squares * reading.share**2):
            if not np.all(np.isfinite(of_prompt)):
                name = list(named_blocks(model.network))[layer]
                where = first_in_forward(model, questions[place].embeddings)
                raise RunError(f"layers: the gradient of {name} on prompt {keys[place][1]} is not finite{where}")
            influences[place].append(from_squares(of_prompt, sampled=kind.sampled))
    return [DepthInfluence.of_layers(layers, of_prompt) for of_prompt in influences]


def chosen_layers(model: Model, layers: str | Sequence[int] | None) -> tuple[int, ...]:
    """The chosen layer indices, after a check that the network has them."""
    count = len(named_blocks(model.network))
    if not count:
        raise UsageError(f"layers need blocks in an nn.ModuleList; {type(model.network).__name__} has none")
    if layers is None or layers == ALL_LAYERS:
        return tuple(range(count))
    chosen = tuple(int(layer) for layer in layers)
    if max(chosen) >= count:
        raise UsageError(f"layer {max(chosen)} is not in the network; layers are 0 to {count - 1}")
    return chosen


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
        steps = max(rounded.shape[1] - 1, 1)
        with np.errstate(divide="ignore", invalid="ignore"):
            relative = np.where(rounded == exact, 0.0, np.abs(rounded - exact) / exact)
        return cls(
            wasserstein=np.abs(np.cumsum(rounded - exact, axis=1)[:, :-1]).sum(axis=1) / steps,
            median_relative=np.median(relative, axis=1),
            largest_relative=relative.max(axis=1),
        )


def norms_in_full_precision(
    model: Model, token_ids: TokenIds, *, kinds: Sequence[Kind], key: Key, options: PassOptions
) -> tuple[dict[str, Float64[np.ndarray, "n_positions"]], str | None]:
    """Raw norms by a float32 copy of the model with the same random draws, or the reason why no copy can be made.

    Neither if the model is not below float32 or the prompt is not among those to check. The copy takes 4 bytes per
    weight while the prompt is measured, and the time of a float32 measurement. `fisher` draws tokens from the model's
    distribution: one that rounding makes it draw differently counts as loss.
    """
    if model.dtype not in REDUCED or key[1] >= options.precision_prompts:
        return {}, None
    reason = not_convertible(model)
    if reason is not None:
        return {}, f"precision check: {reason}"
    full = converted(model, torch.float32)
    with checkpointed(full.network, enabled=options.checkpointing):
        (influences,) = influence_of_positions(full, token_ids[None], kinds=kinds, keys=[key], options=options)
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


@contextmanager
def mixing_of_first_pass(
    model: Model, token_ids: SeveralTokenIds, *, prompts: Sequence[int]
) -> Iterator[Callable[[], list[Mixing | None]]]:
    """Both mixings of prompts from the first forward pass within the context, so that they cost no pass of their own.

    The pass has them in one batch, equally many rows of each. One that reads more than the prompts (a target after
    them) measures them all the same if every layer is causal; after one that reads less, or none at all, there is a
    pass for the mixing alone. Yields a function that gives the mixings when the context is over, None without a family
    description.
    """

    def by_own_passes() -> list[Mixing | None]:
        return [mixing_of_layers(model, ids, prompt=prompt) for ids, prompt in zip(token_ids, prompts, strict=True)]

    if not model.described:
        yield lambda: [None for _ in prompts]
        return
    if not isinstance(model, HuggingFaceModel):
        yield by_own_passes
        return
    family = model.family
    with watch_branches(family.blocks(model.network), once=model.network) as watch:

        def mixings() -> list[Mixing | None]:
            length, n_positions = watch.stream[0].shape[-1] if watch.stream else 0, token_ids.shape[1]
            masks = (family.mask(model.config, layer) for layer in range(family.depth(model.config)))
            looks_ahead = length > n_positions and any(mask.mutual_prefix(length) > 1 for mask in masks)
            if length < n_positions or looks_ahead:
                return by_own_passes()
            norms = watch.norms()
            rows = norms.stream.shape[1] // len(prompts)
            stream, branch = (values[:, ::rows, :n_positions].cpu() for values in (norms.stream, norms.branch))
            return [
                mixing_from_norms(BranchNorms(stream[:, place, None], branch[:, place, None]), prompt=prompt)
                for place, prompt in enumerate(prompts)
            ]

        yield mixings


def mixing_from_norms(norms: BranchNorms, *, prompt: int) -> Mixing:
    """Both mixings of every layer, from the norms of a forward pass of a single prompt; its index is for messages."""
    share = norms.share(f" on prompt {prompt}")
    stream, branch = (
        np.linalg.norm(in_float64(values[:, 0]).numpy(force=True), axis=1) for values in (norms.stream, norms.branch)
    )
    return Mixing(share.mean(axis=1), branch / (stream + branch), share)


LEFT_OUT = "left_out/"
"""Stem of the texts that say what is missing, of a measurement and of the theories stored beside it."""
BY_KIND = ("norms", "standard_errors", "full_precision")
"""Fields that hold an array for every kind."""


@dataclass(frozen=True, eq=False)
class PromptMeasurement:
    """Everything measured on one prompt."""

    norms: dict[str, Float64[np.ndarray, "n_positions"]]
    """Influence of every position by kind name, not normalised."""
    standard_errors: dict[str, Float64[np.ndarray, "n_positions"]]
    """Errors of the norms, for sampled kinds only."""
    mixing: Float64[np.ndarray, "layers"] | None
    """Mean over tokens of |a| / (|x| + |a|); None for a model without a family description."""
    mixing_frobenius: Float64[np.ndarray, "layers"] | None
    details: dict[str, dict[str, float]] = field(default_factory=dict)
    depth: DepthInfluence | None = None
    full_precision: dict[str, Float64[np.ndarray, "n_positions"]] = field(default_factory=dict)
    """The norms again, by a float32 copy of the model; only for models below float32, on the first prompts."""
    left_out: tuple[str, ...] = ()
    """Limits of the numbers, and what the model does not allow."""

    def to_arrays(self) -> dict[str, np.ndarray]:
        """Flat arrays by slash-separated name, for storage."""
        arrays = {f"{sort}/{kind}": values for sort in BY_KIND for kind, values in getattr(self, sort).items()}
        if self.mixing is not None and self.mixing_frobenius is not None:
            arrays |= {"mixing": self.mixing, "mixing_frobenius": self.mixing_frobenius}
        for kind, numbers in self.details.items():
            arrays |= {f"details/{kind}/{name}": np.array([value]) for name, value in numbers.items()}
        arrays |= named_texts(LEFT_OUT, self.left_out)
        if self.depth is not None:
            arrays |= {"depth/layers": np.array(self.depth.layers), "depth/norms": self.depth.norms}
            if self.depth.standard_errors is not None:
                arrays["depth/standard_errors"] = self.depth.standard_errors
        return arrays

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, np.ndarray]) -> "PromptMeasurement":
        """The inverse of `to_arrays`."""
        details: dict[str, dict[str, float]] = {}
        for path, value in below(arrays, "details/").items():
            kind, name = path.split("/")
            details.setdefault(kind, {})[name] = float(value[0])
        depth = None
        if "depth/layers" in arrays:
            layers = tuple(int(layer) for layer in arrays["depth/layers"])
            depth = DepthInfluence(layers, arrays["depth/norms"], arrays.get("depth/standard_errors"))
        return cls(
            **{sort: below(arrays, f"{sort}/") for sort in BY_KIND},
            mixing=arrays.get("mixing"),
            mixing_frobenius=arrays.get("mixing_frobenius"),
            details=details,
            depth=depth,
            left_out=tuple(below(arrays, LEFT_OUT)),
        )


def measure_prompt(
    model: Model, token_ids: TokenIds, *, kinds: Sequence[Kind], key: Key, options: PassOptions | None = None
) -> PromptMeasurement:
    """Measure one prompt: every kind of influence, and the mixing where the model's family is described.

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
    depths: list[DepthInfluence | None] = [None for _ in keys]
    with (
        mixing_of_first_pass(model, token_ids, prompts=[prompt for _, prompt in keys]) as first_mixings,
        checkpointed(model.network, enabled=options.checkpointing),
    ):
        influences = influence_of_positions(model, token_ids, kinds=kinds, keys=keys, options=options)
        if options.layers is not None:
            probes = next((kind for kind in kinds if isinstance(kind, Jacobian)), Jacobian())
            depths = [*influence_by_depth(model, token_ids, kind=probes, keys=keys, options=options)]
    measured = []
    for tokens, key, influence, mixing, depth in zip(token_ids, keys, influences, first_mixings(), depths, strict=True):
        full, reason = norms_in_full_precision(model, tokens, kinds=kinds, key=key, options=options)
        reasons = [limit for result in influence.values() for limit in result.left_out]
        reasons += [] if reason is None else [reason]
        errors = {kind: result.standard_errors for kind, result in influence.items()}
        measured.append(
            PromptMeasurement(
                norms={kind: result.norms for kind, result in influence.items()},
                standard_errors={kind: values for kind, values in errors.items() if values is not None},
                mixing=None if mixing is None else mixing.tokens,
                mixing_frobenius=None if mixing is None else mixing.frobenius,
                details={kind: result.details for kind, result in influence.items() if result.details},
                depth=depth,
                full_precision=full,
                left_out=tuple(reasons),
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
