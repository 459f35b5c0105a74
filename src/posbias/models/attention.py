"""Attention of a loaded network, and what it adds to the stream: seen and changed in one place.

A module that attends is given a copy of its configuration that names our function for the attention interface of
transformers; the network's own stays, and with it the masks that are made. So queries and keys arrive after norms and
rotation, keys and values with everything that is cached, beside mask, scale, soft cap and learned sinks, whatever
kernel then does the work. Families that do not ask the interface (`EAGER`) are seen at the products and the softmax of
their eager attention, a whole matrix at a time.

A block's first addition to its input x is x + a, a the branch with every norm and factor behind attention. Blocks whose
branches are parallel may add attention's output and the MLP's before: (m + a) + x. What a linear layer adds in
attention's place is a as well.
"""

import copy
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from inspect import signature, unwrap
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.functional import dropout, scaled_dot_product_attention
from torch.overrides import TorchFunctionMode

from posbias.errors import UsageError
from posbias.models.model import BranchNorms

FUNCTION = "posbias"
"""Name under which the function is registered with transformers."""
INTERFACE = "ALL_ATTENTION_FUNCTIONS"
"""What the forward pass of a module calls if its attention goes through the interface."""
SITE, SEEN = "posbias_site", "posbias_seen"
"""Attributes of an attention module: what its calls are handed to, and who gets what its kernel gets."""
GROUPS = "num_key_value_groups"
"""Attribute of an attention module: the number of heads that share a key head."""
EAGER: Mapping[str, Callable[[Any], float]] = {
    "BloomAttention": lambda module: module.inv_norm_factor,
    "CodeGenAttention": lambda module: 1 / float(module.scale_attn),
    "FalconAttention": lambda module: module.inv_norm_factor,
    "GPTJAttention": lambda module: 1 / float(module.scale_attn),
    "GPTNeoSelfAttention": lambda module: 1.0,
    "MptAttention": lambda module: module.softmax_scale,
}
"""Modules that attend without the interface, and the factor of q.k in them."""
PRODUCTS = (Tensor.__matmul__, Tensor.matmul, torch.matmul, torch.bmm, Tensor.bmm, Tensor.baddbmm, torch.baddbmm)

Arguments = tuple[tuple[Any, ...], dict[str, Any]]
"""Positional and named arguments of a module's call."""
Attended = tuple[Tensor, Tensor | None]
"""Result of an attention function: [batch query head feature], and weights if the kernel returns them."""


@dataclass(frozen=True)
class KernelCall:
    """One call of a layer's attention, and the kernel that does the work."""

    layer: int
    module: nn.Module
    query: Float[Tensor, "batch head query feature"]
    """Rotated."""
    key: Float[Tensor, "batch key_head key feature"]
    """Rotated, with everything that is cached."""
    value: Float[Tensor, "batch value_head key value_feature"]
    """Has as many heads as the keys, unless an intervention has more keys cached."""
    mask: Tensor | None
    """The mask transformers made, additive or boolean; None if causality alone hides keys."""
    options: dict[str, Any]
    """All other arguments, `scaling` among them."""
    kernel: Callable[..., Attended]
    logits: Float[Tensor, "head query key"] | None = None
    """All that the softmax gets, of attention without the interface; None elsewhere."""
    arguments: Arguments = ((), {})
    """Those of the attention module, of a call that is watched."""

    @property
    def scaling(self) -> float:
        """Factor of q.k."""
        scaling = self.options.get("scaling")
        return float(self.query.shape[-1] ** -0.5 if scaling is None else scaling)

    @property
    def group(self) -> int:
        """Heads that share a key head."""
        return self.query.shape[1] // self.key.shape[1]

    def run(self, **changed: Any) -> Attended:
        """Run the kernel on the call, with some fields changed."""
        call = replace(self, **changed)
        scaling = call.options.get("scaling")
        options = {**call.options, "scaling": self.scaling if scaling is None else scaling}
        module_groups = vars(call.module).get(GROUPS)
        for receive in () if isinstance(call.kernel, _Site) else vars(call.module).get(SEEN, ()):
            receive(call)
        try:
            if module_groups is not None:
                setattr(call.module, GROUPS, call.group)  # kernels repeat key heads so many times
            return call.kernel(call.module, call.query, call.key, call.value, call.mask, **options)
        finally:
            if module_groups is not None:
                setattr(call.module, GROUPS, module_groups)


