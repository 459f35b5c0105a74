"""Weights that do not fit are refused before one is loaded, by the headers of their files."""

import json
from pathlib import Path

import pytest
import torch
import transformers

from gguf_inputs import save_gguf
from posbias.errors import RunError, UsageError
from posbias.models import networks
from posbias.models.loading import load_model
from posbias.models.networks import network_size, random_network
from posbias.models.sources import Source
from posbias.models.weight_files import loaded_files, stored_tensors, weight_bytes


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    config = transformers.LlamaConfig(
        vocab_size=40, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2
    )
    transformers.LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(tmp_path / "tiny")
    return tmp_path / "tiny"


def bytes_of(directory: Path, dtype: torch.dtype | None) -> int:
    files = loaded_files(Source("tiny", str(directory), local=True))
    return weight_bytes(stored_tensors(files, "tiny"), dtype)


@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16"])
def test_the_headers_give_the_bytes_of_the_loaded_weights(llama: Path, dtype: str) -> None:
    network = load_model(llama, dtype=dtype).network
    found = sum(parameter.numel() * parameter.element_size() for parameter in network.parameters())
    assert bytes_of(llama, getattr(torch, dtype)) == found
    assert bytes_of(llama, None) == found // getattr(torch, dtype).itemsize * 2
    network.save_pretrained(llama.parent / "shards", max_shard_size="5KB")
    assert not (llama.parent / "shards" / "model.safetensors").exists()
    assert bytes_of(llama.parent / "shards", getattr(torch, dtype)) == found


def test_too_large_is_one_line_and_loads_nothing(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    needed = bytes_of(llama, torch.float32)
    beside = 600_000
    monkeypatch.setattr(networks, "beside_weights", lambda: beside)
    # The file is in bfloat16, and lies beside what is made of it.
    assert load_model(llama, max_memory=beside + needed * 3 // 2).dtype == torch.float32
    monkeypatch.setattr(networks, "_loaded", None)
    told = (
        r"model 'tiny' needs up to 634 KB to load in float32 \(weights 22\.8 KB, beside them meanwhile 11\.4 KB, "
        r"Python and libraries 600 KB\); 634 KB are allowed; try --dtype bfloat16 or --device auto$"
    )
    with pytest.raises(UsageError, match=told):
        load_model(llama, max_memory=beside + needed * 3 // 2 - 1)
    with pytest.raises(UsageError, match=r"1 KB are allowed; try a smaller model$"):
        load_model(llama, max_memory=1000)
    monkeypatch.setattr(networks, "available_bytes", lambda: beside + needed // 2 - 1)
    monkeypatch.setattr(networks, "resident_bytes", lambda: 0)
    with pytest.raises(UsageError, match=r"in bfloat16 \(.*\); 611 KB are free; try --device auto$"):
        load_model(llama, dtype="bfloat16")


def test_random_weights_and_those_of_gguf_files_are_refused_before_they_are_made(
    llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(networks, "beside_weights", lambda: 0)
    config = transformers.AutoConfig.from_pretrained(llama)
    size = network_size(config)
    assert size.numbers == sum(weight.numel() for weight in load_model(llama).network.parameters())
    # All weights, and the largest once more while it is drawn or expanded; a GGUF file as well.
    needed = 4 * (size.numbers + size.largest)
    assert load_model(llama, init_seed=0, max_memory=needed).width == 16
    with pytest.raises(UsageError, match=r"are allowed; try a smaller model$"):
        load_model(llama, init_seed=0, max_memory=needed - 1)
    path = save_gguf(llama / "tiny.gguf", random_network(config, seed=0))
    needed += path.stat().st_size
    with pytest.raises(UsageError, match=r"KB are allowed; try --dtype bfloat16$"):
        load_model(path, max_memory=needed - 1)
    assert load_model(path, max_memory=needed).width == 16


def test_auto_spreads_what_one_device_would_not_hold(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(networks, "beside_weights", lambda: 600_000)
    monkeypatch.setattr(networks, "available_bytes", lambda: 1000)
    with pytest.raises(UsageError, match="Python and libraries take 600 KB; 600 KB are allowed"):
        load_model(llama, device="auto", max_memory=600_000)
    assert load_model(llama, device="auto", max_memory=601_000).width == 16


HEADERS = {
    "nothing": b"",
    "no header": b"\xff" * 9,
    "a list": b"[]",
    "no JSON": b"{]}",
    "400 digits": b'{"a":{"dtype":"F32","shape":[1' + b"0" * 400 + b'],"data_offsets":[0,4]}}',
    "a shape beyond 64 bits": b'{"a":{"dtype":"F32","shape":[4294967296,4294967296,9],"data_offsets":[0,4]}}',
    "half a character": b'{"\\ud800":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}',
    "deep": b'{"a":' * 10_000 + b"1" + b"}" * 10_000,
    "unknown type": b'{"a":{"dtype":"F33","shape":[1],"data_offsets":[0,4]}}',
    "offsets backwards": b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[4,0]}}',
    "offsets beyond the end": b'{"a":{"dtype":"F32","shape":[1000000],"data_offsets":[0,4000000]}}',
    "text for offsets": b'{"a":{"dtype":"F32","shape":[1],"data_offsets":["0","4"]}}',
    "a long name": b'{"' + b"a" * 100_000 + b'":{"dtype":"F32","shape":[1],"data_offsets":[0,8]}}',
}


@pytest.mark.parametrize("case", HEADERS)
def test_damaged_headers_are_one_line(llama: Path, case: str) -> None:
    header = HEADERS[case]
    length = len(header).to_bytes(8, "little") if header[:1] in b"[{" and header else b""
    (llama / "model.safetensors").write_bytes(length + header + b"\0" * 4)
    with pytest.raises(RunError, match=r"^model 'tiny': model\.safetensors is damaged: ") as refusal:
        load_model(llama)
    assert "\n" not in str(refusal.value)
    assert len(str(refusal.value)) <= 500


def test_a_header_that_says_it_is_endless(llama: Path) -> None:
    with open(llama / "model.safetensors", "wb") as file:
        file.write((1 << 33).to_bytes(8, "little"))
        file.truncate(1 << 34)  # sparse
    with pytest.raises(RunError, match=r"model\.safetensors is damaged: .*too large"):
        load_model(llama)


def test_files_that_are_not_here(llama: Path) -> None:
    (llama / "model.safetensors").write_bytes(b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n")
    with pytest.raises(RunError, match="is a pointer of Git LFS"):
        load_model(llama)
    (llama / "model.safetensors").unlink()
    index = llama / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": {"a": "missing.safetensors"}}))
    with pytest.raises(RunError, match=r"'tiny': missing\.safetensors is missing"):
        load_model(llama)
    for text in ("", "[]", "{", "{}", '{"metadata": {}, "weight_map": {}}', '{"a": "\\ud800"}', "[" * 10_000):
        index.write_text(text)
        with pytest.raises(UsageError, match=r"'tiny': model\.safetensors\.index\.json (is|has|holds) "):
            load_model(llama)
