"""`design`: the architecture, or the bias of a given model, whose profile is the one that is asked for.

Where a solution is exact it is used: gamma keys whose exponents telescope (power laws, flat included, at every length),
a key bias for any target at one length. Everything else is searched for.
"""

from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
from jaxtyping import Float64

from posbias.architecture import Architecture, Causal, GammaKey, KeyBias, NoEncoding
from posbias.architecture.keys import MAX_ALPHA
from posbias.checks import checked
from posbias.designing.exact import key_bias_for, telescoping_alphas
from posbias.designing.initialisation import Initialisation, solve_at_initialisation
from posbias.designing.options import DesignOptions
from posbias.designing.result import KEY_BIAS, Design, Flat, Power, Target, resolve_target
from posbias.designing.solving import FREE, LEFT, MODEL_ALPHA, AlibiSlopes, GammaKeys, Mixings, Problem, SlopedGammaKeys
from posbias.errors import UsageError, check_most
from posbias.profiles import Profile
from posbias.registry import split_literals
from posbias.theory.mean_field.prediction import check_drawn
from posbias.theory.rollout import MOST_STEPS, rollout_profile

SEARCH = 300
"""Passes through all layers and positions that a search from one start takes at most, about, with gradients."""
KEYED = (GammaKeys.name, SlopedGammaKeys.name)
"""Free key biases that are defined at every length; mean field searches them alone."""


