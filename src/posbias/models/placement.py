"""Where the weights of a model go: one device, or spread by accelerate over all devices, the CPU and the disk.

Spread weights are fetched when their module runs; with checkpointing, when it runs again for its gradient, so that no
more than a block's worth is in place at a time.
"""

import tempfile
import weakref
from typing import Any

import torch

from posbias.errors import UsageError, one_line

AUTO = "auto"
WEIGHTS_SHARE = 0.5
"""Share of `max_memory` that weights in place may take on each device; the passes need the rest."""


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


class Placement:
    """How one model is spread, with the folder its weights may be put into; that folder goes when the model does."""

    def __init__(self, max_memory: int | None) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="posbias-offload-", ignore_cleanup_errors=True)
        self.arguments: dict[str, Any] = {"device_map": AUTO, "offload_folder": self._folder.name}
        if max_memory is not None:
            share = int(max_memory * WEIGHTS_SHARE)
            accelerators = range(torch.cuda.device_count())
            self.arguments["max_memory"] = {**dict.fromkeys(accelerators, share), "cpu": share}

    def belongs_to(self, network: object) -> None:
        """Keep the folder for as long as the network lives."""
        weakref.finalize(network, self._folder.cleanup)
