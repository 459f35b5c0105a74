"""Two numbers for every head, the same at every position: a factor of its logits, and a factor of what it gives.

Both are changes of weights: rows of the map of queries, columns of the output map.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from posbias.errors import UsageError
from posbias.interventions.attention import Attended, AttentionCall, attending
from posbias.mitigation.methods.base import MITIGATIONS, Mitigation, Spans, targets_of
from posbias.mitigation.methods.key_bias import check_shape, checked_scales
from posbias.mitigation.methods.weight_changes import LowRank, Scaled
from posbias.models.devices import float64_device
from posbias.models.families.projections import check_unpacked, linear_projections
from posbias.models.hugging_face import HuggingFaceModel
from posbias.runs.caveats import refusal

SIDES = ("logits", "gains")
"""What has a factor for each head."""


@MITIGATIONS.register("head_scales")
@dataclass(frozen=True)
class HeadScales(Mitigation):
    """Every head's logits are multiplied by one number, and its output by another, for all tokens alike.

    With a strength s, to the power of s. As fitted by `fit`: which heads look sharply, and which count, whatever the
    positions; a control for methods that act by position.
    """

    logits: Sequence[Sequence[float]] | None = None
    """Factors > 0 of each head's logits, by layer and head, layer 0 nearest the input; None: 1."""
    gains: Sequence[Sequence[float]] | None = None
    """Factors > 0 of each head's output; None: 1."""
    targets: str = "logits,gains"
    """What a fit finds, by commas: logits, gains."""

    def __post_init__(self) -> None:
        super().__post_init__()
        _ = self.sides
        for name in SIDES:
            object.__setattr__(self, name, checked_scales(self.name, name, getattr(self, name)))

    @property
    def sides(self) -> tuple[str, ...]:
        """The targets one by one, in the order of `SIDES`."""
        asked = targets_of(self.name, self.targets, SIDES)
        return tuple(side for side in SIDES if side in asked)

    @property
    def unfitted(self) -> bool:
        """True without any number."""
        return self.logits is None and self.gains is None

    @property
    def update_rank(self) -> int:
        """Rows and columns of maps are multiplied."""
        return 0

    @contextmanager
    def apply(self, model: HuggingFaceModel, passages: Spans) -> Iterator[None]:
        """Multiply every query, and what attention returns."""
        logits, gains = (self._factors(model, table) for table in (self.logits, self.gains))
        with scaled_heads(model, self, logits, gains):
            yield

    def weight_updates(self, model: HuggingFaceModel) -> dict[str, LowRank | Scaled]:
        """Factors of the rows that make queries, and of the columns that read heads."""
        logits, gains = (self._factors(model, table) for table in (self.logits, self.gains))
        family, updates = model.family, dict[str, LowRank | Scaled]()
        check_unpacked(self.name, family)
        blocks = family.blocks(model.network)
        for projection in linear_projections(model.network, family, model.config):
            made, read = projection.shape
            if "q" in projection.rows and self.logits is not None:
                parts = family.attention_parts(blocks[projection.layer], model.config)
                if parts.query_norm is not None or parts.clip is not None:
                    raise UsageError(
                        f"{self.name} cannot be exported: {family.name} normalises or clips queries after their map; "
                        "allowed: gains alone"
                    )
                rows = torch.ones(made, dtype=logits.dtype, device=logits.device)
                by_head = projection.rows["q"].to(logits.device).reshape(len(logits[projection.layer]), -1)
                rows[by_head] = logits[projection.layer][:, None].expand_as(by_head)
                updates[projection.path] = Scaled(rows, torch.ones(read, dtype=rows.dtype, device=rows.device))
            if "o" in projection.rows and self.gains is not None:
                columns = gains[projection.layer].repeat_interleave(read // len(gains[projection.layer]))
                updates[projection.path] = Scaled(torch.ones(made, dtype=columns.dtype, device=columns.device), columns)
        return updates

    def _factors(self, model: HuggingFaceModel, table: Sequence[Sequence[float]] | None) -> Tensor:
        """Factors [layer, head] at the method's strength."""
        if self.unfitted:
            raise refusal("head_scales_not_fitted")
        heads, depth = model.family.heads(model.config), model.family.depth(model.config)
        if table is None:
            return torch.ones(depth, heads, dtype=torch.float64, device=float64_device(model.device))
        check_shape(self.name, table, depth, heads)
        return torch.tensor(table, dtype=torch.float64, device=float64_device(model.device)) ** self.strength


@contextmanager
def scaled_heads(model: HuggingFaceModel, name: Mitigation | str, logits: Tensor, gains: Tensor) -> Iterator[None]:
    """Within the context, heads have factors [layer, head] of their logits and outputs; a gradient flows through."""

    def attend(call: AttentionCall) -> Attended:
        factors, gain = (table[call.layer].to(call.query) for table in (logits, gains))
        output, weights = call.run(query=call.query * factors[:, None, None])
        return output * gain[:, None], weights

    with attending(model, name, attend):
        yield
