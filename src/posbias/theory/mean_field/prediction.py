"""`mean_field`: the Jacobian of a freshly initialised model, from its configuration alone (docs/theory, section 4)."""

from dataclasses import dataclass

import numpy as np
from jaxtyping import Float64, Int

from posbias.errors import UsageError
from posbias.models.hugging_face import HuggingFaceModel
from posbias.models.model import Model
from posbias.models.reference import ReferenceTransformer
from posbias.profiles import Profile
from posbias.prompts.prompts import Prompts
from posbias.theory.mean_field.bins import (
    EXACT_POSITIONS,
    MOST_BINS,
    Bins,
    Kernel,
    growing_bins,
    unit_bins,
)
from posbias.theory.mean_field.extract import spec_of
from posbias.theory.mean_field.first_order import attention_grams
from posbias.theory.mean_field.inputs import input_kernel, vector_kernel
from posbias.theory.mean_field.levels import LEVELS, FirstOrder, Level, SampledHeads, Setting, ValueOnly
from posbias.theory.mean_field.operators import depends_on_position
from posbias.theory.mean_field.recursion import Forward, run_backward, run_forward
from posbias.theory.mean_field.spec import AttentionSpec, MeanFieldSpec

FIRST_ORDER_LIMIT = 0.3
"""Logit variance up to which the first order is trusted (docs/theory, section 4)."""
SAMPLED_POSITIONS = 256_000
"""Heads times positions that `auto` samples per layer: 2000 heads at N = 128."""
SAMPLED_RANGE = (200, 2000)
PROBED_POSITIONS = 16
"""Context from which `auto` reads the size of the logits: with norms before the branches it depends on no length."""


@dataclass(frozen=True, eq=False)
class MeanField:
    """What the theory says of a model at initialisation."""

    profile: Profile
    """Proportional to `jacobian_norm`."""
    jacobian_norm: Float64[np.ndarray, "n_positions"]
    """Root mean square of ||dh_last / dx_j||_F over initialisations, absolute."""
    level: Level
    logit_variance: Float64[np.ndarray, "layer"]
    """Variance of a logit at the last position: the parameter of the expansion."""
    stream_power: Float64[np.ndarray, "layer_and_final"]
    """Mean square of the residual stream at the last position, before every layer and after the last."""


def mean_field(
    model: Model | MeanFieldSpec,
    n_positions: int,
    *,
    prompts: Prompts | None = None,
    level: Level | str = "auto",
    seed: int = 0,
) -> MeanField:
    """Predict sqrt(E ||dh_last / dx_j||_F^2) over random initialisations; nothing is fitted.

    Args:
        model: A model at initialisation (drawn with an `init_seed`), or a description: `spec_of(model)` describes the
            weights of any model, trained ones too, of which the theory does not speak.
        n_positions: Context length N, >= 1. Up to 512 every position is computed; beyond, bins grow with the position
            (up to 2048 still every position for sampled heads and for logits that depend on position).
        prompts: Token ids, which tell where the input repeats itself, or the vectors of a model of vector inputs (up
            to 512 positions); the prompts' mean squares are averaged. None means all tokens differ. Between wide bins
            only the share of equal tokens counts (within 1 % at N = 800).
        level: `value`, `first`, `sampled(heads=2000)`, or `auto`: first order where it suffices, else sampled heads.
        seed: Of the sampled heads; no other level draws anything.

    Returns:
        The prediction. Its profile compares with a root mean square over seeds. The mean over seeds of normalised
        profiles, as an audit takes it, differs by W1 .01 at 8 layers of width 64 and by less for wider models; where
        logits are large by more: see `network_profiles`.

    Raises:
        UsageError: trained weights, no mean-field theory for this model, prompts of another length, more positions than
            it has learned vectors for, sampled heads or a distance bias beyond 2048 positions, a window too narrow for
            the context.

    Source: ours; Hermite and arc-cosine kernels as in Cho and Saul 2009 and the neural-tangent literature.
    """
    spec = model if isinstance(model, MeanFieldSpec) else spec_of(_at_birth(model))
    if isinstance(model, Model) and spec.positions > 0 and n_positions > (model.max_positions or n_positions):
        raise UsageError(f"n_positions must be at most {model.max_positions}, the learned positions; got {n_positions}")
    if prompts is not None and prompts.n_positions != n_positions:
        raise UsageError(f"prompts hold {prompts.n_positions} tokens each; n_positions asks for {n_positions}")
    chosen = resolve_level(spec, level, n_positions)
    bins = choose_bins(spec, n_positions, exact=isinstance(chosen, SampledHeads))
    setting = Setting(bins, spec.width, np.random.default_rng(seed))
    entries = _entries(model, spec, bins, prompts)
    squares, forward = np.zeros(n_positions), None
    for entry in entries:
        same, forward = kernel_squares(spec, entry, chosen, setting)
        squares += bins.spread(same) / len(entries)
    assert forward is not None
    norm = np.sqrt(spec.width * squares)
    return MeanField(
        profile=Profile.normalised(norm),
        jacobian_norm=norm,
        level=chosen,
        logit_variance=_logit_variances(spec, forward),
        stream_power=_stream_powers(forward),
    )


