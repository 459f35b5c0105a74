"""Document starts, windows that say the same, shuffled tokens and synthetic ones, asked for by name."""

import json

import numpy as np
import pytest

from posbias import UsageError, load_prompts
from posbias.prompts import sources
from posbias.prompts.prompts import PromptSource, shuffled, synthetic_prompts

TEXTS = [f"Document {number}. " + " ".join(f"word{number}x{k}" for k in range(200)) for number in range(12)]


def write(path, texts):
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path


def test_starts_are_the_first_tokens_of_each_document_once(model, tmp_path):
    path = write(tmp_path / "mine.jsonl", TEXTS)
    prompts = load_prompts(PromptSource(path, windows="starts"), model, n_positions=16, count=12)
    windows = [model.tokenizer.decode(row) for row in prompts.token_ids]
    assert all(any(text.startswith(window) for text in TEXTS) for window in windows)
    assert len(set(windows)) == 12
    assert prompts.describe()["windows"] == "starts"
    with pytest.raises(UsageError, match="only 12 distinct prompts"):
        load_prompts(PromptSource(path, windows="starts"), model, n_positions=16, count=13)


def test_starts_follow_the_token_that_opens_a_text(bos_model, tmp_path):
    path = write(tmp_path / "mine.jsonl", TEXTS)
    prompts = load_prompts(PromptSource(path, windows="starts"), bos_model, n_positions=16, count=3)
    assert (prompts.token_ids[:, 0] == 0).all()
    assert all(bos_model.tokenizer.decode(row[1:]).startswith("Document") for row in prompts.token_ids)


def test_windows_that_differ_in_case_and_space_only_are_taken_once_and_counted(model, tmp_path):
    sentence = "It is a truth universally acknowledged, that a single man must be in want of a wife."
    path = write(tmp_path / "same.jsonl", [sentence, sentence.upper(), sentence, TEXTS[0]])
    source = PromptSource(path, windows="starts")
    prompts = load_prompts(source, model, n_positions=2, count=2)
    assert len(prompts.token_ids) == 2
    with pytest.raises(UsageError, match="distinct"):
        load_prompts(source, model, n_positions=2, count=4)
    exact = load_prompts(PromptSource(path, windows="starts"), model, n_positions=20, count=2, seed=3)
    assert exact.describe()["duplicates"] in (0, 1, 2)
    texts = [model.tokenizer.decode(row).casefold() for row in exact.token_ids]
    assert len(set(texts)) == 2


def test_duplicates_are_counted(model, tmp_path):
    path = write(tmp_path / "same.jsonl", [TEXTS[0]] * 5 + [TEXTS[1]])
    source = PromptSource(path, windows="starts")
    found = [load_prompts(source, model, n_positions=16, count=2, seed=seed) for seed in range(6)]
    assert {tuple(sorted(map(tuple, prompts.token_ids))) for prompts in found} == {
        tuple(sorted(map(tuple, found[0].token_ids)))
    }
    assert max(prompts.duplicates for prompts in found) == 4


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


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"windows": "ends"}, "windows must be one of random, starts, got 'ends'"),
        ({"source": PromptSource()}, "not another PromptSource"),
    ],
)
def test_wrong_requests(fields, message):
    with pytest.raises(UsageError, match=message):
        PromptSource(**fields)


@pytest.fixture
def small_segments(monkeypatch):
    """Files are tokenised in segments from a few kilobytes on."""
    monkeypatch.setattr(sources, "WHOLE", 16_384)
    monkeypatch.setattr(sources, "SEGMENT", 4_096)


@pytest.mark.usefixtures("small_segments")
@pytest.mark.parametrize("border", ["\n\f\n", "\r\n \f\t\r\n"])
def test_starts_in_a_large_text_file_are_those_of_its_documents(model, tmp_path, border):
    short = [f"Document {number}. " + f"the word {number} " * (20 + 97 * number % 200) for number in range(30)]
    long = "Document 30. " + "a long one " * 1_000
    path = tmp_path / "large.txt"
    path.write_text(border.join([*short[:15], long, *short[15:]]), newline="")
    assert path.stat().st_size > 3 * sources.WHOLE
    prompts = load_prompts(PromptSource(path, windows="starts"), model, n_positions=16, count=31)
    beginnings = {model.tokenizer.decode(row) for row in prompts.token_ids}
    assert len(beginnings) == 31
    assert all(any(text.startswith(beginning) for text in [*short, long]) for beginning in beginnings)
    with pytest.raises(UsageError, match="only 31 distinct prompts"):
        load_prompts(PromptSource(path, windows="starts"), model, n_positions=16, count=32)


@pytest.mark.usefixtures("small_segments")
def test_one_large_document_has_one_start(model, tmp_path):
    path = tmp_path / "one.txt"
    path.write_text(" ".join(f"w{number}" for number in range(10_000)))
    prompts = load_prompts(PromptSource(path, windows="starts"), model, n_positions=16, count=1)
    assert model.tokenizer.decode(prompts.token_ids[0]).startswith("w0 w1 w2")
    with pytest.raises(UsageError, match="only 1 distinct prompt"):
        load_prompts(PromptSource(path, windows="starts"), model, n_positions=16, count=2)


@pytest.mark.parametrize(("source", "named"), [("synthetic", "'synthetic'"), ([[1, 2, 3]] * 2, "token ids")])
def test_what_has_no_documents_has_no_starts(model, source, named):
    with pytest.raises(UsageError, match=f"windows 'starts' needs documents; {named} ha"):
        load_prompts(PromptSource(source, windows="starts"), model, n_positions=3, count=2)
