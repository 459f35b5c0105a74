"""Half precision as transformers loads it: weights rounded, RoPE frequencies and other tables not."""

from pathlib import Path

import pytest
import torch
import transformers

from posbias import load_model
from posbias.models.networks import random_network, reinitialise
from posbias.models.weights import converted
from tiny_families import CONFIGS, VOCABULARY


def _saved(name: str, directory: Path) -> Path:
    random_network(CONFIGS[name](), seed=0).save_pretrained(directory)
    return directory


@pytest.mark.parametrize("name", [name for name in CONFIGS if "-" not in name])
def test_a_network_in_bfloat16_is_that_of_transformers(name: str, tmp_path: Path) -> None:
    directory = _saved(name, tmp_path)
    plain = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.bfloat16).eval()
    ours = load_model(directory, dtype="bfloat16")
    assert ours.reads_tokens is None
    for kind in ("parameters", "buffers"):
        theirs = dict(getattr(plain, f"named_{kind}")())
        own = dict(getattr(ours.network, f"named_{kind}")())
        assert own.keys() == theirs.keys()
        for key, value in theirs.items():
            assert own[key].dtype == value.dtype, key
            assert torch.equal(own[key], value), key
    token_ids = torch.arange(20)[None] % VOCABULARY
    with torch.no_grad():
        assert torch.equal(ours.network(token_ids).logits, plain(token_ids).logits)


@pytest.mark.parametrize("name", ["llama", "phi", "gemma3_text"])
def test_a_copy_in_full_precision_has_unrounded_tables(name: str, tmp_path: Path) -> None:
    directory = _saved(name, tmp_path)
    full, reduced = (load_model(directory, dtype=dtype) for dtype in ("float32", "bfloat16"))
    again = converted(reduced, torch.float32)
    assert {value.dtype for value in again.network.parameters()} == {torch.float32}
    assert {value.dtype for value in reduced.network.parameters()} == {torch.bfloat16}
    rotary = [key for key, value in full.network.named_buffers() if value.is_floating_point() and "scale" not in key]
    assert rotary
    for key in rotary:
        assert torch.equal(full.network.get_buffer(key), again.network.get_buffer(key)), key


@pytest.mark.parametrize("name", ["llama", "phi", "gemma3_text"])
def test_random_networks_too(name: str, tmp_path: Path) -> None:
    directory = _saved(name, tmp_path)
    full = load_model(directory, init_seed=3)
    for reduced in (
        load_model(directory, init_seed=3, dtype="bfloat16"),
        reinitialise(load_model(directory, dtype="bfloat16"), 3),
    ):
        for key, value in full.network.named_buffers():
            assert torch.equal(reduced.network.get_buffer(key), value), key
        for key, value in full.network.named_parameters():
            assert torch.equal(reduced.network.get_parameter(key), value.to(torch.bfloat16)), key
        reduced.last(reduced.embed(reduced.token_tensor([[3, 4, 5]])))
    wide = load_model(directory, init_seed=3, dtype="float64")
    assert {value.dtype for value in wide.network.buffers() if value.is_floating_point()} == {torch.float64}
