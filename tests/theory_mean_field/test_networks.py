"""Single networks of few heads about the mean field: their scatter and the mean of their profiles are predicted."""

from functools import partial

import numpy as np
import pytest

from posbias import predict
from posbias.theory.mean_field import FirstOrder, SampledHeads, mean_field, network_profiles, scatter_caveat, spec_of
from posbias.theory.mean_field.prediction import scatter

N, SEEDS = 24, 32
LARGE = {"hidden_size": 64, "num_hidden_layers": 2, "intermediate_size": 128, "initializer_range": 0.15}
"""Logits of variance 2."""


def test_scatter_is_the_root_mean_square_distance_from_the_mean():
    ends = np.array([[1.0, 0.0, 0.0], [0.0, 0.0, 1.0]])
    assert scatter(ends) == pytest.approx(0.5 * np.sqrt(2))
    assert scatter(np.stack([ends[0], ends[0]])) == 0


def test_single_networks_scatter_as_their_few_heads_do(fresh, births, profile_distance):
    """Large logits, one head or eight a layer: single profiles scatter as predicted, about the predicted mean."""
    found = []
    for heads in (1, 8):
        settings = {**LARGE, "num_attention_heads": heads, "num_key_value_heads": heads}
        norms = np.sqrt(births(partial(fresh, "llama", **settings), N, SEEDS))
        profiles = norms / norms.sum(axis=1, keepdims=True)
        networks = network_profiles(spec_of(fresh("llama", **settings)), N, count=SEEDS)
        assert scatter(networks) == pytest.approx(scatter(profiles), rel=0.4)
        noise = np.hypot(scatter(profiles), scatter(networks)) / np.sqrt(SEEDS)
        assert profile_distance(networks.mean(axis=0), profiles.mean(axis=0)) < 2 * noise
        found.append(scatter(networks))
    assert found[0] > 1.5 * found[1]


def test_small_logits_leave_nothing_to_chance(fresh):
    spec = spec_of(fresh("llama"))
    assert isinstance(mean_field(spec, 8).level, FirstOrder)
    assert scatter(network_profiles(spec, 32, count=3)) < 1e-3


def test_a_prediction_says_how_far_one_initialisation_lies(fresh):
    assert predict(fresh("llama"), 16, theory="mean_field").caveats == ()
    large = predict(fresh("llama", **LARGE), 16, theory="mean_field(level=sampled)")
    networks = network_profiles(spec_of(fresh("llama", **LARGE)), 16)
    assert large.caveats == (scatter_caveat(networks),)
    one = scatter(networks)
    assert (
        f"a single one lies at least W1 {one:.3f} from the mean of all, the mean of 100 about {one / 10:.3f}"
        in large.caveats[0]
    )
    assert f"about {one / 2:.3f}" in scatter_caveat(networks, initialisations=4)
    record = large.record
    assert record.scalars["caveats"] == list(large.caveats)


def test_networks_are_repeatable_and_have_as_many_heads_as_the_model(fresh):
    spec = spec_of(fresh("llama", **LARGE))
    one, same, other = (network_profiles(spec, 16, count=2, seed=seed) for seed in (0, 0, 1))
    np.testing.assert_array_equal(one, same)
    assert not np.array_equal(one, other)
    heads = spec.layers[0].attention.heads
    drawn = [mean_field(spec, 16, level=SampledHeads(count), seed=3).jacobian_norm for count in (1, heads)]
    assert heads == 4
    np.testing.assert_array_equal(*drawn)  # whole rounds: one head asked for is as many as the model has
