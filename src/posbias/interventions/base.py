"""An intervention: one ingredient of position bias replaced, in a model that runs and in the theory that describes it.

Two faces of the same change. `change` alters the network while a context is open; `description` is the model as a
theory that reads its weights should see it. An intervened model is off its training distribution: what it shows is how
it computes, not what it would have learned.

Calls of attention come from the one place where it is changed (`models.attention`), with the positions of their tokens.
Queries and keys arrive rotated, keys and values with everything that is cached, so caches, batches with padding,
grouped heads and windows go on as they are.
"""

import copy
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from inspect import signature
from typing import Any, ClassVar, Generic, TypeVar

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn.functional import pad
from torch.utils.hooks import RemovableHandle

from posbias.checks import checked
from posbias.errors import UsageError
from posbias.models.attention import Arguments as Arguments
from posbias.models.attention import Attended as Attended
from posbias.models.attention import KernelCall, asks_interface, attention, attention_modules
from posbias.models.hugging_face import INTERVENTION_MARK, HuggingFaceModel
from posbias.registry import Registry, Spelled, split_literals

INTERVENTIONS: Registry["Intervention"] = Registry(
    "intervention",
    left={
        "no_alibi": "`posbias predict` with and without --encoding alibi",
        "no_learned_positions": "zeros in the model's own table of positions, by hand",
        "no_learned_sinks": "`posbias attention` tells the sinks' share",
        "scaled_rope": "no_rope, or another rope_scaling in config.json",
    },
)


class Intervention(Spelled, ABC):
    """One change of one ingredient."""

    ingredient: ClassVar[str]
    """The ingredient: "causal mask", "residual strength", "encoding", "content" or "sinks"."""

    @abstractmethod
    def change(self, model: HuggingFaceModel) -> AbstractContextManager[None]:
        """Within the context, the network computes with the change; afterwards it is bit for bit what it was.

        Raises:
            UsageError: on entry, the model does not allow it; the message says why.
        """

    def description(self, model: HuggingFaceModel) -> HuggingFaceModel:
        """The model, changed, as theories should read it: by default those of its own forward pass alone."""

        def mask(_config: Any, _layer: int) -> Any:
            raise UsageError(f"no theory of masks and encodings speaks of {self}; power_rollout is allowed")

        return described(model, mask=mask)


@checked
@contextmanager
def intervened(model: HuggingFaceModel, intervention: Intervention | str) -> Iterator[HuggingFaceModel]:
    """Context in which one ingredient of a model is replaced; measure it like any other model.

    The network is changed in place, by hooks: until the context ends, `model` computes with the change, too. No weight
    is touched, and afterwards every logit is bit for bit what it was.

    Args:
        model: A Hugging Face model of `load_model`.
        intervention: An object or its literal spelling, `"window(width=64)"`.

    Yields:
        The changed model, with a description of the change where the theories have one.

    Raises:
        UsageError: an unknown intervention, one the model does not allow, or a second one on the same network.
    """
    (resolved,) = resolve_interventions([intervention])
    if model.intervention is not None:  # a second mask would silently replace the first
        raise UsageError(f"{resolved}: the model is already intervened on; one intervention at a time is allowed")
    try:
        with resolved.change(model):
            setattr(model.network, INTERVENTION_MARK, str(resolved))
            yield resolved.description(model)
    finally:
        vars(model.network).pop(INTERVENTION_MARK, None)


def resolve_interventions(interventions: Sequence[Intervention | str] | Intervention | str) -> tuple[Intervention, ...]:
    """Parse interventions from literal spellings, such as "no_rope,no_content", objects, or both; none twice."""
    given = split_literals(interventions) if isinstance(interventions, str) else interventions
    listed = [given] if isinstance(given, Intervention) else given
    resolved = tuple(INTERVENTIONS.parse(item) if isinstance(item, str) else item for item in listed)
    if not resolved:
        raise UsageError(f"no intervention given; known: {', '.join(INTERVENTIONS)}")
    spelled = [str(item) for item in resolved]
    for name in spelled:
        if spelled.count(name) > 1:
            raise UsageError(f"intervention {name!r} is given {spelled.count(name)} times; give each once")
    return resolved


def described(model: HuggingFaceModel, **answers: Callable[..., Any]) -> HuggingFaceModel:
    """Describe the model, if its family is known, by one like it that answers some questions differently."""
    if not model.described:
        return model
    changed = copy.copy(model.family)
    vars(changed).update(answers)  # an instance precedes its class
    return model.described_by(changed)


