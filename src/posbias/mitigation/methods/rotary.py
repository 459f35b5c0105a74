"""Methods that move rotary positions in a finished model: rescaled per head, shifted, or under several bases.

Queries and keys arrive rotated, keys with everything that is cached; both are turned further by the difference between
the wanted angle and the one they have. With a strength s, positions p become p + s (p' - p).
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from posbias.checks import check_choice, check_number, check_whole
from posbias.errors import UsageError
from posbias.interventions.attention import (
    Attended,
    AttentionCall,
    KeptKeys,
    PerCache,
    attending,
    cache_of,
    rotary_frequencies,
    turned_by,
)
from posbias.interventions.base import around_calls
from posbias.mitigation.methods.base import MITIGATIONS, Mitigation, Spans
from posbias.mitigation.methods.passage_attention import in_one_place
from posbias.models.hugging_face import HuggingFaceModel
from posbias.models.rotary import changing_kinds
from posbias.runs.caveats import refusal

VARIANTS = ("as_described", "as_released")
AWARE = 3.0
"""A key counts towards a head's position-awareness if its weight is more than so many times the mean."""
BLOCK = 128
"""Queries that attend at once if some keys are far for a part of them."""
BATCHED = ("input_ids", "inputs_embeds", "attention_mask", "position_ids", "token_type_ids")
"""Inputs of a network that have one row for each prompt."""
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

    low: float = 1.2
    """> 0; 1 leaves a head as it is."""
    high: float = 1.8
    """>= low."""
    first_layer: int = 2
    """From 0."""
    variant: str = "as_described"
    """`as_described` or `as_released`."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_number("ms_poe: low", self.low, above=0.0)
        check_number("ms_poe: high", self.high, least=self.low)
        check_whole("ms_poe: first_layer", self.first_layer, least=0)
        check_choice("ms_poe: variant", self.variant, VARIANTS)

    @contextmanager
    def apply(self, model: HuggingFaceModel, passages: Spans) -> Iterator[None]:
        """Turn queries and keys, the latter repeated for all heads that share them."""
        frequencies = turning(model, self)
        heads = model.family.heads(model.config)
        if self.first_layer >= len(frequencies):
            raise refusal("first_layer_of_ms_poe", depth=len(frequencies), first=self.first_layer)
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


@MITIGATIONS.register("shifted_distances")
@dataclass(frozen=True)
class ShiftedDistances(Mitigation):
    """A rotary distance d >= shift becomes d - shift + window: far keys seem nearer, at distances that training saw.

    Source: STRING (arXiv 2410.18745; HKUNLP/STRING, `replace_with_string`), with its shift of a third of the trained
    length and its local window of 128.
    """

    shift: int | None = None
    """Distance in tokens, >= 1; None: a third of the positions that the model is made for."""
    window: int = 128
    """Distance in tokens, in [0, shift]."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.shift is not None:
            check_whole("shifted_distances: shift", self.shift, least=1)
        check_whole("shifted_distances: window", self.window, least=0)

    @contextmanager
    def apply(self, model: HuggingFaceModel, passages: Spans) -> Iterator[None]:
        """Turn far keys to where they seem to stand; those far for some queries of a block alone stand there twice."""
        frequencies = turning(model, self)
        check_masks(model, self)
        shift = self.shift
        if shift is None:
            shift = int(getattr(model.config, "max_position_embeddings", None) or 0) // 3
        if self.window > shift:
            raise refusal("window_beyond_shift", shift=shift, window=self.window)
        angles = [None if rates is None else self.strength * (shift - self.window) * rates for rates in frequencies]
        turns = [None if angle is None else (angle.cos(), angle.sin()) for angle in angles]

        turned_keys = KeptKeys()

        def attend(call: AttentionCall) -> Attended:
            turn = turns[call.layer]
            reach = int(call.query_positions.max()) - int(call.key_positions.min())
            if turn is None or reach < shift:
                return call.run()
            far = turned_keys.of(call, None, lambda keys, _: turned_by(keys, *turn))
            if call.query.shape[2] <= BLOCK:
                return _with_far(call, far, shift)
            rows = range(0, call.query.shape[2], BLOCK)
            blocks = [_with_far(_block(call, slice(first, first + BLOCK)), far, shift) for first in rows]
            weights = [block for _, block in blocks if block is not None]
            return torch.cat([output for output, _ in blocks], 1), torch.cat(weights, 2) if weights else None

        with attending(model, self, attend):
            yield


