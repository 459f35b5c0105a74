"""`CostEstimate`: bytes and seconds that a run will take, announced before it begins and refused if it cannot fit.

Bytes are the process's at its peak: Python, libraries and all it holds, the weights, the passes of one prompt, and with
workers the same of each. On an accelerator they are those of its memory: weights and passes.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from posbias.memory import resident_bytes, show_at_most, show_bytes
from posbias.models.devices import CPU, free_bytes
from posbias.runs.caveats import Caveat, caveat_text, refusal

FEWEST = 8
"""Positions below which no length is suggested."""
HEADROOM = 1.2
"""Process memory over tensor memory: kernels' own buffers, and on accelerators what PyTorch's allocator holds back."""
KEPT_HEADROOM = 2.0
"""Process memory over tensor memory if freed memory is kept, in holes; seen up to 1.9 without checkpointing."""
MARGIN = 0.03
"""Share of the memory allowed that a remedy leaves free, since no two processes take the very same."""


@dataclass(frozen=True)
class CostEstimate:
    """The expected cost of one prompt of one length in one process."""

    n_positions: int
    weights_bytes: int
    coefficients: tuple[float, ...]
    """Bytes of one prompt's passes: a polynomial in the length, constant first."""
    seconds: float
    headroom: float = HEADROOM
    may_keep: bool = False
    """True if freed memory may be kept for the next tensors when KEPT_HEADROOM fits, which is a third faster."""
    process_bytes: int = 0
    """Memory of the process beside weights and passes; 0 on an accelerator."""
    loading_bytes: int = 0
    """Peak of the process while it loaded the model; 0 if that is not known."""
    copy_bytes: int = 0
    """Size of the float32 copy against which half precision is checked; 0 if there is none."""
    copies: int = 0
    """Most processes that hold such a copy at a time."""
    redrawn_bytes: int = 0
    """Size of the re-initialised network that lies beside the loaded one while it is measured; 0 if there is none."""
    drawing_bytes: int = 0
    """Size of that network's own output table while it is drawn, before it is tied to the input's."""
    device: torch.device = CPU
    pass_seconds: float = 0.0
    """Seconds of a prompt run once by itself, if `seconds` are those of more or less than that."""
    kept: Callable[[int], int] = lambda n_positions: 0
    """Bytes at a length that are counted beforehand: held through all prompts, with no headroom."""
    shorter: str = "--length {}"
    """The option that asks for fewer positions, for a message."""

    def with_constant(self, size: float) -> "CostEstimate":
        """The estimate with `size` more bytes of passes at every length."""
        constant, *higher = self.coefficients
        return replace(self, coefficients=(constant + size, *higher))

    def of_several(self, prompts: int) -> "CostEstimate":
        """The estimate with the passes of so many prompts in one batch."""
        return replace(self, coefficients=tuple(prompts * value for value in self.coefficients))

    @property
    def tensor_bytes(self) -> float:
        """Bytes of tensors that the passes of one prompt make, without headroom."""
        return sum((value * self.n_positions**power for power, value in enumerate(self.coefficients)), 0.0)

    @property
    def passes_bytes(self) -> int:
        """Bytes that the passes of one prompt take beyond the weights."""
        return int(self.headroom * max(self.tensor_bytes, 0.0)) + self.kept(self.n_positions)

    def describe(self, count: int, *, workers: int = 1) -> dict[str, Any]:
        """Plain values for a record."""
        alone = {"seconds_per_pass": self.pass_seconds} if self.pass_seconds else {}
        return {
            "prompts": count,
            "weights_bytes": self.weights_bytes,
            "passes_bytes": self.passes_bytes,
            "process_bytes": self.process_bytes,
            "peak_bytes": max(self.needed(workers), self.loading_bytes),
            "seconds_per_prompt": self.seconds,
            "seconds": self.seconds * -(-count // workers),
            **alone,
        }

    def line(self, count: int, *, workers: int = 1) -> str:
        """The announcement of the cost, for a reader."""
        seconds = self.seconds * -(-count // workers)
        needed = self.needed(workers)
        whose, parts = caveat_text(self._whose(workers)), caveat_text(self._parts(workers))
        peak = f"{show_at_most(max(needed, self.loading_bytes))} for {whose} ({parts})"
        loading = ", its peak while loading," if self.loading_bytes > needed else ""
        redrawn = ", re-initialised networks included" if self.redrawn_bytes else ""
        time = f" and {show_seconds(seconds)} for {count} prompts" if seconds else ""  # 0: it was not timed
        return f"estimate: at most {peak}{loading}{time}{redrawn}"

    def needed(self, workers: int) -> int:
        """Bytes of all processes on this machine from now on: workers load the model too, and this process waits."""
        loaded = self.process_bytes + self.weights_bytes
        copies = min(workers, self.copies) * self.copy_bytes
        working = self.redrawn_bytes + max(self.passes_bytes, self.drawing_bytes)
        if workers == 1:
            return loaded + copies + working
        return loaded + copies + workers * max(loaded + working, self.loading_bytes)

    def check(
        self,
        *,
        workers: int = 1,
        max_memory: int | None = None,
        remedies: "Mapping[str, Remedy] | None" = None,
    ) -> None:
        """Refuse a run that cannot fit into `max_memory`, or into what is held and free now, naming what would fit."""
        allowed = self.allowed(max_memory)
        if allowed is None or self.needed(workers) <= allowed:
            return
        room = int(allowed * (1 - MARGIN))
        changed = {way: remedy() for way, remedy in (remedies or {}).items()}
        ways = [way for way, estimate in changed.items() if estimate and estimate.needed(workers) <= room]
        fewer = next((number for number in range(workers - 1, 0, -1) if self.needed(number) <= room), None)
        ways += [] if fewer is None else [f"--workers {fewer}"]
        fits = self.longest_fitting(room, workers=workers)
        ways = [self.shorter.format(fits), *ways] if fits else ways
        raise refusal(
            "exceeds_memory",
            n_positions=self.n_positions,
            needed=show_bytes(self.needed(workers)),
            whose=self._whose(workers),
            parts=self._parts(workers),
            allowed={"caveat": "memory_free" if max_memory is None else "memory_allowed", "size": show_bytes(allowed)},
            ways=" or ".join(ways) or self._least(workers),
        )

    def allowed(self, max_memory: int | None) -> int | None:
        """Bytes that may be held: `max_memory`, or what is held and free now; None if that is not known."""
        if max_memory is not None or (free := free_bytes(self.device)) is None:
            return max_memory
        resident = resident_bytes() if self.device.type == "cpu" else None
        return free + (self.weights_bytes if resident is None else resident)

    def keeping(self, *, workers: int = 1, max_memory: int | None = None) -> "CostEstimate | None":
        """The estimate with freed memory kept; None if that may not be, or would not surely fit."""
        roomy, allowed = replace(self, headroom=KEPT_HEADROOM), self.allowed(max_memory)
        return roomy if self.may_keep and allowed is not None and roomy.needed(workers) <= allowed else None

    def longest_fitting(self, allowed: int, *, workers: int = 1) -> int:
        """The largest number of positions below the one asked for that fits; 0 if not even a few fit."""
        low, high = 0, self.n_positions
        while low < high:
            middle = (low + high + 1) // 2
            fits = replace(self, n_positions=middle).needed(workers) <= allowed
            low, high = (middle, high) if fits else (low, middle - 1)
        return low if low >= FEWEST else 0

    def _least(self, workers: int) -> Caveat:
        """The advice when nothing else fits: the least memory, for the fewest positions."""
        least = replace(self, n_positions=min(FEWEST, self.n_positions))
        size = least.needed(workers) * (1 + MARGIN)
        return {"caveat": "smaller_model", "size": show_at_most(size, digits=2), "n_positions": least.n_positions}

    def _whose(self, workers: int) -> Caveat:
        if self.device.type != "cpu":
            return {"caveat": "memory_of_device", "device": str(self.device)}
        if workers == 1:
            return {"caveat": "memory_of_process"}
        return {"caveat": "memory_of_several", "count": workers + 1}

    def _parts(self, workers: int) -> Caveat:
        """The parts that the peak of a process consists of."""
        sizes = {"weights": self.weights_bytes, "re-initialised weights": self.redrawn_bytes}
        sizes |= {"float32 copy": self.copy_bytes, "passes": self.passes_bytes}
        sizes |= {"Python, libraries and the rest": self.process_bytes}
        parts = [
            {"caveat": "part_of_memory", "part": name, "size": show_bytes(size)} for name, size in sizes.items() if size
        ]
        return {"caveat": "parts_of_memory" if workers == 1 else "parts_of_memory_each", "parts": parts}


def show_seconds(seconds: float) -> str:
    """Seconds as text, in seconds or minutes."""
    return f"{seconds:.0f} s" if seconds < 100 else f"{seconds / 60:.0f} min"


Remedy = Callable[[], CostEstimate | None]
"""An estimate of the run under other options."""
