"""Design put to the test: which profiles key biases reach, at one length and at every length (docs/design, ours).

Of the residual rollout (weights add) five statements; of linear residual networks at initialisation (energies add) two.
"""

from collections.abc import Sequence
from itertools import combinations
from math import comb

import numpy as np
from jaxtyping import Float64
from scipy.optimize import brentq, minimize
from scipy.signal import lfilter
from scipy.stats import betabinom

from posbias.architecture import Architecture, GammaKey, KeyBias, SlidingWindow
from posbias.designing.exact import closed_profile, key_bias_for, telescoping_alphas
from posbias.designing.targets import Flat, Given
from posbias.theory.rollout import rollout_profile, rollout_rows
from posbias_papers.birth2603.gradient import (
    DEPTH,
    GAIN,
    TOLERANCE,
    measured_norms,
    median_error,
    profile_distance,
    squared_norms,
)
from posbias_papers.birth2603.gradient import N_POSITIONS as ENERGY_POSITIONS
from posbias_papers.claims import Claim, curves
from posbias_papers.pages.verify import CLAIMS, Finding

PAPER = "docs/design (posbias)"
BARE = "causal attention without content: the key bias alone"
RESIDUAL = "residual rollout: (1 - m_l) I + m_l A_l, weights add"
ENERGIES = "linear residual networks, independent value maps, attention held fixed: energies add"

EXACT = 1e-10
"""Relative error of an exact statement."""
INSTANCES = 8
STARTS = 3
"""Of searches."""
N_POSITIONS = 160
LENGTHS = (64, 257, 600)
NOT_FLAT = 0.01
"""Largest over smallest influence, less 1: what counts as not flat."""

Vector = Float64[np.ndarray, "_"]
Rows = Float64[np.ndarray, "rows n_positions"]


def _mixings(generator: np.random.Generator, depth: int) -> Vector:
    return np.asarray(generator.uniform(0.02, 0.5, depth))


def _gamma_rows(alphas: Sequence[float] | Vector, mixing: Vector, n_positions: int, *, mask: str = "causal") -> Rows:
    keys = [GammaKey(float(alpha)) for alpha in alphas]
    stack = Architecture(depth=len(keys), mixing=mixing, encoding=keys, mask=mask)
    return np.asarray(rollout_rows(stack, np.arange(n_positions), n_positions=n_positions))


def _relative(computed: Vector, expected: Vector) -> float:
    return float(np.max(np.abs(computed / expected - 1)))


@CLAIMS.register("design/any-target")
class AnyTarget(Claim):
    """One key bias realises any profile."""

    paper = PAPER
    source = "docs/design, any target at one length"
    statement = "One key bias in all layers gives any positive profile with more than P0 = prod(1 - m_l) at its end."
    assumptions = (BARE, RESIDUAL, "the length that it was designed for")
    broken_by = "the bias is used at half its length"
    computed = "largest relative error of the rollout's profile over {targets:.0f} targets, entry by entry"
    sharper = "the closed form of the profile agrees with the product of matrices to {closed_form_relative_error:.0e}"

    def examine(self, generator: np.random.Generator, *, broken: bool) -> Finding:
        """Random targets over four decades, depths and mixings; the product of matrices against the target."""
        errors, closed = [], []
        for _ in range(INSTANCES):
            mixing = _mixings(generator, int(generator.integers(2, 30)))
            residual = float(np.prod(1 - mixing))
            weights = np.exp(generator.uniform(0, np.log(1e4), N_POSITIONS))
            target = (1 - residual) * weights / weights.sum()
            target[-1] += residual
            bias = key_bias_for(target, mixing)
            used = N_POSITIONS // 2 if broken else N_POSITIONS
            stack = Architecture(depth=len(mixing), mixing=mixing, encoding=KeyBias(bias.tolist()))
            profile = rollout_profile(stack, n_positions=used)
            errors.append(_relative(profile, Given(target).shape(used)))
            closed.append(_relative(closed_profile(bias[:used], mixing), profile))
        return Finding(
            value=max(errors),
            as_stated=max(errors) <= EXACT,
            figure=curves(
                "position", "influence", np.arange(used), {"target": Given(target).shape(used), "rollout": profile}
            ),
            numbers={"targets": INSTANCES, "closed_form_relative_error": max(closed)},
            instances=INSTANCES,
        )


