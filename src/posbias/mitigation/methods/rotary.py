"""A method that moves rotary positions in a finished model, rescaled per head, and what such methods share.

Queries and keys arrive rotated, keys with everything that is cached; both are turned further by the difference between
the wanted angle and the one they have. With a strength s, positions p become p + s (p' - p).
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from annotated_types import Ge
from jaxtyping import Float, Int
from torch import Tensor

from posbias.checks import Natural, OneOf, Positive, checked_value
from posbias.errors import UsageError
from posbias.interventions.attention import (
    Attended,
    AttentionCall,
    KeptKeys,
    PerCache,
    attending,
    rotary_frequencies,
)
from posbias.mitigation.methods.base import MITIGATIONS, Mitigation, Spans
from posbias.mitigation.methods.passage_attention import in_one_place
from posbias.models.hugging_face import HuggingFaceModel
from posbias.models.rotary import changing_kinds, turned_by

VARIANTS = ("as_described", "as_released")
AWARE = 3.0
"""A key counts towards a head's position-awareness if its weight is more than so many times the mean."""
Frequencies = Float[Tensor, "pair"] | None


@MITIGATIONS.register("ms_poe")
@dataclass(frozen=True)
class MsPoe(Mitigation):
    """Head h sees positions p / r_h, with r from `low` (most position-aware head) to `high`, from one layer on.

    Position-awareness of a head: the share of keys whose attention weight is more than 3 times the mean, for the query
    at the last token of the last passage; `passages=[(0, n)]` ranks at the last of a prompt's n tokens, as the paper
    does. A pass that ends before that token ranks at its own last. Source: Ms-PoE, arXiv
    2403.04797; `as_released` follows utils/modify_arch/llama.py of VITA-Group/Ms-PoE, which differs: it ranks by
    attention without rotary positions; gives head h the ratio of the h-th entry of the argsort, where its rank is
    meant; never reaches `high` (steps of 1 / heads); and turns a shared key head by the ratio of the first head of
    its group, so that other heads of the group see no mere distances. The paper's text was not at hand: what it says
    is taken from summaries.
    """

    needs_passages: ClassVar[bool] = True
    reads_whole_text: ClassVar[bool] = True
    shares_cache: ClassVar[bool] = False

    low: Positive = 1.2
    """> 0; 1 leaves a head as it is."""
    high: float = 1.8
    """>= low."""
    first_layer: Natural = 2
    """From 0."""
    variant: Annotated[str, OneOf(*VARIANTS)] = "as_described"
    """`as_described` or `as_released`."""

    def __post_init__(self) -> None:
        checked_value("ms_poe: high", self.high, Annotated[float, Ge(self.low)])

    @contextmanager
    def apply(self, model: HuggingFaceModel, passages: Spans) -> Iterator[None]:
        """Turn queries and keys, the latter repeated for all heads that share them."""
        frequencies = turning(model, self)
        heads = model.family.heads(model.config)
        if self.first_layer >= len(frequencies):
            raise UsageError(f"ms_poe: first_layer must lie in [0, {len(frequencies)}), got {self.first_layer}")
        steps = heads if self.variant == "as_released" else max(heads - 1, 1)
        ratios = self.low + (self.high - self.low) * torch.arange(heads, dtype=torch.float64) / steps
        tables = _tables(frequencies, lambda rates: self.strength * (1 / ratios.to(rates) - 1)[:, None] * rates)
        back = _tables(frequencies, lambda rates: -rates[None])
        turned_keys = KeptKeys()
        ranking_at = passages[-1][1] - 1
        rankings: PerCache[dict[int, Tensor]] = PerCache(
            lambda _network, _arguments, ranked: {} if ranked is None else ranked, copied=True, latest={}
        )

        def attend(call: AttentionCall) -> Attended:
            table = tables[call.layer]
            if table is None or call.layer < self.first_layer:
                return call.run()
            ranked = rankings.latest if rankings.current is None else rankings.current
            assert ranked is not None  # the empty one, if nothing was read before
            earlier, due = ranked.get(call.layer), call.query_positions[:, :1] <= ranking_at
            if earlier is None or due.any():
                fresh = self._indices(call, ranking_at, back[call.layer])
                ranked[call.layer] = fresh if earlier is None or due.all() else torch.where(due, fresh, earlier)
            indices = ranked[call.layer]
            query = table.turn(call.query, call.query_positions, indices)
            shared = self.variant == "as_released" or call.group == 1
            key_indices, repeated = (indices[:, :: call.group], 1) if shared else (indices, call.group)

            def turn(keys: Tensor, positions: Tensor) -> Tensor:
                return table.turn(keys.repeat_interleave(repeated, 1), positions, key_indices)

            key = turned_keys.of(call, indices, turn)
            return call.run_repeated(query, key)

        with rankings.followed(model.network), in_one_place(model, self, passages), attending(model, self, attend):
            yield

    def _indices(self, call: AttentionCall, ranking_at: int, back: "_Table | None") -> Int[Tensor, "batch head"]:
        """The index of every head's ratio, by the query at a position, or the last before it."""
        row = (call.query_positions <= ranking_at).sum(-1).clamp(min=1) - 1
        row = row.expand(len(call.query))
        batch = torch.arange(len(row), device=row.device)
        query, key = call.query[batch, :, row][:, :, None], call.key  # [batch head 1 feature]
        at = call.query_positions.expand(len(row), -1)[batch, row][:, None]
        if self.variant == "as_released" and back is not None:
            none = torch.zeros(1, 1, dtype=torch.long, device=row.device)
            query, key = back.turn(query, at, none), back.turn(key, call.key_positions, none)
        grouped = query.reshape(len(row), key.shape[1], call.group, -1).float()
        logits = (grouped @ key.float().transpose(-1, -2)).flatten(1, 2) * call.scaling
        visible = shown_keys(call, slice(None)).expand(len(row), 1, -1, -1)[batch, :, row]
        weights = logits.masked_fill(~visible, -torch.inf).softmax(-1)
        counted = (weights > AWARE / visible.sum(-1, keepdim=True)).sum(-1)
        order = counted.argsort(stable=True, dim=-1, descending=True)
        return order if self.variant == "as_released" else order.argsort(-1)


