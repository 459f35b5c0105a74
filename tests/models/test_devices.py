"""Where models run: the first accelerator with room, else all devices or the CPU; named ones; what does not fit."""

from typing import Any

import pytest
import torch
import transformers

import posbias.memory
from posbias.errors import UsageError
from posbias.models import devices, networks
from posbias.models.devices import check_device, training_device
from posbias.models.networks import outline_of, placed, random_network
from tiny_families import CONFIGS

GB = 10**9
LLAMA_7B = {"hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32, "num_attention_heads": 32}
LLAMA_70B = {
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
}


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A machine with gigabytes free on every accelerator, and in the memory."""

    def has(*free: float | None, memory: float = 64) -> None:
        known = {torch.device("cuda", index): size for index, size in enumerate(free)}
        monkeypatch.setattr(networks, "accelerators", lambda: iter(known))
        monkeypatch.setattr(devices, "free_bytes", lambda device: known[device] and int(known[device] * GB))
        monkeypatch.setattr(posbias.memory, "available_bytes", lambda: int(memory * GB))

    return has


def where(shape: dict[str, Any], device: str = "auto", dtype: torch.dtype | None = None) -> str:
    """Where a checkpoint in bfloat16 of this shape goes, and in what precision."""
    outline = outline_of(transformers.LlamaConfig(**shape))
    place, precision = placed(outline, device, dtype, own=torch.bfloat16, name="large")
    return f"{str(precision).removeprefix('torch.')} on {place or 'all'}"


@pytest.mark.parametrize(
    ("free", "expected"),
    [
        ((80,), "cuda:0"),
        ((8, 80), "cuda:1"),
        ((8, 8), "all"),
        ((16.8,), "all"),
        ((16.9,), "cuda:0"),
        ((None,), "cuda:0"),
    ],
)
def test_the_first_accelerator_with_room_for_weights_and_passes(
    free: tuple[float | None, ...], expected: str, machine: Any
) -> None:
    """13.5 GB of weights; room that is not known is taken as enough."""
    machine(*free)
    assert where(LLAMA_7B) == f"bfloat16 on {expected}"


def test_a_small_model_needs_a_gigabyte_for_passes(machine: Any) -> None:
    small = {**LLAMA_7B, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "vocab_size": 10}
    for free, expected in ((1.5, "cuda:0"), (0.5, "all")):
        machine(free)
        assert where(small) == f"bfloat16 on {expected}"


def test_a_model_runs_on_the_accelerator_in_its_own_precision_and_on_a_cpu_in_float32(machine: Any) -> None:
    machine(80)
    assert where(LLAMA_7B) == "bfloat16 on cuda:0"
    assert where(LLAMA_7B, dtype=torch.float32) == "float32 on cuda:0"
    assert where(LLAMA_7B, device="cpu") == "float32 on cpu"
    machine()
    assert where(LLAMA_7B) == "float32 on cpu"


def test_70_billion_weights_are_spread_or_refused_with_what_is_free(machine: Any) -> None:
    machine(139, 139)
    assert where(LLAMA_70B) == "bfloat16 on all"
    machine()
    with pytest.raises(UsageError, match=r"float32 take 28\d\.\d GB, and 64\.0 GB of memory are free"):
        where(LLAMA_70B)


def test_names_of_devices() -> None:
    assert check_device("cpu") == torch.device("cpu")
    assert check_device("auto") is check_device("spread") is None
    for name in ("gpu", "cuda:99", "abacus", "meta", ""):
        with pytest.raises(UsageError, match=r"allowed: auto, cpu, spread, or an accelerator .* cuda, cuda:1 or mps$"):
            check_device(name)
    assert training_device("auto") == "cpu" if not torch.accelerator.is_available() else True
    with pytest.raises(UsageError, match="models larger than a device"):
        training_device("spread")


def test_random_weights_are_drawn_alike_whatever_the_default_device() -> None:
    config = CONFIGS["llama"]()
    with torch.device("meta"):  # as if an accelerator were the default
        elsewhere = random_network(config, seed=5)
    here = random_network(config, seed=5)
    assert not any(weight.is_meta for weight in here.parameters())
    for name, weight in here.named_parameters():
        assert torch.equal(weight, elsewhere.get_parameter(name)), name