def before_calls(hooks: Iterable[tuple[nn.Module, Callable[..., Any]]]) -> AbstractContextManager[None]:
    """Within the context, each hook(module, positional, named) stands before every call of its module."""
    return hooked(module.register_forward_pre_hook(hook, with_kwargs=True) for module, hook in hooks)


@contextmanager
def hooked(handles: Iterable[RemovableHandle]) -> Iterator[None]:
    """Within the context, hooks stay where they were registered."""
    with ExitStack() as hooks:
        for handle in handles:
            hooks.enter_context(handle)
        yield


CACHES = ("past_key_values", "layer_past")
"""Names of the argument that hands attention modules their cache."""
ALIGNMENT = 8
"""Features of a head are filled up to a multiple of this, at which kernels are quick."""
Attend = Callable[["AttentionCall"], Attended]
"""An intervention's own attention function, called in place of a layer's."""


@dataclass(frozen=True, kw_only=True)
class AttentionCall(KernelCall):
    """One call of a layer's attention, with the positions of its tokens."""

    query_positions: Int[Tensor, "_ query"]
    """Position of every query in its prompt, 0 at the first token; one row for all prompts, or one for each if some
    are padded (padding counts as 0)."""
    key_positions: Int[Tensor, "_ key"]
    slots: int
    """Slots of a prompt that were read so far, padding and those of the call included: positions are below."""
    cached_keys: Tensor | None = None
    """The tensor of keys that the layer's cache held before the call; None if there was none, or it is not known."""

    def run_biased(self, added: Float[Tensor, "_ head key"], share: Float[Tensor, "_ query"] | None = None) -> Attended:
        """Run with a number added to the logit of every key, for each head, times a share for every query.

        The numbers are carried by further features: those of queries name the head among the heads that share a key
        head, those of keys hold the numbers. No matrix of queries by keys is formed, so every kernel stays as quick as
        it is, without a mask too; a single query gets a short mask. In half precision a number is split into two that
        together have its digits.
        """
        batch = len(self.query)
        if self.query.shape[2] == 1:
            return self._run_single(added if share is None else added * share[:, None])
        precise = added if self.query.dtype == torch.float64 else added.float()
        parts = _parts(precise, self.key.dtype)
        numbers = torch.stack([part.expand(batch, -1, -1) for part in parts], -1)
        numbers = (
            numbers.reshape(batch, -1, self.group, *numbers.shape[2:]).transpose(2, 3).flatten(3)
        )  # [batch key_head key group*parts]
        one_hot = torch.eye(self.group, dtype=self.query.dtype, device=self.query.device) / self.scaling
        names = one_hot.repeat_interleave(len(parts), 1).repeat(self.key.shape[1], 1)[None, :, None]
        if share is not None:
            names = names * share.to(names)[:, None, :, None]
        return self._run_extended(names, numbers)

    def run_grouped(self, added: Float[Tensor, "_ _ query group"], members: Float[Tensor, "_ key group"]) -> Attended:
        """Run with a number added to the logits of every group of keys, a different one for each query.

        A key in several groups (`members` is 1 there, 0 elsewhere) gets the sum. Each group is carried by one further
        feature, two in half precision: no matrix of queries by keys is formed.
        """
        if self.query.shape[2] == 1:
            logits = added[:, :, 0] @ members.to(added).mT
            return self._run_single(logits.expand(-1, self.query.shape[1], -1))
        largest = torch.finfo(self.query.dtype).max / 2
        parts = _parts((added / self.scaling).clamp(-largest, largest), self.query.dtype)
        numbers = torch.cat([members.to(self.key)] * len(parts), -1)
        return self._run_extended(torch.cat(parts, -1), numbers[:, None])

    def run_on(self, value: Float[Tensor, "batch key_head key values"], **changed: Any) -> Attended:
        """Run on values of any width; the kernel gets queries, keys and values filled with zeros to one width."""
        query, key = changed.get("query", self.query), changed.get("key", self.key)
        width = max(query.shape[-1], value.shape[-1])
        width += -width % ALIGNMENT if width > self.query.shape[-1] else 0
        query, key, wide = (pad(features, (0, width - features.shape[-1])) for features in (query, key, value))
        output, weights = self.run(query=query, key=key, value=wide)
        return output[..., : value.shape[-1]], weights

    def _run_extended(self, names: Float[Tensor, "_ _ _ extra"], numbers: Float[Tensor, "_ _ key extra"]) -> Attended:
        """Run with further features of queries and keys."""
        query = torch.cat([self.query, names.expand(*self.query.shape[:3], -1)], -1)
        key = torch.cat([self.key, numbers.expand(*self.key.shape[:3], -1)], -1)
        return self.run_on(self.value, query=query, key=key)

    def _run_single(self, added: Float[Tensor, "_ head key"]) -> Attended:
        """Run one query with numbers added to its logits; it sees every key that its mask, if any, does not hide."""
        logits = added.to(self.query.dtype)[:, :, None]
        if self.mask is not None and self.mask.dtype == torch.bool:
            logits = torch.where(self.mask, logits, torch.finfo(logits.dtype).min)
        elif self.mask is not None:
            logits = (logits + self.mask).clamp(min=torch.finfo(logits.dtype).min)
        return self.run(mask=logits.expand(len(self.query), -1, -1, -1))


