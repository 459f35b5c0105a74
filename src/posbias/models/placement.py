"""Placement of a network's weights, by arithmetic before any is read: the memory that they take, and where so much is.

Weights lie on one device, or are spread over the accelerators, the memory and the disk.
"""

import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

from posbias.errors import UsageError
from posbias.memory import available_bytes, beside_weights, resident_bytes, show_bytes
from posbias.models.devices import (
    AUTO,
    CPU,
    LEAST_ROOM,
    PASSES_ROOM,
    SPREAD,
    accelerators,
    check_device,
    check_precision,
    first_with_room,
    free_bytes,
)
from posbias.models.gguf_format import read_gguf
from posbias.models.sources import Source
from posbias.models.weight_files import Tensors, weight_bytes
from posbias.progress import report

WEIGHTS_SHARE = 0.5
"""Share of the memory that weights take if they are spread; the passes need the rest."""
UNPACKED = {0: torch.float32, 1: torch.float16, 30: torch.bfloat16}
"""By GGUF's number of it: a type of numbers that are not packed."""


@dataclass(frozen=True)
class LoadingPlan:
    """The source of a network, and how it is asked to run."""

    source: Source
    dtype: torch.dtype | None = None
    """Type of numbers; None: the checkpoint's own on an accelerator, float32 on the CPU."""
    device: str = AUTO
    max_memory: int | None = None
    """Bytes on one device; None: what is free."""
    own: bool = False
    """Take the checkpoint's own type on any device."""


class Place(NamedTuple):
    """Device and dtype of a network."""

    device: torch.device | None
    """Device of all weights; None: spread over all devices there are."""
    dtype: torch.dtype


class NetworkSize(NamedTuple):
    """Size of the network that a configuration describes."""

    numbers: int
    """Numbers in all weights."""
    largest: int
    """Numbers in the largest of them."""
    tables: int
    """Bytes of the tables beside them."""


