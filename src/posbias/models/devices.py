"""Devices that a model runs on: what this machine has, the memory that is free on each, and the choice among them.

A model goes to the first accelerator that holds its weights with room for passes; to the processor if there is none.
"""

from collections.abc import Iterator
from functools import cache
from typing import Any

import torch

from posbias.checks import AUTO
from posbias.errors import UsageError, one_line
from posbias.memory import available_bytes

CPU = torch.device("cpu")
SPREAD = "spread"
"""Name of all devices at once; AUTO is the accelerator that is there."""
PASSES_ROOM, LEAST_ROOM = 0.25, 10**9
"""Memory for passes beside the weights on an accelerator: this share of the weights, and no fewer bytes than that. The
passes of a model of 7 billion weights over 8,192 positions take 0.3 of them with checkpointing."""


def check_device(name: str) -> torch.device | None:
    """The device of that name; None for AUTO and SPREAD, which name none. Refused if it cannot be used."""
    if name in (AUTO, SPREAD):
        return None
    try:
        device = torch.device(name)
        torch.empty(1, device=device).sum().item()
    except Exception as error:
        raise UsageError(
            f"device {name!r} cannot be used ({one_line(error)}); allowed: {AUTO}, cpu, {SPREAD}, or an accelerator of "
            "this machine, such as cuda, cuda:1 or mps"
        ) from None
    return device


def accelerators() -> Iterator[torch.device]:
    """The accelerators of this machine that compute in float64, in which norms are summed; `mps` has to be named."""
    if torch.accelerator.is_available() and (kind := torch.accelerator.current_accelerator()):
        yield from filter(has_float64, (torch.device(kind.type, i) for i in range(torch.accelerator.device_count())))


@cache
def has_float64(device: torch.device) -> bool:
    """True if a device computes in float64, which `mps` does not."""
    try:
        total = torch.zeros(1, dtype=torch.float64, device=device).sum()
        # A driver may complain when a number is read back; `meta` has none.
        assert total.is_meta or total.item() == 0
    except Exception:  # whatever a driver raises
        return False
    return True


def check_precision(device: torch.device, dtype: torch.dtype) -> None:
    """Refuse weights in float64 on a device that has none."""
    if dtype == torch.float64 and not has_float64(device):
        raise UsageError(
            f"{device} has no float64; allowed there: float32, bfloat16, float16, or float64 on device cpu"
        )


def float64_device(device: torch.device) -> torch.device:
    """The device on which float64 sums of a device's values are taken: the CPU if the device has no float64."""
    return device if has_float64(device) else CPU


def in_float64(values: torch.Tensor) -> torch.Tensor:
    """The values in float64, on their own device or, if that has no float64, on the CPU."""
    return values.to(float64_device(values.device)).double()


def has_room(device: torch.device, weights: int) -> bool:
    """Tell whether so many bytes of weights, and passes, fit on a device, or it is not known."""
    free = free_bytes(device)
    return free is None or weights + max(int(PASSES_ROOM * weights), LEAST_ROOM) <= free


def training_device(name: str) -> str:
    """The device of that name on which small models are trained; AUTO is the first accelerator, or the processor."""
    if name == SPREAD:
        raise UsageError(f"device {SPREAD!r} is for models larger than a device; allowed here: {AUTO}, cpu, cuda ...")
    check_device(name)
    return name if name != AUTO else next((place.type for place in accelerators()), CPU.type)


def free_bytes(device: torch.device) -> int | None:
    """Bytes of a device's memory that this process could still take; None if not known."""
    if device.type == "cpu":
        return available_bytes()
    module: Any = getattr(torch, device.type, None)
    if not hasattr(module, "mem_get_info"):
        return None
    free, _ = module.mem_get_info(device)
    # What PyTorch has taken from the device and holds no tensor in is there for the next tensors.
    return int(free + module.memory_reserved(device) - module.memory_allocated(device))