@CLAIMS.register("design/every-length")
class EveryLength(Claim):
    """Telescoping gamma keys hold their shape."""

    paper = PAPER
    source = "docs/design, flat at every length"
    statement = (
        "With alpha_0 = 1, alpha_(l+1) = alpha_l/(1 - m_l) every row is flat at every length, but for P0 on itself."
    )
    assumptions = (BARE, RESIDUAL, "alpha_(l+1) = alpha_l / (1 - m_l)")
    broken_by = "alpha is 1 in every layer: no key bias"
    computed = "largest relative error over every entry of every row at N = {lengths}"
    sharper = "another alpha_0 gives the power law alpha_0 x^(alpha_0 - 1), beta-binomial at every finite length"

    def examine(self, generator: np.random.Generator, *, broken: bool) -> Finding:
        """All rows at three lengths, random mixings; for other alpha_0 the beta-binomial law of (alpha_0, 1)."""
        errors = []
        for n_positions in LENGTHS:
            for first in (1.0, float(generator.uniform(0.3, 4))):
                mixing = _mixings(generator, 10)
                alphas = np.ones(10) if broken else telescoping_alphas(first - 1, mixing)
                residual, position = float(np.prod(1 - mixing)), np.arange(n_positions)
                rows = _gamma_rows(alphas, mixing, n_positions)
                law = (1 - residual) * betabinom.pmf(position, position[:, None], first, 1) + residual * np.eye(
                    n_positions
                )
                visible = np.tril_indices(n_positions)
                errors.append(_relative(rows[visible], law[visible]))
        return Finding(
            value=max(errors),
            as_stated=max(errors) <= EXACT,
            figure=curves(
                "position", "influence on the last position", position, {"rollout": rows[-1], "law": law[-1]}
            ),
            numbers={"lengths": list(LENGTHS)},
            instances=2 * len(LENGTHS),
        )


@CLAIMS.register("design/order-of-layers")
class OrderOfLayers(Claim):
    """Gamma keys commute."""

    paper = PAPER
    source = "docs/design, flat at every length"
    statement = "Layers with gamma keys may stand in any order: the rollout is the same."
    assumptions = (BARE, RESIDUAL, "gamma keys")
    broken_by = "random key biases instead of gamma keys"
    computed = "largest relative difference of two orders over {stacks:.0f} stacks of 8 layers"

    def examine(self, generator: np.random.Generator, *, broken: bool) -> Finding:
        """Random exponents and mixings, forwards and shuffled."""
        errors = []
        for _ in range(INSTANCES):
            mixing, order = _mixings(generator, 8), generator.permutation(8)
            while np.array_equal(order, np.arange(8)):
                order = generator.permutation(8)
            keys = [GammaKey(float(alpha)) for alpha in generator.uniform(0.2, 5, 8)]
            biases = [KeyBias(generator.normal(0, 2, N_POSITIONS).tolist()) for _ in range(8)]
            layers = biases if broken else keys
            profiles = [
                rollout_profile(
                    Architecture(depth=8, mixing=mixing[places], encoding=[layers[place] for place in places]),
                    n_positions=N_POSITIONS,
                )
                for places in (np.arange(8), order)
            ]
            errors.append(_relative(*profiles))
        return Finding(
            value=max(errors),
            as_stated=max(errors) <= EXACT,
            figure=curves(
                "position", "influence", np.arange(N_POSITIONS), {"in order": profiles[0], "shuffled": profiles[1]}
            ),
            numbers={"stacks": INSTANCES},
            instances=INSTANCES,
        )


