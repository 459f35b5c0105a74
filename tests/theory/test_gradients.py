"""Gradients of profiles against central differences."""

from dataclasses import replace

import numpy as np
import pytest

from posbias import Architecture, UsageError
from posbias.architecture import Alibi, GammaKey, Rope
from posbias.theory import profile_gradient, rollout_profile

N_POSITIONS = 30
STEP = 1e-5
"""Central differences: truncation STEP^2 and rounding 1e-16 / STEP both stay near 1e-10."""

SLOPES = np.array([[0.3, 0.05, 0.0], [1.2, 0.01, 0.4]])
COTANGENT = np.random.default_rng(0).normal(size=N_POSITIONS)


def architecture_of(mask: str, slopes: np.ndarray = SLOPES) -> Architecture:
    return Architecture(
        depth=2,
        heads=3,
        mask=[mask, [mask, "causal", "causal"]],
        encoding=[Alibi(tuple(layer)) for layer in slopes],
        mixing=[0.4, 0.8],
        content=[[0.0, -1.0, 2.0], [0.5, 30.0, -40.0]],
        sinks=[[0.0, 1.0, -np.inf]] * 2,
    )


def functional(architecture: Architecture) -> float:
    return float(rollout_profile(architecture, n_positions=N_POSITIONS) @ COTANGENT)


def bumped(values: np.ndarray, index: tuple[int, ...], step: float) -> np.ndarray:
    changed = values.copy()
    changed[index] += step
    return changed


@pytest.mark.parametrize("mask", ["causal", "sliding_window(width=6)", "prefix(length=11)", "full"])
def test_equal_central_differences(mask: str) -> None:
    base = architecture_of(mask)
    gradient = profile_gradient(base, COTANGENT)
    assert gradient.value == pytest.approx(functional(base), rel=1e-12)

    def difference(change: object, index: tuple[int, ...]) -> float:
        ahead, behind = change(index, STEP), change(index, -STEP)  # type: ignore[operator]
        return (functional(ahead) - functional(behind)) / (2 * STEP)

    def mix(index: tuple[int, ...], step: float) -> Architecture:
        return replace(base, mixing=bumped(base.layer_mixing, index, step))

    def slope(index: tuple[int, ...], step: float) -> Architecture:
        return architecture_of(mask, bumped(SLOPES + STEP, index, step))

    expected = [difference(mix, (layer,)) for layer in range(2)]
    np.testing.assert_allclose(gradient.mixing, expected, rtol=1e-7, atol=1e-9)
    shifted = profile_gradient(architecture_of(mask, SLOPES + STEP), COTANGENT)
    for index in np.ndindex(2, 3):
        if mask.startswith(("prefix", "full")) and index not in [(1, 1), (1, 2)]:  # heads that look ahead
            assert np.isnan(shifted.slopes[index])
            continue
        assert shifted.slopes[index] == pytest.approx(difference(slope, index), rel=1e-7, abs=1e-9)


def test_the_walk_equals_pushes():
    """An offset of 1e-300 changes no attention, but is found by pushes in place of the walk."""
    for encoding in (Alibi(), GammaKey((0.3, 1.0, 2.5, 40.0))):
        walked, pushed = (
            profile_gradient(Architecture(depth=3, heads=4, encoding=encoding, mixing=0.3, content=content), COTANGENT)
            for content in (0.0, 1e-300)
        )
        name = "slopes" if encoding == Alibi() else "alphas"
        for part in ("value", "mixing", name):
            np.testing.assert_allclose(getattr(walked, part), getattr(pushed, part), rtol=1e-10, atol=1e-15)


def test_other_encodings_have_no_slope_but_a_mixing() -> None:
    gradient = profile_gradient(Architecture(depth=1, encoding=Rope(head_dim=8), mixing=0.5), COTANGENT)
    assert np.all(np.isnan(gradient.slopes))
    ends = [functional(Architecture(depth=1, encoding=Rope(head_dim=8), mixing=0.5 + step)) for step in (STEP, -STEP)]
    assert gradient.mixing[0] == pytest.approx((ends[0] - ends[1]) / (2 * STEP), rel=1e-7)


def test_a_functional_of_the_total_mass_is_stationary() -> None:
    gradient = profile_gradient(Architecture(depth=3, heads=2, encoding="alibi", mixing=0.5), np.ones(20))
    assert gradient.value == pytest.approx(1)
    for values in (gradient.mixing, gradient.slopes):
        np.testing.assert_allclose(values, 0, atol=1e-13)


@pytest.mark.parametrize("cotangent", [np.zeros(0), np.array([1.0, np.nan])])
def test_bad_cotangents_are_refused(cotangent: np.ndarray) -> None:
    with pytest.raises(UsageError, match="one finite weight per position"):
        profile_gradient(Architecture(depth=1), cotangent)


@pytest.mark.parametrize("mask", ["causal", "sliding_window(width=6)"])
def test_exponents_and_slopes_of_gamma_keys_equal_central_differences(mask: str) -> None:
    values = np.array([[0.5, 2.0, 30.0], [0.1, 0.0, -0.05]])  # exponents, slopes

    def of(values: np.ndarray) -> Architecture:
        encoding = GammaKey(*(tuple(row) for row in values.tolist()))
        parts = {"mixing": 0.4, "content": [[0.3, 0.0, 1.0]], "sinks": [[0.0, 1.0, -np.inf]]}
        return Architecture(depth=1, heads=3, mask=mask, encoding=encoding, **parts)

    gradient = profile_gradient(of(values), COTANGENT)
    for name, row in (("alphas", 0), ("slopes", 1)):
        for head in range(3):
            ends = [functional(of(bumped(values, (row, head), step))) for step in (STEP, -STEP)]
            expected = (ends[0] - ends[1]) / (2 * STEP)
            assert getattr(gradient, name)[0, head] == pytest.approx(expected, rel=1e-6, abs=1e-9)
