"""Positions rescaled per head (Ms-PoE), and rotary positions in a finished model, moved, as `pine` does, too.

Queries and keys arrive rotated, keys with everything that is cached; both are turned further by the difference between
the wanted angle and the one they have. With a strength s, positions p become p + s (p' - p).
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from annotated_types import Ge
from jaxtyping import Float, Int
from torch import Tensor

from posbias.checks import Natural, Positive, checked_value
from posbias.errors import UsageError
from posbias.interventions.base import Attended, AttentionCall, KeptKeys, PerCache, attending
from posbias.mitigation.methods.base import MITIGATIONS, Mitigation, Spans
from posbias.models.devices import float64_device
from posbias.models.hugging_face import HuggingFaceModel
from posbias.models.layout import changing_kinds, turned_by

Frequencies = Float[Tensor, "pair"] | None


def turning(model: HuggingFaceModel, method: Mitigation) -> list[Frequencies]:
    """Radians per position of every layer's feature pairs, in float64; None for a layer that turns nothing.

    Raises:
        UsageError: a family whose queries and keys cannot be turned further, by name.
    """
    family = model.family
    for module in model.network.modules():
        kinds = changing_kinds(module)
        if kinds:
            raise UsageError(
                f"{method.name}: the rope type {' '.join(sorted(kinds))} takes its frequencies from the prompt's "
                "length; default, linear and llama3 are allowed"
            )
    frequencies = [
        family.rotary_frequencies(model.network, block, config=model.config, layer=layer)
        for layer, block in enumerate(family.blocks(model.network))
    ]
    if all(rates is None for rates in frequencies):
        raise UsageError(f"{method.name}: {family.name} models have no rotary positions")
    device = float64_device(model.device)
    return [None if rates is None else torch.as_tensor(rates, device=device) for rates in frequencies]


def shown_keys(call: AttentionCall, rows: slice) -> Tensor:
    """True for the keys that some queries see, [batch 1 query key]; the leading size is 1 if it is the same for all."""
    if call.mask is None:
        return call.key_positions[:, None, None] <= call.query_positions[:, None, rows, None]
    mask = call.mask[:, :, rows]
    return mask if mask.dtype == torch.bool else mask > torch.finfo(mask.dtype).min / 2


@MITIGATIONS.register("ms_poe")
@dataclass(frozen=True, repr=False)
class MsPoe(Mitigation):
    """Head h sees positions p / r_h, with r from `low` (most position-aware head) to `high`, from one layer on.

    Position-awareness of a head: the share of keys whose attention weight is more than 3 times the mean, for the query
    at the last token of the last passage; `passages=[(0, n)]` ranks at the last of a prompt's n tokens, as the paper
    does. A pass that ends before that token ranks at its own last. One prompt at a time, without padding.

    Source: Ms-PoE, arXiv 2403.04797, of which summaries were at hand; the released code (utils/modify_arch/llama.py of
    VITA-Group/Ms-PoE) differs: it ranks by attention without rotary positions; gives head h the ratio of the h-th entry
    of the argsort, where its rank is meant; never reaches `high` (steps of 1 / heads); and turns a shared key head by
    the ratio of the first head of its group, so that other heads of the group see no mere distances.
    """

    needs_passages: ClassVar[bool] = True
    single: ClassVar[bool] = True

    low: Positive = 1.2
    """> 0; 1 leaves a head as it is."""
    high: float = 1.8
    """>= low."""
    first_layer: Natural = 2
    """From 0."""

    def __post_init__(self) -> None:
        checked_value("ms_poe: high", self.high, Annotated[float, Ge(self.low)])

    def in_text(self, length: int) -> Spans:
        """Heads are ranked at the end of a text, as at the end of a prompt."""
        return [(0, length)]

    @contextmanager
    def apply(self, model: HuggingFaceModel, passages: Spans) -> Iterator[None]:
        """Turn queries and keys, the latter repeated for all heads that share them."""
        frequencies = turning(model, self)
        heads = model.sizes.get("heads", 0)
        if self.first_layer >= len(frequencies):
            raise UsageError(f"ms_poe: first_layer must lie in [0, {len(frequencies)}), got {self.first_layer}")
        ratios = torch.linspace(self.low, self.high, heads, dtype=torch.float64)
        turned_keys, ranking_at = KeptKeys(), passages[-1][1] - 1
        rankings: PerCache[dict[int, Tensor]] = PerCache(
            lambda _network, _arguments, ranked: {} if ranked is None else ranked, latest={}
        )

        def attend(call: AttentionCall) -> Attended:
            rates = frequencies[call.layer]
            if rates is None or call.layer < self.first_layer:
                return call.run()
            ranked = rankings.latest if rankings.current is None else rankings.current
            assert ranked is not None  # the empty one, if nothing was read before
            if call.layer not in ranked or call.query_positions[0, 0] <= ranking_at:
                ranked[call.layer] = _ranks(call, ranking_at)
            ranks = ranked[call.layer]
            further = self.strength * (1 / ratios.to(rates)[ranks[0].to(rates.device)] - 1)[:, None, None] * rates

            def turn(values: Tensor, positions: Tensor) -> Tensor:
                angles = positions[0, :, None].to(rates) * further
                return turned_by(values.repeat_interleave(heads // values.shape[1], 1), angles.cos(), angles.sin())

            query, keys = turn(call.query, call.query_positions), turned_keys.of(call, ranks, turn)
            value = call.value.repeat_interleave(heads // call.value.shape[1], 1)
            return call.run(query=query, key=keys, value=value)

        with rankings.followed(model.network), attending(model, str(self), attend):
            yield


def _ranks(call: AttentionCall, ranking_at: int) -> Int[Tensor, "one head"]:
    """The rank of every head by position-awareness, of the query at a position, or the last before it."""
    row = int((call.query_positions[0] <= ranking_at).sum().clamp(min=1)) - 1
    grouped = call.query[:, :, row].reshape(1, call.key.shape[1], call.group, -1).float()
    logits = (grouped @ call.key.float().transpose(-1, -2)).flatten(1, 2) * call.scaling
    visible = shown_keys(call, slice(row, row + 1))[:, :, 0]
    weights = logits.masked_fill(~visible, -torch.inf).softmax(-1)
    aware = (weights > 3.0 / visible.sum(-1, keepdim=True)).sum(-1)
    return aware.argsort(stable=True, dim=-1, descending=True).argsort(-1)
