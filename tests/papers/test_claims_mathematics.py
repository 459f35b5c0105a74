"""The mathematics behind the claims: order lemmas on arbitrary kernels, exact laws, graphs, bounds."""

from math import comb

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from posbias import UsageError
from posbias.architecture import Causal, Full, Prefix, SlidingWindow
from posbias.theory.kernels import masked_softmax
from posbias_papers import centre_nodes, verify_mask
from posbias_papers.birth2603.claims import (
    linear_norms,
    measured_norms,
    median_error,
    profile_distance,
    squared_norms,
    uniform_profile,
)
from posbias_papers.kernels import (
    ROUNDING,
    Network,
    closed_positions,
    decay_logits,
    last_row,
    monotonicity_gap,
    random_content_kernel,
    random_monotone_kernel,
    reachable,
    rollouts,
    run_network,
    transition,
    violated_share,
)
from posbias_papers.rollout2602.claims import averaged_kernels
from posbias_papers.wu2025.encodings import distances, envelope_mode, least_squared_steps, log_paths

kernels = st.tuples(st.integers(2, 14), st.integers(0, 2**32 - 1), st.sampled_from([None, 2, 3, 5]))


class TestStochasticOrder:
    @given(kernels)
    @settings(max_examples=60, deadline=None)
    def test_random_monotone_kernels_are_causal_windowed_stochastic_and_monotone(self, drawn):
        n_positions, seed, width = drawn
        kernel = random_monotone_kernel(n_positions, np.random.default_rng(seed), width=width)
        visible = (Causal() if width is None else SlidingWindow(width)).visible(n_positions)
        assert np.allclose(kernel.sum(axis=1), 1, atol=1e-12)
        assert kernel.min() >= 0
        assert not np.any(kernel[~visible])
        assert monotonicity_gap(kernel) <= ROUNDING

    def test_counterexample_to_primacy_drift_without_the_assumption(self):
        below = np.array([[1.0, 0, 0], [0, 1, 0], [1, 0, 0]])
        above = np.array([[1.0, 0, 0], [0, 1, 0], [0, 1, 0]])
        laws = rollouts([below, above])[:, -1]
        assert laws[1].tolist() == [1, 0, 0]
        assert laws[2].tolist() == [0, 1, 0]
        assert violated_share(below) > 0

    def test_shuffled_content_averages_to_uniform_but_its_encoded_mean_is_not(self):
        mask = SlidingWindow(5)
        without, encoded = averaged_kernels(mask, -decay_logits(16, 0.5).T, np.random.default_rng(1))
        np.testing.assert_allclose(without, masked_softmax(mask.visible(16), np.zeros((16, 16))), atol=1e-12)
        assert np.abs(encoded - without).max() > 0.01


class TestNegativeBinomial:
    @pytest.mark.parametrize(("rate", "layers"), [(0.8, 1), (0.8, 6), (0.5, 3)])
    def test_decay_layers_give_it_exactly_away_from_the_first_token(self, rate, layers):
        length = 400
        kernel = masked_softmax(Causal().visible(length), decay_logits(length, -np.log(rate)))
        profile = np.linalg.matrix_power(kernel, layers)[-1, ::-1]
        exact = np.array([(1 - rate) ** layers * comb(layers - 1 + d, d) * rate**d for d in range(150)])
        np.testing.assert_allclose(profile[:150], exact, rtol=1e-10)

    @given(st.integers(1, 12), st.floats(0.05, 2))
    @settings(max_examples=60, deadline=None)
    def test_its_mode_and_when_it_only_falls(self, layers_beyond, strength):
        exact = layers_beyond / np.expm1(strength)
        if abs(exact - round(exact)) < 1e-9:
            return
        mode, falls = envelope_mode(layers_beyond, strength)
        assert mode == int(np.floor(exact))
        assert falls == (exact < 1)

    def test_path_counts(self):
        counts = np.exp(log_paths(3, distances(6)))
        for query in range(6):
            for key in range(query + 1):
                assert counts[query, key] == pytest.approx(comb(3 + query - key, 3))

    def test_least_squared_steps_against_all_compositions(self):
        steps = [(a, b, 9 - a - b) for a in range(10) for b in range(10 - a)]
        assert least_squared_steps(9, 3) == pytest.approx(min(sum(x * x for x in walk) for walk in steps) / 81)
        assert least_squared_steps(10, 5) == pytest.approx(1 / 5)


