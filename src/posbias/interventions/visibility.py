"""Interventions on what a query sees: no causal mask, a shorter window, the first positions hidden.

Each layer's own mask is replaced by an additive one, handed to its attention module in every forward pass.
"""

from abc import abstractmethod
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Annotated, Any, ClassVar

import torch
from annotated_types import Ge
from jaxtyping import Bool, Float
from torch import Tensor, nn

from posbias.architecture import MASKS, Architecture, Full, SlidingWindow
from posbias.errors import UsageError
from posbias.interventions.base import INTERVENTIONS, Arguments, Intervention, before_calls, described
from posbias.models.attention import attention_modules, stream_read
from posbias.models.attention_blocks import HIDDEN_SCORE
from posbias.models.hugging_face import HuggingFaceModel

WIRED = ("eager", "sdpa")
"""Attention implementations that take an additive mask."""
OWN_MASKS = ("gpt_neo", "mpt")
"""Families whose attention modules apply masks of their own."""

Pairs = Bool[Tensor, "_ query key"]
"""Keys that queries see, in all heads or each."""


class Visibility(Intervention):
    """A change of what is visible, layer by layer."""

    ingredient: ClassVar[str] = "causal mask"

    @abstractmethod
    def visible(self, before: Pairs) -> Pairs:
        """What a layer shows under the change, from what it shows; refused if the prompt is too short."""

    @contextmanager
    def change(self, model: HuggingFaceModel) -> Iterator[None]:
        """Hand every attention module its new mask."""
        check_maskable(model, self)

        def replaced(_: nn.Module, positional: tuple[Any, ...], named: dict[str, Any]) -> Arguments:
            read = stream_read(positional, named)
            visible = self.visible(shown(named.get("attention_mask"), read.shape[1], read.device))
            return positional, {**named, "attention_mask": additive(visible).to(read)}

        with before_calls((module, replaced) for module in attention_modules(model.network).values()):
            yield


def shown(mask: Tensor | None, n_positions: int, device: torch.device) -> Pairs:
    """Keys that a mask shows to the last queries among so many positions; without a mask a layer is causal."""
    if mask is None:
        return torch.ones(1, n_positions, n_positions, dtype=torch.bool, device=device).tril()
    return mask[0] if mask.dtype == torch.bool else mask[0] > HIDDEN_SCORE / 2


def additive(visible: Pairs) -> Float[Tensor, "1 _ query key"]:
    """0 where visible, a large negative number elsewhere, as transformers writes masks."""
    return torch.zeros(visible.shape, device=visible.device).masked_fill(~visible, HIDDEN_SCORE)[None]


@INTERVENTIONS.register("bidirectional")
@dataclass(frozen=True)
class Bidirectional(Visibility):
    """No causal mask, no window: every position sees every position, in every layer.

    In a theory: mask `full`. With uniform attention the profile is then flat after one layer of attention alone.
    """

    def visible(self, before: Pairs) -> Pairs:
        """Everything."""
        return torch.ones_like(before)

    def description(self, model: HuggingFaceModel, *, rerun: bool) -> HuggingFaceModel:
        """Full masks; theories that read causal attention refuse them."""
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

    def visible(self, before: Pairs) -> Pairs:
        """The layer's own mask within the window."""
        return before.triu(1 - self.width)

    def description(self, model: HuggingFaceModel, *, rerun: bool) -> HuggingFaceModel:
        """Windows in place of longer masks."""
        if not model.described:
            return model
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

    def visible(self, before: Pairs) -> Pairs:
        """The layer's own mask without the first keys, but for their own queries."""
        n_positions = before.shape[-1]
        if self.positions >= n_positions:
            raise UsageError(f"{self}: positions must be below the prompt's {n_positions}, got {self.positions}")
        visible = before.clone()
        visible[..., self.positions :, : self.positions] = False
        return visible

    def description(self, model: HuggingFaceModel, *, rerun: bool) -> HuggingFaceModel:
        """Leave the model as it is: what reads attention sees what it hides."""
        return model


@INTERVENTIONS.register("no_learned_sinks")
@dataclass(frozen=True)
class NoLearnedSinks(Intervention):
    """The learned sinks of every head take nothing (GPT-OSS): their shares go to the visible keys in proportion."""

    ingredient: ClassVar[str] = "sinks"
    no_ingredient: ClassVar[str] = "an architecture has no learned sinks to take out"

    @contextmanager
    def change(self, model: HuggingFaceModel) -> Iterator[None]:
        """Set logits of -inf in the place of the sinks; the parameter itself comes back afterwards."""
        modules = [module for module in attention_modules(model.network).values() if _learned(module) is not None]
        if not modules:
            raise UsageError(f"{self}: {model.model_type} models have no learned sinks")
        with ExitStack() as later:
            for module in modules:
                learned = module.get_parameter("sinks")
                nothing = nn.Parameter(torch.full_like(learned, -torch.inf), requires_grad=False)
                module.register_parameter("sinks", nothing)
                later.callback(module.register_parameter, "sinks", learned)
            yield

    def description(self, model: HuggingFaceModel, *, rerun: bool) -> HuggingFaceModel:
        """Leave the model as it is: what reads attention sees no sinks."""
        return model


def _learned(module: nn.Module) -> Tensor | None:
    return dict(module.named_parameters(recurse=False)).get("sinks")


def check_maskable(model: HuggingFaceModel, intervention: Intervention | str) -> None:
    """Refuse attention that does not take a plain additive mask."""
    kind, implementation = model.model_type, getattr(model.config, "_attn_implementation", None)
    if not attention_modules(model.network):
        raise UsageError(f"{intervention}: {kind} models have no attention that posbias knows")
    biased = kind == "falcon" and model.config.alibi  # the bias comes in the mask that is handed down
    if kind in OWN_MASKS or biased or implementation not in WIRED:
        raise UsageError(
            f"{intervention}: {kind} with {implementation} attention{' and ALiBi' if biased else ''} takes no "
            f"additive mask; allowed are {' and '.join(WIRED)} attention of families other than {', '.join(OWN_MASKS)}"
        )
