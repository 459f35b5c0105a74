"""Interventions on what a query sees: no causal mask, a shorter window, the first positions hidden.

Each layer's own mask is replaced by an additive one, handed to its attention module in every forward pass.
"""

from abc import abstractmethod
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Annotated, Any, ClassVar

import numpy as np
import torch
from annotated_types import Ge
from jaxtyping import Bool, Float
from torch import Tensor, nn

from posbias.architecture import MASKS, Architecture, Full, Mask, NoEncoding, SlidingWindow
from posbias.errors import UsageError
from posbias.interventions.base import INTERVENTIONS, Arguments, Intervention, before_calls, described, with_attention
from posbias.models.families.layout import Block, stream_read
from posbias.models.families.parts import AttentionParts
from posbias.models.hugging_face import HuggingFaceModel

WIRED = ("eager", "sdpa")
"""Attention implementations that take an additive mask."""
OWN_MASKS = ("gpt_neo", "mpt")
"""Families whose attention modules apply masks of their own."""
BIASED_MASKS = ("falcon",)
"""Families whose ALiBi, if configured, comes in the mask they hand down."""
HIDDEN_SCORE = torch.finfo(torch.float16).min
"""Number that hides a key from the network: every floating type holds it, and no logit outweighs it."""
HIDDEN_LOGIT = -1e4
"""Number that hides a key in a theory's logits: exp of it is 0, and the digits of logits it is added to survive."""


class Visibility(Intervention):
    """A change of what is visible, layer by layer."""

    ingredient: ClassVar[str] = "causal mask"

    @abstractmethod
    def visible(self, layer_mask: Mask, n_positions: int) -> Bool[np.ndarray, "query key"]:
        """Keys that a layer with the mask `layer_mask` shows under the change; refused if the prompt is too short."""

    @contextmanager
    def change(self, model: HuggingFaceModel) -> Iterator[None]:
        """Hand every attention module its new mask."""
        family = model.family
        check_maskable(model, self)
        masks: dict[tuple[Mask, int, torch.dtype, torch.device], Tensor] = {}

        def replaced(layer_mask: Mask, _: nn.Module, positional: tuple[Any, ...], named: dict[str, Any]) -> Arguments:
            read = stream_read(positional, named)
            key = layer_mask, read.shape[1], read.dtype, read.device
            if key not in masks:  # layers with equal masks share one
                masks[key] = additive(self.visible(layer_mask, read.shape[1])).to(read)
            return positional, {**named, "attention_mask": masks[key]}

        hooks = [
            (block.attention, partial(replaced, family.mask(model.config, layer)))
            for layer, block in family.attention_blocks(model.network)
        ]
        with before_calls(hooks):
            yield


def additive(visible: Bool[np.ndarray, "query key"]) -> Float[Tensor, "1 1 query key"]:
    """0 where visible, a large negative number elsewhere, as transformers writes masks."""
    hidden = torch.as_tensor(~visible)
    return torch.zeros(hidden.shape).masked_fill(hidden, HIDDEN_SCORE)[None, None]


@INTERVENTIONS.register("bidirectional")
@dataclass(frozen=True)
class Bidirectional(Visibility):
    """No causal mask, no window: every position sees every position, in every layer.

    In a theory: mask `full`. With uniform attention the profile is then flat after one layer of attention alone.
    """

    def visible(self, layer_mask: Mask, n_positions: int) -> Bool[np.ndarray, "query key"]:
        """Everything."""
        return Full().visible(n_positions)

    def description(self, model: HuggingFaceModel, *, rerun: bool) -> HuggingFaceModel:
        """Full masks; theories that recompute causal attention refuse them."""
        return described(model, mask=lambda config, layer: Full())

    def in_architecture(self, architecture: Architecture) -> Architecture:
        """Mask `full` in every layer and head."""
        return replace(architecture, mask=Full())


@INTERVENTIONS.register("window")
@dataclass(frozen=True)
class Window(Visibility):
    """No query looks back further than a window, in any attention layer; those with a shorter window keep theirs."""

    width: Annotated[int, Ge(1)]
    """Visible keys, the query's own position included (positions, >= 1)."""

    def visible(self, layer_mask: Mask, n_positions: int) -> Bool[np.ndarray, "query key"]:
        """The layer's own mask within the window."""
        window = SlidingWindow(width=self.width).visible(n_positions)
        return np.asarray(layer_mask.visible(n_positions) & window)

    def description(self, model: HuggingFaceModel, *, rerun: bool) -> HuggingFaceModel:
        """Windows in place of longer masks."""
        family = model.family
        return described(model, mask=lambda config, layer: self._narrowed(family.mask(config, layer)))

    def in_architecture(self, architecture: Architecture) -> Architecture:
        """Windows in place of longer masks, head by head."""
        return replace(architecture, mask=self._narrowed(architecture.mask))

    def _narrowed(self, mask: Any) -> Any:
        """A mask that does not look forwards, its spelling, or lists of them, cut to the window."""
        if isinstance(mask, list | tuple):
            return [self._narrowed(item) for item in mask]
        variant = MASKS.parse(mask) if isinstance(mask, str) else mask
        if variant.mutual_prefix(self.width + 1) > 1:
            raise UsageError(f"{self}: the mask {variant} looks forwards; a window needs causal layers")
        return variant if variant.reach(self.width + 1) <= self.width else SlidingWindow(width=self.width)


