"""`mean_field`: the Jacobian of a freshly initialised model, from its configuration alone (docs/theory, section 4).

The prediction is a mean over endlessly many heads. A network has a few per layer; if its logits are large, each
attends to keys of its own choice. Networks with as many heads as the model, and endless width, show by how much.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from jaxtyping import Float64

from posbias.comparison.metrics import wasserstein
from posbias.errors import UsageError
from posbias.models.hugging_face import HuggingFaceModel
from posbias.models.model import Model
from posbias.profiles import Profile
from posbias.prompts.prompts import Prompts
from posbias.theory.mean_field.bins import EXACT_POSITIONS, MOST_BINS, Bins, growing_bins, unit_bins
from posbias.theory.mean_field.recursion import (
    LEVELS,
    FirstOrder,
    Forward,
    Level,
    SampledHeads,
    Setting,
    ValueOnly,
    attention_grams,
    input_kernel,
    run_backward,
    run_forward,
)
from posbias.theory.mean_field.spec import AttentionSpec, MeanFieldSpec, spec_of
from posbias.theory.predict import THEORIES, Prediction, Theory

FIRST_ORDER_LIMIT = 0.3
"""Logit variance up to which the first order is trusted (docs/theory, section 4)."""
SAMPLED_POSITIONS = 256_000
"""Heads times positions that `auto` samples per layer: 2000 heads at N = 128."""
SAMPLED_RANGE = (200, 2000)
PROBED_POSITIONS = 16
"""Context from which `auto` reads the size of the logits: with norms before the branches it depends on no length."""
Profiles = Float64[np.ndarray, "network n_positions"]


@THEORIES.register("mean_field")
@dataclass(frozen=True)
class MeanFieldTheory(Theory):
    """Jacobian norms at initialisation, from the variances of the model's own weights (docs/theory, section 4)."""

    reads_prompts: ClassVar[bool] = False

    level: str = "auto"
    """`value`, `first`, `'sampled(heads=2000)'`, or `auto`."""

    def __post_init__(self) -> None:
        if self.level != "auto":
            LEVELS.parse(self.level)

    def predict(self, subject: Any, n_positions: int, prompts: Any = None, *, seed: int = 0) -> Prediction:
        """The root mean square over initialisations; if heads are drawn, also the distance of a single one from it."""
        if not isinstance(subject, Model | MeanFieldSpec):
            raise UsageError(
                "theory mean_field needs a model (one of load_model or transformers, a hub id, a path, or "
                f"config:PATH for a configuration), got {type(subject).__name__}"
            )
        prediction = mean_field(subject, n_positions, prompts=prompts, level=self.level, seed=seed)
        caveats: tuple[str, ...] = ()
        if isinstance(prediction.level, SampledHeads):
            spec = subject if isinstance(subject, MeanFieldSpec) else spec_of(subject)
            caveats = (scatter_caveat(network_profiles(spec, n_positions, prompts=prompts, seed=seed)),)
        return Prediction(prediction.profile, caveats=caveats, **self.labels(seed))


@dataclass(frozen=True, eq=False)
class MeanField:
    """The theory's prediction for a model at initialisation."""

    profile: Profile
    """Proportional to `jacobian_norm`."""
    jacobian_norm: Float64[np.ndarray, "n_positions"]
    """Root mean square of ||dh_last / dx_j||_F over initialisations, absolute."""
    level: Level
    logit_variance: Float64[np.ndarray, "layer"]
    """Variance of a logit at the last position: the parameter of the expansion."""


