"""What key biases can reach: theorems of docs/theory, section 7, each with its assumption broken, which must refute it.

Layers with gamma keys commute, and their mean position is a product. That no other exponents are flat at every length,
and what holds where energies add, stands in the record of studies/claims (design/uniqueness, design/energies-...).
"""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from posbias.architecture import Architecture, GammaKey, KeyBias
from posbias.theory.rollout import Rollout, rollout_profile

N_POSITIONS = 48

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
