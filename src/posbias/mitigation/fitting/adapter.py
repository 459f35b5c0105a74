"""The fit of `adapter`: all its updates lie in one vector, A drawn at random and B 0, so that nothing changes at first.

Where one map holds queries, keys and values, only the rows that are targets are updated.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from posbias.errors import UsageError
from posbias.measurement.blocks import checkpointed
from posbias.mitigation.fitting.base import FITS, FitOptions
from posbias.mitigation.fitting.gradient_fit import GradientFit
from posbias.mitigation.methods.adapter import Adapter, adapter_of, target_projections
from posbias.mitigation.methods.base import Method
from posbias.mitigation.methods.weight_changes import LowRank, updated
from posbias.models.hugging_face import HuggingFaceModel


class AdapterNumbers:
    """The updates of all target projections, as views of one vector: of each A, then the target rows of B."""

    def __init__(self, model: HuggingFaceModel, template: Adapter, options: FitOptions) -> None:
        self.template, self.options = template, options
        self._projections = target_projections(model, template)
        self._rows = [torch.cat(list(projection.rows.values())).sort().values for projection in self._projections]
        generator = np.random.default_rng([options.seed, template.rank])
        pieces = []
        for projection, rows in zip(self._projections, self._rows, strict=True):
            read = projection.shape[1]
            # As torch draws a linear map: uniform, of variance 1 / (3 x features read).
            pieces.append(generator.uniform(-(read**-0.5), read**-0.5, template.rank * read))
            pieces.append(np.zeros(len(rows) * template.rank))
        dtype = torch.promote_types(model.dtype, torch.float32)
        whole = torch.tensor(np.concatenate(pieces), dtype=dtype, device=model.device)
        self.free = whole.requires_grad_()
        self._rows = [rows.to(model.device) for rows in self._rows]

    def begin_at(self, method: Method) -> None:
        """Take the numbers of a fitted adapter, which must be of the same rank and targets."""
        alike = isinstance(method, Adapter) and (method.rank, method.roles, method.strength) == (
            self.template.rank,
            self.template.roles,
            1,
        )
        if not alike:
            raise UsageError(
                f"fit: begin={self.options.begin!r} is of another form than is fitted here (adapter, rank, targets)"
            )
        pieces: list[Tensor] = []
        for projection, rows in zip(self._projections, self._rows, strict=True):
            down, up = (torch.as_tensor(method.tensors[f"{projection.path}.{side}"]) for side in ("down", "up"))
            pieces += [down.flatten(), up[rows.cpu()].flatten()]
        with torch.no_grad():
            self.free.copy_(torch.cat(pieces))

    @contextmanager
    def applied(self, model: HuggingFaceModel, begins: Sequence[int]) -> Iterator[None]:
        """The model with these updates, from the first token on."""
        with (
            updated(model.network, self._updates()),
            checkpointed(model.network, enabled=self.options.checkpointing),
        ):
            yield

    def method(self) -> Adapter:
        """The adapter with these numbers, in float32."""
        tensors = {
            f"{path}.{side}": np.ascontiguousarray(getattr(projection, side).detach().float().cpu().numpy())
            for path, projection in self._updates().items()
            for side in ("down", "up")
        }
        return adapter_of(self.template, tensors)

    def _updates(self) -> dict[str, LowRank]:
        rank, updates = self.template.rank, {}
        sizes = [
            rank * size
            for projection, rows in zip(self._projections, self._rows, strict=True)
            for size in (projection.shape[1], len(rows))
        ]
        # Their gradients are put together once, where those of slices are each as long as the whole.
        pieces = iter(torch.split_with_sizes(self.free, sizes))
        for projection, rows in zip(self._projections, self._rows, strict=True):
            made, read = projection.shape
            down, up = next(pieces).view(rank, read), next(pieces).view(-1, rank)
            if len(rows) < made:
                up = torch.zeros(made, rank, dtype=up.dtype, device=up.device).index_copy(0, rows, up)
            updates[projection.path] = LowRank(down, up)
        return updates


@FITS.register(Adapter.name)
@dataclass(frozen=True)
class AdapterFit(GradientFit):
    """Updates under which a model gives the right answers wherever they stand, and reads ordinary text as before."""

    method = Adapter
    defaults: ClassVar[Mapping[str, Any]] = {"steps": 60, "rate": 0.002, "batch": 4, "held_out": 0.2}

    template: Adapter = field(default_factory=Adapter)
    """Rank and targets, and the strength."""

    def settled(self, options: FitOptions) -> FitOptions:
        """It acts on all tokens, and has neither knots nor scales."""
        return replace(super().settled(options), knots=(), from_question=False, scales=False, shared="none")

    def numbers(self, model: HuggingFaceModel, options: FitOptions) -> AdapterNumbers:
        """A at random from the seed, B at 0."""
        return AdapterNumbers(model, self.template, options)
