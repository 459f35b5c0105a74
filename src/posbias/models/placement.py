"""Where the weights of a model go: one device, or spread by accelerate over all devices, the CPU and the disk.

Spread weights are fetched when their module runs; with checkpointing, when it runs again for its gradient, so that no
more than a block's worth is in place at a time.
"""

from collections.abc import Callable
from typing import Any

import torch

from posbias.errors import UsageError, one_line
from posbias.memory import available_bytes, beside_weights, resident_bytes, show_bytes

AUTO = "auto"
WEIGHTS_SHARE = 0.5
"""Share of `max_memory` that weights in place may take on each device; the passes need the rest."""

Sizes = Callable[[torch.dtype], tuple[int, int]]
"""By the dtype that weights are loaded in: their bytes, and those that lie beside them meanwhile."""


def check_device(name: str) -> torch.device | None:
    """The device of that name; None for "auto".

    Raises:
        UsageError: it cannot be used.
    """
    if name == AUTO:
        return None
    try:
        device = torch.device(name)
        torch.empty(1, device=device).sum().item()
    except Exception as error:
        raise UsageError(f"device {name!r} cannot be used ({one_line(error)}); cpu always can, as can auto") from None
    return device


def check_room(name: str, sizes: Sizes, *, dtype: torch.dtype, spreadable: bool, max_memory: int | None) -> None:
    """Refuse weights whose loading would take the process past what it may hold.

    Args:
        name: Of the model.
        sizes: What its loading takes.
        dtype: In which it is loaded.
        spreadable: Whether it could be spread over devices.
        max_memory: Bytes that the process may hold; None: what is free.

    Raises:
        UsageError: it does not fit; the message says what would.
    """
    base, free = beside_weights(), available_bytes()
    limits = [] if free is None else [(free + (resident_bytes() or 0), "free")]
    size, word = min([*limits, *([] if max_memory is None else [(max_memory, "allowed")])], default=(0, ""))
    weights, meanwhile = sizes(dtype)
    needed = base + weights + meanwhile
    if not word or needed <= size:
        return
    half = dtype.itemsize > torch.bfloat16.itemsize and base + sum(sizes(torch.bfloat16)) <= size
    ways = [*(["--dtype bfloat16"] if half else []), *(["--device auto"] if spreadable and base < size else [])]
    beside = f", beside them meanwhile {show_bytes(meanwhile)}" if meanwhile else ""
    raise UsageError(
        f"model {name!r} needs up to {show_bytes(needed)} to load in {str(dtype).removeprefix('torch.')} (weights "
        f"{show_bytes(weights)}{beside}, Python and libraries {show_bytes(base)}); {show_bytes(size)} are {word}; "
        f"try {' or '.join(ways) or 'a smaller model'}"
    )


def spread(max_memory: int | None) -> dict[str, Any]:
    """Arguments of `from_pretrained` that spread a model over the accelerators, the CPU and a folder.

    Raises:
        UsageError: Python and libraries alone take more than is allowed.
    """
    if max_memory is None:
        return {"device_map": AUTO}
    base = beside_weights()
    if base >= max_memory:
        raise UsageError(f"Python and libraries take {show_bytes(base)}; {show_bytes(max_memory)} are allowed")
    shares: dict[int | str, int] = {**dict.fromkeys(range(torch.cuda.device_count()), max_memory)}
    shares["cpu"] = max_memory - base
    limits = {device: int(share * WEIGHTS_SHARE) for device, share in shares.items()}
    return {"device_map": AUTO, "max_memory": limits}