Attend = Callable[[KernelCall], Attended]


def attention_modules(network: nn.Module) -> dict[int, nn.Module]:
    """The modules of a network that attend, by layer, counted from 0 at the input; layers without attention have none.

    Each has its configuration and its layer's number.
    """
    found: dict[int, nn.Module] = {}
    for module in network.modules():
        layer = getattr(module, "layer_idx", getattr(module, "layer_id", None))
        if isinstance(layer, int) and (asks_interface(module) or type(module).__name__ in EAGER):
            found[layer] = module
    return dict(sorted(found.items()))


def asks_interface(module: nn.Module) -> bool:
    """Tell whether a module's forward pass calls a function that is registered with transformers."""
    code = getattr(unwrap(type(module).forward), "__code__", None)
    return code is not None and INTERFACE in code.co_names


def stream_read(
    positional: tuple[Any, ...], named: Mapping[str, Any]
) -> Float[Tensor, "*copies batch position feature"]:
    """The stream that a block, or its attention, is about to read, among the arguments of its call.

    Gemma 3n has several copies of it.
    """
    stream: Tensor = positional[0] if positional else named["hidden_states"]
    return stream


@contextmanager
def attention(network: nn.Module, attend: Mapping[int, Attend]) -> Iterator[None]:
    """Within the context, the functions compute the attention of their layers, all of which ask the interface.

    Contexts stand one in the other: what the later one runs is the earlier one's.
    """
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    AttentionInterface.register(FUNCTION, _attention)
    AttentionMaskInterface.register(FUNCTION, ALL_MASK_ATTENTION_FUNCTIONS["sdpa"])  # or it would run unmasked
    modules, before = attention_modules(network), []
    try:
        for layer, function in attend.items():
            module, below = modules[layer], vars(modules[layer]).get(SITE)
            home, config = vars(sys.modules[type(module).__module__]), copy.copy(module.config)
            kernel: Any = below or ALL_ATTENTION_FUNCTIONS.get_interface(
                config._attn_implementation,  # type: ignore[union-attr]
                home.get("eager_attention_forward"),
            )
            before.append((module, module.config, below))
            config._attn_implementation_internal = FUNCTION  # type: ignore[union-attr]
            module.config = config
            setattr(module, SITE, _Site(layer, function, kernel))
        yield
    finally:
        for module, config, below in reversed(before):
            module.config = config
            vars(module).pop(SITE, None)
            if below is not None:
                setattr(module, SITE, below)


@dataclass(frozen=True)
class _Site:
    """What a layer's attention module hands its calls to, and the kernel, or the site, below."""

    layer: int
    attend: Attend
    kernel: Callable[..., Attended]

    def __call__(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **options: Any
    ) -> Attended:
        return self.attend(KernelCall(self.layer, module, query, key, value, mask, options, self.kernel))


def _attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any
) -> Attended:
    """The function registered with transformers, which hands a module's call to its site."""
    return vars(module)[SITE](module, query, key, value, attention_mask, **options)  # type: ignore[no-any-return]


@contextmanager
def _wrapped(module: nn.Module, call: Callable[..., Any]) -> Iterator[None]:
    """Within the context, a module's forward pass is `call` of the one that it has, and of the arguments."""
    name = "_old_forward" if hasattr(module, "_old_forward") else "forward"  # accelerate's, which moves inputs
    before = vars(module).get(name)
    setattr(module, name, partial(call, getattr(module, name)))
    try:
        yield
    finally:
        vars(module).pop(name)
        if before is not None:
            setattr(module, name, before)


