"""The fit of `head_scales`: the logarithms of all factors, from 0."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np
import torch

from posbias.errors import UsageError
from posbias.measurement.blocks import checkpointed
from posbias.mitigation.fitting.base import FITS, FitOptions
from posbias.mitigation.fitting.gradient_fit import GradientFit
from posbias.mitigation.methods.base import Method
from posbias.mitigation.methods.head_scales import HeadScales, scaled_heads
from posbias.models.hugging_face import HuggingFaceModel


class ScaleNumbers:
    """Logarithms of the factors of logits and outputs, [layer, head, two]."""

    def __init__(self, model: HuggingFaceModel, options: FitOptions) -> None:
        shape = (model.family.depth(model.config), model.family.heads(model.config), 2)
        self.free = torch.zeros(shape, dtype=torch.float64, device=model.device, requires_grad=True)
        self._options = options

    def begin_at(self, method: Method) -> None:
        """Take the numbers of fitted scales."""
        if not isinstance(method, HeadScales) or method.logits is None or method.gains is None or method.strength != 1:
            raise UsageError(f"fit: begin={self._options.begin!r} is of another form than is fitted here (head_scales)")
        with torch.no_grad():
            self.free.copy_(torch.tensor(np.log([method.logits, method.gains])).movedim(0, -1))

    @contextmanager
    def applied(self, model: HuggingFaceModel, begins: Sequence[int]) -> Iterator[None]:
        """The model with these factors, from the first token on."""
        logits, gains = self.free.exp().unbind(-1)
        with (
            scaled_heads(model, "fit", logits, gains),
            checkpointed(model.network, enabled=self._options.checkpointing),
        ):
            yield

    def method(self) -> HeadScales:
        """The method with these factors, to six digits."""
        factors = np.vectorize(lambda value: float(f"{value:.6g}"))(self.free.detach().exp().cpu().numpy())
        return HeadScales(factors[..., 0].tolist(), factors[..., 1].tolist())


@FITS.register(HeadScales.name)
class HeadScalesFit(GradientFit):
    """Factors under which a model gives the right answers wherever they stand, and reads ordinary text as before."""

    method = HeadScales
    defaults: ClassVar[Mapping[str, Any]] = {"steps": 300, "rate": 0.02, "batch": 1, "held_out": 0.0}

    def settled(self, options: FitOptions) -> FitOptions:
        """It acts on all tokens, and has no knots."""
        return replace(super().settled(options), knots=(), from_question=False, scales=False, shared="none")

    def numbers(self, model: HuggingFaceModel, options: FitOptions) -> ScaleNumbers:
        """All 0."""
        return ScaleNumbers(model, options)
