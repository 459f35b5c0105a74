"""Documents in no order (PINE): they see each other both ways, and every query has the most important ones nearest."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from posbias.architecture import Mask
from posbias.errors import UsageError
from posbias.interventions.base import Attended, AttentionCall, KeptKeys, attending, has_sinks
from posbias.mitigation.methods.base import MITIGATIONS, Mitigation, Spans
from posbias.mitigation.methods.ms_poe import Frequencies, shown_keys, turning
from posbias.models.hugging_face import LOOKS_AHEAD_MARK, HuggingFaceModel
from posbias.models.layout import turned_by

BLOCK = 128
"""Queries outside of documents that attend at once."""
OUTSIDE = -1
"""Stands for the document of a token that is in none."""


@MITIGATIONS.register("pine")
@dataclass(frozen=True, repr=False)
class Pine(Mitigation):
    """Passages see each other both ways; every query has them ordered by their importance to it, the greatest nearest.

    The importance of a document to a query: its attention to it per token, without rotary positions, in a softmax over
    all documents, for each layer and head; to a document, the sum over its tokens of that in a softmax over all others.
    To its own tokens a document stands behind all others, at the end of the stretch that documents take. So the order
    in which documents are given makes no difference, but for the text between them, such as numbers and separators: it
    belongs to the one behind it, and what stands before the first to none. If a layer's window is shorter than the
    prompt, order matters again: it hides by original places, later documents beyond its reach, too.

    One prompt at a time, without padding, and all passages in one call. With a strength s, positions p become
    p + s (p' - p), and ln s is added to the logits of documents that stand behind a query. Logits are formed for a
    document's queries at once, without dropout; gradients hold the order fixed.

    Source: PINE, arXiv 2407.01100, and its released code, wzq016/PINE (pine/models/llama/modeling_llama.py), which
    takes one prompt at a time, ranks in the model's dtype (here in float32 at least), and has no text between
    documents. This follows it in what the paper leaves open: the order is every head's own, a token behind the
    documents has one of its own, and a document's own attention to itself is left out.
    """

    needs_passages: ClassVar[bool] = True
    single: ClassVar[bool] = True
    every_layer: ClassVar[bool] = True

    @contextmanager
    def apply(self, model: HuggingFaceModel, passages: Spans) -> Iterator[None]:
        """Attend by queries that are turned anew for every document."""
        implementation = getattr(model.config, "_attn_implementation", None)
        if implementation not in ("eager", "sdpa"):
            raise UsageError(f"pine: attention {implementation!r} takes no mask; allowed are eager and sdpa")
        if has_sinks(model):
            raise UsageError(f"pine: {model.family.name} models have learned sinks; allowed are those without")
        windows = windows_of(passages)
        layers = [
            Documents(windows, self.strength, rates, model.family.mask(model.config, layer))
            for layer, rates in enumerate(turning(model, self))
        ]
        plain_keys = KeptKeys()

        def attend(call: AttentionCall) -> Attended:
            if len(windows) == 1 or int(call.query_positions.max()) < windows[0][0]:
                return call.run()
            documents = layers[call.layer]
            return documents.attended(call, plain_keys.of(call, None, documents.turned_back))

        with attending(model, str(self), attend):
            setattr(model.network, LOOKS_AHEAD_MARK, True)
            try:
                yield
            finally:
                vars(model.network).pop(LOOKS_AHEAD_MARK, None)


def windows_of(spans: Spans) -> Spans:
    """Passages with what stands before each, behind the last."""
    return [(spans[0][0] if index == 0 else spans[index - 1][1], end) for index, (_, end) in enumerate(spans)]


@dataclass(frozen=True)
class Documents:
    """The places of documents, and one layer's attention to them."""

    windows: Spans
    strength: float
    frequencies: Frequencies
    mask: Mask

    def attended(self, call: AttentionCall, plain: Float[Tensor, "one key_head key feature"]) -> Attended:
        """Attention of a prompt; `plain` are the keys without rotary positions."""
        owners, keys = self._owners(call.query_positions[0]), self._owners(call.key_positions[0])
        n_read, n_wanted = int((owners >= 0).sum()), self.windows[-1][1] - self.windows[0][0]
        if 0 < n_read < n_wanted:
            raise UsageError(f"pine: the {n_wanted} tokens of all passages must be read in one call, got {n_read}")
        precise = replace(call, query=_precise(call.query), key=_precise(call.key), value=_precise(call.value))
        bare = replace(call, query=self.turned_back(call.query, call.query_positions), key=plain)
        found, (runs, counts) = [], torch.unique_consecutive(owners, return_counts=True)
        for document, count, end in zip(runs.tolist(), counts.tolist(), counts.cumsum(0).tolist(), strict=True):
            size = BLOCK if document == OUTSIDE else count  # the queries of a document have one order
            blocks = [slice(begin, min(begin + size, end)) for begin in range(end - count, end, size)]
            found += [self._block(precise, bare, rows, document, keys) for rows in blocks]
        return torch.cat(found, 1).to(call.query.dtype), None

    def turned_back(self, values: Tensor, positions: Int[Tensor, "_ token"]) -> Tensor:
        """Queries or keys without rotary positions."""
        return self._further(_precise(values), -positions[:, None])

    def _further(self, values: Tensor, positions: Tensor) -> Tensor:
        """Queries or keys turned by so many positions more."""
        if self.frequencies is None:
            return values
        angles = positions[..., None].to(self.frequencies) * self.frequencies
        return turned_by(values, angles.cos(), angles.sin())

    def _owners(self, positions: Int[Tensor, "token"]) -> Int[Tensor, "token"]:
        """The document of every token, or `OUTSIDE`."""
        begins, ends = torch.tensor(self.windows, device=positions.device).unbind(1)
        inside = (positions[:, None] >= begins) & (positions[:, None] < ends)
        return torch.where(inside.any(1), inside.int().argmax(1), OUTSIDE)

    def _block(
        self, call: AttentionCall, bare: AttentionCall, rows: slice, document: int, keys: Int[Tensor, "key"]
    ) -> Tensor:
        """The output of some queries of one document, or outside; `bare` is the call without positions."""
        at, places = call.query_positions[0, rows, None], call.key_positions[0]
        later = (places > at) & (keys != OUTSIDE) & (keys != document) & (document != OUTSIDE)
        later &= places - at <= self.mask.keys_before(places, call.slots)
        visible = shown_keys(call, rows) | later
        moved, query = self._moved(bare, rows, document, keys, visible), call.query[:, :, rows]
        logits = query.new_empty(*query.shape[:3], len(keys))
        for other in range(OUTSIDE, len(self.windows)):
            of_other = (keys == other).nonzero().squeeze(1)
            away = self._further(query, self.strength * (moved[..., document] - moved[..., other]))
            logits[..., of_other] = _products(away, call.key[:, :, of_other], call.group)
        weights = _softmax(logits * call.scaling + later.to(logits) * math.log(self.strength), visible)
        shared = weights.reshape(len(weights), call.value.shape[1], -1, *weights.shape[2:])
        return (shared @ call.value[:, :, None]).flatten(1, 2).transpose(1, 2)

    @torch.no_grad()
    def _moved(
        self,
        bare: AttentionCall,
        rows: slice,
        document: int,
        keys: Int[Tensor, "key"],
        visible: Bool[Tensor, "_ 1 query key"],
    ) -> Float[Tensor, "batch head _ document"]:
        """The positions by which every document moves for queries of one, or outside; last, 0 for what is in none.

        Documents are ordered by the attention of these queries to them without positions, per token, in a softmax over
        all but their own.
        """
        begins, ends = torch.tensor(self.windows, device=keys.device).unbind(1)
        lengths, there = ends - begins, keys >= 0
        if self.frequencies is None or bare.query_positions[0, rows.start] < begins[0]:
            return bare.query.new_zeros(*bare.query.shape[:2], 1, len(lengths) + 1)
        logits = _products(bare.query[:, :, rows], bare.key[:, :, there], bare.group) * bare.scaling
        shares = _softmax(logits, visible[..., there] & (keys[there] != document))
        ranked = shares @ torch.nn.functional.one_hot(keys[there], len(lengths)).to(shares) / lengths
        if document != OUTSIDE:
            ranked = ranked.sum(2, keepdim=True)
            ranked[..., document] = math.inf
        order = ranked.argsort(dim=-1, descending=True, stable=True)
        behind = lengths[order].cumsum(-1).gather(-1, order.argsort(dim=-1))  # tokens from its begin to the end of all
        return torch.nn.functional.pad((ends[-1] - behind - begins).to(ranked), (0, 1))


def _precise(values: Tensor) -> Tensor:
    """Values in float32 at least: ranks hang on small differences, and kernels are as precise."""
    return values.to(torch.promote_types(values.dtype, torch.float32))


def _softmax(logits: Tensor, visible: Bool[Tensor, "*shown key"]) -> Tensor:
    """The softmax over visible keys; 0 for a query that sees none, as padding does."""
    return logits.masked_fill(~visible, -math.inf).softmax(-1).nan_to_num(0.0)


def _products(query: Tensor, key: Tensor, group: int) -> Float[Tensor, "batch head query key"]:
    """Products of every query with the keys that its head shares."""
    return (query.reshape(len(query), -1, group, *query.shape[2:]) @ key[:, :, None].mT).flatten(1, 2)
