"""Random and shuffled prompts."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

import posbias as pb
from posbias import load_prompts
from posbias.prompts.prompts import PromptSource


@given(st.integers(2, 60), st.integers(1, 6), st.integers(0, 3))
def test_tokens_are_distinct_where_the_vocabulary_allows(n_positions, count, seed):
    model = SimpleNamespace(tokenizer=None, vocabulary_size=30, max_positions=None)
    prompts = load_prompts("synthetic", model, n_positions=n_positions, count=count, seed=seed)
    assert prompts.token_ids.shape == (count, n_positions)
    assert prompts.token_ids.max() < 30
    if n_positions <= 30:
        assert all(len(set(row)) == n_positions for row in prompts.token_ids.tolist())
    more = load_prompts("synthetic", model, n_positions=n_positions, count=count + 2, seed=seed)
    np.testing.assert_array_equal(more.token_ids[:count], prompts.token_ids)


def test_special_tokens_and_unused_rows_are_left_out(model):
    padded = replace(model, vocabulary_size=model.vocabulary_size + 500)
    ordinary = len(model.tokenizer) - len(model.tokenizer.all_special_ids)
    prompts = load_prompts("synthetic", padded, n_positions=ordinary, count=1)
    assert set(prompts.token_ids[0].tolist()) == set(range(len(model.tokenizer))) - set(model.tokenizer.all_special_ids)


def test_tokens_without_an_embedding_are_left_out_and_no_other_draw_changes(tiny_llama, monkeypatch):
    loaded = pb.load_model(tiny_llama)
    blind = SimpleNamespace(
        tokenizer=loaded.tokenizer, vocabulary_size=loaded.vocabulary_size, max_positions=loaded.max_positions
    )
    whole = load_prompts("synthetic", loaded, n_positions=60, count=3)
    np.testing.assert_array_equal(whole.token_ids, load_prompts("synthetic", blind, n_positions=60, count=3).token_ids)
    padding = whole.token_ids[[0, 2], 0].tolist()
    loaded.network.get_input_embeddings().weight.data[padding] = 0
    found = load_prompts("synthetic", loaded, n_positions=60, count=3)
    assert not np.isin(found.token_ids, padding).any()
    monkeypatch.setattr("posbias.prompts.prompts.EMBEDDED", 7 * loaded.width)  # looked at in pieces: the same
    np.testing.assert_array_equal(load_prompts("synthetic", loaded, n_positions=60, count=3).token_ids, found.token_ids)
    mixing = pb.measure(loaded, found, kinds="probability").mixing
    assert np.isfinite(mixing).all()


def test_shuffling_keeps_the_tokens_and_the_opening(bos_model):
    asked = {"n_positions": 64, "count": 4, "seed": 5}
    plain = load_prompts("default#austen", bos_model, **asked)
    mixed = load_prompts(PromptSource("default#austen", shuffle=True), bos_model, **asked)
    np.testing.assert_array_equal(np.sort(mixed.token_ids), np.sort(plain.token_ids))
    np.testing.assert_array_equal(mixed.token_ids[:, 0], plain.token_ids[:, 0])
    assert (mixed.token_ids != plain.token_ids).mean() > 0.5
    assert mixed.source == "default#austen (shuffled, seed 5)"
    ready = PromptSource(plain, shuffle=True)
    np.testing.assert_array_equal(load_prompts(ready, bos_model, **asked).token_ids, mixed.token_ids)
    assert load_prompts(ready, bos_model, **{**asked, "seed": 6}).sha256 != mixed.sha256
    assert load_prompts("synthetic", bos_model, **asked).source == "synthetic"
