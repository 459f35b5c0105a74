"""`design`: the architecture, or the bias of a given model, whose profile is the one that is asked for.

Where a solution is exact it is used: gamma keys whose exponents telescope (power laws, flat included, at every length),
a key bias for any target at one length. Everything else is searched for.
"""

from dataclasses import replace
from typing import Any

import numpy as np
from jaxtyping import Float64

from posbias.architecture import Architecture, Causal, GammaKey, KeyBias, NoEncoding
from posbias.architecture.keys import MAX_ALPHA
from posbias.checks import checked
from posbias.designing.exact import key_bias_for, telescoping_alphas
from posbias.designing.initialisation import Initialisation, solve_at_initialisation
from posbias.designing.options import STARTS, DesignOptions
from posbias.designing.result import GAMMA_KEY, KEY_BIAS, OVER, Design, Flat, Power, Target, resolve_target
from posbias.designing.solving import MODEL_ALPHA, Problem
from posbias.errors import UsageError, check_most
from posbias.profiles import Profile
from posbias.theory.mean_field.prediction import check_drawn
from posbias.theory.rollout import MOST_STEPS, rollout_profile

LEFT = {
    "alibi": "gamma_key, which has exact designs; slopes of your own: predict --encoding 'alibi(slopes=[...])'",
    "windows": "gamma_key; widths of your own: predict --mask 'sliding_window(width=W)'",
    "spline": "key_bias is exact at one length, gamma_key is defined at every length",
    "gamma_alibi": "gamma_key, beside which a model's own slopes stay",
    "mixing": "give other mixings (--mixing), one design each",
    "sinks": "they could only switch attention off; predict has them: --sinks",
    "residual_scale": "--mixing: a branch added s times is mixing s / (1 + s)",
    "norm_placement": "a design for each configuration, --model config:PATH",
}
"""Free parameters that posbias had."""
SEARCH = 300
"""Passes through all layers and positions that a search from one start takes at most, about, with gradients."""


@checked
def design(
    target: Any = "flat",
    over: str = GAMMA_KEY,
    *,
    architecture: Architecture | None = None,
    model: Any = None,
    options: DesignOptions | None = None,
) -> Design:
    """Find the architecture whose profile is the target.

    Args:
        target: "flat", "power(exponent=1.0)", "recency(rate=3.0)", "u_shape(middle=0.25)", a `Profile`, one positive
            weight per position, a .csv file of them, or a finished run ("runs/x").
        over: What is free: "key_bias" (one bias for all layers, exact at its own length), or "gamma_key" (an exponent
            per layer: exact at every length for flat and power targets).
        architecture: The architecture to change, in place of depth, heads and mixing among the options.
        model: A model at initialisation, whose theory is `mean_field`, over "gamma_key".
        options: Depth, heads and mixing unless an architecture or a model has them, theory, lengths and search.

    Returns:
        The design with its profiles at the lengths asked for, at half the least and at twice the largest. A search may
        miss the target: `met` tells.

    Raises:
        UsageError: an unknown target or parameter, a target below the residual stream's share on the last position
            (the message names it), or values beyond the range of a solver.

    Source: ours (docs/design).
    """
    options = DesignOptions() if options is None else options
    if over in LEFT:
        raise UsageError(f"free parameter {over} left posbias after 0.1.0: {LEFT[over]}")
    if over not in OVER:
        raise UsageError(f"unknown free parameter {over!r}; known: {', '.join(OVER)}")
    starts = STARTS[options.theory] if options.starts is None else options.starts
    aim, search = resolve_target(target), {"starts": starts, "seed": options.seed}
    if options.theory == "mean_field":
        return _by_mean_field(model, aim, over, options.lengths, **search)
    if architecture is None and model is not None:
        architecture = Architecture.from_model(model, mixing=options.mixing)
    if architecture is None:
        if options.depth is None:
            raise UsageError("depth is missing: give depth (and heads, mixing), an architecture or a model")
        architecture = Architecture(depth=options.depth, heads=options.heads, mixing=options.mixing)
    return _by_rollout(architecture, aim, over, options.lengths, **search)


