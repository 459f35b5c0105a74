"""What key biases can reach: theorems of docs/design, each with its assumption broken, which must refute it.

Of the residual rollout, where weights add: layers with gamma keys commute, their mean position is a product, no other
exponents are flat at every length. Of linear residual networks at initialisation, where energies add: any profile at
one length, none that is flat at every length.
"""

from itertools import combinations
from math import comb

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import brentq, minimize
from scipy.signal import lfilter

from posbias.architecture import Architecture, GammaKey, KeyBias
from posbias.designing.exact import key_bias_for, telescoping_alphas
from posbias.theory.rollout import Rollout, rollout_profile

N_POSITIONS = 48
GAIN = 0.6
"""Size g of a layer's update relative to the residual stream."""

exponents = st.lists(st.tuples(st.floats(0.2, 5), st.floats(0.02, 0.5)), min_size=2, max_size=8)


@given(exponents, st.randoms(use_true_random=False))
@settings(max_examples=10)
def test_layers_with_gamma_keys_commute(layers, random):
    shuffled = random.sample(layers, len(layers))
    profiles = [
        rollout_profile(
            Architecture(
                depth=len(order),
                mixing=[mixing for _, mixing in order],
                encoding=[GammaKey(alpha) for alpha, _ in order],
            ),
            n_positions=N_POSITIONS,
        )
        for order in (layers, shuffled)
    ]
    np.testing.assert_allclose(*profiles, rtol=1e-10)


def test_layers_with_other_key_biases_do_not_commute():
    biases = [KeyBias(row) for row in np.random.default_rng(0).normal(0, 2, (2, N_POSITIONS)).tolist()]
    first, second = (
        rollout_profile(Architecture(depth=2, mixing=0.3, encoding=order), n_positions=N_POSITIONS)
        for order in (biases, biases[::-1])
    )
    assert np.abs(first / second - 1).max() > 0.1


def relative_means(layers, mask):
    """The mean position that each row attends to, over i prod_l (1 - m_l/(alpha_l + 1)); the first row apart."""
    alphas, mixing = np.array(layers).T
    stack = Architecture(
        depth=len(layers), mixing=mixing, mask=mask, encoding=[GammaKey(float(alpha)) for alpha in alphas]
    )
    rollout = Rollout(stack, N_POSITIONS)
    rows = np.stack([rollout.pull(rollout.unit(position)) for position in range(N_POSITIONS)])
    positions = np.arange(N_POSITIONS)
    return ((rows @ positions) / (positions * np.prod(1 - mixing / (alphas + 1))).clip(1e-300))[1:]


@given(exponents)
@settings(max_examples=10)
def test_the_mean_position_with_gamma_keys_is_a_product(layers):
    np.testing.assert_allclose(relative_means(layers, "causal"), 1, rtol=1e-10)


def test_with_a_window_it_is_not():
    assert np.abs(relative_means([(1.0, 0.3), (2.0, 0.1)], "sliding_window(width=16)") - 1).max() > 0.01


@pytest.mark.parametrize(("depth", "mixing"), [(4, 0.3), (8, 0.2)])
def test_bounded_gamma_keys_are_not_flat_at_every_length(depth, mixing):
    """Moments E t^s of a flat row, s = 1 ... 12, are met by 1, 1/(1 - m), 1/(1 - m)^2 ... and by nothing below."""
    end = (1 - mixing) ** -(depth - 1.0)
    generator = np.random.default_rng(0)
    bounded, free = (
        min(moment_misfit(depth, mixing, np.log(bound), generator) for _ in range(3)) for bound in (np.sqrt(end), end)
    )
    assert free < 1e-4 < 1e-3 < bounded
    chain = np.log(telescoping_alphas(0.0, np.full(depth, mixing)))
    assert moment_gaps(chain, depth, mixing)[0] == pytest.approx(np.zeros(12), abs=1e-12)


def moment_gaps(logs, depth, mixing):
    """ln E t^s - ln (1 + P0 s)/(1 + s) of every order s, and its slopes by the exponents' logarithms."""
    orders = np.arange(1, 13)[:, None]
    above, below = np.exp(logs) + (1 - mixing) * orders, np.exp(logs) + orders
    flat = np.log((1 + (1 - mixing) ** depth * orders) / (1 + orders))[:, 0]
    return np.log(above / below).sum(axis=1) - flat, np.exp(logs) * (1 / above - 1 / below)


def moment_misfit(depth, mixing, top, generator):
    """Root mean square of the gaps, the least that a search from one start finds."""

    def misfit(logs):
        gaps, slopes = moment_gaps(logs, depth, mixing)
        return float(np.mean(gaps**2)), 2 * gaps @ slopes / gaps.size

    start, tight = np.sort(generator.uniform(0, top, depth)), {"ftol": 1e-18, "gtol": 1e-12, "maxfun": 3000}
    found = minimize(misfit, start, jac=True, method="L-BFGS-B", bounds=[(-6.0, top)] * depth, options=tight)
    return float(np.sqrt(found.fun))