def check_drawn(model: Model | MeanFieldSpec) -> None:
    """Refuse a model whose weights were not drawn at random: mean field does not speak of it."""
    if isinstance(model, HuggingFaceModel) and model.origin.init_seed is None:
        raise UsageError(
            f"mean field speaks of models at initialisation; the weights of {model.identity['source']!r} are trained "
            "or of unknown origin: load it with init_seed=0, or give spec_of(model)"
        )


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
        prompts: Token ids, whose repetitions count; the prompts' mean squares are averaged. None means all tokens
            differ. Between wide bins only the share of equal tokens counts (within 1 % at N = 800).
        level: `value`, `first`, `sampled(heads=2000)`, or `auto`: first order if it suffices, else sampled heads.
        seed: Seed of the sampled heads; no other level draws anything.

    Returns:
        The prediction. Its profile compares with a root mean square over seeds. The mean over seeds of normalised
        profiles, as an audit takes it, differs by W1 .01 at 8 layers of width 64, by less for wider models, and by more
        if logits are large: see `network_profiles`.

    Raises:
        UsageError: trained weights, no mean-field theory for this model, prompts of another length, more positions than
            it has learned vectors for, sampled heads or a distance bias beyond 2048 positions, a window too narrow for
            the context.

    Source: ours; Hermite and arc-cosine kernels as in Cho and Saul 2009 and the neural-tangent literature.
    """
    check_drawn(model)
    spec = model if isinstance(model, MeanFieldSpec) else spec_of(model)
    if isinstance(model, Model) and spec.positions > 0 and n_positions > (model.max_positions or n_positions):
        raise UsageError(f"n_positions must be at most {model.max_positions}, the learned positions; got {n_positions}")
    if prompts is not None and prompts.n_positions != n_positions:
        raise UsageError(f"prompts hold {prompts.n_positions} tokens each; n_positions asks for {n_positions}")
    chosen = resolve_level(spec, level, n_positions)
    bins = choose_bins(spec, n_positions, exact=isinstance(chosen, SampledHeads))
    setting = Setting(bins, spec.width, np.random.default_rng(seed))
    entries = [input_kernel(spec, bins, token_ids=ids) for ids in ([None] if prompts is None else prompts.token_ids)]
    squares, forward = np.zeros(n_positions), None
    for entry in entries:
        forward = run_forward(spec, entry, chosen, setting)
        squares += bins.spread(run_backward(spec, forward, chosen, setting).same) / len(entries)
    assert forward is not None
    norm = np.sqrt(spec.width * squares)
    return MeanField(
        profile=Profile.normalised(norm),
        jacobian_norm=norm,
        level=chosen,
        logit_variance=_logit_variances(spec, forward),
    )


def choose_bins(spec: MeanFieldSpec, n_positions: int, *, exact: bool = False) -> Bins:
    """One bin per position in short contexts; growing ones, narrow enough for every window, in long ones.

    Also one per position on demand (`exact`: sampled heads), and if logits depend on position.

    Raises:
        UsageError: more than 2048 bins would be needed.
    """
    if exact or n_positions <= EXACT_POSITIONS or spec.single_positions:
        bins = unit_bins(n_positions)
    else:
        bins = growing_bins(n_positions, windows=spec.windows(n_positions))
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
    if not any(layer.attention.query_norm or layer.attention.key_norm for layer in spec.layers):
        # From a short context: gains and biases of the norms, and a stream that grows, are in it.
        bins = unit_bins(PROBED_POSITIONS)
        setting = Setting(bins, spec.width, np.random.default_rng(0))
        forward = run_forward(spec, input_kernel(spec, bins), ValueOnly(), setting)
        if _logit_variances(spec, forward).max(initial=0.0) < FIRST_ORDER_LIMIT:
            return FirstOrder()
    return SampledHeads(int(np.clip(SAMPLED_POSITIONS // n_positions, *SAMPLED_RANGE)))


def _logit_variances(spec: MeanFieldSpec, forward: Forward) -> Float64[np.ndarray, "layer"]:
    branches = [branch for step in forward.steps for branch in step]
    read = [(branch.spec, branch.x) for branch in branches if isinstance(branch.spec, AttentionSpec)]
    return np.array([attention_grams(attention, spec.width, x).logit_variance for attention, x in read])


def network_profiles(
    spec: MeanFieldSpec, n_positions: int, *, prompts: Prompts | None = None, count: int = 8, seed: int = 0
) -> Profiles:
    """Profiles of `count` networks that have no more heads than the model; the prompts are taken in turn.

    Up to 2048 positions; rows sum to 1. Their mean compares with a mean over seeds of normalised profiles.
    """
    rows = []
    for index, network_seed in enumerate(np.random.SeedSequence(seed).generate_state(count)):
        prompt = None if prompts is None else Prompts(prompts.token_ids[[index % prompts.count]])
        # SampledHeads fills up one round of the model's heads.
        network = mean_field(spec, n_positions, prompts=prompt, level=SampledHeads(1), seed=int(network_seed))
        rows.append(network.profile.influence)
    return np.stack(rows)


def scatter(profiles: Profiles) -> float:
    """Distance of one network's profile from the mean of many: root mean square W1, at least two networks.

    It tells of shape alone, without the effect of finite width (W1 .01 at width 128).
    """
    distances = wasserstein(profiles, profiles.mean(axis=0))
    return float(np.sqrt((distances**2).sum() / (len(profiles) - 1)))


def scatter_caveat(profiles: Profiles, *, initialisations: int | None = None) -> str:
    """Warning for a comparison with measurements: the distance of networks, at least two, from the prediction."""
    single = scatter(profiles)
    flat = wasserstein(profiles.mean(axis=0), np.full(profiles.shape[1], 1 / profiles.shape[1]))
    many = 100 if initialisations is None else initialisations
    return (
        "mean field: attention logits are large at this initialisation, and a network has few heads: a single one lies "
        f"at least W1 {single:.3f} from the mean of all, the mean of {many} about {single / np.sqrt(many):.3f}, a flat "
        f"line {flat:.3f}; a distance no larger than that is chance"
    )
