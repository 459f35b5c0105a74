"""The interventions on what a query sees, on what tells positions apart, and on the attention branch.

Masks: each layer's own is replaced by an additive one, handed to its attention module in every forward pass. Rotary
angles are changed inside the rotary module; changing the network's own `position_ids` would be a trap: equal ids are
taken for packed sequences, and attention becomes diagonal. Branch and stream are caught where a block adds them
(`models.attention.branches`).
"""

from abc import abstractmethod
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from inspect import signature
from typing import Annotated, Any, ClassVar

import torch
from annotated_types import Ge
from jaxtyping import Bool
from torch import Tensor, nn

from posbias.checks import NonNegative
from posbias.errors import UsageError
from posbias.interventions.base import INTERVENTIONS, Arguments, Intervention, before_calls, described
from posbias.models.attention import (
    Attended,
    KernelCall,
    asks_interface,
    attention,
    attention_modules,
    branches,
    stream_read,
)
from posbias.models.attention_blocks import HIDDEN_SCORE, VANISHING
from posbias.models.hugging_face import HuggingFaceModel
from posbias.models.layout import AttentionParts, Block, Linear, Norm, changing_kinds, scaled

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

    def change(self, model: HuggingFaceModel) -> AbstractContextManager[None]:
        """Hand every attention module its new mask; refuse attention that takes no plain additive one."""
        kind, implementation = model.model_type, getattr(model.config, "_attn_implementation", None)
        modules = attention_modules(model.network).values()
        biased = kind == "falcon" and model.config.alibi  # the bias comes in the mask that is handed down
        if not modules or kind in OWN_MASKS or biased or implementation not in WIRED:
            raise UsageError(
                f"{self}: {kind} with {implementation} attention{' and ALiBi' if biased else ''} takes no additive "
                f"mask; allowed are {' and '.join(WIRED)} attention of families other than {', '.join(OWN_MASKS)}"
            )

        def replaced(_: nn.Module, positional: tuple[Any, ...], named: dict[str, Any]) -> Arguments:
            read, mask = stream_read(positional, named), named.get("attention_mask")
            if mask is None:  # a causal layer
                shown = torch.ones(1, read.shape[1], read.shape[1], dtype=torch.bool, device=read.device).tril()
            else:
                shown = mask[0] if mask.dtype == torch.bool else mask[0] > HIDDEN_SCORE / 2
            hidden = ~self.visible(shown)
            # A large negative number, as transformers writes masks.
            added = torch.zeros_like(hidden, dtype=read.dtype).masked_fill(hidden, HIDDEN_SCORE)
            return positional, {**named, "attention_mask": added[None]}

        return before_calls((module, replaced) for module in modules)


@INTERVENTIONS.register("bidirectional")
@dataclass(frozen=True)
class Bidirectional(Visibility):
    """No causal mask, no window: every position sees every position, in every layer.

    With uniform attention the profile is then flat after one layer of attention alone.
    """

    def visible(self, before: Pairs) -> Pairs:
        """Everything."""
        return torch.ones_like(before)


@INTERVENTIONS.register("window")
@dataclass(frozen=True)
class Window(Visibility):
    """No query looks back further than a window, in any attention layer; those with a shorter window keep theirs."""

    width: Annotated[int, Ge(1)]
    """Visible keys, the query's own position included (positions, >= 1)."""

    def visible(self, before: Pairs) -> Pairs:
        """The layer's own mask within the window."""
        return before.triu(1 - self.width)


@INTERVENTIONS.register("sink_masked")
@dataclass(frozen=True)
class SinkMasked(Visibility):
    """The first positions, where attention sinks sit, are hidden from all later queries; they still see each other.

    Their attention goes to the other visible keys in proportion: the columns are removed and rows renormalised.
    """

    ingredient: ClassVar[str] = "sinks"

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


