"""Attention of a loaded network, seen and changed in one place: the attention interface of transformers.

A module that attends is given a copy of its configuration that names our function; the network's own stays, and with it
the masks that are made. So queries and keys arrive after norms and rotation, keys and values with everything that is
cached, beside mask, scale, soft cap and learned sinks, whatever kernel then does the work. Families that do not ask the
interface (`EAGER`) are seen at the products and the softmax of their eager attention, a whole matrix at a time.
"""

import copy
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from inspect import signature, unwrap
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from torch.overrides import TorchFunctionMode

from posbias.errors import UsageError

PLAIN_KERNEL = "sdpa_attention_forward"
"""The kernel of transformers that returns no weights."""
FUNCTION = "posbias"
"""Name under which the function is registered with transformers."""
INTERFACE = "ALL_ATTENTION_FUNCTIONS"
"""What the forward pass of a module calls if its attention goes through the interface."""
SITE = "posbias_site"
"""Attribute of an attention module whose calls are handed over."""
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
    plain: bool
    """The kernel is torch's fused one, which returns no weights."""
    logits: Float[Tensor, "head query key"] | None = None
    """All that the softmax gets, of attention without the interface; None elsewhere."""

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
        try:
            if module_groups is not None:
                setattr(call.module, GROUPS, call.group)  # kernels repeat key heads so many times
            return call.kernel(call.module, call.query, call.key, call.value, call.mask, **options)
        finally:
            if module_groups is not None:
                setattr(call.module, GROUPS, module_groups)


Receive = Callable[[KernelCall], None]
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

    AttentionInterface.register(FUNCTION, _attention)
    AttentionMaskInterface.register(FUNCTION, ALL_MASK_ATTENTION_FUNCTIONS["sdpa"])  # or it would run unmasked
    modules = attention_modules(network)
    before: list[tuple[nn.Module, Any, Any]] = []
    try:
        for layer, function in attend.items():
            module = modules[layer]
            site, config = _Site(layer, module, function), copy.copy(module.config)
            before.append((module, module.config, vars(module).get(SITE)))
            config._attn_implementation_internal = FUNCTION  # type: ignore[union-attr]
            module.config = config
            setattr(module, SITE, site)
        yield
    finally:
        for module, config, outer in reversed(before):
            module.config = config
            vars(module).pop(SITE, None)
            if outer is not None:
                setattr(module, SITE, outer)


@contextmanager
def seen_attention(network: nn.Module, receive: Mapping[int, Receive]) -> Iterator[None]:
    """Within the context, each function gets what the kernel of its layer gets, in every pass of a single prompt."""
    modules, plain = attention_modules(network), {}
    with ExitStack() as later:
        for layer, function in receive.items():
            if asks_interface(modules[layer]):
                plain[layer] = _run
            else:
                later.enter_context(_eagerly(modules[layer], layer, function))
        later.enter_context(attention(network, {layer: f for layer, f in plain.items() if not _site(modules[layer])}))
        for layer in plain:
            site = _site(modules[layer])
            while isinstance(site.kernel, _Site):
                site = site.kernel
            later.callback(setattr, site, "received", site.received)
            site.received = receive[layer]
        yield


def _run(call: KernelCall) -> Attended:
    return call.run()


def _site(module: nn.Module) -> Any:
    return vars(module).get(SITE)


class _Site:
    """A layer's attention module whose calls are handed over, and the kernel below."""

    received: Receive | None = None

    def __init__(self, layer: int, module: nn.Module, attend: Attend) -> None:
        from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

        self.layer, self.attend = layer, attend
        home: Any = vars(sys.modules[type(module).__module__])
        config: Any = module.config
        self.kernel = _site(module) or ALL_ATTENTION_FUNCTIONS.get_interface(
            config._attn_implementation, home.get("eager_attention_forward")
        )
        self.plain: bool = self.kernel.plain if isinstance(self.kernel, _Site) else self.kernel.__name__ == PLAIN_KERNEL

    def __call__(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **options: Any
    ) -> Attended:
        call = KernelCall(self.layer, module, query, key, value, mask, options, self.below, self.plain)
        return self.attend(call)

    def below(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **options: Any
    ) -> Attended:
        if self.received is not None:
            self.received(KernelCall(self.layer, module, query, key, value, mask, options, self.kernel, self.plain))
        attended: Attended = self.kernel(module, query, key, value, mask, **options)
        return attended


def _attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any
) -> Attended:
    """The function registered with transformers, which hands a module's call to its site."""
    return _site(module)(module, query, key, value, attention_mask, **options)  # type: ignore[no-any-return]


class _Products(TorchFunctionMode):
    """Sees eager attention: a product of queries and keys, a softmax, and a product with values."""

    def __init__(self, module: nn.Module, layer: int, receive: Receive) -> None:
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
        self._receive(KernelCall(self._layer, module, query, key, value, mask, options, _run, False, whole))


@contextmanager
def _eagerly(module: nn.Module, layer: int, receive: Receive) -> Iterator[None]:
    """Within the context, a module without the interface hands over what it multiplies."""
    plain = module.forward

    def forward(*positional: Any, **named: Any) -> Any:
        with _Products(module, layer, receive):
            return plain(*positional, **named)

    module.forward = forward
    try:
        yield
    finally:
        del module.forward


class EnoughError(Exception):
    """All that was wanted of a call is known."""


Arguments = tuple[tuple[Any, ...], dict[str, Any]]
"""Positional and named arguments of a module's call."""


@torch.no_grad()
def unturned(module: nn.Module, layer: int, arguments: Arguments) -> KernelCall:
    """Queries and keys of an attention module's call before rotation, whatever is changed in it.

    The module computes them once more with cosines of 1 and sines of 0, so that no convention of rotation matters.

    Raises:
        UsageError: the module gets its angles in no known way.
    """
    positional, named = arguments
    angles = named.get("position_embeddings")
    if "position_embeddings" in signature(type(module).forward).parameters and "position_embeddings" not in named:
        raise UsageError(f"{type(module).__name__} of layer {layer} gets its rotary angles in no way posbias knows")
    if isinstance(angles, Tensor):  # complex numbers of modulus 1
        named = {**named, "position_embeddings": torch.ones_like(angles)}
    elif angles is not None:
        named = {**named, "position_embeddings": _unit(angles)}
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
