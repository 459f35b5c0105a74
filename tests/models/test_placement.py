"""Models spread over memory and disk, and models with packed weights: the same gradients, or one line why not."""

from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from posbias import MeasureOptions, RunError, UsageError, load_model, measure
from posbias.models import loading
from posbias.models.model import ModelRequest
from posbias.models.sources import absolute_source
from posbias.models.weights import dispatched, first_not_finite, weights_sha256
from posbias.prompts.prompts import Prompts
from tiny_families import LLAMA


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Lets accelerate believe in so many bytes of memory, and in no accelerator."""

    def has(size: int) -> None:
        monkeypatch.setattr("transformers.integrations.accelerate.get_max_memory", lambda *_, **__: {"cpu": size})

    return has


PROMPTS = Prompts(np.arange(3, 27, dtype=np.int64).reshape(2, 12))


def saved(directory: Path, *, dtype: torch.dtype = torch.float32, **changes: Any) -> Path:
    network = transformers.LlamaForCausalLM(transformers.LlamaConfig(**{**LLAMA, "num_hidden_layers": 6, **changes}))
    network.to(dtype).save_pretrained(directory)
    return directory


def weight_bytes(model: Any) -> int:
    return sum(parameter.numel() * parameter.element_size() for parameter in model.network.parameters())


@pytest.mark.parametrize(("tied", "stored"), [(False, torch.float32), (True, torch.bfloat16)])
def test_a_model_put_away_to_disk_measures_the_same(
    tmp_path: Path, tied: bool, stored: torch.dtype, memory: Callable[[int], None]
) -> None:
    directory = saved(tmp_path / "six", dtype=stored, tie_word_embeddings=tied)
    whole = load_model(directory)
    memory(weight_bytes(whole) // 2)
    spread = load_model(directory, device="spread")
    assert spread.places == ("cpu", "disk")
    assert spread.precision == "float32 on cpu, disk"
    assert spread.describe()["device"] == "cpu, disk"
    assert dispatched(spread.network)
    assert any(parameter.is_meta for parameter in spread.network.parameters())
    assert (spread.device, spread.dtype) == (torch.device("cpu"), torch.float32)
    assert weights_sha256(spread.network) == weights_sha256(whole.network)
    expected = measure(whole, PROMPTS)
    for checkpointing in (False, True):
        options = MeasureOptions(checkpointing=checkpointing)
        found = measure(spread, PROMPTS, options=options)
        for kind in ("jacobian", "probability"):
            np.testing.assert_allclose(found.per_prompt[kind], expected.per_prompt[kind], rtol=1e-6)
        np.testing.assert_allclose(found.mixing, expected.mixing, rtol=1e-6)
    last = [parameter for name, parameter in spread.network.named_parameters() if ".5." in name]
    assert all(
        parameter.is_meta for parameter in last
    )  # put away again after every pass, the last of a recomputed block too


def test_weights_on_disk_are_checked_too(tmp_path: Path, memory: Callable[[int], None]) -> None:
    directory = saved(tmp_path / "bad")
    network = transformers.LlamaForCausalLM.from_pretrained(directory)
    with torch.no_grad():
        network.get_parameter("model.layers.5.mlp.up_proj.weight")[3, 4] = torch.nan
    network.save_pretrained(directory)
    memory(100_000)
    with pytest.raises(RunError, match=r"model\.layers\.5\.mlp\.up_proj\.weight"):
        load_model(directory, device="spread")


def test_only_weights_of_safetensors_files_are_spread(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="for weights of safetensors files, and those are drawn"):
        load_model(saved(tmp_path / "six"), init_seed=0, device="spread")


def test_a_request_loads_the_same_model_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved(tmp_path / "six")
    monkeypatch.chdir(tmp_path)
    model = load_model("six", dtype="float64")
    assert model.request == ModelRequest(str(tmp_path / "six"), dtype="float64")
    monkeypatch.chdir("/")
    again = load_model(**asdict(model.request))
    assert weights_sha256(again.network) == weights_sha256(model.network)
    assert [absolute_source(name) for name in ("demo", "config:demo", "owner/name")] == [
        "demo",
        "config:demo",
        "owner/name",
    ]
    assert absolute_source(f"config:{tmp_path}") == f"config:{tmp_path.resolve()}"


def packed(directory: Path) -> Path:
    """A checkpoint with 8-bit weights packed into 32-bit words, as llm-compressor writes them."""
    compression = pytest.importorskip("compressed_tensors", reason="the compressed-tensors package is not installed")
    rules = compression.quantization
    network = transformers.LlamaForCausalLM.from_pretrained(saved(directory.with_name("plain")))
    weights = rules.QuantizationArgs(num_bits=8, symmetric=True, strategy="channel")
    scheme = rules.QuantizationScheme(targets=["Linear"], weights=weights)
    rules.apply_quantization_config(
        network,
        rules.QuantizationConfig(config_groups={"all": scheme}, ignore=["lm_head"], format="pack-quantized"),
    )
    for module in network.modules():
        if hasattr(module, "weight_scale"):
            module.weight_scale.data = module.weight.detach().abs().amax(dim=1, keepdim=True) / 127
    compressor = compression.ModelCompressor.from_pretrained_model(network, quantization_format="pack-quantized")
    compressor.compress_model(network)
    network.save_pretrained(directory)
    compressor.update_config(str(directory))
    return directory


@pytest.mark.filterwarnings("ignore")
def test_a_packed_checkpoint_measures_near_the_plain_one(tmp_path: Path) -> None:
    directory = packed(tmp_path / "packed")
    model = load_model(directory)
    plain = load_model(tmp_path / "plain")
    found, expected = measure(model, PROMPTS, kinds="jacobian"), measure(plain, PROMPTS, kinds="jacobian")
    difference = np.abs(found.per_prompt["jacobian"] / expected.per_prompt["jacobian"] - 1).max()
    assert 0 < difference < 0.05
    assert model.describe()["weights_sha256"] == load_model(directory).describe()["weights_sha256"]
    assert not load_model(directory, init_seed=0).request.init_seed
    assert first_not_finite(model.network) is None


@pytest.mark.filterwarnings("ignore")
def test_packed_weights_without_gradients_are_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = packed(tmp_path / "packed")

    def no_gradient(*_: object, **__: object) -> None:
        raise RuntimeError("derivative is not implemented\nfor int4")

    monkeypatch.setattr(loading.torch.autograd, "grad", no_gradient)
    with pytest.raises(UsageError, match=r"cannot be differentiated here \(derivative is not implemented\)") as caught:
        load_model(directory)
    assert "\n" not in str(caught.value)


@pytest.mark.filterwarnings("ignore")
def test_packed_weights_whose_gradients_change_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = packed(tmp_path / "packed")
    passes = iter([torch.ones(2), torch.zeros(2)])
    monkeypatch.setattr(loading, "_trial_gradient", lambda _model: next(passes))
    with pytest.raises(UsageError, match="gradient changes after a pass without gradients"):
        load_model(directory)
