"""`AttentionOptions`: which statistics of attention are measured and kept, and the memory that they may take."""

from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import Annotated, Any

from posbias.checks import Count, Natural, Share, checked
from posbias.errors import UsageError
from posbias.memory import show_bytes
from posbias.registry import split_numbers

KERNEL_POSITIONS = 1024
"""Longest prompts whose mean kernels are kept position by position unless asked for: 4 MB each in float32."""
KERNEL_CELLS = 256
"""Side of the mean kernels of longer prompts, in cells of neighbouring positions."""
CONTENT_BYTES = 1 << 29
"""Mean content logits (layers x heads x N x N) are kept without being asked for up to this size: 512 MiB."""
MEMORY_LIMIT = 4 * 10**9
"""Largest size of all kept matrices together, in bytes."""
FEWEST_POSITIONS = 3
"""Fewest positions of a prompt: the content and the monotonicity of fewer say nothing."""
NUMBER_BYTES = 4
"""Bytes of one kept number, unless the model is in float64."""
UNRECORDED = ("directory", "overwrite")
"""Settings that decide no number."""


@checked
@dataclass(frozen=True)
class AttentionOptions:
    """Settings of `attention`: thresholds, the matrices that are kept, and their memory."""

    sink_thresholds: Annotated[tuple[Share, ...], partial(split_numbers, sort=float)] = (0.2, 0.3)
    """Thresholds of the sink score, in (0, 1), at least one; 0.2 in Wu et al. (arXiv 2502.01951), 0.3 in Gu et al."""
    kernel_cells: Count | None = None
    """Side of the kept mean kernels, 1 to N; N keeps every entry. None: N up to KERNEL_POSITIONS, else KERNEL_CELLS."""
    mean_content: bool | None = None
    """Keep the mean content logits of every head and pair; by default if they fit CONTENT_BYTES."""
    block: Count | None = None
    """Most queries at a time, >= 1; long prompts take fewer. None: as suits the device. Never changes what is measured.
    """
    memory_limit: Natural = MEMORY_LIMIT
    """Bytes that the kept matrices may take together, >= 0."""
    rollouts: bool = True
    """Roll the same attention out, too, if nothing else mixes positions."""
    directory: Path | None = None
    """Run directory of the record; None keeps nothing."""
    overwrite: bool = False
    """Replace finished work in the directory, which is refused otherwise."""

    def __post_init__(self) -> None:
        if not self.sink_thresholds:
            raise UsageError("attention: sink_thresholds must be at least one number in (0, 1), got none")

    def cells(self, n_positions: int) -> int:
        """Side of the kept kernels for prompts of `n_positions` tokens."""
        if self.kernel_cells is None:
            return n_positions if n_positions <= KERNEL_POSITIONS else KERNEL_CELLS
        if self.kernel_cells > n_positions:
            raise UsageError(f"kernel_cells must be 1 to {n_positions}, one per position; got {self.kernel_cells}")
        return self.kernel_cells

    def keeps_content(self, matrices: int, n_positions: int, *, number_bytes: int = NUMBER_BYTES) -> bool:
        """True if the mean content logits of `matrices` heads are kept."""
        if self.mean_content is not None:
            return self.mean_content
        return matrices * n_positions**2 * number_bytes <= CONTENT_BYTES

    def kept_bytes(self, *, layers: int, heads: int, n_positions: int, number_bytes: int = NUMBER_BYTES) -> int:
        """Bytes of all kept matrices."""
        numbers = layers * 2 * self.cells(n_positions) ** 2
        if self.keeps_content(layers * heads, n_positions, number_bytes=number_bytes):
            numbers += layers * heads * n_positions**2
        return numbers * number_bytes

    def check_memory(self, *, layers: int, heads: int, n_positions: int, number_bytes: int = NUMBER_BYTES) -> int:
        """Return the bytes of all kept matrices; above the limit refuse, and name settings that take less."""
        size = self.kept_bytes(layers=layers, heads=heads, n_positions=n_positions, number_bytes=number_bytes)
        if size > self.memory_limit:
            cells = self.cells(n_positions)
            content = self.keeps_content(layers * heads, n_positions, number_bytes=number_bytes)
            fewer = ", in Python no mean content logits (mean_content=False)" if content else ""
            raise UsageError(
                f"the kept matrices would take {show_bytes(size)} ({layers} layers, {heads} heads, kernels of"
                f" {cells} x {cells}); allowed are {show_bytes(self.memory_limit)}: take shorter prompts (--length),"
                f" fewer kernel cells (--kernel-cells, kernel_cells){fewer}, or allow more (in Python, memory_limit)"
            )
        return size

    def describe(self) -> dict[str, Any]:
        """Plain values for a record."""
        return {part.name: getattr(self, part.name) for part in fields(self) if part.name not in UNRECORDED}
