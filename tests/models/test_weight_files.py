"""Weights that do not fit are refused before one is loaded, by the headers of their files."""

import json
from pathlib import Path

import pytest
import torch
import transformers

from posbias.errors import UsageError
from posbias.models import load_model, loading, weight_files
from posbias.models.sources import Source
from posbias.models.weight_files import weight_bytes


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    config = transformers.LlamaConfig(
        vocab_size=40, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2
    )
    transformers.LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(tmp_path / "tiny")
    return tmp_path / "tiny"


def source(directory: Path) -> Source:
    return Source("tiny", str(directory), local=True)


@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16"])
def test_the_headers_give_the_bytes_of_the_loaded_weights(llama: Path, dtype: str) -> None:
    network = load_model(llama, dtype=dtype).network
    found = sum(parameter.numel() * parameter.element_size() for parameter in network.parameters())
    assert weight_bytes(source(llama), getattr(torch, dtype)) == found
    assert weight_bytes(source(llama), None) == found // getattr(torch, dtype).itemsize * 2
    network.save_pretrained(llama.parent / "shards", max_shard_size="5KB")
    assert not (llama.parent / "shards" / "model.safetensors").exists()
    assert weight_bytes(source(llama.parent / "shards"), getattr(torch, dtype)) == found


def test_too_large_is_one_line_and_loads_nothing(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    needed = weight_bytes(source(llama), torch.float32)
    assert needed is not None
    assert load_model(llama, max_memory=needed).dtype == torch.float32
    monkeypatch.setattr(loading, "_pretrained_network", None)
    told = r"'tiny' has weights of 22\.8 KB in float32; 1 KB are allowed; try --dtype bfloat16 or --device auto$"
    with pytest.raises(UsageError, match=told):
        load_model(llama, max_memory=1000)
    monkeypatch.setattr(weight_files, "available_bytes", lambda: needed // 2 - 1)
    with pytest.raises(UsageError, match=r"in bfloat16; .* KB are free; try --device auto$"):
        load_model(llama, dtype="bfloat16")


def test_auto_spreads_what_one_device_would_not_hold(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weight_files, "available_bytes", lambda: 0)
    assert load_model(llama, device="auto", max_memory=1000).width == 16


def test_what_cannot_be_read_is_left_to_the_loader(llama: Path) -> None:
    hub = Source("nobody/nothing", "nobody/nothing", local=False)
    assert weight_bytes(hub, torch.float32) is None
    assert weight_bytes(Source("a.gguf", str(llama), local=True, gguf="a.gguf"), torch.float32) is None
    path = llama / "model.safetensors"
    for content in (b"", b"\xff" * 9, (2).to_bytes(8, "little") + b"[]", (3).to_bytes(8, "little") + b"{]}"):
        path.write_bytes(content)
        assert weight_bytes(source(llama), torch.float32) is None
    path.unlink()
    (llama / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "missing.safetensors"}}))
    assert weight_bytes(source(llama), torch.float32) is None