def _parts(numbers: Tensor, dtype: torch.dtype) -> list[Tensor]:
    """Numbers in a type; in half precision two that together have their digits."""
    first = numbers.to(dtype)
    whole = dtype in (torch.float32, torch.float64)
    return [first] if whole else [first, (numbers - first.to(numbers.dtype)).to(dtype)]


class Padding:
    """Follows how many slots at the beginning of every prompt of a batch are padding, by the mask of the network."""

    def __init__(self) -> None:
        self.slots: Tensor | None = None
        self.past, self.shape = 0, torch.Size()
        self._known: dict[tuple[int, int], Tensor] = {}

    def read(self, network: nn.Module, positional: tuple[Any, ...], named: dict[str, Any]) -> None:
        """Hook on the whole network: take in its two-dimensional mask, if any."""
        arguments = named_arguments(network, positional, named)
        self.past, self.shape = cached_length(arguments), entering(arguments).shape
        mask = arguments.get("attention_mask")
        padded = isinstance(mask, Tensor) and mask.ndim == 2 and not bool(mask.all())
        self.slots = (mask.cumsum(-1) == 0).sum(-1) if padded and mask is not None else None
        self._known.clear()

    def forget(self, *_: Any) -> None:
        """Hook behind the network, so that a part of it that is called alone has no padding."""
        self.slots = None
        self._known.clear()

    def followed(self, network: nn.Module) -> AbstractContextManager[None]:
        """Within the context, follow the network's calls."""
        first = network.register_forward_pre_hook(self.read, with_kwargs=True)
        return hooked([first, network.register_forward_hook(self.forget, with_kwargs=True, always_call=True)])

    def reading(self, device: torch.device) -> Int[Tensor, "batch token"]:
        """Positions of all tokens that the network now reads."""
        batch, count = self.shape[:2]
        return self.between(self.past, self.past + count, device).expand(batch, -1)

    def between(self, first: int, last: int, device: torch.device) -> Int[Tensor, "_ slot"]:
        """Positions, in their prompts, of the slots first ... last - 1, found once for all layers of a pass."""
        if (first, last) not in self._known:
            slots = torch.arange(first, last, device=device)[None]
            if self.slots is not None:  # padding counts as 0
                slots = (slots - self.slots[:, None].to(slots)).clamp(min=0)
            self._known[first, last] = slots
        return self._known[first, last].to(device)


State = TypeVar("State")


class PerCache(Generic[State]):
    """A state for each prompt that a network reads, recognised by the prompt's cache, so that prompts may take turns.

    An unknown cache is taken for a copy of the last one.

    Args:
        read: Called before the network reads, with the network, its arguments, and the state of its cache (None:
            nothing is cached); returns the state from then on.
        latest: The last state, before the first call.
    """

    def __init__(
        self, read: Callable[[nn.Module, dict[str, Any], State | None], State | None], latest: State | None = None
    ) -> None:
        self._read, self.latest = read, latest
        self._kept: weakref.WeakKeyDictionary[Any, State] = weakref.WeakKeyDictionary()
        self.current: State | None = None
        """State of what the network is reading; None if only a part of the network was called."""

    def followed(self, network: nn.Module) -> AbstractContextManager[None]:
        """Within the context, follow everything that the network reads."""

        def before(network: nn.Module, positional: tuple[Any, ...], named: dict[str, Any]) -> None:
            arguments = named_arguments(network, positional, named)
            state = self._kept.get(cache_of(arguments), self.latest) if cached_length(arguments) else None
            state = self.current = self._read(network, arguments, state)
            self.latest = self.latest if state is None else state

        def after(network: nn.Module, positional: tuple[Any, ...], named: dict[str, Any], output: Any) -> None:
            cache, state = cache_of(named_arguments(network, positional, named)), self.current
            cache = getattr(output, CACHES[0], None) if cache is None else cache
            if cache is not None and state is not None:
                self._kept[cache] = state
            self.current = None

        first = network.register_forward_pre_hook(before, with_kwargs=True)
        return hooked([first, network.register_forward_hook(after, with_kwargs=True)])