class TestCentreNodes:
    def test_of_the_papers_masks(self):
        assert centre_nodes(Causal().visible(7)).tolist() == [0]
        assert centre_nodes(SlidingWindow(3).visible(7)).tolist() == [0]
        assert centre_nodes(SlidingWindow(1).visible(7)).tolist() == []
        assert centre_nodes(Prefix(3).visible(7)).tolist() == [0, 1, 2]
        assert centre_nodes(Full().visible(4)).tolist() == [0, 1, 2, 3]
        assert centre_nodes(Causal().visible(7).T).tolist() == [6]

    @given(st.integers(1, 9), st.integers(0, 2**32 - 1), st.floats(0.05, 0.5))
    @settings(max_examples=80, deadline=None)
    def test_closure_against_matrix_powers_and_centres_against_the_definition(self, n_positions, seed, density):
        generator = np.random.default_rng(seed)
        visible = (generator.random((n_positions, n_positions)) < density) | np.eye(n_positions, dtype=bool)
        walks = np.linalg.matrix_power(visible.astype(float), n_positions) > 0
        assert np.array_equal(reachable(visible), walks)
        centres, closed = centre_nodes(visible), closed_positions(visible)
        assert centres.tolist() == [node for node in range(n_positions) if walks[:, node].all()]
        assert len(closed) > 0
        if len(centres):
            assert centres.tolist() == closed.tolist()

    def test_a_users_mask_with_two_sinks_has_no_centre_and_fails(self):
        visible = np.eye(6, dtype=bool)
        visible[2:4, 0] = visible[4:, 1] = True
        verdict = verify_mask(visible)
        assert verdict.verdict == "fails as stated"
        assert verdict.finding.numbers["factor_outside_closed_groups"] < 1
        assert "none" in verdict.computed

    def test_a_users_mask_without_self_loops(self):
        visible = np.zeros((4, 4), dtype=bool)
        visible[0, 1] = visible[1, 0] = visible[2, 1] = visible[3, 2] = True
        verdict = verify_mask(visible)
        assert verdict.verdict == "holds"
        assert centre_nodes(visible).tolist() == [0, 1]

    @pytest.mark.parametrize(
        ("visible", "named"),
        [
            (np.zeros((3, 3), dtype=bool), "sees none"),
            (np.ones((2, 3), dtype=bool), "shape"),
            (np.ones((1, 1), dtype=bool), "2 to 256"),
            (np.ones((257, 257), dtype=bool), "2 to 256"),
        ],
    )
    def test_masks_that_are_refused(self, visible, named):
        with pytest.raises(UsageError, match=named):
            verify_mask(visible)


class TestNetworks:
    @pytest.mark.parametrize("width", [3, 16])
    def test_bounded_networks_keep_their_promises(self, width):
        network = Network(Causal().visible(8), np.ones(20), width=width)
        run = run_network(network, np.random.default_rng(3))
        np.testing.assert_allclose(run.kernels.sum(axis=2), 1, atol=1e-12)
        assert not np.any(run.kernels[:, ~network.visible])
        assert run.largest_state <= run.state_bound
        assert run.smallest_entry >= np.exp(-2 * run.content_bound) / 8


class TestUniformProfiles:
    @pytest.mark.parametrize("slope", [0.0, 0.3])
    def test_pull_equals_product(self, slope):
        kernel = masked_softmax(Causal().visible(20), decay_logits(20, slope))
        mixing = np.array([0.2, 1.0, 0.5])
        expected = last_row([transition(kernel, share) for share in mixing])
        np.testing.assert_allclose(uniform_profile(20, mixing, slope=slope), expected, rtol=1e-12)


class TestLinearNetworks:
    def test_identity_maps_add_linearly_and_exactly(self):
        kernel = masked_softmax(Causal().visible(10), np.zeros((10, 10)))
        layers = [kernel] * 4
        measured = measured_norms(layers, np.random.default_rng(0), identities=True)
        np.testing.assert_allclose(measured, linear_norms(layers), rtol=1e-12)

    def test_squares_over_sets_of_layers(self):
        kernel = masked_softmax(Causal().visible(10), np.zeros((10, 10)))
        total = sum(
            comb(4, steps) * 0.6 ** (2 * steps) * np.linalg.matrix_power(kernel, steps)[-1] ** 2 for steps in range(5)
        )
        np.testing.assert_allclose(squared_norms([kernel] * 4) ** 2, total, rtol=1e-12)

    def test_norms_of_independent_paths_add_in_squares(self):
        generator, causal = np.random.default_rng(0), Causal().visible(32)
        layers = [random_content_kernel(causal, generator, spread=1.0) for _ in range(6)]
        measured = measured_norms(layers, generator)
        squares, linear = squared_norms(layers), linear_norms(layers)
        assert median_error(squares, measured) < 0.03
        assert median_error(linear, measured) > 10 * median_error(squares, measured)
        assert profile_distance(squares, measured) < 0.01 < 0.1 < profile_distance(linear, measured)
