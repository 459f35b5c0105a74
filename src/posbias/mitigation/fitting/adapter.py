"""The fit of `adapter`: A drawn at random and B 0, so that nothing changes at first.

Where one map holds queries, keys and values, only the rows that are targets are updated.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from posbias.measurement.blocks import checkpointed
from posbias.mitigation.fitting.base import FITS, Calibration, FitOptions
from posbias.mitigation.fitting.gradient_fit import fit_by_gradient
from posbias.mitigation.methods.adapter import SIDES, Adapter, target_projections, tensors_hash, tuned
from posbias.mitigation.methods.base import Method
from posbias.models.hugging_face import HuggingFaceModel

DEFAULTS: Mapping[str, Any] = {"steps": 60, "rate": 0.002, "batch": 4, "held_out": 0.2}
"""Settings of this fit where nothing else is asked for."""


class AdapterNumbers:
    """A and B of every target projection."""

    def __init__(self, template: Adapter, model: HuggingFaceModel, options: FitOptions) -> None:
        self.template, self.options = template, options
        generator = np.random.default_rng([options.seed, template.rank])
        dtype = torch.promote_types(model.dtype, torch.float32)
        self._updates: dict[str, tuple[nn.Parameter, nn.Parameter]] = {}
        self.count = 0
        for projection in target_projections(model, template):
            made, read = projection.shape
            # As torch draws a linear map: uniform, of variance 1 / (3 x features read).
            drawn = generator.uniform(-(read**-0.5), read**-0.5, (template.rank, read))
            down, up = (
                nn.Parameter(torch.tensor(numbers, dtype=dtype, device=model.device))
                for numbers in (drawn, np.zeros((made, template.rank)))
            )
            rows, targets = torch.cat(list(projection.rows.values())), torch.zeros_like(up[:, :1])
            targets[rows] = 1.0
            self.count += template.rank * (read + len(rows))
            up.register_hook(targets.mul)  # type: ignore[no-untyped-call] # other rows stay 0
            self._updates[projection.path] = down, up

    @property
    def free(self) -> list[Tensor]:
        """All A and B."""
        return [numbers for sides in self._updates.values() for numbers in sides]

    @contextmanager
    def applied(self, model: HuggingFaceModel, begin: int) -> Iterator[None]:
        """The model with these updates, from the first token on."""
        recomputed = checkpointed(model.network, enabled=self.options.checkpointing)
        with tuned(model.network, self._updates), recomputed:
            yield

    def method(self) -> Adapter:
        """The adapter with these numbers, in float32."""
        tensors = {
            f"{path}.{side}": np.ascontiguousarray(numbers.detach().float().cpu().numpy())
            for path, sides in self._updates.items()
            for side, numbers in zip(SIDES, sides, strict=True)
        }
        return replace(self.template, weights=tensors_hash(tensors), updates=tensors)


@FITS.register(Adapter.name)
def fit_adapter(
    calibration: Calibration, options: FitOptions, *, template: Adapter | None = None
) -> tuple[Method, dict[str, Any]]:
    """Updates under which a model gives the right answers wherever they stand, and reads ordinary text as before.

    The template says rank, targets and strength. They act on all tokens, and have neither knots nor scales.
    """
    numbers = partial(AdapterNumbers, template or Adapter())
    return fit_by_gradient(numbers, calibration, options.settled(DEFAULTS, knots=(), from_question=False, scales=False))
