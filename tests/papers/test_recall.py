"""Mixed demands of recall: primacy and recency of planted curves, and networks of every order trained in small."""

import numpy as np
import pytest

from posbias.tasks.synthetic import RecallAndSpan
from posbias_papers.later2026.recall import MixedDemands, Sizes, ends, recalled


def test_primacy_and_recency_are_first_and_last_places_less_the_middle() -> None:
    rows = np.tile([0.6, 0.5, 0.4, 0.2, 0.2, 0.2, 0.1, 0.2, 0.3], (4, 1)) + np.arange(4)[:, None] / 100
    primacy, recency = ends(rows)
    assert primacy.value == pytest.approx(0.3)
    assert recency.value == pytest.approx(0)


def test_networks_of_each_order_are_trained_and_scored_by_place() -> None:
    sizes = Sizes(seeds=2, steps=10, items=7, vocabulary=8, width=8, examples=20)
    tasks = {order: RecallAndSpan(7, 8, 3, order=order) for order in ("listed", "random")}
    rows = recalled(np.random.default_rng(0), tasks, sizes)
    assert {name: row.shape for name, row in rows.items()} == {"listed": (2, 7), "random": (2, 7)}
    assert all(((row > 0) & (row < 1)).all() for row in rows.values())
    assert (rows["listed"] != rows["random"]).any()


def test_before_training_nothing_is_recalled_better_than_the_rest() -> None:
    verdict = MixedDemands(Sizes(seeds=3, steps=1, items=7, vocabulary=8, examples=50)).check(np.random.default_rng(0))
    assert verdict.verdict == "fails as stated"
    assert verdict.sharper
