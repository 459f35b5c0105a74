"""Norms of the stream and of what attention branches add to it, caught as a network runs."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from posbias.models.families.layout import Block, stream_read
from posbias.models.model import BranchNorms


@dataclass(frozen=True)
class BranchWatch:
    """Norms of the layers that have run so far, of one forward pass."""

    stream: list[Tensor] = field(default_factory=list)
    """|x| of every layer, [batch position]."""
    branch: list[Tensor] = field(default_factory=list)
    """|a| of every layer, with a dimension of batch times positions if the family flattens them."""

    def norms(self) -> BranchNorms:
        """All layers of the forward pass that ran within the context."""
        device = self.stream[0].device  # layers may lie on several
        stream = torch.stack([norms.to(device) for norms in self.stream])
        return BranchNorms(stream, torch.stack([norms.to(device) for norms in self.branch]).view(stream.shape))

    def before(self, _module: nn.Module, positional: tuple[Any, ...], named: dict[str, Any]) -> None:
        """Hook on a block: keep the norm of its input."""
        self.stream.append(_length(stream_read(positional, named)))

    def after(self, scale: float, _module: nn.Module, _inputs: tuple[Any, ...], output: Any) -> None:
        """Hook on the module that returns the attention branch, which is scaled when it is added."""
        self.branch.append(abs(scale) * _length(output[0] if isinstance(output, tuple) else output))


def _length(vectors: Tensor) -> Tensor:
    dtype = torch.float64 if vectors.dtype == torch.float64 else torch.float32
    length: Tensor = torch.linalg.vector_norm(vectors.detach(), dim=-1, dtype=dtype)
    return length


@contextmanager
def watch_branches(blocks: Sequence[Block], *, once: nn.Module | None = None) -> Iterator[BranchWatch]:
    """Within the context, keep the norms of one forward pass of a model's blocks, in order.

    With the network given as `once`, watching stops when its first forward pass is over: what runs a block again
    afterwards (checkpointing, the next kind's passes) is then not seen.
    """
    watch = BranchWatch()
    with ExitStack() as hooks:
        for block in blocks:
            hooks.enter_context(block.module.register_forward_pre_hook(watch.before, with_kwargs=True))
            hooks.enter_context(block.adds.register_forward_hook(partial(watch.after, block.branch_scale)))
        if once is not None:
            hooks.callback(once.register_forward_hook(lambda *_: hooks.close()).remove)
        yield watch
