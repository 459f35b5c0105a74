"""The mathematics behind the claims: exact laws, graphs, and what random instances promise."""

from math import comb

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from posbias import UsageError
from posbias.architecture import Causal, Full, Prefix, SlidingWindow
from posbias_papers import centre_nodes, verify_mask
from posbias_papers.birth2603.claims import squared_norms
from posbias_papers.kernels import (
    ROUNDING,
    closed_positions,
    decay_logits,
    even_kernel,
    monotonicity_gap,
    random_monotone_kernel,
    reachable,
)
from posbias_papers.rollout2602.claims import averaged_kernels
from posbias_papers.wu2025.encodings import distances, envelope_mode, least_squared_steps, log_paths


@given(st.integers(2, 14), st.integers(0, 2**32 - 1), st.sampled_from([None, 2, 3, 5]))
@settings(max_examples=60, deadline=None)
def test_random_monotone_kernels_are_causal_windowed_stochastic_and_monotone(n_positions, seed, width):
    kernel = random_monotone_kernel(n_positions, np.random.default_rng(seed), width=width)
    visible = (Causal() if width is None else SlidingWindow(width)).visible(n_positions)
    assert np.allclose(kernel.sum(axis=1), 1, atol=1e-12)
    assert kernel.min() >= 0
    assert not np.any(kernel[~visible])
    assert monotonicity_gap(kernel) <= ROUNDING


def test_shuffled_content_averages_to_uniform_but_its_encoded_mean_is_not():
    mask = SlidingWindow(5)
    without, encoded = averaged_kernels(mask, -decay_logits(16, 0.5).T, np.random.default_rng(1))
    np.testing.assert_allclose(without, even_kernel(mask.visible(16)), atol=1e-12)
    assert np.abs(encoded - without).max() > 0.01


@given(st.integers(1, 12), st.floats(0.05, 2))
@settings(max_examples=60, deadline=None)
def test_the_mode_of_the_negative_binomial_and_when_it_only_falls(layers_beyond, strength):
    exact = layers_beyond / np.expm1(strength)
    if abs(exact - round(exact)) > 1e-9:
        assert envelope_mode(layers_beyond, strength) == (int(np.floor(exact)), exact < 1)


def test_paths_and_their_squares_are_counted_rightly():
    counts = np.exp(log_paths(3, distances(6)))
    for query, key in zip(*np.tril_indices(6), strict=True):
        assert counts[query, key] == pytest.approx(comb(3 + query - key, 3))
    steps = [(a, b, 9 - a - b) for a in range(10) for b in range(10 - a)]
    assert least_squared_steps(9, 3) == pytest.approx(min(sum(x * x for x in walk) for walk in steps) / 81)
    assert least_squared_steps(10, 5) == pytest.approx(1 / 5)
    kernel = even_kernel(Causal().visible(10))
    walks = (comb(4, k) * 0.6 ** (2 * k) * np.linalg.matrix_power(kernel, k)[-1] ** 2 for k in range(5))
    np.testing.assert_allclose(squared_norms([kernel] * 4) ** 2, sum(walks), rtol=1e-12)


@pytest.mark.parametrize(
    ("visible", "centres"),
    [
        (Causal().visible(7), [0]),
        (SlidingWindow(3).visible(7), [0]),
        (SlidingWindow(1).visible(7), []),
        (Prefix(3).visible(7), [0, 1, 2]),
        (Full().visible(4), [0, 1, 2, 3]),
        (Causal().visible(7).T, [6]),
    ],
)
def test_centre_nodes_of_the_papers_masks(visible, centres):
    assert centre_nodes(visible).tolist() == centres


@given(st.integers(1, 9), st.integers(0, 2**32 - 1), st.floats(0.05, 0.5))
@settings(max_examples=80, deadline=None)
def test_closure_against_matrix_powers_and_centres_against_the_definition(n_positions, seed, density):
    generator = np.random.default_rng(seed)
    visible = (generator.random((n_positions, n_positions)) < density) | np.eye(n_positions, dtype=bool)
    walks = np.linalg.matrix_power(visible.astype(float), n_positions) > 0
    assert np.array_equal(reachable(visible), walks)
    centres, closed = centre_nodes(visible).tolist(), closed_positions(visible).tolist()
    assert centres == [node for node in range(n_positions) if walks[:, node].all()]
    assert closed
    assert centres in ([], closed)


def test_users_masks_without_self_loops_and_with_two_sinks():
    looped = np.zeros((4, 4), dtype=bool)
    looped[0, 1] = looped[1, 0] = looped[2, 1] = looped[3, 2] = True
    assert verify_mask(looped).verdict == "holds"
    assert centre_nodes(looped).tolist() == [0, 1]
    sinks = np.eye(6, dtype=bool)
    sinks[2:4, 0] = sinks[4:, 1] = True
    verdict = verify_mask(sinks)
    assert verdict.verdict == "fails as stated"
    assert verdict.finding.numbers["factor_outside_closed_groups"] < 1
    assert "none" in verdict.computed


@pytest.mark.parametrize(
    ("visible", "named"),
    [
        (np.zeros((3, 3), dtype=bool), "sees none"),
        (np.ones((2, 3), dtype=bool), "shape"),
        (np.ones((1, 1), dtype=bool), "2 to 256"),
        (np.ones((257, 257), dtype=bool), "2 to 256"),
    ],
)
def test_masks_that_are_refused(visible, named):
    with pytest.raises(UsageError, match=named):
        verify_mask(visible)