@pytest.mark.parametrize("seed", range(3))
def test_a_key_bias_gives_any_norms_at_initialisation_where_the_rollouts_bias_does_not(seed):
    n_positions, depth = 32, 6
    shape = np.exp(np.random.default_rng(seed).uniform(0, np.log(30), n_positions))
    before = shape[:-1] / shape[:-1].sum()

    def norms(ratios):
        found = squared_norms(kernel_of(ratios), depth)[:-1]
        return found / found.sum()

    np.testing.assert_allclose(norms(energy_shares(shape, depth)), before, rtol=1e-8)
    mixing = np.full(depth, GAIN / (1 + GAIN))
    target = (1 - np.prod(1 - mixing)) * shape / shape.sum()
    target[-1] += np.prod(1 - mixing)
    shares = KeyBias(key_bias_for(target, mixing).tolist()).key_shares([0], n_positions, 1)
    assert np.abs(norms(shares(0, n_positions)[0][:, 0]) / before - 1).max() > 0.01


def squared_norms(kernel, depth):
    """sqrt(G_jj), G <- G + g^2 A' G A from the top layer down, G = 1 at the last position."""
    energies = np.zeros(kernel.shape)
    energies[-1, -1] = 1.0
    for _ in range(depth):
        energies = energies + GAIN**2 * kernel.T @ energies @ kernel
    return np.sqrt(np.diagonal(energies))


def kernel_of(ratios):
    """A_ij = r_j (1 - r_(j+1)) ... (1 - r_i)."""
    kernel = np.zeros((ratios.size, ratios.size))
    for row in range(ratios.size):
        kernel[row] = kernel[row - 1] * (1 - ratios[row]) if row else 0.0
        kernel[row, row] = ratios[row]
    return kernel


def energy_shares(shape, depth):
    """r_j of the one key bias whose energies sum_k C(L, k) g^2k (A^k)_(last, j)^2 have norms of this shape.

    The proof's algorithm: given the scale of the norms and the later r, position j's energy rises with r_j, one root
    per position; given all of them, what is left for the first position falls with the scale, one root more.
    """
    weights = np.array([comb(depth, k) * GAIN ** (2 * k) for k in range(1, depth + 1)])

    def terms(ratio, states):
        return lfilter([1.0], [1.0, -ratio], states)

    def energy(ratio, states):
        return float(weights @ (ratio * terms(ratio, states)) ** 2)

    def solve(scale):
        """Energy left for the first position beyond its target (-1: none is left for a later one), and all r."""
        energies, ratios, states = (scale * shape / shape.max()) ** 2, np.ones(shape.size), np.eye(depth)[0]
        for j in range(shape.size - 1, 0, -1):
            if energy(1.0, states) <= energies[j]:
                return -1.0, ratios
            missing = lambda ratio, wanted=energies[j], states=states: energy(ratio, states) - wanted  # noqa: E731
            ratios[j] = brentq(missing, 0.0, 1.0, xtol=1e-300, rtol=1e-15)
            states = (1 - ratios[j]) * terms(ratios[j], states)
        return energy(1.0, states) - energies[0], ratios

    top = np.sqrt(energy(1.0, np.eye(depth)[0]))
    return solve(brentq(lambda trial: solve(trial)[0], 1e-12, top, xtol=1e-300, rtol=1e-15))[1]


def test_gamma_keys_are_flat_at_every_length_with_one_layer_alone_where_energies_add():
    generator = np.random.default_rng(0)
    one, two, three = (min(least_spread(depth, generator) for _ in range(3)) for depth in (1, 2, 3))
    assert one < 1e-3 < 0.01 < min(two, three)


def least_spread(depth, generator):
    """Largest over smallest norm, less 1: the end of one search over exponents that are kept apart by 2 %."""
    grid = np.linspace(0, 6, 61)

    def alphas_of(logs):
        return np.exp(logs[0]) * np.cumprod(np.concatenate([[1.0], 1.02 + np.exp(logs[1:])]))

    def spread(logs):
        return float(np.std(np.log(energy_density(alphas_of(logs), grid))))

    start = np.concatenate([generator.uniform(-0.5, 0.1, 1), generator.uniform(-2, 1, depth - 1)])
    tight = {"maxiter": 400, "xatol": 1e-6, "fatol": 1e-9}
    density = energy_density(alphas_of(minimize(spread, start, method="Nelder-Mead", options=tight).x), grid)
    return float(np.sqrt(density.max() / density.min()) - 1)


def energy_density(alphas, grid):
    """Limit of N^2 times the energy at x = exp(-u): sum over sets S of layers of g^(2|S|) f_S(x)^2.

    f_S is the density of a product of Beta(alpha_l, 1), l in S: in u a sum of exponentials, by partial fractions.
    """
    total, curves = np.zeros_like(grid), np.exp(np.outer(1 - alphas, grid))
    for chosen in (list(c) for size in range(1, alphas.size + 1) for c in combinations(range(alphas.size), size)):
        rates = alphas[chosen]
        factors = rates / (rates - rates[:, None] + np.diag(rates))
        total += GAIN ** (2 * len(chosen)) * ((factors.prod(axis=1) * rates) @ curves[chosen]) ** 2
    return total