@checked
def design(
    target: Any = "flat",
    over: str | Sequence[str] = "gamma_key",
    *,
    architecture: Architecture | None = None,
    model: Any = None,
    options: DesignOptions | None = None,
) -> Design:
    """Find the architecture whose profile is the target.

    Args:
        target: "flat", "power(exponent=1.0)", "recency(rate=3.0)", "u_shape(middle=0.25)", a `Profile`, one positive
            weight per position, a .csv file of them, or a finished run ("runs/x").
        over: Free parameters: "key_bias" (one bias for all layers, exact at its own length), "gamma_key" (an exponent
            per layer: exact at every length for flat and power targets), "gamma_alibi" (the same, and a slope per
            head), "alibi" (a slope per head), "windows" (a width per layer), "mixing" (m_l of every layer, which is the
            scale of its attention branch beside the stream), or one encoding and any of the last two, as a list or with
            commas.
        architecture: The architecture to change, in place of depth, heads and mixing among the options.
        model: A model at initialisation, whose theory is `mean_field`; over "gamma_key", or over "gamma_alibi" in place
            of the model's own slopes.
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
    names = _checked_names(over)
    aim, search = resolve_target(target), {"starts": options.n_starts, "seed": options.seed}
    if options.theory == "mean_field":
        return _by_mean_field(model, aim, names, options.lengths, **search)
    return _by_rollout(_base(architecture, model, options), aim, names, options.lengths, **search)


def _checked_names(over: str | Sequence[str]) -> tuple[str, ...]:
    """Names of the free parameters, at least one, all of them known."""
    names = tuple(split_literals(over) if isinstance(over, str) else over)
    if not names:
        raise UsageError(f"nothing is free; over takes {KEY_BIAS} or some of {', '.join(FREE)}")
    for name in set(names) - {KEY_BIAS}:
        if name not in FREE and name not in LEFT:
            raise UsageError(f"unknown free parameter {name!r}; known: {', '.join(sorted((KEY_BIAS, *FREE)))}")
        _ = FREE[name]
    return names


def _by_rollout(
    base: Architecture, aim: Target, names: tuple[str, ...], lengths: tuple[int, ...], *, starts: int, seed: int
) -> Design:
    residual = float(np.prod(1 - base.layer_mixing))
    for length in lengths:
        aim.profile(length, residual)
    _check_encodings(base, names)
    if residual == 1 and Mixings.name not in names:
        raise UsageError("mixing is 0 in every layer: attention moves nothing, and no design changes the profile")
    bare = not np.any(base.layer_content) and bool(np.all(base.layer_sinks == -np.inf))
    problem = Problem(base, [FREE.build(name) for name in names if name != KEY_BIAS], aim, lengths)
    if names == (KEY_BIAS,):
        if not bare:
            raise UsageError(f"{KEY_BIAS} is designed without content and sinks; gamma_key is searched for with them")
        if len(lengths) > 1:
            raise UsageError(f"a key bias is exact at one length; {len(lengths)} are given: take gamma_key for several")
        bias = key_bias_for(aim.profile(lengths[0], residual), base.layer_mixing).tolist()
        keyed = replace(base, encoding=KeyBias(bias))
        return _found(problem, keyed, {KEY_BIAS: bias}, exact=True, reach=len(bias), seed=seed)
    if names == (GammaKeys.name,) and bare and isinstance(aim, Flat | Power):
        alphas = telescoping_alphas(aim.exponent if isinstance(aim, Power) else 0.0, base.layer_mixing)
        if alphas.max() <= MAX_ALPHA:
            keyed = replace(base, encoding=[GammaKey(alpha) for alpha in alphas.tolist()])
            return _found(problem, keyed, {GammaKeys.name: alphas.tolist()}, exact=True, seed=seed)
    steps = SEARCH * starts * base.depth * base.heads * sum(lengths)
    searches = f"a search from {starts} starts through {base.depth} layers at {sum(lengths):,} positions"
    check_most(searches, steps, MOST_STEPS, "steps")
    return _searched(problem, problem.solve(starts=starts, seed=seed), seed=seed)


def _base(architecture: Architecture | None, model: Any, options: DesignOptions) -> Architecture:
    if architecture is not None:
        return architecture
    if model is not None:
        return Architecture.from_model(model, mixing=options.mixing)
    if options.depth is None:
        raise UsageError("depth is missing: give depth (and heads, mixing), an architecture or a model")
    return Architecture(depth=options.depth, heads=options.heads, mixing=options.mixing)


def _check_encodings(base: Architecture, names: tuple[str, ...]) -> None:
    """Refuse two encodings for a head, key biases beside another encoding or mask, slopes where a mask looks ahead."""
    encodings = [name for name in names if name in {KEY_BIAS, *KEYED, AlibiSlopes.name}]
    if len(encodings) > 1:
        raise UsageError(f"over {', '.join(names)}: a head has one encoding; allowed: {' or '.join(encodings)}")
    for name, group in product(encodings, (group for groups in base.head_groups for group in groups)):
        if name == AlibiSlopes.name and group.mask.mutual_prefix(2) > 1:
            raise UsageError(f"{name} is designed for masks that do not look ahead; got {group.mask}")
        if name != AlibiSlopes.name and not (isinstance(group.mask, Causal) and isinstance(group.encoding, NoEncoding)):
            raise UsageError(
                f"{name} is designed for causal layers with encoding none; got mask {group.mask} and encoding "
                f"{group.encoding}"
            )


def _searched(problem: Problem, values: Float64[np.ndarray, "_"], **fields: Any) -> Design:
    """The design with these values of its free parameters."""
    split = list(zip(problem.free, problem.split(values), problem.at_ends(values), strict=True))
    ends = {sort.name: (int(ended.sum()), ended.size) for sort, _, ended in split if ended.any()}
    parameters = {sort.name: sort.plain(part) for sort, part, _ in split}
    return _found(problem, problem.architecture(values), parameters, at_ends=ends, **fields)


def _found(
    problem: Problem,
    designed: Architecture,
    parameters: dict[str, list[Any]],
    *,
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
        over=tuple(parameters),
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
    model: Any, target: Target, names: tuple[str, ...], lengths: tuple[int, ...], *, starts: int, seed: int
) -> Design:
    if model is None:
        raise UsageError("theory mean_field needs a model at initialisation: model=load_model('config:DIR')")
    if len(names) > 1 or not set(names) <= set(KEYED):
        raise UsageError(
            f"over {', '.join(names)}: mean field designs over one of {', '.join(KEYED)}; windows and residual scale "
            "of a model are set by hand: window(width=W), attention_scaled(factor=F)"
        )
    check_drawn(model)
    born, base = Initialisation(model, seed=seed), Architecture.from_model(model, mixing=1.0)
    if max(lengths) > born.reach:
        raise UsageError(f"mean field of this model reaches {born.reach:.0f} positions, got {max(lengths)}")
    free = SlopedGammaKeys() if SlopedGammaKeys.name in names else GammaKeys(MODEL_ALPHA)
    problem = Problem(base, [free], target, lengths)
    values = solve_at_initialisation(born, problem, starts=starts, seed=seed)
    return _searched(problem, values, born=born, model=model.describe(), seed=seed)
