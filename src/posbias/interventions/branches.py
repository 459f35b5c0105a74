"""Interventions on the attention branch: how strongly it is added, whether the stream passes beside it, what it reads.

The branch is caught at the module whose output is what gets added to the stream: the output projection, or the norm
after it if a family has one.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
from jaxtyping import Float64
from torch import Tensor, nn

from posbias.architecture import Architecture
from posbias.checks import NonNegative
from posbias.errors import UsageError
from posbias.interventions.base import INTERVENTIONS, Intervention, described, hooked, with_attention
from posbias.models.families.layout import Block, stream_read
from posbias.models.families.parts import AttentionParts, Norm
from posbias.models.hugging_face import HuggingFaceModel

SCALE = "scaling"
"""Attribute of an attention module by which q.k is multiplied, in the families wired to the attention interface."""
VANISHING = 1e-30
"""In place of a scale of 0, which torch's fused attention turns into NaN; e^logit is 1 to every digit."""


@INTERVENTIONS.register("attention_scaled")
@dataclass(frozen=True)
class AttentionScaled(Intervention):
    """Every attention branch is multiplied by a factor before it is added: below 1 the residual is stronger.

    In a theory: m -> f m / (1 - m + f m), since |a| becomes f |a| beside the same |x|.
    """

    ingredient: ClassVar[str] = "residual strength"
    patterns_stay: ClassVar[bool] = True

    factor: NonNegative
    """At least 0; 0 takes attention out, 1 changes nothing."""

    @contextmanager
    def change(self, model: HuggingFaceModel) -> Iterator[None]:
        """Multiply what every branch adds."""

        def scaled(_: nn.Module, _inputs: tuple[Any, ...], output: Tensor) -> Tensor:
            return output * self.factor

        adding = [block.adds for block in model.family.blocks(model.network)]
        with hooked(module.register_forward_hook(scaled) for module in adding):
            yield

    def description(self, model: HuggingFaceModel, *, rerun: bool) -> HuggingFaceModel:
        """Put the factor into the output projection, or into the norm after it."""
        family = model.family
        after = {id(block.attention_post_norm) for block in family.blocks(model.network)}

        def parts(block: Block, config: Any) -> AttentionParts:
            whole = family.attention_parts(block, config)
            if block.attention_post_norm is not None:
                return whole
            bias = None if whole.output_bias is None else whole.output_bias * self.factor
            return replace(whole, output=whole.output * self.factor, output_bias=bias)

        def norm(module: nn.Module) -> Norm:
            whole = family.norm(module)
            if id(module) not in after:
                return whole
            bias = None if whole.bias is None else whole.bias * self.factor
            return replace(whole, gain=whole.gain * self.factor, bias=bias)

        return described(model, attention_parts=parts, norm=norm)

    def mixing(self, mixing: Float64[np.ndarray, "layers"]) -> Float64[np.ndarray, "layers"]:
        """f m / (1 - m + f m); 0 with factor 0."""
        branch = self.factor * mixing
        total = 1 - mixing + branch
        return np.divide(branch, total, out=np.zeros_like(branch), where=total > 0)

    def in_architecture(self, architecture: Architecture) -> Architecture:
        """Keep masks and encodings under the new mixing."""
        return replace(architecture, mixing=self.mixing(architecture.layer_mixing))


@INTERVENTIONS.register("no_residual")
@dataclass(frozen=True)
class NoResidual(Intervention):
    """No stream passes beside the attention branches: x + a becomes a. In a theory: mixing 1, attention only.

    The MLP's own residual stays, except in parallel blocks, which read the same x and lose it with the attention's. No
    description fits: every one has the stream pass by attention and MLP alike, or by neither.
    """

    ingredient: ClassVar[str] = "residual strength"
    patterns_stay: ClassVar[bool] = True
    undescribed: ClassVar[str] = (
        "the stream passes by attention and MLPs alike in this theory; one cannot lose it alone"
    )

    @contextmanager
    def change(self, model: HuggingFaceModel) -> Iterator[None]:
        """Let every branch return a - x / s, so that what is added up, s times that, leaves s a of x + s a."""
        blocks = model.family.blocks(model.network)
        if any(block.branch_scale == 0 for block in blocks):
            raise UsageError(f"{self}: this model's branches are scaled by 0 and the stream is all there is")
        with ExitStack() as hooks:
            for block in blocks:
                keep, subtract = _subtract_stream(block.branch_scale)
                # Not the block itself: recomputing activations calls a block past its hooks.
                reads = block.attention_norm or block.mixer.module
                hooks.enter_context(reads.register_forward_pre_hook(keep, with_kwargs=True))
                hooks.enter_context(block.adds.register_forward_hook(subtract))
            yield

    def description(self, model: HuggingFaceModel, *, rerun: bool) -> HuggingFaceModel:
        """Mark the changed network's own activations as a misfit."""
        whole = super().description(model, rerun=rerun)
        return whole.described_by(model.family, misfit="its attention branches have no residual")

    def mixing(self, mixing: Float64[np.ndarray, "layers"]) -> Float64[np.ndarray, "layers"]:
        """1 in every layer."""
        return np.ones_like(mixing)

    def in_architecture(self, architecture: Architecture) -> Architecture:
        """Attention alone."""
        return replace(architecture, mixing=1.0)


@INTERVENTIONS.register("no_content")
@dataclass(frozen=True)
class NoContent(Intervention):
    """Every product q.k counts 0: attention is what mask and additive encodings make of it, whatever the tokens are.

    Rotary positions act through q.k alone and vanish with it: attention is then uniform over what the mask shows.
    """

    ingredient: ClassVar[str] = "content"

    @contextmanager
    def change(self, model: HuggingFaceModel) -> Iterator[None]:
        """Let the scale of the logits vanish while the context is open."""
        family = model.family
        modules = [block.attention for _, block in family.attention_blocks(model.network)]
        if not all(isinstance(getattr(module, SCALE, None), float) for module in modules):
            raise UsageError(f"{self}: attention of {family.name} models has no scale of q.k that could be changed")
        before: list[Any] = [getattr(module, SCALE) for module in modules]
        try:
            for module in modules:
                setattr(module, SCALE, VANISHING)
            yield
        finally:
            for module, scale in zip(modules, before, strict=True):
                setattr(module, SCALE, scale)

    def description(self, model: HuggingFaceModel, *, rerun: bool) -> HuggingFaceModel:
        """Scale 0 in every layer."""
        return with_attention(model, lambda parts: replace(parts, scale=0.0))

    def in_architecture(self, architecture: Architecture) -> Architecture:
        """No content offset in any head."""
        return replace(architecture, content=0.0)


def _subtract_stream(branch_scale: float) -> tuple[Callable[..., None], Callable[..., Tensor]]:
    """A pair of hooks for one block: keep the stream where its branch reads it, take it off what the branch adds."""
    streams: list[Tensor] = []

    def keep(_: nn.Module, positional: tuple[Any, ...], named: dict[str, Any]) -> None:
        streams[:] = [stream_read(positional, named)]

    def subtract(_: nn.Module, _inputs: tuple[Any, ...], output: Tensor) -> Tensor:
        (stream,) = streams
        streams.clear()
        return output - stream.reshape(output.shape) / branch_scale

    return keep, subtract
