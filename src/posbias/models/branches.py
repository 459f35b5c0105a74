"""The stream of a decoder, and what attention adds to it: seen and changed where a block adds the two.

A block's first addition to its input x is x + a, a with every norm and factor behind attention. Blocks whose branches
are parallel may add attention's output and the MLP's before: (m + a) + x. What a linear layer adds in attention's place
is a as well.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import dropout
from torch.overrides import TorchFunctionMode

from posbias.errors import UsageError
from posbias.models.attention import attention_modules, stream_read
from posbias.models.model import BranchNorms

MARK = "posbias_branches"
"""Attribute of a block whose additions are seen: what is done there."""
SUMS = (torch.add, Tensor.add, Tensor.__add__, Tensor.__radd__, Tensor.add_, Tensor.__iadd__)


Done = Callable[[int, Tensor, Tensor | None], None]
"""Called with a block's number, the stream and the branch as they met; the branch is None if none met the stream."""


@dataclass(frozen=True)
class Branches:
    """What is done with the stream and with the branch as they meet: by default nothing."""

    stream: Callable[[Tensor], Tensor] = lambda stream: stream
    """What goes on from the stream."""
    branch: Callable[[Tensor], Tensor] = lambda branch: branch
    """What is added to it."""
    done: Done = lambda *_: None
    """Called when a block is through."""


@dataclass(eq=False)
class _Block(TorchFunctionMode):
    """Sees the additions of one block in one call."""

    stream: Tensor
    changes: Sequence[Branches]
    branch: Tensor | None = None
    passing: Tensor | None = None
    """The stream as it met a branch."""
    total: Tensor | None = None
    """The stream with the branch added."""
    goes_on: bool = False
    """True if the MLP's branch meets it, too."""
    output: Tensor | None = None
    """What the attention module returned."""

    def __post_init__(self) -> None:
        super().__init__()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        named = kwargs or {}
        if func is dropout and self.output is not None and args[0] is self.output:
            self.output = func(*args, **named)
            return self.output
        if func in SUMS and len(args) > 1 and isinstance(args[0], Tensor) and isinstance(args[1], Tensor):
            first, second, *rest = args
            return self._add(lambda *operands: func(*operands, *rest, **named), first, second)
        return func(*args, **named)

    def _add(self, add: Callable[[Tensor, Tensor], Tensor], first: Tensor, second: Tensor) -> Tensor:
        if self.passing is None and (_same(first, self.stream) or _same(second, self.stream)):
            met_first = _same(first, self.stream)
            passing, other = (first, second) if met_first else (second, first)
            for change in self.changes:
                passing = change.stream(passing)
            self.passing, self.goes_on = passing, self.branch is not None
            if self.branch is None:
                other = self._changed(other)
            self.total = add(passing, other) if met_first else add(other, passing)
            return self.total
        if self.branch is None and self.output is not None and (first is self.output or second is self.output):
            met_first, changed = first is self.output, self._changed(self.output)
            return add(changed, second) if met_first else add(first, changed)
        if self.total is not None and (_same(first, self.total) or _same(second, self.total)):
            self.goes_on = True
        return add(first, second)

    def _changed(self, branch: Tensor) -> Tensor:
        for change in self.changes:
            branch = change.branch(branch)
        self.branch = branch
        return branch

    def finish(self, number: int) -> None:
        """Report what met."""
        for change in self.changes:
            if self.passing is None or not self.goes_on:
                change.done(number, self.stream, None)
            else:
                change.done(number, self.passing, self.branch)


def _same(one: Tensor, other: Tensor) -> bool:
    return one is other or (one.numel() == other.numel() and one.data_ptr() == other.data_ptr() != 0)


def named_blocks(network: nn.Module) -> dict[str, nn.Module]:
    """The network's blocks by module path, such as `model.layers.17`, nearest the input first.

    They are the entries of its `nn.ModuleList` with the most parameters; empty if it has none.
    """
    lists = [named for named in network.named_modules() if isinstance(named[1], nn.ModuleList) and len(named[1])]
    if not lists:
        return {}
    path, largest = max(lists, key=lambda named: sum(parameter.numel() for parameter in named[1].parameters()))
    return {f"{path}.{name}".removeprefix("."): block for name, block in largest.named_children()}


