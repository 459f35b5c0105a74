"""Gradients of profiles against central differences."""

from dataclasses import replace

import numpy as np
import pytest

from posbias import Architecture, UsageError
from posbias.architecture import Alibi, Decay, GammaKey, KeyBias, Rope
from posbias.theory import profile_gradient, rollout_profile
from posbias.theory.kernels import derivatives

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

    def content(index: tuple[int, ...], step: float) -> Architecture:
        return replace(base, content=bumped(base.layer_content, index, step))

    def slope(index: tuple[int, ...], step: float) -> Architecture:
        return architecture_of(mask, bumped(SLOPES + STEP, index, step))

    expected = [difference(mix, (layer,)) for layer in range(2)]
    np.testing.assert_allclose(gradient.mixing, expected, rtol=1e-7, atol=1e-9)
    shifted = profile_gradient(architecture_of(mask, SLOPES + STEP), COTANGENT)
    for index in np.ndindex(2, 3):
        assert gradient.content[index] == pytest.approx(difference(content, index), rel=1e-7, abs=1e-9)
        assert shifted.slopes[index] == pytest.approx(difference(slope, index), rel=1e-7, abs=1e-9)


def test_rates_follow_from_slopes() -> None:
    def value(rate: float) -> float:
        return functional(Architecture(depth=2, encoding=Decay(rate), mixing=0.5))

    gradient = profile_gradient(Architecture(depth=2, encoding=Decay(0.8), mixing=0.5), COTANGENT)
    difference = (value(0.8 + STEP) - value(0.8 - STEP)) / (2 * STEP)
    assert gradient.rates.sum() == pytest.approx(difference, rel=1e-7)


@pytest.mark.parametrize("kept", [0, 2, 1000])
@pytest.mark.parametrize("encoding", [Alibi(), GammaKey((0.3, 1.0, 2.5, 40.0))])
def test_tables_that_layers_share_chunk_by_chunk_change_nothing(encoding, kept, monkeypatch):
    """An offset of 1e-300 changes no attention, but is found by pulls in place of the walk."""
    monkeypatch.setattr(derivatives, "CHUNK", 28)
    monkeypatch.setattr(derivatives, "KEPT_CHUNKS", kept)
    walked, pulled = (
        profile_gradient(Architecture(depth=3, heads=4, encoding=encoding, mixing=0.3, content=content), COTANGENT)
        for content in (0.0, 1e-300)
    )
    for name in ("value", "mixing", "content", "slopes", "rates", "alphas"):
        np.testing.assert_allclose(getattr(walked, name), getattr(pulled, name), rtol=1e-10, atol=1e-15, err_msg=name)


def test_other_encodings_have_no_slope_but_the_rest() -> None:
    base = Architecture(depth=1, heads=2, encoding=Rope(head_dim=8), mixing=0.5, content=[[0.2, -0.3]])
    gradient = profile_gradient(base, COTANGENT)
    assert np.all(np.isnan(gradient.slopes))
    for head in range(2):
        ahead, behind = (replace(base, content=bumped(base.layer_content, (0, head), s)) for s in (STEP, -STEP))
        assert gradient.content[0, head] == pytest.approx(
            (functional(ahead) - functional(behind)) / (2 * STEP), rel=1e-7
        )


def test_a_functional_of_the_total_mass_is_stationary() -> None:
    gradient = profile_gradient(Architecture(depth=3, heads=2, encoding="alibi", mixing=0.5), np.ones(20))
    assert gradient.value == pytest.approx(1)
    for values in (gradient.mixing, gradient.content, gradient.slopes):
        np.testing.assert_allclose(values, 0, atol=1e-13)


@pytest.mark.parametrize("cotangent", [np.zeros(0), np.array([1.0, np.nan])])
def test_bad_cotangents_are_refused(cotangent: np.ndarray) -> None:
    with pytest.raises(UsageError, match="one finite weight per position"):
        profile_gradient(Architecture(depth=1), cotangent)


def test_chunks_have_no_gradients_unless_one_holds_everything() -> None:
    with pytest.raises(UsageError, match="and no chunks"):
        profile_gradient(Architecture(depth=1, mask="chunks(width=4)"), np.ones(9))
    whole, causal = (
        profile_gradient(Architecture(depth=2, mask=mask, encoding="alibi"), np.arange(9.0)).slopes
        for mask in ("chunks(width=9)", "causal")
    )
    np.testing.assert_array_equal(whole, causal)


@pytest.mark.parametrize("mask", ["causal", "sliding_window(width=6)", "prefix(length=11)"])
def test_key_biases_and_sinks_equal_central_differences(mask: str) -> None:
    generator = np.random.default_rng(1)
    values = generator.normal(size=(2, 3, N_POSITIONS))
    sinks = np.array([[0.0, 1.0, -1.0], [0.5, 0.5, 0.5]])

    def of(values: np.ndarray, sinks: np.ndarray) -> Architecture:
        encodings = [KeyBias(layer.tolist()) for layer in values]
        parts = {"mixing": [0.4, 0.8], "content": [[0.3, 0.0, 1.0], [0.0] * 3], "sinks": sinks}
        return Architecture(depth=2, heads=3, mask=mask, encoding=encodings, **parts)

    gradient = profile_gradient(of(values, sinks), COTANGENT)
    for index in [(0, 0, 0), (0, 2, 7), (1, 1, 12), (1, 0, N_POSITIONS - 1)]:
        ends = [functional(of(bumped(values, index, step), sinks)) for step in (STEP, -STEP)]
        expected = (ends[0] - ends[1]) / (2 * STEP)
        assert gradient.keys[index[:2]][index[2]] == pytest.approx(expected, rel=1e-6, abs=1e-9)
    for index in np.ndindex(2, 3):
        ends = [functional(of(values, bumped(sinks, index, step))) for step in (STEP, -STEP)]
        assert gradient.sinks[index] == pytest.approx((ends[0] - ends[1]) / (2 * STEP), rel=1e-6, abs=1e-9)
