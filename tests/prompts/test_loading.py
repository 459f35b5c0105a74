"""`load_prompts` on the default corpus, files of every kind, and token ids that are ready."""

import json
from dataclasses import replace
from importlib import resources

import numpy as np
import pytest
import torch

from conftest import json_lines
from posbias import UsageError, load_prompts
from posbias.prompts import sources
from posbias.prompts.prompts import Prompts
from posbias.prompts.sources import default_corpus

TEXTS = [f"Document {number}. " + " ".join(f"word{number}x{k}" for k in range(200)) for number in range(30)]


def contains(text: str, window: str) -> bool:
    """A window may begin or end within a character: its broken bytes show as replacement characters."""
    return window.strip("�") in text


def test_prompts_show_themselves_in_a_line(bos_model, tmp_path):
    (tmp_path / "mine.txt").write_text("What it says " * 20)
    prompts = load_prompts(tmp_path / "mine.txt", bos_model, n_positions=8, count=2, seed=1)
    assert repr(prompts) == "Prompts(2 of 8 tokens, source='mine.txt', seed=1)"
    ready = load_prompts(np.zeros((1, 4), dtype=int), replace(bos_model, tokenizer=None), n_positions=4, count=1)
    assert repr(ready) == "Prompts(1 of 4 tokens, source='token ids', seed=None)"


@pytest.mark.parametrize("n_positions", [2, 64])
def test_default_prompts_lie_inside_documents_of_all_sources(model, n_positions):
    prompts = load_prompts("default", model, n_positions=n_positions, count=15, seed=4)
    assert prompts.token_ids.shape == (15, n_positions)
    assert (prompts.source, prompts.seed, prompts.prefix) == ("default", 4, ())
    windows = [model.tokenizer.decode(row) for row in prompts.token_ids]
    if n_positions < 10:
        return
    groups = [group.segments[0] for group in default_corpus()]
    owners = [next(k for k, texts in enumerate(groups) if any(contains(t, w) for t in texts)) for w in windows]
    assert sorted(owners) == sorted(list(range(5)) * 3)


def test_same_seed_same_prompts_other_seed_others(model):
    source = "default#austen,jargon_file"
    sixteen = load_prompts(source, model, n_positions=128, count=16, seed=1)
    eight = load_prompts(source, model, n_positions=128, count=8, seed=1)
    np.testing.assert_array_equal(eight.token_ids, sixteen.token_ids[:8])
    assert sixteen.sha256 == load_prompts(source, model, n_positions=128, count=16, seed=1).sha256
    assert sixteen.sha256 != load_prompts(source, model, n_positions=128, count=16, seed=2).sha256


def test_bos_opens_every_prompt_and_stands_nowhere_else(bos_model):
    prompts = load_prompts("default#austen", bos_model, n_positions=100, count=6)
    assert prompts.prefix == (0,)
    assert prompts.describe()["prefix"] == [0]
    assert (prompts.token_ids[:, 0] == 0).all()
    assert (prompts.token_ids[:, 1:] > 1).all()


def text_source(folder, texts):
    path = folder / "mine.txt"
    path.write_text("\n\f\n".join(texts), encoding="utf-8")
    return path


def jsonl_source(folder, texts):
    path = folder / "mine.jsonl"
    path.write_text("".join(json.dumps({"id": 1, "text": text}) + "\n\n" for text in texts), encoding="utf-8")
    return path


@pytest.mark.parametrize("make", [text_source, jsonl_source])
def test_each_kind_of_file_gives_windows_of_all_its_documents(model, tmp_path, make):
    path = make(tmp_path, TEXTS)
    prompts = load_prompts(str(path), model, n_positions=40, count=30)
    windows = [model.tokenizer.decode(row) for row in prompts.token_ids]
    owners = [next(k for k, text in enumerate(TEXTS) if contains(text, window)) for window in windows]
    assert sorted(owners) == list(range(30))
    assert prompts.source == path.name
    assert prompts.sha256 == load_prompts(path, model, n_positions=40, count=30).sha256


@pytest.mark.parametrize("make", [text_source, jsonl_source])
def test_large_files_are_tokenised_in_segments(model, tmp_path, monkeypatch, make):
    monkeypatch.setattr("posbias.prompts.sources.WHOLE", 1000)
    monkeypatch.setattr("posbias.prompts.sources.SEGMENT", 5000)
    texts = [text.replace("word", "wörd") for text in TEXTS]
    path = make(tmp_path, texts)
    prompts = load_prompts(path, model, n_positions=30, count=200)
    windows = [model.tokenizer.decode(row) for row in prompts.token_ids]
    assert all(any(contains(text, window) for text in texts) for window in windows)