class _Products(TorchFunctionMode):
    """Sees eager attention: a product of queries and keys, a softmax, and a product with values."""

    def __init__(self, module: nn.Module, layer: int, receive: Callable[[KernelCall], None]) -> None:
        super().__init__()
        self._module, self._layer, self._receive = module, layer, receive
        self._product: tuple[Tensor, ...] = ()
        self._logits: Tensor | None = None

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        named = kwargs or {}
        if func is scaled_dot_product_attention:
            query, key, value = args[:3]
            self._hand_over(query, key, value, named.get("attn_mask"), None)
        elif getattr(func, "__name__", "") == "softmax":
            self._logits = args[0]
        elif func in PRODUCTS:
            left, right = (named["batch1"], named["batch2"]) if "batch1" in named else args[:2]
            if self._logits is not None:
                query, key = self._product
                self._hand_over(query, key.mT, right, None, self._logits)
                self._logits = None
            self._product = left, right
        return func(*args, **named)

    def _hand_over(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, logits: Tensor | None) -> None:
        module: Any = self._module
        query, key, value = (part.reshape(1, -1, *part.shape[-2:]) for part in (query, key, value))
        options = {"scaling": EAGER[type(module).__name__](module)}
        whole = None if logits is None else logits.reshape(-1, *logits.shape[-2:])
        call = KernelCall(self._layer, module, query, key, value, mask, options, KernelCall.run, whole)
        self._receive(call)


class EnoughError(Exception):
    """All that was wanted of a call is known."""


@contextmanager
def watch_attention(network: nn.Module, receive: Callable[[KernelCall], None]) -> Iterator[None]:
    """Within the context, get what every layer's kernel gets, as a single prompt's pass reaches it; keep nothing."""
    arguments: dict[int, Arguments] = {}

    def keep(layer: int, _module: nn.Module, positional: tuple[Any, ...], named: dict[str, Any]) -> None:
        arguments[layer] = positional, named

    def hand_over(call: KernelCall) -> None:
        receive(replace(call, arguments=arguments.pop(call.layer)))

    def seen(module: nn.Module, layer: int, forward: Callable[..., Any], *positional: Any, **named: Any) -> Any:
        with _Products(module, layer, hand_over):
            return forward(*positional, **named)

    asking: dict[int, Attend] = {}
    with ExitStack() as later:
        for layer, module in attention_modules(network).items():
            # After those of interventions, which may change a call.
            later.enter_context(module.register_forward_pre_hook(partial(keep, layer), with_kwargs=True))
            if asks_interface(module):
                asking[layer], before = KernelCall.run, vars(module).get(SEEN, ())
                later.callback(setattr, module, SEEN, before)
                setattr(module, SEEN, (*before, hand_over))
            else:
                later.enter_context(_wrapped(module, partial(seen, module, layer)))
        with attention(network, asking):
            yield


@torch.no_grad()
def unturned(module: nn.Module, layer: int, arguments: Arguments) -> KernelCall:
    """Queries and keys of an attention module's call before rotation, whatever is changed in it.

    The module computes them once more with cosines of 1 and sines of 0, so that no convention of rotation matters.

    Raises:
        UsageError: the module gets its angles in no known way.
    """
    positional, named = arguments
    angles, entry = named.get("position_embeddings"), "position_embeddings"
    if entry in signature(type(module).forward).parameters and entry not in named:
        raise UsageError(f"{type(module).__name__} of layer {layer} gets its rotary angles in no way posbias knows")
    if angles is not None:  # or, complex numbers of modulus 1
        named = {**named, entry: torch.ones_like(angles) if isinstance(angles, Tensor) else _unit(angles)}
    caught: list[KernelCall] = []

    def catch(call: KernelCall) -> Any:
        caught.append(call)
        raise EnoughError

    table = vars(module).get("_buffers", {}).get("embed_positions")
    with ExitStack() as later:
        for part in module.modules():
            if type(part).__name__.endswith("RotaryEmbedding"):
                later.enter_context(part.register_forward_hook(lambda _module, _inputs, output: _unit(output)))
        if table is not None:  # sines, then cosines
            sine, cosine = table.chunk(2, -1)
            later.callback(setattr, module, "embed_positions", table)
            module.embed_positions = torch.cat([torch.zeros_like(sine), torch.ones_like(cosine)], -1)
        forward: Callable[..., Any] = module.forward
        if asks_interface(module):
            later.enter_context(attention(module, {layer: catch}))
        else:
            forward = partial(type(module).forward, module)
            later.enter_context(_Products(module, layer, catch))
        later.enter_context(suppress(EnoughError))
        forward(*positional, **named)
    return caught[0]


