"""Windows that say the same, shuffled tokens and synthetic ones, asked for by name."""

import json

import numpy as np

from posbias import load_prompts
from posbias.prompts.prompts import PromptSource, shuffled, synthetic_prompts


def test_windows_that_differ_in_case_and_space_only_are_taken_once_and_counted(model, tmp_path):
    sentence = "It is a truth universally acknowledged, that a single man must be in want of a wife."
    path = tmp_path / "same.jsonl"
    texts = [sentence, sentence.upper(), f"  {sentence}", "Document 0. " + " ".join(f"word0x{k}" for k in range(200))]
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    found = [load_prompts(path, model, n_positions=20, count=2, seed=seed) for seed in range(6)]
    for prompts in found:
        assert len({"".join(model.tokenizer.decode(row).split()).casefold() for row in prompts.token_ids}) == 2


def test_shuffled_and_synthetic_by_name(model, tmp_path):
    plain = load_prompts("default#austen", model, n_positions=64, count=3, seed=5)
    mixed = load_prompts(PromptSource("default#austen", shuffle=True), model, n_positions=64, count=3, seed=5)
    np.testing.assert_array_equal(mixed.token_ids, shuffled(plain, 5).token_ids)
    np.testing.assert_array_equal(np.sort(mixed.token_ids), np.sort(plain.token_ids))
    assert mixed.source == "default#austen (shuffled, seed 5)"
    random = load_prompts("synthetic", model, n_positions=64, count=3, seed=5)
    np.testing.assert_array_equal(random.token_ids, synthetic_prompts(model, n_positions=64, count=3, seed=5).token_ids)
    assert random.source == "synthetic"


def test_shuffling_ready_prompts(model):
    given = load_prompts("default#austen", model, n_positions=32, count=2)
    mixed = load_prompts(PromptSource(given, shuffle=True), model, n_positions=32, count=2, seed=1)
    np.testing.assert_array_equal(mixed.token_ids, shuffled(given, 1).token_ids)
