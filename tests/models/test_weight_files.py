"""Weights that do not fit are refused before one is loaded, by the headers of their files; so is what has no place."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

from gguf_inputs import save_gguf
from posbias import RunError, UsageError, load_model
from posbias.models import networks, placement
from posbias.models.networks import network_size, outline_of, random_network
from posbias.models.sources import Source
from posbias.models.weight_files import loaded_files, stored_tensors, weight_bytes
from tiny_families import CONFIGS


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
    monkeypatch.setattr(placement, "beside_weights", lambda: beside)
    # The file is in bfloat16, and lies beside what is made of it.
    assert load_model(llama, max_memory=beside + needed * 3 // 2).dtype == torch.float32
    monkeypatch.setattr(networks, "_loaded", None)
    told = (
        r"model 'tiny' needs up to 634 KB to load in float32 \(weights 22\.8 KB, beside them meanwhile 11\.4 KB, "
        r"Python and libraries 600 KB\); 634 KB are allowed; try --dtype bfloat16 or --device spread$"
    )
    with pytest.raises(UsageError, match=told):
        load_model(llama, device="cpu", max_memory=beside + needed * 3 // 2 - 1)
    with pytest.raises(UsageError, match=r"1 KB are allowed; try a smaller model$"):
        load_model(llama, device="cpu", max_memory=1000)
    monkeypatch.setattr(placement, "available_bytes", lambda: beside + needed // 2 - 1)
    monkeypatch.setattr(placement, "resident_bytes", lambda: 0)
    with pytest.raises(UsageError, match=r"in bfloat16 \(.*\); 611 KB are free; try --device spread$"):
        load_model(llama, device="cpu", dtype="bfloat16")


def test_random_weights_and_those_of_gguf_files_are_refused_before_they_are_made(
    llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(placement, "beside_weights", lambda: 0)
    config = transformers.AutoConfig.from_pretrained(llama)
    size = network_size(outline_of(config))
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


def test_what_one_device_would_not_hold_is_spread(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(placement, "beside_weights", lambda: 600_000)
    monkeypatch.setattr(placement, "available_bytes", lambda: 1000)
    with pytest.raises(UsageError, match="Python and libraries take 600 KB; 600 KB are allowed"):
        load_model(llama, device="spread", max_memory=600_000)
    assert load_model(llama, device="spread", max_memory=601_000).width == 16


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


def changed(directory: Path, tensors: dict[str, Tensor], **entries: Any) -> Path:
    """A checkpoint with other tensors and other entries of its configuration."""
    stored = {**load_file(directory / "model.safetensors"), **tensors}
    save_file(
        {name: value.contiguous() for name, value in stored.items()}, directory / "model.safetensors", {"format": "pt"}
    )
    config = directory / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), **entries}))
    return directory


LAYER = "model.layers.0.self_attn"
WITHOUT_A_PLACE: dict[str, tuple[dict[str, Tensor], dict[str, Any]]] = {
    "a bias": ({f"{LAYER}.q_proj.bias": torch.ones(16)}, {}),
    "a layer": ({}, {"num_hidden_layers": 1}),
    "a later layer that is not configured": ({"model.layers.2.mtp_norm.weight": torch.ones(16)}, {}),
    "a layer after the later ones": (
        {"model.layers.3.norm.weight": torch.ones(16)},
        {"num_nextn_predict_layers": 1},
    ),
    "factors of an adapter": ({f"{LAYER}.q_proj.lora_A.weight": torch.ones(2, 16)}, {}),
    "magnitudes of an adapter": ({f"{LAYER}.q_proj.lora_magnitude_vector": torch.ones(16)}, {}),
    "a prompt that was learned": ({"prompt_encoder.default.embedding.weight": torch.ones(4, 16)}, {}),
    "norms of queries": ({f"{LAYER}.q_norm.weight": torch.ones(8)}, {}),
    "a bias of the logits": ({"lm_head.bias": torch.ones(40)}, {}),
    "a scale of a cache": ({f"{LAYER}.k_scale": torch.ones(())}, {}),
    "an attention's own bias": ({f"{LAYER}.bias": torch.ones(16)}, {}),
    "a norm by its older name": ({"model.norm.gamma": torch.ones(16)}, {}),
}


@pytest.mark.parametrize("case", WITHOUT_A_PLACE)
@pytest.mark.parametrize("device", ["cpu", "auto", "spread"])
def test_weights_without_a_place_are_refused_by_name(llama: Path, case: str, device: str) -> None:
    tensors, entries = WITHOUT_A_PLACE[case]
    first = next(iter(tensors), "model.layers.1.input_layernorm.weight")
    told = rf"weights of its files have no place in the network of its configuration, first '{re.escape(first)}'$"
    with pytest.raises(RunError, match=told):
        load_model(changed(llama, tensors, **entries), device=device)


def test_what_needs_no_place(llama: Path) -> None:
    expected = load_model(llama).describe()["weights_sha256"]
    frequencies = 1e4 ** -(torch.arange(0, 8, 2) / 8)
    harmless = {
        f"{LAYER}.rotary_emb.inv_freq": frequencies.bfloat16(),
        f"{LAYER}.rotary_emb.cos_cached": torch.ones(1, 1, 64, 8),
        f"{LAYER}.bias": torch.ones(1, 1, 64, 64, dtype=torch.bool),
        f"{LAYER}.masked_bias": torch.tensor(-1e4),
        "model.position_ids": torch.arange(64)[None],
        "model.layers.2.enorm.weight": torch.ones(16),
        "mtp.fc.weight": torch.ones(16, 16),
        "v_head.summary.weight": torch.ones(1, 16),
        "vision_tower.patch.weight": torch.ones(3, 3),
    }
    model = load_model(changed(llama, harmless, num_nextn_predict_layers=1))
    assert model.describe()["weights_sha256"] == expected


@pytest.mark.parametrize("name", ["gpt2", "gpt_neox", "gptj", "gpt_neo"])
def test_causal_masks_of_older_checkpoints(tmp_path: Path, name: str) -> None:
    network = random_network(CONFIGS[name](), seed=0)
    network.save_pretrained(tmp_path)
    attention = {"gpt_neox": "gpt_neox.layers.0.attention", "gpt_neo": "transformer.h.0.attn.attention"}
    path = attention.get(name, "transformer.h.0.attn")
    masks = {f"{path}.bias": torch.ones(1, 1, 9, 9, dtype=torch.uint8), f"{path}.masked_bias": torch.tensor(-1e9)}
    assert load_model(changed(tmp_path, masks)).width == 32


@pytest.mark.parametrize(
    ("rope", "base", "allowed"),
    [
        ({"rope_type": "default", "rope_theta": 1e4}, 1e4, True),
        ({"rope_type": "default", "rope_theta": 1e4}, 1e6, False),
        ({"rope_type": "linear", "rope_theta": 1e6, "factor": 4.0}, 1e6, True),
        ({"rope_type": "linear", "rope_theta": 1e6, "factor": 4.0}, 1e4, False),
    ],
)
def test_stored_frequencies_are_those_of_the_configuration(
    llama: Path, rope: dict[str, Any], base: float, allowed: bool
) -> None:
    stored = {f"{LAYER}.rotary_emb.inv_freq": base ** -(torch.arange(0, 8, 2) / 8)}
    path = changed(llama, stored, rope_parameters=rope)
    if allowed:
        assert load_model(path).width == 16
    else:
        with pytest.raises(RunError, match=r"rotary_emb\.inv_freq' holds other frequencies than the rotary positions"):
            load_model(path)


def test_one_weight_twice(llama: Path) -> None:
    twice = {"norm.weight": torch.ones(16)}
    with pytest.raises(
        RunError, match=r"its files hold 'model\.norm\.weight' and 'norm\.weight', which are one weight"
    ):
        load_model(changed(llama, twice))
    (llama / "model.safetensors").rename(llama / "a.safetensors")
    save_file({"model.norm.weight": torch.ones(16)}, llama / "b.safetensors", {"format": "pt"})
    places = {"model.norm.weight": "b.safetensors", "lm_head.weight": "a.safetensors"}
    (llama / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))
    with pytest.raises(RunError, match=r"b\.safetensors holds 'model\.norm\.weight', as another file does"):
        load_model(llama)


def test_a_head_beside_tied_embeddings_is_the_head(llama: Path) -> None:
    head = load_file(llama / "model.safetensors")["lm_head.weight"]
    network = load_model(changed(llama, {}, tie_word_embeddings=True)).network
    assert torch.equal(network.get_parameter("lm_head.weight"), head.float())


@pytest.mark.parametrize("method", ["modelopt", "sorcery", "gguf", None, 7])
def test_unknown_quantisations(llama: Path, method: Any) -> None:
    path = changed(llama, {}, quantization_config={"quant_method": method, "bits": 4})
    told = rf"'tiny' is quantised by quant_method {method!r}, which is unknown; allowed: aqlm, auto-round, awq, "
    with pytest.raises(UsageError, match=told):
        load_model(path)
    assert load_model(path, init_seed=0).width == 16  # weights that are drawn are not quantised


FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}


def test_eight_bit_floats_are_multiplied_by_their_scales(tmp_path: Path) -> None:
    sizes = {"hidden_size": 128, "intermediate_size": 128, "num_hidden_layers": 1, "num_attention_heads": 2}
    network = random_network(transformers.LlamaConfig(vocab_size=40, **sizes), seed=0)
    network.save_pretrained(tmp_path / "tiny")
    stored, expected = {}, {}
    for name, weight in network.named_parameters():
        if "_proj" in name:
            scale = weight.detach().abs().max() / 448
            stored[name], stored[f"{name}_scale_inv"] = (weight / scale).to(torch.float8_e4m3fn), scale.reshape(1, 1)
            expected[name] = stored[name].float() * scale
    path = changed(tmp_path / "tiny", stored, quantization_config=FP8)
    loaded = load_model(path).network
    for name, weight in expected.items():
        torch.testing.assert_close(loaded.get_parameter(name), weight, rtol=1e-6, atol=0)
    no_method = changed(path, {}, quantization_config=None)
    with pytest.raises(UsageError, match=r"is stored as F8_E4M3, which its configuration names no quantisation of$"):
        load_model(no_method)
    kept = load_file(path / "model.safetensors")
    del kept["model.layers.0.mlp.up_proj.weight_scale_inv"]
    save_file(kept, path / "model.safetensors", {"format": "pt"})
    with pytest.raises(
        UsageError, match=r"'model\.layers\.0\.mlp\.up_proj\.weight' is stored as F8_E4M3, with no scale"
    ):
        load_model(changed(path, {}, quantization_config=FP8))


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.bool, torch.int64, torch.float8_e5m2])
def test_numbers_that_would_be_cast(llama: Path, dtype: torch.dtype) -> None:
    with pytest.raises(
        UsageError, match=r"weight 'model\.norm\.weight' is stored as \w+, which its configuration names"
    ):
        load_model(changed(llama, {"model.norm.weight": torch.ones(16).to(dtype)}))
