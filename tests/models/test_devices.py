"""Where models run: the first accelerator with room, else all devices or the CPU; named ones; what does not fit."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

import posbias as pb
from gguf_inputs import save_gguf
from posbias.errors import UsageError
from posbias.measurement.work import peak_tensor_bytes
from posbias.models import placement
from posbias.models.devices import Accelerator, check_device, first_with_room, training_device
from posbias.models.hugging_face import HuggingFaceModel
from posbias.models.loading import load_model
from posbias.models.networks import network_size, outline_of, random_network
from posbias.models.placement import LoadingMemory, LoadingPlan, passes_per_position, weight_shares
from posbias.models.sources import Source
from posbias.prompts.prompts import Prompts
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
        monkeypatch.setattr(placement, "accelerators", lambda: iter(gpus(*free)))
        monkeypatch.setattr(placement, "available_bytes", lambda: int(memory * GB))
        monkeypatch.setattr(placement, "beside_weights", lambda: GB)
        monkeypatch.setattr(placement, "resident_bytes", lambda: 0)

    return has


def placed(shape: dict[str, Any], *, stored: bool = True, device: str = "auto", **plan: Any) -> str:
    """Where a checkpoint in bfloat16 of this shape (or random weights) goes, and in what precision."""
    config = transformers.LlamaConfig(**shape, dtype="bfloat16")
    size = network_size(outline_of(config))
    tensors = {"all": ("BF16", [size.numbers])} if stored else None
    memory = LoadingMemory(size, Source("large", ".", local=True), tensors, packed=False)
    place = memory.place(LoadingPlan(memory.source, device=device, **plan), config)
    return f"{str(place.dtype).removeprefix('torch.')} on {place.device or 'all'}"


@pytest.mark.parametrize(
    ("free", "expected"),
    [((80,), "cuda:0"), ((8, 80), "cuda:1"), ((8, 8), None), ((16.8,), None), ((16.9,), "cuda:0"), ((), None)],
)
def test_the_first_accelerator_with_room_for_weights_and_passes(free: tuple[float, ...], expected: str | None) -> None:
    found = first_with_room(gpus(*free), int(13.5 * GB))
    assert (None if found is None else str(found)) == expected


def test_room_that_is_not_known_is_taken_as_enough_and_no_more_than_allowed() -> None:
    unknown = [Accelerator(torch.device("xpu", 0), None)]
    assert first_with_room(unknown, 70 * GB) == torch.device("xpu", 0)
    assert first_with_room(unknown, 70 * GB, most=80 * GB) is None
    assert first_with_room(gpus(1.5), 1) is not None  # a small model needs a gigabyte for passes
    assert first_with_room(gpus(0.5), 1) is None


def test_a_model_runs_on_the_accelerator_in_its_own_precision_and_on_a_cpu_in_float32(machine: Any) -> None:
    machine(80)
    assert placed(LLAMA_7B) == "bfloat16 on cuda:0"
    assert placed(LLAMA_7B, stored=False) == "bfloat16 on cuda:0"
    assert placed(LLAMA_7B, dtype=torch.float32) == "float32 on cuda:0"
    assert placed(LLAMA_7B, device="cpu") == "float32 on cpu"
    machine()
    assert placed(LLAMA_7B) == "float32 on cpu"
    machine(memory=30)
    assert placed(LLAMA_7B) == "float32 on all"  # 27 GB beside a file of 13.5 GB
    assert placed(LLAMA_7B, dtype=torch.bfloat16) == "bfloat16 on cpu"


def test_70_billion_weights_are_spread_where_they_fit_and_announced(
    machine: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    machine(139, 139)
    assert placed(LLAMA_70B) == "bfloat16 on all"
    assert capfd.readouterr().err == (
        "model 'large' has 141 GB of weights in bfloat16; spread: up to 111 GB on cuda:0, up to 111 GB on cuda:1, up "
        "to 32 GB on cpu; passes with checkpointing take about 1.79 GB per 1,000 positions\n"
    )
    machine(80, memory=64)
    assert placed(LLAMA_70B) == "bfloat16 on all"
    told = "spread: up to 64 GB on cuda:0, up to 32 GB on cpu, 45.1 GB read from the disk in every pass; passes "
    assert told in capfd.readouterr().err


def test_70_billion_weights_that_fit_nowhere_are_refused_with_the_arithmetic(
    machine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine(80, memory=200)
    with pytest.raises(UsageError, match=r"needs up to 287 GB to load in float32 \(weights 282 GB, .* 200 GB are free"):
        placed(LLAMA_70B, stored=False)  # random weights are drawn in the memory
    monkeypatch.setattr(placement, "check_device", lambda name: None if name == "spread" else torch.device(name))
    monkeypatch.setattr(placement, "free_bytes", lambda device: 80 * GB)
    with pytest.raises(UsageError, match=r"141 GB of .* bfloat16; 80 GB are free on cuda; try --device spread$"):
        placed(LLAMA_70B, device="cuda")
    with pytest.raises(UsageError, match=r"141 GB of .* bfloat16; 80 GB are free on cuda; try --device cpu$"):
        placed(LLAMA_70B, device="cuda", stored=False)
    monkeypatch.setattr(placement.shutil, "disk_usage", lambda _: type("Disk", (), {"free": 50 * GB}))
    with pytest.raises(UsageError, match=r"282 GB of weights in float32; there is room for .* and 50 GB on the disk"):
        placed(LLAMA_70B, device="spread", dtype=torch.float32)  # in another precision they are written


def test_the_passes_that_are_announced_are_those_that_run() -> None:
    shape = {"hidden_size": 64, "intermediate_size": 176, "num_hidden_layers": 12, "num_attention_heads": 4}
    config = transformers.LlamaConfig(vocab_size=40, **shape)
    model = HuggingFaceModel(random_network(config, seed=0))
    model = model.described_by(model.family, misfit="mixing has vectors of its own")
    options = pb.MeasureOptions(checkpointing=True)

    def counted(n_positions: int) -> int:
        prompts = Prompts(np.arange(n_positions)[None] % 40)
        return peak_tensor_bytes(lambda: pb.measure(model, prompts, kinds="probability", options=options), model.device)

    counted(16)
    by_position = (counted(256) - counted(128)) / 128 / torch.float32.itemsize
    assert by_position == pytest.approx(passes_per_position(config), rel=0.15)


def test_shares_leave_room_for_passes(machine: Any) -> None:
    machine(100, 2, 0.5, memory=40)
    for most, expected in ((None, (80, 1, 0, 20)), (11 * GB, (8.8, 1, 0, 5))):
        assert [share / GB for share in weight_shares(most).values()] == pytest.approx(expected)


def test_gguf_files_have_the_precision_of_their_numbers(tmp_path: Path) -> None:
    path = save_gguf(tmp_path / "tiny.gguf", random_network(CONFIGS["llama"](), seed=0))
    source = Source("tiny", str(tmp_path), local=True, gguf=path.name)
    memory = LoadingMemory(network_size(outline_of(CONFIGS["llama"]())), source, None, packed=False)
    assert memory.own_dtype(None) == torch.float32
    assert load_model(path).precision == "float32 on cpu"


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
