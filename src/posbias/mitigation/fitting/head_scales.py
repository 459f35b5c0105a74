"""The fit of `head_scales`: the logarithms of its factors, from 0."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import numpy as np
import torch

from posbias.errors import UsageError
from posbias.measurement.blocks import checkpointed
from posbias.mitigation.fitting.base import FITS, FitOptions
from posbias.mitigation.fitting.gradient_fit import GradientFit
from posbias.mitigation.methods.base import Method
from posbias.mitigation.methods.head_scales import SIDES, HeadScales, scaled_heads
from posbias.models.devices import float64_device
from posbias.models.hugging_face import HuggingFaceModel


class ScaleNumbers:
    """Logarithms of the factors of logits, outputs or both, [layer, head, side]."""

    def __init__(self, model: HuggingFaceModel, template: HeadScales, options: FitOptions) -> None:
        shape = (model.family.depth(model.config), model.family.heads(model.config), len(template.sides))
        self.free = torch.zeros(shape, dtype=torch.float64, device=float64_device(model.device), requires_grad=True)
        self._template, self._options = template, options

    def begin_at(self, method: Method) -> None:
        """Take the numbers of fitted scales of the same targets."""
        sides = self._template.sides
        tables = {side: getattr(method, side, None) for side in SIDES}
        alike = isinstance(method, HeadScales) and method.strength == 1
        if not alike or any((tables[side] is None) == (side in sides) for side in SIDES):
            raise UsageError(f"fit: begin={self._options.begin!r} is of another form than is fitted here (head_scales)")
        with torch.no_grad():
            self.free.copy_(
                torch.log(torch.tensor([tables[side] for side in sides], dtype=torch.float64)).movedim(0, -1)
            )

    @contextmanager
    def applied(self, model: HuggingFaceModel, begins: Sequence[int]) -> Iterator[None]:
        """The model with these factors, from the first token on."""
        factors = dict(zip(self._template.sides, self.free.exp().unbind(-1), strict=True))
        unchanged = torch.ones_like(self.free[..., 0])
        with (
            scaled_heads(model, "fit", *(factors.get(side, unchanged) for side in SIDES)),
            checkpointed(model.network, enabled=self._options.checkpointing),
        ):
            yield

    def method(self) -> HeadScales:
        """The method with these factors, to six digits."""
        factors = np.vectorize(lambda value: float(f"{value:.6g}"))(self.free.detach().exp().cpu().numpy())
        tables = {side: factors[..., number].tolist() for number, side in enumerate(self._template.sides)}
        return replace(self._template, **tables)


@FITS.register(HeadScales.name)
@dataclass(frozen=True)
class HeadScalesFit(GradientFit):
    """Factors under which a model gives the right answers wherever they stand, and reads ordinary text as before."""

    method = HeadScales
    defaults: ClassVar[Mapping[str, Any]] = {"steps": 300, "rate": 0.02, "batch": 1, "held_out": 0.0}

    template: HeadScales = field(default_factory=HeadScales)
    """What has factors, and the strength."""

    def settled(self, options: FitOptions) -> FitOptions:
        """It acts on all tokens, and has no knots."""
        return replace(super().settled(options), knots=(), from_question=False, scales=False, shared="none")

    def numbers(self, model: HuggingFaceModel, options: FitOptions) -> ScaleNumbers:
        """All 0."""
        return ScaleNumbers(model, self.template, options)