@dataclass(frozen=True)
class LoadingMemory:
    """The memory that loading a network takes, and where there is as much.

    Weights in files are mapped into memory, and count beside those made of them. A GGUF file is expanded beside itself;
    random weights are drawn in float32 before they are cast.
    """

    size: NetworkSize
    source: Source
    tensors: Tensors | None
    """Weights of safetensors files, which alone can be spread; None: a GGUF file, or random weights."""
    packed: bool

    def place(self, plan: LoadingPlan, config: Any) -> Place:
        """The device and the precision that are asked for, or those that fit what there is.

        Raises:
            UsageError: the weights do not fit there; the message says what would.
        """
        device, most = check_device(plan.device), plan.max_memory
        accelerated = device.type != "cpu" if device else next(accelerators(), None) is not None
        asked = self.own_dtype(config, packed=torch.float32) if plan.own else plan.dtype
        dtype = asked or (self.own_dtype(config) if accelerated else torch.float32)
        if plan.device == AUTO:
            device = first_with_room(accelerators(), self.weights_in(dtype), most=most)
            if device is None and (self.tensors is None or not accelerated):
                device, dtype = CPU, asked or torch.float32
                if self._refused_by_memory(dtype, most) and self._spreadable(dtype, most):
                    device = None
        if device is None:
            return self._spread(Place(None, dtype), most, passes=passes_per_position(config) * dtype.itemsize)
        check_precision(device, dtype)
        refusal = None
        if device.type != "cpu" and plan.device != AUTO:
            refusal = self._refused_by(device, dtype, most)
        if device.type == "cpu" or self.tensors is None:  # through the memory of this process
            refusal = refusal or self._refused_by_memory(dtype, most)
        if refusal:
            raise UsageError(refusal)
        return Place(device, dtype)

    def own_dtype(self, config: Any, *, packed: torch.dtype = torch.bfloat16) -> torch.dtype:
        """The type of the checkpoint's numbers: `packed` if a GGUF file packs them, float32 if nothing names it."""
        if self.source.gguf is not None:
            tensors = read_gguf(Path(self.source.location) / self.source.gguf).tensors.values()
            return UNPACKED.get(max(tensors, key=lambda tensor: tensor.n_bytes).kind, packed)
        named = str(getattr(config, "dtype", None)).removeprefix("torch.")
        dtypes = (torch.float64, *UNPACKED.values())
        return next((dtype for dtype in dtypes if str(dtype) == f"torch.{named}"), torch.float32)

    def weights_in(self, dtype: torch.dtype) -> int:
        """Bytes of the weights, once they are loaded in a dtype."""
        if self.packed and self.tensors is not None:
            return weight_bytes(self.tensors, None)
        counted = self.size.numbers * dtype.itemsize
        return counted if self.tensors is None else max(weight_bytes(self.tensors, dtype), counted)

    def bytes_in(self, dtype: torch.dtype) -> tuple[int, int]:
        """Bytes that the weights take in the memory while they are loaded, and what lies beside them meanwhile."""
        source, size, weights = self.source, self.size, self.weights_in(dtype)
        if self.tensors is None:
            drawn = size.numbers * torch.float32.itemsize if source.gguf is None else 0
            file = 0 if source.gguf is None else (Path(source.location) / source.gguf).stat().st_size
            return max(weights, drawn), file + size.largest * torch.float32.itemsize
        stored = weight_bytes(self.tensors, None)
        return weights, 0 if weights == stored else stored

    def _refused_by(self, device: torch.device, dtype: torch.dtype, max_memory: int | None) -> str | None:
        """Why an accelerator cannot hold the weights; None if it can, or if that is not known."""
        weights, there = self.weights_in(dtype), free_bytes(device)
        most = min((size for size in (there, max_memory) if size is not None), default=weights)
        if weights <= most:
            return None
        ways = [f"--device {SPREAD}"] if self.tensors is not None else []
        if dtype.itemsize > torch.bfloat16.itemsize and self.weights_in(torch.bfloat16) <= most:
            ways = ["--dtype bfloat16", *ways]
        advice = " or ".join(ways) or "--device cpu"
        return f"{self._told(dtype)}; {show_bytes(most)} are free on {device}; try {advice}"

    def _refused_by_memory(self, dtype: torch.dtype, max_memory: int | None) -> str | None:
        """Why this process cannot load the weights, with what it could; None if it can."""
        base, (size, word) = beside_weights(), _limit(max_memory)
        weights, meanwhile = self.bytes_in(dtype)
        needed = base + weights + meanwhile
        if not word or needed <= size:
            return None
        half = dtype.itemsize > torch.bfloat16.itemsize and base + sum(self.bytes_in(torch.bfloat16)) <= size
        ways = ["--dtype bfloat16"] if half else []
        ways += [f"--device {SPREAD}"] if self._spreadable(dtype, max_memory) else []
        beside = f", beside them meanwhile {show_bytes(meanwhile)}" if meanwhile else ""
        return (
            f"model {self.source.name!r} needs up to {show_bytes(needed)} to load in "
            f"{str(dtype).removeprefix('torch.')} (weights {show_bytes(weights)}{beside}, Python and libraries "
            f"{show_bytes(base)}); {show_bytes(size)} are {word}; try {' or '.join(ways) or 'a smaller model'}"
        )

    def _spreadable(self, dtype: torch.dtype, max_memory: int | None) -> bool:
        """Tell whether the weights can be spread: the memory must hold the largest of them twice, once for passes."""
        room = WEIGHTS_SHARE * (_limit(max_memory)[0] - beside_weights())
        return self.tensors is not None and room >= self.size.largest * dtype.itemsize

    def _spread(self, place: Place, max_memory: int | None, *, passes: int) -> Place:
        """All devices at once, which is announced before hours go into it; `passes` in bytes per position.

        Raises:
            UsageError: weights that cannot be spread, or no room on the disk for those that are written there.
        """
        if self.tensors is None:
            kind = "random" if self.source.gguf is None else "a GGUF file"
            raise UsageError(
                f"device {SPREAD!r} is for safetensors weights, and those of {self.source.name!r} are {kind}; allowed: "
                f"{AUTO}, cpu or an accelerator"
            )
        weights, rewritten = self.bytes_in(place.dtype)
        shares = weight_shares(max_memory)
        places = [f"up to {show_bytes(share)} on {device}" for device, share in shares.items()]
        if (rest := weights - sum(shares.values())) > 0:
            disk = shutil.disk_usage(tempfile.gettempdir()).free
            if rewritten and rest > disk:
                room = f"{', '.join(places)}, and {show_bytes(disk)} on the disk"
                raise UsageError(f"{self._told(place.dtype)}; there is room for {room}")
            places.append(f"{show_bytes(rest)} read from the disk in every pass")
        report(
            f"{self._told(place.dtype)}; spread: {', '.join(places)}; passes with checkpointing take about "
            f"{show_bytes(1000 * passes)} per 1,000 positions"
        )
        return place

    def _told(self, dtype: torch.dtype) -> str:
        weights = show_bytes(self.weights_in(dtype))
        return f"model {self.source.name!r} has {weights} of weights in {str(dtype).removeprefix('torch.')}"


def passes_per_position(config: Any) -> int:
    """Numbers per position that a forward and backward pass with checkpointing hold, in all layers together.

    One vector per layer, and within one block about 12 of them and 5 of the inner width, as counted on Llama, Qwen3 and
    Gemma 3 (to a tenth); attention that holds its matrices (`eager`) takes more.
    """
    decoder = config.get_text_config(decoder=True)
    width, layers = decoder.hidden_size, decoder.num_hidden_layers
    inner = getattr(decoder, "intermediate_size", None) or 4 * width
    return int((layers + 12) * width + 5 * inner)


def _limit(max_memory: int | None) -> tuple[int, str]:
    """Bytes that this process may hold in all, and why: because they are free, or allowed; no word: not known."""
    free = available_bytes()
    limits = [] if free is None else [(free + (resident_bytes() or 0), "free")]
    return min([*limits, *([] if max_memory is None else [(max_memory, "allowed")])], default=(0, ""))


def weight_shares(max_memory: int | None) -> dict[torch.device, int]:
    """Bytes that spread weights may take on every accelerator and in the memory."""
    shares: dict[torch.device, int] = {}
    for device, free in accelerators():
        room = min((size for size in (free, max_memory) if size is not None), default=0)
        shares[device] = max(min(int(room / (1 + PASSES_ROOM)), room - LEAST_ROOM), 0)
    base, free = beside_weights(), available_bytes()
    if max_memory is not None and base >= max_memory:
        raise UsageError(f"Python and libraries take {show_bytes(base)}; {show_bytes(max_memory)} are allowed")
    allowed = None if max_memory is None else max_memory - base
    shares[CPU] = int(WEIGHTS_SHARE * min((size for size in (free, allowed) if size is not None), default=2**62))
    return shares
