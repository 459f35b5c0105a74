"""Random and shuffled prompts."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from posbias import load_prompts
from posbias.prompts.prompts import PromptSource, shuffled, synthetic_prompts


@given(st.integers(2, 60), st.integers(1, 6), st.integers(0, 3))
def test_tokens_are_distinct_where_the_vocabulary_allows(n_positions, count, seed):
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


def test_tokens_without_an_embedding_are_left_out_and_no_other_draw_changes(tiny_llama, monkeypatch):
    import posbias as pb
    from posbias.prompts import prompts as prompts_module

    loaded = pb.load_model(tiny_llama)
    blind = SimpleNamespace(
        tokenizer=loaded.tokenizer, vocabulary_size=loaded.vocabulary_size, max_positions=loaded.max_positions
    )
    whole = synthetic_prompts(loaded, n_positions=60, count=3)
    np.testing.assert_array_equal(whole.token_ids, synthetic_prompts(blind, n_positions=60, count=3).token_ids)
    padding = whole.token_ids[[0, 2], 0].tolist()
    loaded.network.get_input_embeddings().weight.data[padding] = 0
    found = synthetic_prompts(loaded, n_positions=60, count=3)
    assert not np.isin(found.token_ids, padding).any()
    monkeypatch.setattr(prompts_module, "EMBEDDED", 7 * loaded.width)  # looked at in pieces: the same
    np.testing.assert_array_equal(synthetic_prompts(loaded, n_positions=60, count=3).token_ids, found.token_ids)
    mixing = pb.measure(loaded, found, kinds="probability").mixing
    assert np.isfinite(mixing).all()


def test_shuffling_keeps_the_tokens_and_the_opening(bos_model):
    prompts = load_prompts("default", bos_model, n_positions=64, count=4)
    mixed = shuffled(prompts, seed=1)
    np.testing.assert_array_equal(np.sort(mixed.token_ids), np.sort(prompts.token_ids))
    np.testing.assert_array_equal(mixed.token_ids[:, 0], prompts.token_ids[:, 0])
    assert (mixed.token_ids != prompts.token_ids).mean() > 0.5
    assert mixed.sha256 == shuffled(prompts, seed=1).sha256 != shuffled(prompts, seed=2).sha256
    assert mixed.source == "default (shuffled, seed 1)"


def test_shuffled_and_synthetic_by_name(model, tmp_path):
    plain = load_prompts("default#austen", model, n_positions=64, count=3, seed=5)
    mixed = load_prompts(PromptSource("default#austen", shuffle=True), model, n_positions=64, count=3, seed=5)
    np.testing.assert_array_equal(mixed.token_ids, shuffled(plain, 5).token_ids)
    np.testing.assert_array_equal(np.sort(mixed.token_ids), np.sort(plain.token_ids))
    assert mixed.source == "default#austen (shuffled, seed 5)"
    random = load_prompts("synthetic", model, n_positions=64, count=3, seed=5)
    np.testing.assert_array_equal(random.token_ids, synthetic_prompts(model, n_positions=64, count=3, seed=5).token_ids)
    assert random.source == "synthetic"
    ready = load_prompts(PromptSource(plain, shuffle=True), model, n_positions=64, count=3, seed=5)
    np.testing.assert_array_equal(ready.token_ids, mixed.token_ids)
