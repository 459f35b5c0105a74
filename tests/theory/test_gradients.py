"""Gradients of profiles against central differences."""

from dataclasses import replace

import numpy as np
import pytest

from posbias import Architecture, UsageError
from posbias.architecture import Alibi, GammaKey
from posbias.theory import profile_gradient, rollout_profile

N_POSITIONS = 30
STEP = 1e-5
"""Central differences: truncation STEP^2 and rounding 1e-16 / STEP both stay near 1e-10."""

SLOPES = np.array([[0.3, 0.05, 0.0], [1.2, 0.01, 0.4]])
COTANGENT = np.random.default_rng(0).normal(size=N_POSITIONS)
BESIDE = {"content": [[0.0, -1.0, 2.0], [0.5, 30.0, -40.0]], "sinks": [[0.0, 1.0, -np.inf]] * 2}


def functional(architecture: Architecture) -> float:
    return float(rollout_profile(architecture, n_positions=N_POSITIONS) @ COTANGENT)


def differences(build: object, values: np.ndarray) -> np.ndarray:
    """Central differences of the functional of `build(values)`, entry by entry."""
    found = np.empty(values.shape)
    for index in np.ndindex(*values.shape):
        step = np.zeros(values.shape)
        step[index] = STEP
        found[index] = (functional(build(values + step)) - functional(build(values - step))) / (2 * STEP)  # type: ignore[operator]
    return found


@pytest.mark.parametrize("mask", ["causal", "sliding_window(width=6)", "prefix(length=11)", "full"])
@pytest.mark.parametrize("encoding", ["alibi", "rope(head_dim=8)", "gamma_key(alpha=[0.5, 2.0, 30.0])"])
def test_mixing_equals_differences_with_content_and_sinks_beside_it(mask: str, encoding: str) -> None:
    base = Architecture(
        depth=2, heads=3, mask=[mask, [mask, "causal", "causal"]], encoding=encoding, mixing=[0.4, 0.8], **BESIDE
    )
    gradient = profile_gradient(base, COTANGENT)
    assert gradient.value == pytest.approx(functional(base), rel=1e-12)
    expected = differences(lambda mixing: replace(base, mixing=mixing), base.layer_mixing)
    np.testing.assert_allclose(gradient.mixing, expected, rtol=1e-7, atol=1e-9)
    assert np.all(np.isnan(gradient.slopes))
    assert np.all(np.isnan(gradient.alphas))


def test_slopes_and_exponents_of_causal_heads_equal_differences() -> None:
    def sloped(slopes: np.ndarray) -> Architecture:
        return Architecture(2, 3, encoding=[Alibi(tuple(layer)) for layer in slopes.tolist()], mixing=[0.4, 0.8])

    def keyed(alphas: np.ndarray) -> Architecture:
        return Architecture(2, 3, encoding=[GammaKey(tuple(layer)) for layer in alphas.tolist()], mixing=[0.4, 0.8])

    for build, values, name in ((sloped, SLOPES + STEP, "slopes"), (keyed, SLOPES * 30 + 0.1, "alphas")):
        gradient = profile_gradient(build(values), COTANGENT)
        np.testing.assert_allclose(getattr(gradient, name), differences(build, values), rtol=1e-7, atol=1e-9)


def test_a_functional_of_the_total_mass_is_stationary() -> None:
    gradient = profile_gradient(Architecture(depth=3, heads=2, encoding="alibi", mixing=0.5), np.ones(20))
    assert gradient.value == pytest.approx(1)
    for values in (gradient.mixing, gradient.slopes):
        np.testing.assert_allclose(values, 0, atol=1e-13)


@pytest.mark.parametrize("cotangent", [np.zeros(0), np.array([1.0, np.nan])])
def test_bad_cotangents_are_refused(cotangent: np.ndarray) -> None:
    with pytest.raises(UsageError, match="one finite weight per position"):
        profile_gradient(Architecture(depth=1), cotangent)