@CLAIMS.register("design/mean-position")
class MeanPosition(Claim):
    """Mean position of the mass of a row."""

    paper = PAPER
    source = "docs/design, one shared exponent"
    statement = "With gamma keys the mean position that row i attends to is i prod_l (1 - m_l/(alpha_l + 1))."
    assumptions = (BARE, RESIDUAL, "gamma keys")
    broken_by = "attention sees the last 16 positions only"
    computed = "largest relative error of a row's mean position over {stacks:.0f} stacks"
    sharper = (
        "one alpha for all layers with the mean of a flat row is a near miss: 24 layers, m = .1, alpha = "
        "{shared_alpha:.3f}, W1 {shared_distance:.3f} to flat at N = {positions:.0f}"
    )

    def examine(self, generator: np.random.Generator, *, broken: bool) -> Finding:
        """Random exponents and mixings; the shared exponent that puts the mean where a flat row has it."""
        errors, mask = [], str(SlidingWindow(16)) if broken else "causal"
        for _ in range(INSTANCES):
            mixing, alphas = _mixings(generator, 12), generator.uniform(0.2, 8, 12)
            means = _gamma_rows(alphas, mixing, N_POSITIONS, mask=mask) @ np.arange(N_POSITIONS)
            expected = np.arange(N_POSITIONS) * np.prod(1 - mixing / (alphas + 1))
            errors.append(_relative(means[1:], expected[1:]))
        shared, distance = shared_alpha(np.full(24, 0.1), N_POSITIONS)
        return Finding(
            value=max(errors),
            as_stated=max(errors) <= EXACT,
            figure=curves("row", "mean position", np.arange(N_POSITIONS), {"rollout": means, "product": expected}),
            numbers={
                "stacks": INSTANCES,
                "positions": N_POSITIONS,
                "shared_alpha": shared,
                "shared_distance": distance,
            },
            instances=INSTANCES,
        )


def shared_alpha(mixing: Vector, n_positions: int) -> tuple[float, float]:
    """The exponent that, shared by all layers, gives the mean position of a flat row; W1 to flat that it leaves."""
    residual = float(np.prod(1 - mixing))
    middle = lambda alpha: float(np.prod(1 - mixing / (alpha + 1))) - (1 + residual) / 2  # noqa: E731
    alpha = float(brentq(middle, 1e-9, 1e9))
    profile = _gamma_rows(np.full(mixing.size, alpha), mixing, n_positions)[-1]
    return alpha, profile_distance(profile, Flat().profile(n_positions, residual))


@CLAIMS.register("design/uniqueness")
class Uniqueness(Claim):
    """No other gamma keys are flat at every length."""

    paper = PAPER
    source = "docs/design, bounded exponents"
    statement = "Flat at every length needs the exponents 1, 1/(1 - m), 1/(1 - m)^2 ...: bounded ones fall short."
    assumptions = (BARE, RESIDUAL, "gamma keys with alpha below (1 - m)^-(L - 1)", "the same mixing m in every layer")
    broken_by = "the bound is the end of the chain itself"
    computed = "least misfit of the moments of a row to those of a flat one, over searches and two stacks"
    sharper = "poles and zeros of the moments must cancel, which leaves one chain up to the order of layers"

    def examine(self, generator: np.random.Generator, *, broken: bool) -> Finding:
        """The least misfit of moments E t^s, s = 1 ... 12, with alpha_l at most the square root of the chain's end."""
        least = []
        for depth, mixing in ((4, 0.3), (8, 0.2)):
            end = (1 - mixing) ** -(depth - 1.0)
            bound = end if broken else np.sqrt(end)
            least.append(min(_moment_misfit(depth, mixing, bound, generator) for _ in range(STARTS)))
        alphas = telescoping_alphas(0.0, np.full(8, 0.2))
        return Finding(
            value=min(least),
            as_stated=min(least) > NOT_FLAT / 10,
            figure=curves("layer", "exponent", np.arange(8), {"the chain, 8 layers, m = .2": alphas}),
            instances=2 * STARTS,
        )


def _moment_misfit(depth: int, mixing: float, bound: float, generator: np.random.Generator) -> float:
    """Root mean square of ln E t^s - ln (1 + P0 s)/(1 + s), the best within alpha <= bound from one start."""
    orders, residual = np.arange(1, 13)[:, None], (1 - mixing) ** depth
    target = np.log((1 + residual * orders) / (1 + orders))[:, 0]

    def misfit(logs: Vector) -> tuple[float, Vector]:
        above, below = np.exp(logs) + (1 - mixing) * orders, np.exp(logs) + orders
        gaps = np.log(above / below).sum(axis=1) - target
        slopes = np.exp(logs) * (1 / above - 1 / below)
        return float(np.mean(gaps**2)), 2 * gaps @ slopes / gaps.size

    top = float(np.log(bound))
    start = np.sort(generator.uniform(0, top, depth))
    optimum = minimize(
        misfit,
        start,
        jac=True,
        method="L-BFGS-B",
        bounds=[(-6.0, top)] * depth,
        options={"ftol": 1e-18, "gtol": 1e-12, "maxfun": 3000},
    )
    return float(np.sqrt(optimum.fun))