def _at_birth(model: Model) -> Model:
    """The model, if its weights are as drawn."""
    if isinstance(model, HuggingFaceModel) and model.origin.init_seed is None:
        raise UsageError(
            f"mean field speaks of models at initialisation; the weights of {model.origin.source!r} are trained or of "
            "unknown origin: load it with init_seed=0, or give spec_of(model)"
        )
    return model


def gradient_squares(
    spec: MeanFieldSpec, token_ids: Int[np.ndarray, "n_positions"] | None, level: Level, setting: Setting
) -> tuple[Float64[np.ndarray, "bin"], Forward]:
    """G_jj at the input, and the forward pass it came from."""
    return kernel_squares(spec, input_kernel(spec, setting.bins, token_ids=token_ids), level, setting)


def kernel_squares(
    spec: MeanFieldSpec, entry: Kernel, level: Level, setting: Setting
) -> tuple[Float64[np.ndarray, "bin"], Forward]:
    """The same from the kernel of the vectors that enter the network."""
    forward = run_forward(spec, entry, level, setting)
    return run_backward(spec, forward, level, setting).same, forward


def _entries(model: Model | MeanFieldSpec, spec: MeanFieldSpec, bins: Bins, prompts: Prompts | None) -> list[Kernel]:
    """An input kernel per prompt; of vector inputs from the vectors that the prompt names."""
    if prompts is None:
        return [input_kernel(spec, bins)]
    if isinstance(model, ReferenceTransformer) and model.config.vocabulary_size is None:
        rows = [model.embed(model.token_tensor([ids.tolist()]))[0].double().cpu().numpy() for ids in prompts.token_ids]
        return [vector_kernel(spec, bins, vectors) for vectors in rows]
    return [input_kernel(spec, bins, token_ids=ids) for ids in prompts.token_ids]


def choose_bins(spec: MeanFieldSpec, n_positions: int, *, exact: bool = False) -> Bins:
    """One bin per position in short contexts; growing ones, narrow enough for every window, in long ones.

    Args:
        spec: The model.
        n_positions: Context length N.
        exact: Ask for one bin per position whatever the length (sampled heads); logits that depend on position ask
            for it themselves.

    Raises:
        UsageError: more than 2048 bins would be needed.
    """
    groups = [group for layer in spec.layers if layer.attention is not None for group in layer.attention.groups]
    if exact or n_positions <= EXACT_POSITIONS or any(depends_on_position(group) for group in groups):
        bins = unit_bins(n_positions)
    else:
        reaches = {group.mask.reach(n_positions) for group in groups}
        bins = growing_bins(n_positions, windows=reaches - {n_positions})
    if bins.count > MOST_BINS:
        raise UsageError(
            f"mean field needs {bins.count} bins for {n_positions} positions of this model, at most {MOST_BINS} are "
            "allowed: sampled heads, a distance bias and narrow windows do not reach further"
        )
    return bins


def resolve_level(spec: MeanFieldSpec, level: Level | str, n_positions: int) -> Level:
    """The level to compute: `auto` takes sampled heads for query/key norms and for logits of large variance.

    Longer contexts average over more keys and queries, so `auto` draws fewer heads there at equal noise.
    """
    if isinstance(level, Level):
        return level
    if level != "auto":
        return LEVELS.parse(level)
    attentions = [layer.attention for layer in spec.layers if layer.attention is not None]
    normed = any(attention.query_norm is not None or attention.key_norm is not None for attention in attentions)
    if not normed and largest_logit_variance(spec) < FIRST_ORDER_LIMIT:
        return FirstOrder()
    return SampledHeads(int(np.clip(SAMPLED_POSITIONS // n_positions, *SAMPLED_RANGE)))


def largest_logit_variance(spec: MeanFieldSpec) -> float:
    """Over layers, from a short context: gains and biases of the norms, and a stream that grows, are in it."""
    bins = unit_bins(PROBED_POSITIONS)
    setting = Setting(bins, spec.width, np.random.default_rng())
    forward = run_forward(spec, input_kernel(spec, bins), ValueOnly(), setting)
    return float(_logit_variances(spec, forward).max(initial=0.0))


def _logit_variances(spec: MeanFieldSpec, forward: Forward) -> Float64[np.ndarray, "layer"]:
    grams = [
        attention_grams(branch.spec, spec.width, branch.x)
        for step in forward.steps
        for branch in step.branches
        if isinstance(branch.spec, AttentionSpec)
    ]
    return np.array([gram.logit_variance for gram in grams])


def _stream_powers(forward: Forward) -> Float64[np.ndarray, "layer_and_final"]:
    before = [
        branch.stream.same[-1]
        for step in forward.steps
        for branch in step.branches
        if isinstance(branch.spec, AttentionSpec)
    ]
    return np.array([*before, forward.final.same[-1]])