def _unit(angles: Any) -> tuple[Tensor, Tensor]:
    cosine, sine = angles
    return torch.ones_like(cosine), torch.zeros_like(sine)


MARK = "posbias_branches"
"""Attribute of a block whose additions are seen: what is done there."""
SUMS = (torch.add, Tensor.add, Tensor.__add__, Tensor.__radd__, Tensor.add_, Tensor.__iadd__)


Done = Callable[[int, Tensor, Tensor | None], None]
"""Called when a block is through: its number, the stream and the branch as they met, None if none met the stream."""
Change = Callable[[Tensor], Tensor]


def unchanged(tensor: Tensor) -> Tensor:
    """What goes on from the stream, or is added to it, as it is."""
    return tensor


@dataclass(eq=False)
class _Block(TorchFunctionMode):
    """Sees the additions of one block in one call."""

    stream: Tensor
    changes: Sequence[tuple[Change, Change, Done]]
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
            for stream, _, _ in self.changes:
                passing = stream(passing)
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
        for _, change, _ in self.changes:
            branch = change(branch)
        self.branch = branch
        return branch

    def finish(self, number: int) -> None:
        """Report what met."""
        branch = self.branch if self.goes_on else None
        stream = self.stream if branch is None or self.passing is None else self.passing
        for _, _, done in self.changes:
            done(number, stream, branch)


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
def branches(
    network: nn.Module, done: Done, *, stream: Change = unchanged, branch: Change = unchanged
) -> Iterator[Callable[[], None]]:
    """Within the context, every block of a decoder adds its attention branch with a change, and reports what met.

    Contexts may stand one in the other: the later one sees what the earlier one makes. A block has no branch if it does
    not add those of attention and MLP, one after the other or together, to its input. The function that is yielded ends
    the change before the context does.
    """
    ends, change = ExitStack(), (stream, branch, done)
    with ExitStack() as later:
        for number, block in enumerate(named_blocks(network).values()):
            changes = vars(block).get(MARK)
            if changes is None:
                changes = vars(block)[MARK] = []
                later.callback(vars(block).pop, MARK)
                later.enter_context(_wrapped(block, partial(_watched, number, block)))
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


@dataclass(frozen=True)
class BranchWatch:
    """Norms of the layers that have run so far, of one forward pass."""

    seen: list[tuple[Tensor, Tensor | None]] = field(default_factory=list)
    """|x| and |a| of every layer, [batch position] each; None if no branch was seen."""

    def norms(self, layers: Sequence[int] | None = None) -> BranchNorms:
        """Norms of some layers, by default of all.

        Raises:
            UsageError: some layer does not add a branch to its input.
        """
        kept = dict(enumerate(self.seen)) if layers is None else {layer: self.seen[layer] for layer in layers}
        without = [str(layer) for layer, (_, branch) in kept.items() if branch is None]
        if without or not kept:
            raise UsageError(
                f"mixing needs blocks that add branches of attention and of an MLP to their input; those of layers "
                f"{', '.join(without)} do not"
            )
        device = self.seen[0][0].device  # layers may lie on several
        stream, branch = (torch.stack([part.to(device) for part in side]) for side in zip(*kept.values(), strict=True))
        return BranchNorms(stream, branch.view(stream.shape))

    def done(self, _number: int, stream: Tensor, branch: Tensor | None) -> None:
        """Keep the norms of a block."""
        dtype = torch.promote_types(stream.dtype, torch.float32)
        length = partial(torch.linalg.vector_norm, dim=-1, dtype=dtype)
        self.seen.append((length(stream.detach()), None if branch is None else length(branch.detach())))


@contextmanager
def watch_branches(network: nn.Module) -> Iterator[BranchWatch]:
    """Within the context, keep the norms of the network's blocks in its first forward pass, in order.

    What runs a block again afterwards (checkpointing, the next kind's passes) is not seen.
    """
    watch = BranchWatch()
    with branches(network, watch.done) as end, network.register_forward_hook(lambda *_: end()):
        yield watch
