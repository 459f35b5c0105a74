"""Where models run: the first accelerator with room, else all devices or the CPU; named ones; what does not fit."""

from typing import Any

import pytest
import torch
import transformers

import posbias.memory
from posbias.errors import UsageError
from posbias.models import networks
from posbias.models.devices import Accelerator, check_device, first_with_room, training_device
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


def gpus(*free: float) -> list[Accelerator]:
    return [Accelerator(torch.device("cuda", index), int(size * GB)) for index, size in enumerate(free)]


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A machine with gigabytes free on every accelerator, and in the memory."""

    def has(*free: float, memory: float = 64) -> None:
        monkeypatch.setattr(networks, "accelerators", lambda: iter(gpus(*free)))
        monkeypatch.setattr(posbias.memory, "available_bytes", lambda: int(memory * GB))

    return has


def where(shape: dict[str, Any], device: str = "auto", dtype: torch.dtype | None = None) -> str:
    """Where a checkpoint in bfloat16 of this shape goes, and in what precision."""
    outline = outline_of(transformers.LlamaConfig(**shape))
    place, precision = placed(outline, device, dtype, own=torch.bfloat16, name="large")
    return f"{str(precision).removeprefix('torch.')} on {place or 'all'}"


@pytest.mark.parametrize(
    ("free", "expected"),
    [((80,), "cuda:0"), ((8, 80), "cuda:1"), ((8, 8), None), ((16.8,), None), ((16.9,), "cuda:0"), ((), None)],
)
def test_the_first_accelerator_with_room_for_weights_and_passes(free: tuple[float, ...], expected: str | None) -> None:
    found = first_with_room(gpus(*free), int(13.5 * GB))
    assert (None if found is None else str(found)) == expected


def test_room_that_is_not_known_is_taken_as_enough() -> None:
    unknown = [Accelerator(torch.device("xpu", 0), None)]
    assert first_with_room(unknown, 70 * GB) == torch.device("xpu", 0)
    assert first_with_room(gpus(1.5), 1) is not None  # a small model needs a gigabyte for passes
    assert first_with_room(gpus(0.5), 1) is None


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
    with pytest.raises(UsageError, match=r"weights of 'large' in float32 take 282 GB, and 64 GB of memory are free"):
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