def beyond_attention(network: nn.Module) -> list[int]:
    """The layers that have no attention, or beside it a linear layer, which is known by its convolution."""
    return [
        layer
        for layer, block in enumerate(named_blocks(network).values())
        if not attention_modules(block) or any(isinstance(part, nn.Conv1d) for part in block.modules())
    ]


@contextmanager
def branches(network: nn.Module, change: Branches) -> Iterator[Callable[[], None]]:
    """Within the context, every block of a decoder adds its attention branch with a change, and reports what met.

    Contexts may stand one in the other: the later one sees what the earlier one makes. A block has no branch if it does
    not add those of attention and MLP, one after the other or together, to its input. The function that is yielded ends
    the change before the context does.
    """
    ends = ExitStack()
    with ExitStack() as later:
        for number, block in enumerate(named_blocks(network).values()):
            changes = vars(block).get(MARK)
            if changes is None:
                changes = vars(block)[MARK] = []
                name = (
                    "_old_forward" if hasattr(block, "_old_forward") else "forward"
                )  # accelerate's, which moves inputs
                later.callback(_restore, block, name, vars(block).get(name))
                setattr(block, name, partial(_watched, number, block, getattr(block, name)))
            changes.append(change)
            ends.callback(changes.remove, change)
        later.enter_context(ends)
        yield ends.close


def _watched(number: int, block: nn.Module, forward: Callable[..., Any], *positional: Any, **named: Any) -> Any:
    """The forward pass of a block whose additions are seen."""
    changes = tuple(vars(block).get(MARK, ()))
    if not changes:  # ended, or run again for a gradient after the context
        return forward(*positional, **named)
    seen = _Block(stream_read(positional, named), changes)

    def returned(_module: nn.Module, _inputs: Any, output: Any) -> None:
        seen.output = output[0] if isinstance(output, tuple) else output

    with ExitStack() as hooks:
        for attention in attention_modules(block).values():
            hooks.enter_context(attention.register_forward_hook(returned))
        hooks.enter_context(seen)
        result = forward(*positional, **named)
    seen.finish(number)
    return result


def _restore(block: nn.Module, name: str, before: Any) -> None:
    del vars(block)[MARK]
    vars(block).pop(name, None)
    if before is not None:
        setattr(block, name, before)


@dataclass(frozen=True)
class BranchWatch:
    """Norms of the layers that have run so far, of one forward pass."""

    stream: list[Tensor] = field(default_factory=list)
    """|x| of every layer, [batch position]."""
    branch: list[Tensor | None] = field(default_factory=list)
    """|a| of every layer; None if none was seen."""

    def norms(self, layers: Sequence[int] | None = None) -> BranchNorms:
        """Norms of some layers, by default of all.

        Raises:
            UsageError: some layer does not add a branch to its input.
        """
        kept = range(len(self.stream)) if layers is None else layers
        pairs = [(self.stream[layer], self.branch[layer]) for layer in kept]
        without = [layer for layer, (_, branch) in zip(kept, pairs, strict=True) if branch is None]
        if without or not pairs:
            raise UsageError(
                f"mixing needs blocks that add branches of attention and of an MLP to their input; those of layers "
                f"{', '.join(map(str, without))} do not"
            )
        device = pairs[0][0].device  # layers may lie on several
        stream, branch = (torch.stack([norms.to(device) for norms in side]) for side in zip(*pairs, strict=True))
        return BranchNorms(stream, branch.view(stream.shape))

    def done(self, _number: int, stream: Tensor, branch: Tensor | None) -> None:
        """Keep the norms of a block."""
        self.stream.append(_length(stream))
        self.branch.append(None if branch is None else _length(branch))


def _length(vectors: Tensor) -> Tensor:
    dtype = torch.float64 if vectors.dtype == torch.float64 else torch.float32
    length: Tensor = torch.linalg.vector_norm(vectors.detach(), dim=-1, dtype=dtype)
    return length


@contextmanager
def watch_branches(network: nn.Module, *, once: bool = False) -> Iterator[BranchWatch]:
    """Within the context, keep the norms of one forward pass of a network's blocks, in order.

    With `once`, watching stops when the network's first forward pass is over: what runs a block again afterwards
    (checkpointing, the next kind's passes) is then not seen.
    """
    watch = BranchWatch()
    with ExitStack() as hooks:
        end = hooks.enter_context(branches(network, Branches(done=watch.done)))
        if once:
            hooks.callback(network.register_forward_hook(lambda *_: end()).remove)
        yield watch
