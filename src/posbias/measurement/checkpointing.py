"""The network as a list of blocks: activation checkpointing, and where a forward pass stops being finite.

Checkpointing here needs no training mode (which would switch dropout on) and no family description: the blocks are
the entries of the network's largest `nn.ModuleList`. Each keeps only its input and is run again when a gradient
passes through it. Memory falls from all layers' activations to one layer's plus one stream per layer; time rises by
one forward per backward pass.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from posbias.errors import UsageError
from posbias.models.model import Model


def network_blocks(network: nn.Module) -> list[nn.Module]:
    """The network's blocks, nearest the input first: its `nn.ModuleList` with the most parameters, or nothing."""
    lists = [module for module in network.modules() if isinstance(module, nn.ModuleList) and len(module)]
    if not lists:
        return []
    largest = max(lists, key=_parameters)
    return list(largest)


@contextmanager
def checkpointed(network: nn.Module, *, enabled: bool = True) -> Iterator[None]:
    """Checkpoint every block while the context lasts; nothing when not `enabled`.

    Raises:
        UsageError: the network has no list of blocks.
    """
    if not enabled:
        yield
        return
    blocks = network_blocks(network)
    if not blocks:
        raise UsageError(f"checkpointing needs blocks in an nn.ModuleList; {type(network).__name__} has none")
    # A forward of the instance's own (set by a device dispatcher, say) must come back afterwards.
    own_forwards = [vars(block).get("forward") for block in blocks]
    try:
        for block in blocks:
            block.forward = partial(checkpoint, block.forward, use_reentrant=False, preserve_rng_state=False)
        yield
    finally:
        for block, forward in zip(blocks, own_forwards, strict=True):
            vars(block).pop("forward", None)
            if forward is not None:
                block.forward = forward


def first_non_finite_layer(model: Model, embeddings: Float[Tensor, "batch position feature"]) -> int | None:
    """The first block whose output holds NaN or infinity, by one more forward pass; None when no block's does."""
    broken: list[int] = []

    def watch(layer: int, output: Any) -> None:
        stream = output[0] if isinstance(output, tuple) else output
        if isinstance(stream, Tensor) and not bool(stream.isfinite().all()):
            broken.append(layer)

    handles = [
        block.register_forward_hook(lambda _module, _inputs, output, layer=layer: watch(layer, output))
        for layer, block in enumerate(network_blocks(model.network))
    ]
    try:
        with torch.no_grad():
            model.last(embeddings)
    finally:
        for handle in handles:
            handle.remove()
    return broken[0] if broken else None


def _parameters(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())