@CLAIMS.register("design/energies-any-target")
class EnergiesAnyTarget(Claim):
    """At initialisation, too, one key bias realises any profile."""

    paper = PAPER
    source = "docs/design, energies"
    statement = (
        "One key bias gives a linear residual network at initialisation any Jacobian profile before the last position."
    )
    assumptions = (BARE, ENERGIES, "the length that it was designed for")
    broken_by = "the bias that the rollout asks for, where weights add"
    computed = "largest relative error of the norms' shape over 3 targets, the last position apart"
    sharper = "back-propagation through random value maps differs from the recursion by {simulated_error:.3f} (median)"

    def examine(self, generator: np.random.Generator, *, broken: bool) -> Finding:
        """Random shapes of norms; the recursion of energies against them, and back-propagation through random maps."""
        errors = []
        for _ in range(3):
            shape = np.exp(generator.uniform(0, np.log(30), ENERGY_POSITIONS))
            if broken:
                mixing = np.full(DEPTH, GAIN / (1 + GAIN))
                residual = float(np.prod(1 - mixing))
                target = (1 - residual) * shape / shape.sum()
                target[-1] += residual
                share = KeyBias(key_bias_for(target, mixing).tolist()).key_shares([0], ENERGY_POSITIONS, 1)
                ratios = share(0, ENERGY_POSITIONS)[0][:, 0]
            else:
                ratios = energy_shares(shape, DEPTH, GAIN)
            layers = [[_kernel(ratios)]] * DEPTH
            norms = squared_norms(layers, gain=GAIN)[:-1]
            target_shape = shape[:-1] / shape[:-1].sum()
            errors.append(_relative(norms / norms.sum(), target_shape))
        simulated = measured_norms(layers, generator, gain=GAIN)[:-1]
        noise = median_error(norms, simulated)
        return Finding(
            value=max(errors),
            as_stated=max(errors) <= 1e-8 and noise <= TOLERANCE,
            figure=curves(
                "position",
                "share of the Jacobian norm",
                np.arange(ENERGY_POSITIONS - 1),
                {"target": target_shape, "energies": norms / norms.sum(), "simulated": simulated / simulated.sum()},
            ),
            numbers={"simulated_error": noise},
            instances=3,
        )


def energy_shares(shape: Vector, depth: int, gain: float) -> Vector:
    """r_j of the one key bias whose energies sum_k C(L, k) g^2k (A^k)_(last, j)^2 have norms of this shape.

    The proof's algorithm: given the scale of the norms and the later r, position j's energy rises with r_j, one root
    per position; given all of them, what is left for the first position falls with the scale, one root more. The last
    position's energy counts without the residual stream's own.
    """
    weights = np.array([comb(depth, k) * gain ** (2 * k) for k in range(1, depth + 1)])

    def root(energy: float, states: Vector) -> float:
        return float(brentq(lambda ratio: _energy(ratio, states, weights) - energy, 0.0, 1.0, xtol=1e-300, rtol=1e-15))

    def solve(scale: float) -> tuple[float, Vector]:
        """Energy left for the first position beyond its target (-1: none is left for a later one), and all r."""
        energies, ratios, states = (scale * shape / shape.max()) ** 2, np.ones(shape.size), np.eye(depth)[0]
        for j in range(shape.size - 1, 0, -1):
            if _energy(1.0, states, weights) <= energies[j]:
                return -1.0, ratios
            ratios[j] = root(energies[j], states)
            states = (1 - ratios[j]) * _terms(ratios[j], states)
        return _energy(1.0, states, weights) - energies[0], ratios

    top = np.sqrt(_energy(1.0, np.eye(depth)[0], weights))
    scale = brentq(lambda trial: solve(trial)[0], 1e-12, top, xtol=1e-300, rtol=1e-15)
    return solve(scale)[1]


def _terms(ratio: float, states: Vector) -> Vector:
    """T_n = sum_m r^m H_(n - m)."""
    return np.asarray(lfilter([1.0], [1.0, -ratio], states))