@MITIGATIONS.register("rotary_bases")
@dataclass(frozen=True)
class RotaryBases(Mitigation):
    """The model is run under several rotary bases at once, and their next-token probabilities are pooled.

    p = sum of w_b p_b, where w_b is proportional to the largest probability of p_b. Costs one pass for each base, and
    as much cache, which holds what the bases make as further heads of each prompt. Only logits are pooled: other
    outputs have a row for each prompt and base. Source: Attention Buckets, arXiv 2312.04455, which weighs by
    confidence; its formula was not at hand.
    """

    in_every_layer: ClassVar[bool] = True
    shares_cache: ClassVar[bool] = False

    bases: Sequence[float] = (1.0, 1.3, 1.6, 1.9, 2.2, 2.5, 2.8)
    """Multiples of the model's own base, > 0; the default is that of the source's question answering (10,000 ...
    28,000 for models of base 10,000)."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.bases, str | int | float) or not len(self.bases):
            raise UsageError(f"rotary_bases: bases must be at least one number, got {self.bases!r}")
        for base in self.bases:
            check_number("rotary_bases: bases", base, above=0.0)
        object.__setattr__(self, "bases", tuple(map(float, self.bases)))

    @contextmanager
    def apply(self, model: HuggingFaceModel, passages: Spans) -> Iterator[None]:
        """Give the network every row once for each base, and pool what comes out."""
        n_bases = len(self.bases)

        def rates(radians: Tensor) -> Tensor:
            share = torch.arange(len(radians), dtype=radians.dtype, device=radians.device) / len(radians)
            factors = torch.tensor(self.bases, dtype=radians.dtype, device=radians.device)[:, None] ** -share
            return self.strength * (factors - 1) * radians

        tables = _tables(turning(model, self), rates)

        def attend(call: AttentionCall) -> Attended:
            table = tables[call.layer]
            if table is None:
                return call.run()
            base = (torch.arange(len(call.query), device=call.query.device) % n_bases)[:, None]
            query = table.turn(call.query, call.query_positions, base)
            return call.run(query=query, key=table.turn(call.key, call.key_positions, base))

        def multiply(_: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any]) -> Any:
            if len(inputs) > 1 or (inputs and not isinstance(inputs[0], Tensor)):
                raise UsageError("rotary_bases: give the network its inputs by name")
            if named.get("labels") is not None or named.get("return_dict") is False:
                raise UsageError("rotary_bases: labels and return_dict=False are not allowed; pooled are logits alone")
            first = inputs[0] if inputs else named.get("input_ids")
            rows = len(named["inputs_embeds"] if first is None else first)
            names = [name for name in BATCHED if isinstance(named.get(name), Tensor) and len(named[name]) == rows]
            _reshape(cache_of(named), lambda rows: rows.reshape(-1, rows.shape[1] // n_bases, *rows.shape[2:]))
            many = {name: named[name].repeat_interleave(n_bases, 0) for name in names}
            return tuple(tensor.repeat_interleave(n_bases, 0) for tensor in inputs), {**named, **many}

        def pool(_: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any], output: Any) -> Any:
            given_cache = cache_of(named)
            cache = cache_of(output) if given_cache is None else given_cache
            _reshape(cache, lambda rows: rows.reshape(len(rows) // n_bases, -1, *rows.shape[2:]))
            output.logits = pooled(output.logits.unflatten(0, (-1, n_bases)), 1)
            return output

        with around_calls(model.network, multiply, pool), attending(model, self, attend):
            yield


def _reshape(cache: Any, change: Callable[[Tensor], Tensor]) -> None:
    """Change the keys and values of a cache; between calls it has one row for each prompt, which beams reorder."""
    for layer in getattr(cache, "layers", ()):
        if isinstance(layer.keys, Tensor) and layer.keys.ndim == 4:
            layer.keys, layer.values = change(layer.keys), change(layer.values)


def pooled(logits: Tensor, dim: int) -> Tensor:
    """Logits of the mean of distributions along a dimension, each weighted by its largest probability.

    They are shifted by the mean of the distributions' normalisers: equal distributions give back their logits.
    """
    precise = logits.to(torch.promote_types(logits.dtype, torch.float32))
    normaliser = precise.logsumexp(-1, keepdim=True)
    single = precise - normaliser
    weight = single.amax(-1, keepdim=True).log_softmax(dim)
    return ((single + weight).logsumexp(dim) + normaliser.mean(dim)).to(logits.dtype)


def turning(model: HuggingFaceModel, method: Mitigation) -> list[Frequencies]:
    """Radians per position of every layer's feature pairs.

    Raises:
        UsageError: a family whose queries and keys cannot be turned further, by name.
    """
    family = model.family
    if family.turns_neighbours:
        raise refusal("turns_neighbours", method=method.name, family=family.name)
    if not family.rotary:
        raise refusal("no_rotary_positions", method=method.name, family=family.name)
    for module in model.network.modules():
        kinds = changing_kinds(module)
        if kinds:
            raise refusal("rope_of_length_under_method", method=method.name, rope=" ".join(sorted(kinds)))
    frequencies = rotary_frequencies(model)
    if all(rates is None for rates in frequencies):
        raise refusal("turns_nothing", method=method.name, family=family.name)
    return frequencies


def check_masks(model: HuggingFaceModel, method: Mitigation) -> None:
    """Refuse attention that is not told by a mask which keys a query sees."""
    implementation = getattr(model.config, "_attn_implementation", None)
    if implementation not in ("eager", "sdpa"):
        raise refusal("no_mask", method=method.name, implementation=implementation)


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


def _block(call: AttentionCall, rows: slice) -> AttentionCall:
    """Some of the queries, with the keys that they may see if causality alone hides the others."""
    query_positions = call.query_positions[:, rows]
    block = replace(call, query=call.query[:, :, rows], query_positions=query_positions)
    if call.mask is not None:
        return replace(block, mask=call.mask[:, :, rows])
    n_keys = int((call.key_positions <= query_positions.max()).any(0).sum())
    return replace(
        block,
        key=call.key[:, :, :n_keys],
        value=call.value[:, :, :n_keys],
        key_positions=call.key_positions[:, :n_keys],
    )


def _with_far(call: AttentionCall, far_keys: Float[Tensor, "batch key_head _ feature"], shift: int) -> Attended:
    """Attention with other keys from a distance of `shift` on.

    If that differs between the queries, a key stands there as both, and every query sees one of them.
    """
    far = call.query_positions[:, None, :, None] - call.key_positions[:, None, None] >= shift
    counts = far.sum(-1)
    first, last = int(counts.min()), int(counts.max())
    key = torch.cat([far_keys[:, :, :last], call.key[:, :, first:]], 2)
    if first == last and (call.mask is not None or call.query.shape[2] == 1):
        return call.run(key=key)
    mask, n_keys = call.mask, call.key.shape[2]
    lowest = torch.finfo(call.query.dtype).min
    if mask is None or mask.dtype == torch.bool:
        visible = shown_keys(call, slice(None))
        mask = torch.zeros(visible.shape, dtype=call.query.dtype, device=visible.device).masked_fill(~visible, lowest)
    halves = [
        mask[..., :last].masked_fill(~far[..., :last], lowest),
        mask[..., first:].masked_fill(far[..., first:], lowest),
    ]
    value = torch.cat([call.value[:, :, :last], call.value[:, :, first:]], 2)
    mask = torch.cat(halves, -1).expand(len(call.query), -1, -1, -1)
    places = torch.cat([call.key_positions[:, :last], call.key_positions[:, first:]], 1)
    output, weights = call.run(key=key, value=value, mask=mask, key_positions=places)
    if weights is not None:
        doubled = weights
        weights = doubled.new_zeros(*doubled.shape[:-1], n_keys)
        weights[..., :last] = doubled[..., :last]
        weights[..., first:] += doubled[..., last:]
    return output, weights
