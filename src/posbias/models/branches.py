"""How large each attention branch is beside the stream it is added to, caught while the model runs.

Two hooks per block, whatever the family: the block's input, and the output of the module whose output is what gets
added to the stream. Only norms are kept.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from posbias.models.families import Block
from posbias.models.model import BranchNorms


@dataclass(frozen=True)
class BranchWatch:
    """Norms of the layers that have run so far, of one forward pass."""

    stream: list[Tensor] = field(default_factory=list)
    """|x| of every layer, [batch position]."""
    branch: list[Tensor] = field(default_factory=list)
    """|a| of every layer, with a dimension of batch times positions where the family flattens them."""

    def norms(self) -> BranchNorms:
        """All layers of the forward pass that ran within the context."""
        device = self.stream[0].device  # layers may lie on several
        stream = torch.stack([norms.to(device) for norms in self.stream])
        return BranchNorms(stream, torch.stack([norms.to(device) for norms in self.branch]).view(stream.shape))


@contextmanager
def watch_branches(blocks: Sequence[Block], *, once: nn.Module | None = None) -> Iterator[BranchWatch]:
    """Within the context, keep the norms of one forward pass; weights and outputs stay as they are.

    Args:
        blocks: Of one model, in order.
        once: The network, to stop watching when its first forward pass is over: what runs a block again afterwards
            (checkpointing, the next kind's passes) is then not seen.
    """
    watch = BranchWatch()
    with ExitStack() as hooks:
        for block in blocks:
            # The module whose output is what gets added; BLOOM's attention module would return residual + branch.
            adds = block.attention_post_norm or block.attention_output
            before = block.module.register_forward_pre_hook(_record_input(watch.stream), with_kwargs=True)
            after = adds.register_forward_hook(_record_output(watch.branch, block.branch_scale))
            hooks.callback(before.remove)
            hooks.callback(after.remove)
        if once is not None:
            hooks.callback(once.register_forward_hook(lambda *_: hooks.close()).remove)
        yield watch


def _norms(values: Tensor) -> Tensor:
    precise = values if values.dtype == torch.float64 else values.float()
    norms: Tensor = torch.linalg.vector_norm(precise.detach(), dim=-1)
    return norms


def _record_input(into: list[Tensor]) -> Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], None]:
    def record(_module: nn.Module, positional: tuple[Any, ...], named: dict[str, Any]) -> None:
        into.append(_norms(positional[0] if positional else named["hidden_states"]))

    return record


def _record_output(into: list[Tensor], scale: float) -> Callable[[nn.Module, tuple[Any, ...], Any], None]:
    def record(_module: nn.Module, _inputs: tuple[Any, ...], output: Any) -> None:
        into.append(abs(scale) * _norms(output[0] if isinstance(output, tuple) else output))

    return record