def turning(model: HuggingFaceModel, method: Mitigation) -> list[Frequencies]:
    """Radians per position of every layer's feature pairs.

    Raises:
        UsageError: a family whose queries and keys cannot be turned further, by name.
    """
    family = model.family
    if family.turns_neighbours:
        raise UsageError(
            f"{method.name}: {family.name} models turn neighbouring features; only half against half is allowed, as in "
            "llama, qwen2, qwen3, gemma3 and mistral"
        )
    if not family.rotary:
        raise UsageError(f"{method.name}: {family.name} models have no rotary positions")
    for module in model.network.modules():
        kinds = changing_kinds(module)
        if kinds:
            raise UsageError(
                f"{method.name}: the rope type {' '.join(sorted(kinds))} takes its frequencies from the prompt's "
                "length; default, linear and llama3 are allowed"
            )
    frequencies = rotary_frequencies(model)
    if all(rates is None for rates in frequencies):
        raise UsageError(f"{method.name}: this {family.name} model turns nothing by position")
    return frequencies


def check_masks(model: HuggingFaceModel, method: Mitigation) -> None:
    """Refuse attention that is not told by a mask which keys a query sees."""
    implementation = getattr(model.config, "_attn_implementation", None)
    if implementation not in ("eager", "sdpa"):
        raise UsageError(f"{method.name}: attention {implementation!r} takes no mask; allowed are eager and sdpa")


class _Table:
    """Cosines and sines of the angles position x rate, for several sets of rates; grown as positions are asked for."""

    def __init__(self, rates: Float[Tensor, "set pair"]) -> None:
        self.rates, self.n_positions = rates, 0

    def turn(
        self,
        values: Float[Tensor, "batch head position feature"],
        positions: Int[Tensor, "_ position"],
        chosen: Int[Tensor, "_ _"],
    ) -> Float[Tensor, "batch head position feature"]:
        """Values turned, every head of every row by its chosen set."""
        most = int(positions.max()) + 1
        if most > self.n_positions:
            self.n_positions = max(most + most // 4, 64)
            angles = torch.arange(self.n_positions, device=self.rates.device)[:, None] * self.rates[:, None]
            precise = torch.promote_types(values.dtype, torch.float32)
            self.cosine, self.sine = (side.to(values.device, precise) for side in (angles.cos(), angles.sin()))
        index = chosen[:, :, None], positions[:, None]
        return turned_by(values, self.cosine[index], self.sine[index])


def _tables(frequencies: Sequence[Frequencies], rates: Callable[[Tensor], Tensor]) -> list[_Table | None]:
    """A table for every layer; layers of equal frequencies share one."""
    tables: dict[tuple[float, ...], _Table] = {}
    return [
        None if layer is None else tables.setdefault(tuple(layer.tolist()), _Table(rates(layer)))
        for layer in frequencies
    ]


def shown_keys(call: AttentionCall, rows: slice) -> Tensor:
    """True for the keys that some queries see, [batch 1 query key]; the leading size is 1 if it is the same for all."""
    if call.mask is None:
        return call.key_positions[:, None, None] <= call.query_positions[:, None, rows, None]
    mask = call.mask[:, :, rows]
    return mask if mask.dtype == torch.bool else mask > torch.finfo(mask.dtype).min / 2
