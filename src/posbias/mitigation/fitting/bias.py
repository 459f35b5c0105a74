"""The fits of `key_bias` and `context_bias`: numbers that are added to logits, and factors of them.

A key bias is splines of ln(1 + j), a few numbers per head and layer, or one number for all keys before the question.
Biases that act from the question on have a scale of each head's own logits, too.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from posbias.architecture import LogSpline
from posbias.architecture.keys import log_spline_basis
from posbias.errors import UsageError
from posbias.interventions.keys import KeyLogits, biased
from posbias.measurement.blocks import checkpointed
from posbias.mitigation.fitting.base import FITS, Calibration, FitOptions
from posbias.mitigation.fitting.gradient_fit import fit_by_gradient
from posbias.mitigation.methods.base import Method, Mitigation
from posbias.mitigation.methods.context_bias import ContextBias
from posbias.mitigation.methods.heads import BEFORE
from posbias.mitigation.methods.key_bias import KeyBiasMethod
from posbias.models.hugging_face import HuggingFaceModel

DEFAULTS: Mapping[str, Any] = {"steps": 300, "rate": 0.05, "batch": 1, "held_out": 0.0}
"""Settings of these fits where nothing else is asked for."""
SCALE_RATE = 0.4
"""Rate of the logarithm of a head's scale, as a share of the rate of biases."""


class BiasNumbers:
    """The numbers that are fitted: biases at all knots but the last, which is 0; or of the context, with scales."""

    def __init__(self, model: HuggingFaceModel, options: FitOptions) -> None:
        self.heads, self.depth = model.family.heads(model.config), model.family.depth(model.config)
        self.options = options
        shape = self.depth, self.heads, max(1, len(options.knots) - 1) + options.scales
        self._numbers = torch.zeros(shape, dtype=torch.float64, requires_grad=True)  # 0 for no change
        self.free, self.count = [self._numbers], self._numbers.numel()
        self._bases: dict[int, Tensor] = {}

    @contextmanager
    def applied(self, model: HuggingFaceModel, begin: int) -> Iterator[None]:
        """The model with these numbers, for prompts of which the question begins at that token."""

        def logits(layer: int, n_positions: int) -> Float[Tensor, "heads n"]:
            basis = self._basis(n_positions) if self.options.knots else BEFORE[:, None]
            return self._numbers[layer][:, : basis.shape[1]] @ basis.T

        def scales(layer: int) -> Float[Tensor, "heads"]:
            return (SCALE_RATE * self._numbers[layer][:, -1]).exp()

        added = KeyLogits(logits, scales if self.options.scales else None, by_side=not self.options.knots)
        recomputed = self.options.checkpointing and not self.options.from_question
        with (
            biased(model, "fit", added, first_query=begin),
            checkpointed(model.network, enabled=recomputed),
        ):
            yield

    def _basis(self, n_positions: int) -> Float[Tensor, "n knots"]:
        if n_positions not in self._bases:
            self._bases[n_positions] = torch.tensor(log_spline_basis(self.options.knots, n_positions)[:, :-1])
        return self._bases[n_positions]

    def method(self) -> Mitigation:
        """The method with these numbers, to six digits."""
        scales = _rounded((SCALE_RATE * self._numbers[..., -1]).exp()) if self.options.scales else None
        if not self.options.knots:
            return ContextBias(_rounded(self._numbers[..., 0]), scales)
        by_layer = [
            [[*head, 0.0] for head in layer] for layer in _rounded(self._numbers[..., : len(self.options.knots) - 1])
        ]
        biases = [str(LogSpline(values=heads, knots=self.options.knots)) for heads in by_layer]
        return KeyBiasMethod(biases, from_question=self.options.from_question, scales=scales)


def _rounded(numbers: Tensor) -> Any:
    """Nested lists of numbers to six digits."""
    return np.vectorize(lambda value: float(f"{value:.6g}"))(numbers.detach().numpy()).tolist()


@FITS.register(KeyBiasMethod.name)
def fit_key_bias(calibration: Calibration, options: FitOptions) -> tuple[Method, dict[str, Any]]:
    """Splines over positions, for all queries, with a penalty, or from the question on, with scales."""
    if not options.knots:
        raise UsageError(f"fit: {KeyBiasMethod.name} needs knots; allowed without any is {ContextBias.name}")
    fixed: dict[str, Any] = {"penalty": 0.0} if options.from_question else {"scales": False}
    return fit_by_gradient(BiasNumbers, calibration, options.settled(DEFAULTS, **fixed))


@FITS.register(ContextBias.name)
def fit_context_bias(calibration: Calibration, options: FitOptions) -> tuple[Method, dict[str, Any]]:
    """One number for every head and layer, for all keys before the question, and a scale."""
    options = options.settled(DEFAULTS, knots=(), from_question=True, penalty=0.0)
    return fit_by_gradient(BiasNumbers, calibration, options)
