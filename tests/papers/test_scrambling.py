"""Layer conductance: complete at every layer, at the top all of the last position, zero for what nothing reads."""

import numpy as np
import pytest

from posbias import Architecture
from posbias.models.reference.config import ReferenceConfig
from posbias.models.reference.network import ReferenceTransformer
from posbias_papers.later2026.scrambling import (
    MARK,
    ScramblingInvariance,
    Sizes,
    conductance,
    last_share,
    marked_network,
)

IDS = np.array([3, 1, 4, 1, 5, 9, 2, 6])


def network(mask: str = "causal") -> ReferenceTransformer:
    config = ReferenceConfig(
        Architecture(3, mask=mask),
        width=8,
        vocabulary_size=12,
        attention="content",
        values="gaussian",
        residual="added",
    )
    return ReferenceTransformer(config)


def test_every_layer_has_the_whole_change_of_the_score_and_the_last_position_all_of_the_top() -> None:
    influence = conductance(network(), IDS, steps=200)
    assert influence.missed < 1e-3
    np.testing.assert_allclose(influence.conductance.sum(1), influence.conductance.sum(1)[0], rtol=1e-3)
    np.testing.assert_array_equal(influence.conductance[-1, :-1], 0)
    assert (influence.conductance[0, :-1] != 0).all()


def test_positions_that_the_last_one_cannot_reach_have_none() -> None:
    """Under a window of 2, each layer above reaches one position further back."""
    influence = conductance(network("sliding_window(width=2)"), IDS)
    reached = np.abs(influence.conductance) > 0
    np.testing.assert_array_equal(reached.sum(1), [4, 3, 2, 1])
    assert (influence.gradient > 0).sum() == 4


def test_a_profile_follows_the_token_that_decides() -> None:
    """The break in small: a network by hand has all conductance of the input, and hardly less gradient, at its mark."""
    verdict = ScramblingInvariance(Sizes(seeds=3, prompts=4)).check(np.random.default_rng(0), broken=True)
    assert verdict.verdict == "fails as stated"
    generator = np.random.default_rng(0)
    ids = np.array([3, 1, MARK, 1, 5, 9])
    influence = conductance(marked_network(generator), ids)
    shares = np.abs(influence.conductance[0]) / np.abs(influence.conductance[0]).sum()
    assert shares[2] > 0.5
    assert last_share(np.full((2, 16), 1 / 16)) == pytest.approx(1 / 8)


def test_networks_are_trained_on_characters_and_read_texts_of_their_own() -> None:
    verdict = ScramblingInvariance(Sizes(seeds=2, steps=1, prompts=2)).check(np.random.default_rng(0))
    assert verdict.finding.numbers["top"] == pytest.approx(1)
    assert verdict.finding.instances == 2
