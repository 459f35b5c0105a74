"""The network as a list of blocks, for activation checkpointing and to find where a pass stops being finite.

Checkpointing here needs no training mode (which would switch dropout on) and no family description: the blocks are
the entries of the network's largest `nn.ModuleList`. Each keeps only its input and is run again when a gradient
passes through it. Memory falls from all layers' activations to one layer's plus one stream per layer; time rises by
one forward per backward pass.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

from posbias.errors import UsageError
from posbias.models.attention import named_blocks
from posbias.models.model import Model
from posbias.models.weights import dispatched

WIDER = "; in a wider type it may be: --dtype float32 or float64"
"""What to do about gradients that overflow: a half precision model may run to a finite output all the same."""


@contextmanager
def checkpointed(network: nn.Module, *, enabled: bool = True) -> Iterator[None]:
    """Checkpoint every block while the context lasts; nothing when not `enabled`."""
    if not enabled:
        yield
        return
    blocks = list(named_blocks(network).values())
    if not blocks:
        raise UsageError(f"checkpointing needs blocks in an nn.ModuleList; {type(network).__name__} has none")
    # A forward of the instance's own (set by a device dispatcher, say) must come back afterwards.
    own_forwards = [vars(block).get("forward") for block in blocks]
    try:
        for block in blocks:
            block.forward = partial(checkpoint, block.forward, use_reentrant=False, preserve_rng_state=False)
        # Whole blocks are run again where weights are fetched for them: cut short, the last would not be put away.
        with set_checkpoint_early_stop(not dispatched(network)):
            yield
    finally:
        for block, forward in zip(blocks, own_forwards, strict=True):
            vars(block).pop("forward", None)
            if forward is not None:
                block.forward = forward


def first_in_forward(model: Model, embeddings: Float[Tensor, "batch position feature"]) -> str:
    """The first block whose output holds NaN or infinity, by one more forward pass, as the end of a sentence."""
    if not bool(embeddings.isfinite().all()):
        return ", already in the embeddings"
    with block_outputs(model.network) as streams, torch.no_grad():
        model.last(embeddings.detach())
    finite = [bool(stream.isfinite().all()) for stream in streams]
    return "" if all(finite) else f", first in {list(named_blocks(model.network))[finite.index(False)]}"


@contextmanager
def block_outputs(network: nn.Module) -> Iterator[list[Tensor]]:
    """Within the context, collect the stream after every block, differentiable, in the order of the blocks."""
    streams: list[Tensor] = []

    def hook(_module: nn.Module, _inputs: tuple[Any, ...], output: Any) -> None:
        streams.append(output[0] if isinstance(output, tuple) else output)

    with ExitStack() as hooks:
        for block in named_blocks(network).values():
            hooks.callback(block.register_forward_hook(hook).remove)
        yield streams