def _by_rollout(
    base: Architecture, aim: Target, over: str, lengths: tuple[int, ...], *, starts: int, seed: int
) -> Design:
    residual = float(np.prod(1 - base.layer_mixing))
    for length in lengths:
        aim.profile(length, residual)
    for group in (group for groups in base.head_groups for group in groups):
        if not (isinstance(group.mask, Causal) and isinstance(group.encoding, NoEncoding)):
            raise UsageError(
                f"{over} is designed for causal layers with encoding none; got mask {group.mask} and encoding "
                f"{group.encoding}"
            )
    if residual == 1:
        raise UsageError("mixing is 0 in every layer: attention moves nothing, and no design changes the profile")
    problem = Problem(base, aim, lengths)
    if over == KEY_BIAS:
        if not base.bare:
            raise UsageError(f"{KEY_BIAS} is designed without content and sinks; gamma_key is searched for with them")
        if len(lengths) > 1:
            raise UsageError(f"a key bias is exact at one length; {len(lengths)} are given: take gamma_key for several")
        bias = key_bias_for(aim.profile(lengths[0], residual), base.layer_mixing).tolist()
        keyed = replace(base, encoding=KeyBias(bias))
        return _found(problem, keyed, bias, over=KEY_BIAS, exact=True, reach=len(bias), seed=seed)
    if base.bare and isinstance(aim, Flat | Power):
        alphas = telescoping_alphas(aim.exponent if isinstance(aim, Power) else 0.0, base.layer_mixing)
        if alphas.max() <= MAX_ALPHA:
            keyed = replace(base, encoding=[GammaKey(alpha) for alpha in alphas.tolist()])
            return _found(problem, keyed, alphas.tolist(), exact=True, seed=seed)
    steps = SEARCH * starts * base.depth * base.heads * sum(lengths)
    searches = f"a search from {starts} starts through {base.depth} layers at {sum(lengths):,} positions"
    check_most(searches, steps, MOST_STEPS, "steps")
    return _searched(problem, problem.solve(starts=starts, seed=seed), seed=seed)


def _searched(problem: Problem, values: Float64[np.ndarray, "_"], **fields: Any) -> Design:
    """The design with exponents of these logarithms."""
    at_ends = problem.at_ends(values)
    return _found(problem, problem.architecture(values), np.exp(values).tolist(), at_ends=at_ends, **fields)


def _found(
    problem: Problem,
    designed: Architecture,
    parameters: list[Any],
    *,
    over: str = GAMMA_KEY,
    born: Initialisation | None = None,
    exact: bool = False,
    reach: float = np.inf,
    **fields: Any,
) -> Design:
    """The design with its profiles at the lengths asked for, half the least and twice the largest, as far as known."""
    target, lengths = problem.target, tuple(problem.lengths)
    at = sorted({max(min(lengths) // 2, 3), *lengths, 2 * max(lengths)})
    within_reach = [n for n in at if n <= (reach if born is None else born.reach)]
    # Energies add in mean field: what the residual stream keeps there is no share of a target.
    residual = float(np.prod(1 - designed.layer_mixing)) if born is None else 0.0

    def profiles(architecture: Architecture) -> dict[int, Profile]:
        theory = born.full if born else lambda stack, n: rollout_profile(stack, n_positions=n)
        return {n: Profile.normalised(theory(architecture, n)) for n in within_reach}

    return Design(
        target=target,
        over=over,
        theory="mean_field" if born else "rollout",
        architecture=designed,
        exact=exact,
        lengths=lengths,
        profiles=profiles(designed),
        before=profiles(problem.base),
        targets={n: target.shape(n) if target.whole else target.profile(n, residual) for n in within_reach},
        parameters=parameters,
        residual=residual,
        **fields,
    )


def _by_mean_field(
    model: Any, target: Target, over: str, lengths: tuple[int, ...], *, starts: int, seed: int
) -> Design:
    if model is None:
        raise UsageError("theory mean_field needs a model at initialisation: model=load_model('config:DIR')")
    if over != GAMMA_KEY:
        raise UsageError(f"over {over}: mean field designs over {GAMMA_KEY} alone")
    check_drawn(model)
    born, base = Initialisation(model, seed=seed), Architecture.from_model(model, mixing=1.0)
    if max(lengths) > born.reach:
        raise UsageError(f"mean field of this model reaches {born.reach:.0f} positions, got {max(lengths)}")
    problem = Problem(base, target, lengths, MODEL_ALPHA)
    values = solve_at_initialisation(born, problem, starts=starts, seed=seed)
    return _searched(problem, values, born=born, model=model.describe(), seed=seed)