@INTERVENTIONS.register("sink_masked")
@dataclass(frozen=True)
class SinkMasked(Visibility):
    """The first positions, where attention sinks sit, are hidden from all later queries; they still see each other.

    Their attention goes to the other visible keys in proportion: the columns are removed and rows renormalised.
    """

    ingredient: ClassVar[str] = "sinks"
    no_ingredient: ClassVar[str] = (
        "an architecture without content has no sinks on its positions, so there is nothing to hide"
    )

    positions: Annotated[int, Ge(1)] = 1
    """Leading positions that are hidden (>= 1, fewer than the prompt has)."""

    def visible(self, layer_mask: Mask, n_positions: int) -> Bool[np.ndarray, "query key"]:
        """The layer's own mask without the first keys, but for their own queries."""
        self._check_length(n_positions)
        index = np.arange(n_positions)
        hidden = (index[:, None] >= self.positions) & (index[None, :] < self.positions)
        visible: np.ndarray = layer_mask.visible(n_positions) & ~hidden
        return visible

    def description(self, model: HuggingFaceModel, *, rerun: bool) -> HuggingFaceModel:
        """A logit so low at the first keys that later queries do not see them."""
        return with_attention(model, lambda parts: replace(parts, position_logits=partial(self._logits, parts)))

    def _check_length(self, n_positions: int) -> None:
        if self.positions >= n_positions:
            raise UsageError(f"{self}: positions must be below the prompt's {n_positions}, got {self.positions}")

    def _logits(self, parts: AttentionParts, n_positions: int) -> Float[Tensor, "heads n_positions"]:
        self._check_length(n_positions)
        device = parts.query.device
        hidden = (torch.arange(n_positions, device=device) < self.positions) * HIDDEN_LOGIT
        if parts.position_logits is None:
            return torch.zeros(parts.heads, 1, device=device) + hidden
        return parts.position_logits(n_positions) + hidden


@INTERVENTIONS.register("no_learned_sinks")
@dataclass(frozen=True)
class NoLearnedSinks(Intervention):
    """The learned sinks of every head take nothing (GPT-OSS): their shares go to the visible keys in proportion."""

    ingredient: ClassVar[str] = "sinks"
    no_ingredient: ClassVar[str] = "an architecture has no learned sinks to take out"

    @contextmanager
    def change(self, model: HuggingFaceModel) -> Iterator[None]:
        """Set logits of -inf in the place of the sinks; the parameter itself comes back afterwards."""
        with ExitStack() as later:
            for block in self._blocks(model):
                learned = block.attention.get_parameter("sinks")
                nothing = nn.Parameter(torch.full_like(learned, -torch.inf), requires_grad=False)
                block.attention.register_parameter("sinks", nothing)
                later.callback(block.attention.register_parameter, "sinks", learned)
            yield

    def description(self, model: HuggingFaceModel, *, rerun: bool) -> HuggingFaceModel:
        """Describe attention without sinks."""
        self._blocks(model)
        return with_attention(model, lambda parts: replace(parts, sinks=None))

    def _blocks(self, model: HuggingFaceModel) -> list[Block]:
        blocks = [block for _, block in model.family.attention_blocks(model.network)]
        if not all("sinks" in dict(block.attention.named_parameters(recurse=False)) for block in blocks):
            raise UsageError(f"{self}: {model.family.name} models have no learned sinks")
        return blocks


def check_maskable(model: HuggingFaceModel, intervention: Intervention | str) -> None:
    """Refuse attention that does not take a plain additive mask."""
    family, config = model.family, model.config
    if not family.attention_blocks(model.network):
        raise UsageError(f"{intervention}: {family.name} models have no attention")
    implementation = getattr(config, "_attn_implementation", None)
    biased = family.name in BIASED_MASKS and not isinstance(family.encoding(config, 0), NoEncoding)
    if family.name in OWN_MASKS or biased or implementation not in WIRED:
        raise UsageError(
            f"{intervention}: {family.name} with {implementation} attention{' and ALiBi' if biased else ''} takes no "
            f"additive mask; allowed are {' and '.join(WIRED)} attention of families other than {', '.join(OWN_MASKS)}"
        )