@INTERVENTIONS.register("no_rope")
@dataclass(frozen=True)
class NoRope(Intervention):
    """Every rotary angle is 0: cosines 1, sines 0, queries and keys as projected.

    A factor that a RoPE variant puts on cosines and sines (YaRN) stays where the network runs.
    """

    ingredient: ClassVar[str] = "encoding"

    def change(self, model: HuggingFaceModel) -> AbstractContextManager[None]:
        """Position 0 for the rotary modules."""

        def at_start(_: nn.Module, positional: tuple[Any, ...], named: dict[str, Any]) -> Arguments:
            if "position_ids" in named:
                return positional, {**named, "position_ids": torch.zeros_like(named["position_ids"])}
            return (positional[0], torch.zeros_like(positional[1]), *positional[2:]), named

        rotary = [module for module in model.network.modules() if type(module).__name__.endswith("RotaryEmbedding")]
        unused = getattr(model.config, "alibi", False) or getattr(model.config, "position_embedding_type", None)
        attending = attention_modules(model.network).values()
        takes = (signature(type(module).forward).parameters for module in attending)
        if not rotary or unused not in (False, None, "rope") or not any("position_embeddings" in one for one in takes):
            raise UsageError(f"{self}: this {model.model_type} model has no rotary module to change")
        kinds = set().union(*map(changing_kinds, rotary))
        if kinds:
            raise UsageError(
                f"{self}: the rope type {' '.join(sorted(kinds))} takes its frequencies from the prompt's length; "
                "default, linear, yarn and llama3 are allowed"
            )
        return before_calls((module, at_start) for module in rotary)

    def description(self, model: HuggingFaceModel) -> HuggingFaceModel:
        """No layer turns anything."""
        return described(model, rotates=lambda attention, config: False)


@INTERVENTIONS.register("attention_scaled")
@dataclass(frozen=True)
class AttentionScaled(Intervention):
    """Every attention branch is multiplied by a factor before it is added: below 1 the residual is stronger.

    In a theory: m -> f m / (1 - m + f m), since |a| becomes f |a| beside the same |x|.
    """

    ingredient: ClassVar[str] = "residual strength"

    factor: NonNegative
    """At least 0; 0 takes attention out, 1 changes nothing."""

    def change(self, model: HuggingFaceModel) -> AbstractContextManager[None]:
        """Multiply what every branch adds."""
        return changed_branches(model, self, branch=lambda branch: branch * self.factor)

    def description(self, model: HuggingFaceModel) -> HuggingFaceModel:
        """Put the factor into the output projection, or into the norm after it."""

        def parts(block: Block, config: Any) -> AttentionParts:
            whole = model.family.attention_parts(block, config)
            if block.attention_post_norm is not None:
                return whole
            return replace(whole, output=Linear(*(scaled(part, self.factor) for part in whole.output)))

        def norm(module: nn.Module) -> Norm:
            whole = model.family.norm(module)
            if all(block.attention_post_norm is not module for block in model.family.blocks(model.network)):
                return whole
            return replace(whole, gain=whole.gain * self.factor, bias=scaled(whole.bias, self.factor))

        return described(model, attention_parts=parts, norm=norm)


@INTERVENTIONS.register("no_residual")
@dataclass(frozen=True)
class NoResidual(Intervention):
    """No stream passes beside the attention branches: x + a becomes a. In a theory: mixing 1, attention only.

    The MLP's own residual stays, except in parallel blocks, which read the same x and lose it with the attention's. No
    description fits: every one has the stream pass by attention and MLP alike, or by neither.
    """

    ingredient: ClassVar[str] = "residual strength"

    def change(self, model: HuggingFaceModel) -> AbstractContextManager[None]:
        """Let nothing stand in the stream's place where a branch is added to it."""
        return changed_branches(model, self, stream=torch.zeros_like)

    def description(self, model: HuggingFaceModel) -> HuggingFaceModel:
        """Mark the changed network's own activations as a misfit."""
        misfit = "its attention branches have no residual"
        return model.described_by(model.family, misfit=misfit) if model.described else model


@INTERVENTIONS.register("no_content")
@dataclass(frozen=True)
class NoContent(Intervention):
    """Every product q.k counts 0: attention is what mask and additive encodings make of it, whatever the tokens are.

    Rotary positions act through q.k alone and vanish with it: attention is then uniform over what the mask shows.
    """

    ingredient: ClassVar[str] = "content"

    def change(self, model: HuggingFaceModel) -> AbstractContextManager[None]:
        """Let the scale of the logits vanish while the context is open."""
        modules = attention_modules(model.network)
        if not modules or not all(map(asks_interface, modules.values())):
            raise UsageError(
                f"{self}: attention of {model.model_type} models has no scale of q.k that could be changed"
            )

        def vanish(call: KernelCall) -> Attended:
            return call.run(options={**call.options, "scaling": VANISHING})

        return attention(model.network, dict.fromkeys(modules, vanish))


def changed_branches(
    model: HuggingFaceModel, intervention: Intervention, **changes: Any
) -> AbstractContextManager[Any]:
    """Within the context, blocks add their branches with a change; one that adds none to its input is refused."""

    def check(layer: int, _stream: Tensor, branch: Tensor | None) -> None:
        if branch is None:
            raise UsageError(
                f"{intervention}: layer {layer} of this {model.model_type} model does not add a branch of attention to "
                "its input; allowed are models whose every block does"
            )

    return branches(model.network, check, **changes)
