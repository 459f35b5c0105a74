"""Sink scores against the published definition, entry by entry."""

import numpy as np
import pytest
import torch

from posbias.architecture import Causal, SlidingWindow
from posbias_papers.wu2025.icl import sink_scores


@pytest.mark.parametrize("mask", [Causal(), SlidingWindow(3)])
def test_scores_are_the_published_sum(mask: Causal | SlidingWindow) -> None:
    visible = mask.visible(6)
    logits = torch.randn(2, 3, 4, 1, 6, 6, generator=torch.Generator().manual_seed(0))
    maps = logits.masked_fill(~torch.from_numpy(visible), -torch.inf).softmax(-1)
    expected = np.zeros((3, 6))
    for member, key in np.ndindex(3, 6):
        above = (maps[:, member, :, 0, :, key] > 0.2).double().mean((0, 1)).sum().item()
        expected[member, key] = above / visible[:, key].sum()
    np.testing.assert_allclose(sink_scores(maps, visible), expected, atol=1e-12)


def test_attention_to_the_first_key_alone_is_a_full_sink() -> None:
    maps = torch.zeros(1, 1, 2, 1, 5, 5)
    maps[..., 0] = 1
    np.testing.assert_array_equal(sink_scores(maps, Causal().visible(5)), [[1, 0, 0, 0, 0]])


def test_attention_that_is_not_finite_has_no_score() -> None:
    maps = torch.full((1, 2, 1, 1, 3, 3), 1 / 3)
    maps[0, 1, 0, 0, 0, 0] = torch.nan
    scores = sink_scores(maps, np.ones((3, 3), dtype=bool))
    assert np.isnan(scores[1]).all()
    assert (scores[0] == 1).all()
