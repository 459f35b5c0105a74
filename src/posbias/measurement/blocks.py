"""The network as a list of blocks, for activation checkpointing and to find where a pass stops being finite.

Checkpointing here needs no training mode (which would switch dropout on) and no family description: the blocks are
the entries of the network's largest `nn.ModuleList`. Each keeps only its input and is run again when a gradient
passes through it. Memory falls from all layers' activations to one layer's plus one stream per layer; time rises by
one forward per backward pass. A half precision model may run to a finite output and overflow only in its gradients, so
both ways are watched.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

from posbias.errors import UsageError
from posbias.models.model import Model
from posbias.models.weights import dispatched


def named_blocks(network: nn.Module) -> dict[str, nn.Module]:
    """The network's blocks by module path, such as `model.layers.17`, nearest the input first.

    They are the entries of its `nn.ModuleList` with the most parameters; empty if it has none.
    """
    lists = [named for named in network.named_modules() if isinstance(named[1], nn.ModuleList) and len(named[1])]
    if not lists:
        return {}
    path, largest = max(lists, key=lambda named: sum(parameter.numel() for parameter in named[1].parameters()))
    return {f"{path}.{name}".removeprefix("."): block for name, block in largest.named_children()}


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
    broken: list[str] = []

    def look(name: str, stream: Tensor) -> None:
        if not bool(stream.isfinite().all()):
            broken.append(name)

    with _at_block_outputs(model.network, look), torch.no_grad():
        model.last(embeddings.detach())
    return f", first in {broken[0]}" if broken else ""


@contextmanager
def first_in_backward(network: nn.Module) -> Iterator[Callable[[], str]]:
    """Watch the gradients of a forward and backward pass within the context.

    Yields a function that afterwards names the block in which the gradient, coming from the output, first holds NaN or
    infinity, as the end of a sentence.
    """
    names = list(named_blocks(network))
    broken: set[str] = set()

    def look(name: str, stream: Tensor) -> None:
        def check(gradient: Tensor) -> None:
            if not bool(gradient.isfinite().all()):
                broken.add(name)

        if stream.requires_grad:
            stream.register_hook(check)  # type: ignore[no-untyped-call]

    def answer() -> str:
        if not names:
            return ""
        # The block after the last broken one had a finite gradient at its output and gave a broken one to its input.
        last = max((index for index, name in enumerate(names) if name in broken), default=-1)
        if last == len(names) - 1:
            return f", first after {names[-1]}, between the output and the blocks"
        return f", first in {names[last + 1]} on the way back"

    with _at_block_outputs(network, look):
        yield answer


@contextmanager
def block_outputs(network: nn.Module) -> Iterator[list[Tensor]]:
    """Within the context, collect the stream after every block, differentiable, in the order of the blocks."""
    streams: list[Tensor] = []
    with _at_block_outputs(network, lambda _name, stream: streams.append(stream)):
        yield streams


@contextmanager
def _at_block_outputs(network: nn.Module, look: Callable[[str, Tensor], None]) -> Iterator[None]:
    def hook(name: str, _module: nn.Module, _inputs: tuple[Any, ...], output: Any) -> None:
        stream = output[0] if isinstance(output, tuple) else output
        if isinstance(stream, Tensor):
            look(name, stream)

    with ExitStack() as hooks:
        for name, block in named_blocks(network).items():
            hooks.callback(block.register_forward_hook(partial(hook, name)).remove)
        yield
