"""Interventions on the attention branch: how strongly it is added, whether the stream passes beside it, what it reads.

Branch and stream are caught where a block adds them (`models.branches`).
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
import torch
from jaxtyping import Float64
from torch import Tensor, nn

from posbias.architecture import Architecture
from posbias.checks import NonNegative
from posbias.errors import UsageError
from posbias.interventions.base import INTERVENTIONS, Intervention, described, with_attention
from posbias.models.attention import Attended, KernelCall, asks_interface, attention, attention_modules
from posbias.models.attention_blocks import VANISHING
from posbias.models.branches import Branches, branches
from posbias.models.families.layout import Block
from posbias.models.families.parts import AttentionParts, Norm
from posbias.models.hugging_face import HuggingFaceModel


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
        with changed_branches(model, self, Branches(branch=lambda branch: branch * self.factor)):
            yield

    def description(self, model: HuggingFaceModel, *, rerun: bool) -> HuggingFaceModel:
        """Put the factor into the output projection, or into the norm after it."""
        if not model.described:
            return model
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
        """Let nothing stand in the stream's place where a branch is added to it."""
        with changed_branches(model, self, Branches(stream=torch.zeros_like)):
            yield

    def description(self, model: HuggingFaceModel, *, rerun: bool) -> HuggingFaceModel:
        """Mark the changed network's own activations as a misfit."""
        whole = super().description(model, rerun=rerun)
        if not model.described:
            return whole
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
        modules = attention_modules(model.network)
        if not modules or not all(map(asks_interface, modules.values())):
            raise UsageError(
                f"{self}: attention of {model.model_type} models has no scale of q.k that could be changed"
            )

        def vanish(call: KernelCall) -> Attended:
            return call.run(options={**call.options, "scaling": VANISHING})

        with attention(model.network, dict.fromkeys(modules, vanish)):
            yield

    def description(self, model: HuggingFaceModel, *, rerun: bool) -> HuggingFaceModel:
        """Scale 0 in every layer."""
        return with_attention(model, lambda parts: replace(parts, scale=0.0))

    def in_architecture(self, architecture: Architecture) -> Architecture:
        """No content offset in any head."""
        return replace(architecture, content=0.0)


@contextmanager
def changed_branches(model: HuggingFaceModel, intervention: Intervention, change: Branches) -> Iterator[None]:
    """Within the context, blocks add their branches with a change; one that adds none to its input is refused."""

    def check(layer: int, _stream: Tensor, branch: Tensor | None) -> None:
        if branch is None:
            raise UsageError(
                f"{intervention}: layer {layer} of this {model.model_type} model does not add a branch of attention to "
                "its input; allowed are models whose every block does"
            )

    with branches(model.network, replace(change, done=check)):
        yield