def _energy(ratio: float, states: Vector, weights: Vector) -> float:
    return float(weights @ (ratio * _terms(ratio, states)) ** 2)


def _kernel(ratios: Vector) -> Float64[np.ndarray, "n n"]:
    """A_ij = r_j (1 - r_(j+1)) ... (1 - r_i)."""
    n = ratios.size
    kernel = np.zeros((n, n))
    for row in range(n):
        kernel[row] = kernel[row - 1] * (1 - ratios[row]) if row else 0.0
        kernel[row, row] = ratios[row]
    return kernel


@CLAIMS.register("design/energies-not-scale-free")
class EnergiesNotScaleFree(Claim):
    """Gamma keys cannot be flat at every length if energies add."""

    paper = PAPER
    source = "docs/design, energies"
    statement = "With two or more layers no gamma keys make a linear residual network's Jacobian flat at every length."
    assumptions = (BARE, ENERGIES, "two layers or more", "long contexts: the limit of relative positions")
    broken_by = "one layer, where alpha = 1 is flat"
    computed = "least of largest over smallest norm, less 1, that a search over exponents found"
    sharper = (
        "no other term cancels the density's x^(2 max(alpha) - 2) and x^(2 min(alpha) - 2), whose coefficients are "
        "positive"
    )

    def examine(self, generator: np.random.Generator, *, broken: bool) -> Finding:
        """The least spread of the limit's density over x from exp(-6) to 1, for 2 and 3 layers, over several starts."""
        grid = np.linspace(0, 6, 61)
        depths = (1,) if broken else (2, 3)
        best = [
            min((_least_spread(depth, grid, generator) for _ in range(STARTS)), key=lambda search: search[0])
            for depth in depths
        ]
        spreads = [spread for spread, _ in best]
        lines = {
            f"{depth} layers, alpha {', '.join(f'{alpha:.2f}' for alpha in np.sort(alphas))}": energy_density(
                alphas, grid
            )
            for depth, (_, alphas) in zip(depths, best, strict=True)
        }
        scaled = {label: np.sqrt(density / density.mean()) for label, density in lines.items()}
        return Finding(
            value=min(spreads),
            as_stated=min(spreads) > NOT_FLAT,
            figure=curves("relative position", "norm (mean 1)", np.exp(-grid), scaled, log_x=True),
            numbers={f"spread_{depth}": spread for depth, spread in zip(depths, spreads, strict=True)},
            instances=STARTS * len(depths),
        )


def energy_density(alphas: Vector, grid: Vector) -> Vector:
    """Limit of N^2 times the energy at x = exp(-u): sum over sets S of layers of g^(2|S|) f_S(x)^2.

    f_S is the density of a product of Beta(alpha_l, 1), l in S: in u a sum of exponentials, by partial fractions.

    Args:
        alphas: Distinct.
        grid: u >= 0.
    """
    total, curves_of = np.zeros_like(grid), np.exp(np.outer(1 - alphas, grid))
    for size in range(1, alphas.size + 1):
        for chosen in combinations(range(alphas.size), size):
            rates = alphas[list(chosen)]
            factors = rates / (rates - rates[:, None] + np.diag(rates))
            total += GAIN ** (2 * size) * ((factors.prod(axis=1) * rates) @ curves_of[list(chosen)]) ** 2
    return total


def _least_spread(depth: int, grid: Vector, generator: np.random.Generator) -> tuple[float, Vector]:
    """Largest over smallest norm, less 1, and its exponents: the end of one search, exponents kept apart by 2 %."""

    def alphas_of(logs: Vector) -> Vector:
        return np.asarray(np.exp(logs[0]) * np.cumprod(np.concatenate([[1.0], 1.02 + np.exp(logs[1:])])))

    def spread(logs: Vector) -> float:
        logarithm = np.log(energy_density(alphas_of(logs), grid))
        return float(np.std(logarithm))

    start = np.concatenate([generator.uniform(-0.5, 0.1, 1), generator.uniform(-2, 1, depth - 1)])
    optimum = minimize(spread, start, method="Nelder-Mead", options={"maxiter": 400, "xatol": 1e-6, "fatol": 1e-9})
    density = energy_density(alphas_of(optimum.x), grid)
    return float(np.sqrt(density.max() / density.min()) - 1), alphas_of(optimum.x)