def test_a_long_text_is_cut_between_words_and_loses_nothing(monkeypatch):
    monkeypatch.setattr(sources, "WHOLE", 1000)
    monkeypatch.setattr(sources, "SEGMENT", 400)
    for text in ("naïve café " * 500, "位置偏差" * 900):
        segments = sources.segmented([text, "short"], 2)
        assert "".join(piece for segment in segments for piece in segment) == f"{text}short"
        assert all(len(piece) <= 800 for segment in segments for piece in segment)
        assert all(piece[0] in " n" for segment in segments[:-1] for piece in segment) or " " not in text


def test_files_that_are_too_large_are_refused(model, tmp_path, monkeypatch):
    for make in (text_source, jsonl_source):
        path = make(tmp_path, TEXTS)
        path.write_bytes(path.read_bytes() * 700)
        with pytest.raises(UsageError, match="at most 33,554,432 "):
            load_prompts(path, model, n_positions=8, count=1)


def test_named_field_and_token_id_records(model, tmp_path):
    records = [{"token_ids": list(range(k, k + 50)), "body": "x " * 99} for k in range(5)]
    path = json_lines(tmp_path / "ids.jsonl", *records)
    prompts = load_prompts(path, replace(model, tokenizer=None), n_positions=50, count=5)
    assert sorted(prompts.token_ids[:, 0]) == [0, 1, 2, 3, 4]
    body = load_prompts(f"{path}#body", model, n_positions=8, count=1)
    assert body.source == "ids.jsonl#body"
    assert "x x" in model.tokenizer.decode(body.token_ids[0])


@pytest.mark.parametrize("kind", [list, np.array, torch.tensor, lambda rows: np.array(rows, dtype=np.uint16)])
def test_ready_token_ids_are_taken_as_they_are(model, kind):
    rows = [[1, 2, 3], [4, 5, 6], [7, 8, 9]]
    prompts = load_prompts(kind(rows), model, n_positions=3, count=2)
    assert prompts.token_ids.tolist() == rows[:2]
    assert (prompts.source, prompts.seed) == ("token ids", None)


def test_prompts_are_checked_and_cut(model):
    given = Prompts(np.arange(12, dtype=np.int64).reshape(4, 3), source="before", seed=5)
    prompts = load_prompts(given, model, n_positions=3, count=2)
    assert prompts.token_ids.tolist() == [[0, 1, 2], [3, 4, 5]]
    assert (prompts.source, prompts.seed) == ("before", 5)
    with pytest.raises(UsageError, match=r"vocabulary 0 \.\.\. 4"):
        load_prompts(given, replace(model, vocabulary_size=5), n_positions=3, count=2)


def test_the_default_corpus_fills_the_longest_context_of_the_demo_model_from_each_file(model):
    from posbias.models.loading import load_tokenizer

    demo = replace(model, tokenizer=load_tokenizer("demo"), vocabulary_size=49_152, max_positions=8_192)
    prompts = load_prompts("default", demo, n_positions=8_192, count=5)
    assert prompts.token_ids.shape == (5, 8_192)
    assert len({row.tobytes() for row in prompts.token_ids}) == 5


def test_windows_that_differ_in_case_and_space_only_are_taken_once_and_counted(model, tmp_path):
    sentence = "It is a truth universally acknowledged, that a single man must be in want of a wife."
    texts = [sentence, sentence.upper(), f"  {sentence}", "Document 0. " + " ".join(f"word0x{k}" for k in range(200))]
    path = json_lines(tmp_path / "same.jsonl", *({"text": text} for text in texts))
    found = [load_prompts(path, model, n_positions=20, count=2, seed=seed) for seed in range(6)]
    for prompts in found:
        assert len({"".join(model.tokenizer.decode(row).split()).casefold() for row in prompts.token_ids}) == 2


def test_the_corpus_has_five_described_sources_each_long_enough_for_long_windows():
    described = (resources.files("posbias.prompts") / "corpus" / "SOURCES.md").read_text(encoding="utf-8")
    corpus = {group.name: group.segments[0] for group in default_corpus()}
    sizes = {name: sum(len(text.encode()) for text in documents) for name, documents in corpus.items()}
    assert len(sizes) == 5
    assert 380_000 < sum(sizes.values()) < 420_000
    assert all(50_000 < size < 95_000 for size in sizes.values())
    assert all(f"### {name}" in described for name in sizes)
    assert all(max(map(len, documents)) > 35_000 for documents in corpus.values())
