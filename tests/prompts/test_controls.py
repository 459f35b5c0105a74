"""Random and shuffled prompts."""

from dataclasses import replace

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from posbias.prompts import load_prompts, shuffled, synthetic_prompts


@given(st.integers(2, 60), st.integers(1, 6), st.integers(0, 3))
def test_tokens_are_distinct_where_the_vocabulary_allows(n_positions, count, seed):
    from types import SimpleNamespace

    model = SimpleNamespace(tokenizer=None, vocabulary_size=30, max_positions=None)
    prompts = synthetic_prompts(model, n_positions=n_positions, count=count, seed=seed)
    assert prompts.token_ids.shape == (count, n_positions)
    assert prompts.token_ids.max() < 30
    if n_positions <= 30:
        assert all(len(set(row)) == n_positions for row in prompts.token_ids.tolist())
    more = synthetic_prompts(model, n_positions=n_positions, count=count + 2, seed=seed)
    np.testing.assert_array_equal(more.token_ids[:count], prompts.token_ids)


def test_special_tokens_and_unused_rows_are_left_out(model):
    padded = replace(model, vocabulary_size=model.vocabulary_size + 500)
    ordinary = len(model.tokenizer) - len(model.tokenizer.all_special_ids)
    prompts = synthetic_prompts(padded, n_positions=ordinary, count=1)
    assert set(prompts.token_ids[0].tolist()) == set(range(len(model.tokenizer))) - set(model.tokenizer.all_special_ids)


def test_shuffling_keeps_the_tokens_and_the_opening(bos_model):
    prompts = load_prompts("default", bos_model, n_positions=64, count=4)
    mixed = shuffled(prompts, seed=1)
    np.testing.assert_array_equal(np.sort(mixed.token_ids), np.sort(prompts.token_ids))
    np.testing.assert_array_equal(mixed.token_ids[:, 0], prompts.token_ids[:, 0])
    assert (mixed.token_ids != prompts.token_ids).mean() > 0.5
    assert mixed.sha256 == shuffled(prompts, seed=1).sha256 != shuffled(prompts, seed=2).sha256
    assert mixed.source == "default (shuffled, seed 1)"