def named_arguments(network: nn.Module, positional: tuple[Any, ...], named: dict[str, Any]) -> dict[str, Any]:
    """Arguments of a network's call by name; a first one without a name is the token ids."""
    if not positional:
        return named
    names = [name for name in signature(network.forward).parameters if name != "args"]
    return {"input_ids": positional[0], **dict(zip(names, positional, strict=False)), **named}


def entering(arguments: Mapping[str, Any]) -> Tensor:
    """The embeddings, or token ids, that a network is to read."""
    embeddings: Tensor | None = arguments.get("inputs_embeds")
    return arguments["input_ids"] if embeddings is None else embeddings


def cached_length(arguments: dict[str, Any], layer: Any = 0) -> int:
    """Tokens, or slots of one layer, that are cached before those which a network or attention module is to read."""
    cache = cache_of(arguments)
    return 0 if cache is None else int(cache.get_seq_length(layer))


def cache_of(named: Mapping[str, Any]) -> Any:
    """The cache among the named arguments, or outputs, of a module or network; None if there is none."""
    return next((named[name] for name in CACHES if named.get(name) is not None), None)


def has_sinks(model: HuggingFaceModel) -> bool:
    """Tell whether the softmax of a model's attention has a learned logit that belongs to no key."""
    return any(getattr(module, "sinks", None) is not None for module in attention_modules(model.network).values())


def is_wired(model: HuggingFaceModel) -> bool:
    """Tell whether every attention module asks transformers' attention interface, and caps no logits."""
    modules = attention_modules(model.network).values()
    capped = getattr(model.config, "attn_logit_softcapping", None) is not None
    return bool(modules) and not capped and all(map(asks_interface, modules))


@contextmanager
def attending(model: HuggingFaceModel, intervention: object, attend: Attend) -> Iterator[None]:
    """Within the context, `attend` computes every layer's attention.

    Raises:
        UsageError: on entry, the family's attention does not go through functions registered with transformers.
    """
    if not is_wired(model):
        raise UsageError(
            f"{intervention}: {model.model_type} models do not let attention be replaced; allowed are families whose "
            "attention goes through transformers' attention interface, such as llama, qwen2, qwen3, gemma3 and mistral"
        )
    network, padding, modules = model.network, Padding(), attention_modules(model.network)
    before: dict[int, tuple[int, Tensor | None]] = {}

    def read_layer(layer: int, _module: nn.Module, _positional: tuple[Any, ...], named: dict[str, Any]) -> None:
        """Find what the layer had read before its current call extends its cache."""
        layers: Any = getattr(cache_of(named), "layers", ())
        cached_keys = getattr(layers[layer], "keys", None) if layer < len(layers) else None
        before[layer] = cached_length(named, layer), cached_keys

    def placed(call: KernelCall) -> Attended:
        past, cached_keys = before[call.layer]
        total, device = past + call.query.shape[2], call.query.device
        first = max(0, total - call.key.shape[2])  # a window's cache holds no others; a static one has room behind
        whole = AttentionCall(
            **vars(call),
            query_positions=padding.between(past, total, device),
            key_positions=padding.between(first, first + call.key.shape[2], device),
            slots=total,
            cached_keys=cached_keys,
        )
        return attend(whole)

    hooks = [(module, partial(read_layer, layer)) for layer, module in modules.items()]
    with padding.followed(network), before_calls(hooks), attention(network, dict.fromkeys(modules, placed)):
        yield


class KeptKeys:
    """Changed keys, kept beside the cache, so that a step of decoding has to change the new ones alone.

    They serve the next single query of a layer while its cache goes on from the very tensor of the last; after anything
    else (a prompt, a window that moves on, a cache that was cut or reordered) all are changed anew.
    """

    def __init__(self) -> None:
        self._kept: dict[int, tuple[weakref.ref[Tensor], object, Tensor]] = {}

    def of(self, call: AttentionCall, mark: object, change: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
        """Keys after `change`, which takes keys and positions, each on its own; another `mark` changes all anew."""
        last, last_mark, before = self._kept.pop(call.layer, (lambda: None, None, call.key))
        if call.query.shape[2] > 1 or call.key.requires_grad:
            return change(call.key, call.key_positions)
        cached = call.cached_keys
        goes_on = cached is not None and last() is cached and last_mark is mark
        ready = cached.shape[2] if cached is not None and goes_on else 0
        keys = change(call.key[:, :, ready:], call.key_positions[:, ready:])
        keys = torch.cat([before, keys], 2) if ready else keys
        self._kept[call.layer] = weakref.ref(call.key), mark, keys
        return keys
