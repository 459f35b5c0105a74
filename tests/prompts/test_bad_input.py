"""Every wrong request is one line that names the value."""

from dataclasses import replace

import numpy as np
import pytest

from posbias import UsageError, load_prompts


def refused(source, model, message, **request):
    with pytest.raises(UsageError, match=message) as caught:
        load_prompts(source, model, **{"n_positions": 8, "count": 1, **request})
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        ({"n_positions": 1}, "n_positions must be a whole number >= 2"),
        ({"n_positions": 4097}, "at most the model's 4096 positions, got 4097"),
        ({"count": 0}, "count must be a whole number >= 1"),
        ({"seed": -1}, "seed must be a whole number >= 0"),
    ],
)
def test_requests(model, request_, message):
    for source in ("synthetic", "default"):
        refused(source, model, message, **request_)


@pytest.mark.parametrize("texts", [["one text", "another"], ("one text",), [[1, 2], "text"]])
def test_a_list_of_texts_is_no_source(model, texts):
    refused(texts, model, r"got a list of texts; give the path of a .jsonl file, with \{\"text\": ...\} on each line$")


def test_fewer_windows_than_asked(model, tmp_path):
    path = tmp_path / "few.jsonl"
    path.write_text('{"token_ids": [1, 2, 3, 4, 5, 6, 7, 8, 9]}\n')
    assert load_prompts(path, model, n_positions=8, count=2).count == 2
    refused(path, model, "few.jsonl gives only 2 distinct prompts of 8 tokens, 3 were asked for", count=3)
    refused(path, model, "no document gives 10 tokens; the longest available gives 9", n_positions=10)


@pytest.mark.parametrize("bytes_", [b"", b" \n\n\t ", b"\n\x0c\n"])
def test_empty_text(model, tmp_path, bytes_):
    path = tmp_path / "empty.txt"
    path.write_bytes(bytes_)
    refused(path, model, "holds no text")


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ("\n\n", "holds no records"),
        ('{"text": ""}\n', "holds no text"),
        ('{"text": "a"}\n{"text: 1}\n', "line 2: is not JSON"),
        ('{"text": "a"}\n\n[1]\n', "line 3: need a JSON object, got list"),
        ('{"text": "a"}\n{"body": "b", "id": 1}\n', "line 2: no field 'text'; known: body, id"),
        ('{"body": "b"}\n', "line 1: no field 'text' or 'token_ids'; known: body"),
        ('{"text": "a"}\n{"text": null}\n', "line 2: need text, got NoneType"),
        ('{"text": 7}\n', "line 1: need text or one flat list of token ids, got 0 levels"),
        ('{"token_ids": [1, [2]]}\n', "line 1: token ids are ragged"),
        ('{"token_ids": [1.5]}\n', "line 1: token ids must be whole numbers"),
        ('{"token_ids": [[1]]}\n', "line 1: need text or one flat list of token ids"),
        ('{"token_ids": [600]}\n', "token id 600 is outside the model's vocabulary 0 ... 599"),
        ('{"token_ids": [-1]}\n', "token id -1 is outside"),
        ("[" * 100_000 + "\n", "line 1: is nested deeper"),
    ],
)
def test_json_lines(model, tmp_path, lines, message):
    path = tmp_path / "bad.jsonl"
    path.write_text(lines)
    refused(path, model, message)


def test_not_utf8(model, tmp_path):
    for name in ("latin.txt", "latin.jsonl"):
        path = tmp_path / name
        path.write_bytes(b'{"text": "caf\xe9 au lait"}\n')
        refused(path, model, "not UTF-8")


def test_paths(model, tmp_path):
    refused(tmp_path / "absent.txt", model, "No such file")
    refused(tmp_path / "absent.jsonl", model, "No such file")
    refused("defualt", model, "prompts 'defualt': need 'default'")
    (tmp_path / "text.csv").write_text("a")
    refused(tmp_path / "text.csv", model, "need 'default'")
    refused("table.parquet", model, "need 'default'")
    refused("hf:owner/name:split", model, r"hf: left posbias after 0.1.0: load_dataset\(NAME, .*to_json")
    (tmp_path / "folder.txt").mkdir()
    refused(tmp_path / "folder.txt", model, "cannot read")


def test_text_needs_a_tokenizer(model):
    refused("default", replace(model, tokenizer=None), "has no tokenizer")


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([[1, 2], [3]], "ragged"),
        ([[1.0] * 8], "whole numbers"),
        ([[True] * 8], "whole numbers"),
        ([["a"] * 8], "whole numbers"),
        ([1] * 8, r"need shape \[count, n_positions\], both >= 1; got \(8,\)"),
        ([[1] * 7], "have 7 tokens, fewer than the 8 asked for"),
        ([[1] * 9], "have 9 tokens, more than the 8 asked for"),
        (np.zeros((0, 8), dtype=int), r"both >= 1; got \(0, 8\)"),
        ([[0] * 7 + [600]], "token id 600 is outside the model's vocabulary 0 ... 599"),
        ([[0] * 7 + [-3]], "token ids must be >= 0, got -3"),
        (np.full((1, 8), 2**64 - 1, dtype=np.uint64), "whole numbers below"),
        (None, "whole numbers|shape"),
    ],
)
def test_token_ids(model, rows, message):
    refused(rows, model, message)
