"""What of a model's attention is kept over the prompts, and how much memory that may take."""

from dataclasses import asdict, dataclass
from typing import Any

from posbias.checks import check_whole, checked
from posbias.errors import UsageError
from posbias.memory import show_bytes
from posbias.models.attention import BLOCK_QUERIES

KERNEL_POSITIONS = 1024
"""Longest prompts whose mean kernels are kept position by position unless asked for: 4 MB each in float32."""
KERNEL_CELLS = 256
"""Side of the mean kernels of longer prompts, in cells of neighbouring positions."""
CONTENT_BYTES = 1 << 29
"""Mean content logits (layers x heads x N x N) are kept without being asked for up to this size: 512 MiB."""
MEMORY_LIMIT = 4 * 10**9
"""Largest size of all kept matrices together, in bytes."""
FEWEST_POSITIONS = 3
"""Of a prompt: the content and the monotonicity of fewer say nothing."""
NUMBER_BYTES = 4
"""Of one kept number, unless the model is in float64."""


@checked
@dataclass(frozen=True)
class AttentionOptions:
    """What `attention_statistics` keeps."""

    sink_thresholds: tuple[float, ...] = (0.2, 0.3)
    """In (0, 1), at least one; 0.2 in Wu et al. (arXiv 2502.01951), 0.3 in Gu et al."""
    kernel_cells: int | None = None
    """Side of the kept mean kernels, 1 to N; N keeps every entry. None: N up to KERNEL_POSITIONS, else KERNEL_CELLS."""
    by_head: bool = False
    """Whether to keep the mean kernel of every head beside the mean over heads."""
    mean_content: bool | None = None
    """Whether to keep the mean content logits of every head and pair; by default where they fit CONTENT_BYTES."""
    block: int = BLOCK_QUERIES
    """Most queries at a time, >= 1; long prompts take fewer. Never changes what is measured."""
    memory_limit: int = MEMORY_LIMIT
    """Bytes that the kept matrices may take together, >= 0."""

    def __post_init__(self) -> None:
        try:
            thresholds = tuple(float(threshold) for threshold in self.sink_thresholds)
        except (TypeError, ValueError):
            thresholds = ()
        if not thresholds or not all(0 < threshold < 1 for threshold in thresholds):
            raise UsageError(f"sink_thresholds must be numbers in (0, 1), at least one; got {self.sink_thresholds!r}")
        object.__setattr__(self, "sink_thresholds", thresholds)
        check_whole("block", self.block, least=1)
        check_whole("memory_limit", self.memory_limit, least=0)
        if self.kernel_cells is not None:
            check_whole("kernel_cells", self.kernel_cells, least=1)

    def cells(self, n_positions: int) -> int:
        """Side of the kept kernels for prompts of `n_positions` tokens.

        Raises:
            UsageError: more cells than positions.
        """
        if self.kernel_cells is None:
            return n_positions if n_positions <= KERNEL_POSITIONS else KERNEL_CELLS
        if self.kernel_cells > n_positions:
            raise UsageError(f"kernel_cells must be 1 to {n_positions}, one per position; got {self.kernel_cells}")
        return self.kernel_cells

    def keeps_content(self, matrices: int, n_positions: int, *, number_bytes: int = NUMBER_BYTES) -> bool:
        """Whether the mean content logits of `matrices` heads are kept."""
        if self.mean_content is not None:
            return self.mean_content
        return matrices * n_positions**2 * number_bytes <= CONTENT_BYTES

    def kept_bytes(self, *, layers: int, heads: int, n_positions: int, number_bytes: int = NUMBER_BYTES) -> int:
        """Of all kept matrices.

        Raises:
            UsageError: more kernel cells than positions.
        """
        numbers = layers * (2 + (heads if self.by_head else 0)) * self.cells(n_positions) ** 2
        if self.keeps_content(layers * heads, n_positions, number_bytes=number_bytes):
            numbers += layers * heads * n_positions**2
        return numbers * number_bytes

    def check_memory(self, *, layers: int, heads: int, n_positions: int, number_bytes: int = NUMBER_BYTES) -> int:
        """Bytes of all kept matrices.

        Raises:
            UsageError: they exceed `memory_limit`.
        """
        size = self.kept_bytes(layers=layers, heads=heads, n_positions=n_positions, number_bytes=number_bytes)
        if size > self.memory_limit:
            cells = self.cells(n_positions)
            content = self.keeps_content(layers * heads, n_positions, number_bytes=number_bytes)
            raise UsageError(
                f"the kept matrices would take {show_bytes(size)} ({layers} layers, {heads} heads, kernels of"
                f" {cells} x {cells}); allowed are {show_bytes(self.memory_limit)}: {self._ways_out(content)}"
            )
        return size

    def _ways_out(self, content: bool) -> str:
        """What would take less and is in use, by flag and by parameter."""
        heads = ", no kernels of heads (--heads, by_head)" if self.by_head else ""
        logits = ", in Python no mean content logits (mean_content=False)" if content else ""
        return (
            f"take shorter prompts (--length), fewer kernel cells (--kernel-cells, kernel_cells){heads}{logits}, or"
            " allow more (--max-memory, memory_limit)"
        )

    def describe(self) -> dict[str, Any]:
        """Plain values for a record."""
        return asdict(self)
