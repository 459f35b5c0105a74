"""Hugging Face datasets, streamed from a local directory of data files: what is read, and how refusals read."""

import sys
from dataclasses import replace

import pyarrow as pa
import pytest
from pyarrow import parquet

from posbias import UsageError, load_prompts

TEXTS = [f"Document {number}. " + " ".join(f"word{number}x{k}" for k in range(60)) for number in range(40)]


@pytest.fixture
def directory(tmp_path):
    folder = tmp_path / "pages"
    folder.mkdir()
    for shard in range(2):
        part = TEXTS[shard * 20 : shard * 20 + 20]
        table = pa.table({"title": ["t"] * 20, "text": part, "ids": [[shard, 1, 2, 3, k] for k in range(20)]})
        parquet.write_table(table, folder / f"train-{shard}.parquet")
    parquet.write_table(pa.table({"text": ["too short"]}), folder / "test-0.parquet")
    return folder


@pytest.fixture
def hub(monkeypatch):
    """The library, without the seconds it sleeps at the end of every stream."""
    library = pytest.importorskip("datasets", reason="the datasets extra is not installed")
    monkeypatch.setattr(library.config, "SLEEP_TIME_ON_THREADS_SHUTDOWN", 0)


@pytest.mark.parametrize("wrong", ["hf:", "hf:a[b", "hf:a#", "hf:a:b:c"])
def test_the_literal(model, wrong):
    with pytest.raises(UsageError, match="need hf:owner/name"):
        load_prompts(wrong, model, n_positions=8, count=1)


def test_without_the_library_it_is_one_line(model, directory, monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(UsageError, match=r"need the datasets package: pip install 'posbias\[datasets\]'"):
        load_prompts(f"hf:{directory}", model, n_positions=8, count=1)


def test_windows_lie_in_its_documents_and_are_the_same_for_every_count(model, directory, hub):
    many = load_prompts(f"hf:{directory}", model, n_positions=24, count=12, seed=3)
    few = load_prompts(f"hf:{directory}", model, n_positions=24, count=5, seed=3)
    assert (many.token_ids[:5] == few.token_ids).all()
    assert many.source == "hf:pages:train"
    windows = [model.tokenizer.decode(row) for row in many.token_ids]
    assert all(any(window.strip("�") in text for text in TEXTS) for window in windows)
    other = load_prompts(f"hf:{directory}", model, n_positions=24, count=5, seed=4)
    assert other.sha256 != few.sha256


def test_fields_and_refusals(model, directory, hub):
    ids = load_prompts(f"hf:{directory}#ids", replace(model, tokenizer=None), n_positions=5, count=3)
    assert set(ids.token_ids[:, 0]) <= {0, 1}

    def refused(source, message):
        with pytest.raises(UsageError, match=message) as caught:
            load_prompts(source, model, n_positions=8, count=1)
        assert "\n" not in str(caught.value)

    refused(f"hf:{directory}#body", "no field 'body'; known: title, text, ids")
    refused(f"hf:{directory}:nowhere", "cannot be loaded: .*nowhere")
    refused(f"hf:{directory}:test", "no document gives 8 tokens")
    refused(f"hf:{directory}[polish]", "cannot be loaded")
