"""Gradients of profiles against central differences."""

import numpy as np

from posbias import Architecture
from posbias.architecture import GammaKey
from posbias.theory.rollout import Rollout, exponent_gradient

STEP = 1e-5
"""Central differences: truncation STEP^2 and rounding 1e-16 / STEP both stay near 1e-10."""


def rollout_of(alphas: np.ndarray) -> Rollout:
    return Rollout(
        Architecture(2, 3, encoding=[GammaKey(tuple(layer)) for layer in alphas.tolist()], mixing=[0.4, 0.8]), 30
    )


def test_exponents_of_causal_heads_equal_differences() -> None:
    alphas = np.array([[9.1, 1.6, 0.1], [36.1, 0.4, 12.1]])
    cotangent = np.random.default_rng(0).normal(size=30)
    expected = np.empty(alphas.shape)
    for index in np.ndindex(*alphas.shape):
        step = np.zeros(alphas.shape)
        step[index] = STEP
        ahead, behind = (rollout.pull(rollout.unit(-1)) for rollout in map(rollout_of, (alphas + step, alphas - step)))
        expected[index] = cotangent @ (ahead - behind) / (2 * STEP)
    np.testing.assert_allclose(exponent_gradient(rollout_of(alphas), cotangent), expected, rtol=1e-7, atol=1e-9)


def test_a_functional_of_the_total_mass_is_stationary() -> None:
    np.testing.assert_allclose(exponent_gradient(rollout_of(np.full((2, 3), 3.0)), np.ones(30)), 0, atol=1e-13)
