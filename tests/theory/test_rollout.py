"""The rollout against the multiplied-out matrices, and the propositions it has to satisfy."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from posbias import Architecture, UsageError
from posbias.theory import Rollout, rollout_profile
from posbias.theory.kernels import dense_heads

MIXED = Architecture(
    depth=5,
    heads=3,
    mask=["causal", "sliding_window(width=7)", "prefix(length=9)", ["causal", "full", "causal"], "causal"],
    encoding=["alibi", "none", "decay(rate=0.7)", ["rope(head_dim=8)", "none", "alibi"], "rope(head_dim=4)"],
    mixing=[0.5, 0.0, 1.0, 0.2, 0.7],
    content=[0.0, 2.0, -2.0, 30.0, 0.0],
)

ALL_ENCODINGS = ["none", "alibi", "decay(rate=0.8)"]
"""Encodings whose mean kernels are ordered (Assumption 4.1 of arXiv 2602.16837)."""


def dense_layers(architecture: Architecture, n_positions: int) -> list[np.ndarray]:
    layers = []
    for mixing, groups in zip(architecture.layer_mixing, architecture.head_groups, strict=True):
        attention = sum(dense_heads(group, n_positions).sum(axis=0) for group in groups) / architecture.heads
        layers.append((1 - mixing) * np.eye(n_positions) + mixing * attention)
    return layers


def product(layers: list[np.ndarray]) -> np.ndarray:
    total = np.eye(len(layers[0]))
    for layer in layers:
        total = layer @ total
    return total


def test_rows_are_those_of_the_product() -> None:
    n_positions = 33
    dense = product(dense_layers(MIXED, n_positions))
    np.testing.assert_allclose(rollout_profile(MIXED, n_positions=n_positions), dense[-1], rtol=1e-12)
    rollout = Rollout(MIXED, n_positions)
    for position in (0, 17, -2):
        np.testing.assert_allclose(rollout.pull(rollout.unit(position)), dense[position], rtol=1e-12)


@pytest.mark.parametrize("encoding", ALL_ENCODINGS)
@settings(max_examples=25, deadline=None)
@given(
    n_positions=st.integers(2, 60),
    mixing=st.lists(st.floats(0, 1), min_size=1, max_size=6),
    more=st.floats(0, 1),
    content=st.floats(0, 20),
)
def test_propositions_on_prefix_masses(
    encoding: str, n_positions: int, mixing: list[float], more: float, content: float
) -> None:
    """arXiv 2602.16837: 4.2 depth raises every F_k, 4.3 so does mixing, 4.5 content > 0 lowers them and < 0 raises."""

    def prefix_masses(mixing: list[float], content: float = 0.0) -> np.ndarray:
        architecture = Architecture(len(mixing), 2, encoding=encoding, mixing=mixing, content=content)
        return np.cumsum(rollout_profile(architecture, n_positions=n_positions))

    masses, slack = prefix_masses(mixing), 1e-12
    assert np.all(prefix_masses([*mixing, more]) >= masses - slack)
    assert np.all(prefix_masses([value + (1 - value) * more for value in mixing]) >= masses - slack)
    assert np.all(prefix_masses(mixing, content) <= masses + slack)
    assert np.all(prefix_masses(mixing, -content) >= masses - slack)


@settings(max_examples=25, deadline=None)
@given(steep=st.floats(0, 5), extra=st.floats(0, 5), depth=st.integers(1, 5))
def test_a_steeper_bias_lowers_every_prefix_mass(steep: float, extra: float, depth: int) -> None:
    """Proposition 4.4: adding logits that do not fall towards the query."""

    def prefix_masses(slope: float) -> np.ndarray:
        architecture = Architecture(depth, encoding=f"alibi(slopes=[{slope}])", mixing=0.4)
        return np.cumsum(rollout_profile(architecture, n_positions=40))

    assert np.all(prefix_masses(steep + extra) <= prefix_masses(steep) + 1e-12)


def test_decay_away_from_the_start_is_negative_binomial() -> None:
    """docs/theory, section 3: t + 1 layers give (1-r)^(t+1) C(t+d, d) r^d at distance d, where rows are full."""
    rate, layers, n_positions = 0.5, 4, 400
    decaying = Architecture(depth=layers, encoding=f"decay(rate={rate})", mixing=1)
    profile = rollout_profile(decaying, n_positions=n_positions)
    distance = np.arange(100)
    binomials = np.array([np.prod((distance_ + np.arange(1, layers)) / np.arange(1, layers)) for distance_ in distance])
    np.testing.assert_allclose(profile[::-1][:100], (1 - rate) ** layers * binomials * rate**distance, rtol=1e-12)


@pytest.mark.parametrize("n_positions", [0, -3, True])
def test_bad_lengths_are_named(n_positions: object) -> None:
    with pytest.raises(UsageError, match=f"whole number >= 1, got {n_positions}"):
        Rollout(Architecture(depth=1), n_positions)
