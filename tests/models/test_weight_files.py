"""Weights that do not fit are refused before one is loaded, by the headers of their files."""

import json
from pathlib import Path

import pytest
import torch
import transformers

from posbias.errors import RunError, UsageError
from posbias.models import load_model, loading, placement
from posbias.models.initialise import parameter_counts
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
    beside = 600_000
    monkeypatch.setattr(placement, "beside_weights", lambda: beside)
    # The file is in bfloat16, and lies beside what is made of it.
    assert load_model(llama, max_memory=beside + needed * 3 // 2).dtype == torch.float32
    monkeypatch.setattr(loading, "_pretrained_network", None)
    told = (
        r"model 'tiny' needs up to 634 KB to load in float32 \(weights 22\.8 KB, beside them meanwhile 11\.4 KB, "
        r"Python and libraries 600 KB\); 634 KB are allowed; try --dtype bfloat16 or --device auto$"
    )
    with pytest.raises(UsageError, match=told):
        load_model(llama, max_memory=beside + needed * 3 // 2 - 1)
    with pytest.raises(UsageError, match=r"1 KB are allowed; try a smaller model$"):
        load_model(llama, max_memory=1000)
    monkeypatch.setattr(placement, "available_bytes", lambda: beside + needed // 2 - 1)
    monkeypatch.setattr(placement, "resident_bytes", lambda: 0)
    with pytest.raises(UsageError, match=r"in bfloat16 \(.*\); 611 KB are free; try --device auto$"):
        load_model(llama, dtype="bfloat16")


def test_random_weights_and_those_of_gguf_files_are_refused_before_they_are_made(
    llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(placement, "beside_weights", lambda: 0)
    config = transformers.AutoConfig.from_pretrained(llama)
    counts = parameter_counts(config)
    assert sum(counts) == sum(weight.numel() for weight in load_model(llama).network.parameters())
    # All weights, and the largest once more while it is drawn or expanded; a GGUF file as well.
    needed = 4 * (sum(counts) + max(counts))
    assert load_model(llama, init_seed=0, max_memory=needed).width == 16
    with pytest.raises(UsageError, match=r"are allowed; try a smaller model$"):
        load_model(llama, init_seed=0, max_memory=needed - 1)
    (llama / "tiny.gguf").write_bytes(b"-" * 1000)
    monkeypatch.setattr(loading, "read_config", lambda _: config)
    with pytest.raises(UsageError, match=r"26\.4 KB are allowed; try --dtype bfloat16$"):
        load_model(llama / "tiny.gguf", max_memory=needed + 999)
    with pytest.raises(RunError, match="cannot be loaded"):
        load_model(llama / "tiny.gguf", max_memory=needed + 1000)


def test_auto_spreads_what_one_device_would_not_hold(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(placement, "beside_weights", lambda: 600_000)
    monkeypatch.setattr(placement, "available_bytes", lambda: 0)
    with pytest.raises(UsageError, match="Python and libraries take 600 KB; 600 KB are allowed"):
        load_model(llama, device="auto", max_memory=600_000)
    assert load_model(llama, device="auto", max_memory=601_000).width == 16


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
