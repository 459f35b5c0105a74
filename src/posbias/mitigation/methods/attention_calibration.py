"""Attention calibrated by passage: each document gets what its relevance asks for, not what its place does."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

import torch
from annotated_types import Lt
from jaxtyping import Float, Int
from torch import Tensor, nn
from transformers import DynamicCache

from posbias.checks import Natural, Positive, checked_value
from posbias.errors import UsageError
from posbias.interventions.base import Attended, AttentionCall, PerCache, attending, cached_length
from posbias.mitigation.methods.base import MITIGATIONS, Mitigation, Spans, check_one_list
from posbias.models.hugging_face import HuggingFaceModel

UNSEEN = 1e-30
"""Attention on a passage below which it counts as not seen, as one that a window hides."""
Caches = list[tuple[Tensor, Tensor]]
"""Keys and values of every layer."""
LEAST_FACTOR = 1e-35
"""Of a passage's attention; the smallest, whose logarithm is finite, and which is 0 beside any other weight."""


@MITIGATIONS.register("attention_calibration")
@dataclass(frozen=True, repr=False)
class AttentionCalibration(Mitigation):
    """Queries after the passages attend to each of them by its relevance, not by its place.

    rel(k) = attention to document k minus attention to a dummy at its place, per token, mean over all layers and heads
    of the unchanged model; in the upper half of the layers, tokens of document k get alpha_k / A_k times what they
    had, alpha = softmax(rel / t), A_k a head's own attention to k per token, times what keeps the sum over all
    documents. With a strength s, each weight is (1 - s) times the old one plus s times this.

    rel is every query's own, so that nothing depends on tokens behind it. The dummies replace one document at a time,
    in K further passes per prompt, which begin where they first differ from the prompt's own, and read what is decoded
    with it in one batch. One prompt at a time, without padding.

    Source: found-in-the-middle, arXiv 2406.16008, equations 4 to 6 and appendix B (no code is released; the paper does
    not say what its dummy reads).
    """

    needs_passages: ClassVar[bool] = True
    every_layer: ClassVar[bool] = True

    temperature: Positive = 5e-5
    """Temperature of the softmax over documents, in attention per token, > 0."""
    dummy: str | tuple[int, ...] = "This document is empty.\n"
    """Text of a dummy, repeated to the document's length, or token ids for a model without a tokenizer."""

    @contextmanager
    def apply(self, model: HuggingFaceModel, passages: Spans) -> Iterator[None]:
        """Rescale attention on passages in the upper layers, query by query."""
        spans, first = tuple(passages), model.sizes.get("layers", 0) // 2
        passes = DummyPasses(model, spans, _dummy_tokens(model, self.dummy))

        def attend(call: AttentionCall) -> Attended:
            if passes.seen is not None:
                return passes.watch(call, passes.seen)
            relevance = None if passes.of.current is None else passes.of.current.relevance
            if call.layer < first or relevance is None or len(spans) == 1:
                return call.run()
            members, values = _members(spans, call)
            mass = call.run_on(values)[0].transpose(1, 2).to(relevance)
            visible = mass >= UNSEEN
            shares = (relevance / self.temperature).log_softmax(-1) + passes.lengths.to(relevance).log()
            shares = shares.masked_fill(~visible, torch.finfo(shares.dtype).min).softmax(-1)
            target = mass.sum(-1, keepdim=True) * shares
            factor = 1 + self.strength * (target / mass.clamp(min=UNSEEN) - 1)
            behind = (call.query_positions >= spans[-1][1])[:, None, :, None]
            added = torch.where(behind & visible, factor, 1.0).clamp(min=LEAST_FACTOR).log()
            return call.run_grouped(added, members)

        with passes.of.followed(model.network), attending(model, str(self), attend):
            yield


@dataclass
class _Read:
    """The tokens that were read of a prompt, and the passes beside it."""

    tokens: Float[Tensor, "one token feature"]
    caches: Caches
    """Of the prompt's own pass and those with dummies, in one batch; empty before them."""
    relevance: Tensor | None = None
    """rel of the tokens that the network is now given, [1 1 query document]; None if no query is behind."""


class DummyPasses:
    """Passes of the unchanged network beside a prompt's own: the prompt as it is, and with dummies for documents.

    They keep caches of their own, which are cut back if the prompt's own goes on from an earlier token.
    """

    def __init__(self, model: HuggingFaceModel, spans: Spans, dummy: Int[Tensor, "token"]) -> None:
        self.model, self.spans, self.dummy = model, spans, dummy
        self.lengths = torch.tensor(spans).diff(dim=1)[:, 0]
        self.of: PerCache[_Read] = PerCache(self._follow)
        self.seen: list[Tensor] | None = None
        """Attention to every document, per token, by layer, of a pass beside the prompt's own; None while none runs."""

    def watch(self, call: AttentionCall, seen: list[Tensor]) -> Attended:
        """The output of one layer; attention to every document, per token, is kept."""
        width, (_, values) = call.value.shape[-1], _members(self.spans, call)
        output, weights = call.run_on(torch.cat([call.value, values], -1))
        mass = output[..., width:].to(torch.promote_types(call.query.dtype, torch.float32))
        seen.append(mass.mean(2) / self.lengths.to(mass))
        return output[..., :width], weights

    def _follow(self, network: nn.Module, arguments: dict[str, Any], before: _Read | None) -> _Read | None:
        """Run the tokens that the network is about to read beside it."""
        if self.seen is not None:
            return None
        check_one_list(arguments, AttentionCalibration.name, single=True)
        entering, past = arguments.get("inputs_embeds"), cached_length(arguments)
        new: Tensor = self.model.embed(arguments["input_ids"]) if entering is None else entering
        if past and (before is None or past > before.tokens.shape[1]):
            raise UsageError(
                f"attention_calibration: {past} tokens were cached without it; use a cache that was filled under it"
            )
        state = _Read(new if before is None else torch.cat([before.tokens[:, :past], new], 1), [])
        if before is not None and past >= self.spans[-1][1]:  # up to there the passes read different tokens
            state.caches = [(keys[:, :, :past], values[:, :, :past]) for keys, values in before.caches]
        if state.tokens.shape[1] > self.spans[-1][1]:
            if state.caches:
                n_passes, _, first, _ = state.caches[0][0].shape
                behind = state.tokens[:, first:].expand(n_passes, -1, -1)
                (own, *others), state.caches = self._pass(behind, state.caches)
            else:
                own, *others = self._begin(state)
            dummies = torch.stack(others).diagonal(dim1=0, dim2=2)
            state.relevance = (own - dummies)[None, None, -new.shape[1] :]
        return state

    def _begin(self, state: _Read) -> Float[Tensor, "pass token document"]:
        """Run each pass from its first difference to the prompt's own, which is run first."""
        attention: list[Tensor] = []
        caches: list[Caches] = []
        for start, end in ((0, 0), *self.spans):
            entering = state.tokens.clone()
            if end:
                tokens = self.dummy[torch.arange(end - start, device=entering.device) % len(self.dummy)]
                entering[:, start:end] = self.model.embed(tokens[None]).to(entering)
            own = [(keys[:, :, :start], values[:, :, :start]) for keys, values in caches[0]] if start else []
            found, cache = self._pass(entering[:, start:], own)
            attention.append(torch.nn.functional.pad(found, (0, 0, start, 0)))
            caches.append(cache)
        for layer in zip(*caches, strict=True):
            keys, values = map(torch.cat, zip(*layer, strict=True))
            state.caches.append((keys, values))
        return torch.cat(attention)

    def _pass(
        self, entering: Float[Tensor, "pass new feature"], caches: Caches
    ) -> tuple[Float[Tensor, "pass new document"], Caches]:
        """Attention to every document per token, mean over layers and heads, and keys and values from then on."""
        cache, seen = DynamicCache(caches or None), list[Tensor]()
        self.seen = seen
        try:
            self.model.outputs(entering, [entering.shape[1] - 1], cache=cache)
        finally:
            self.seen = None
        layers: Any = cache.layers
        return torch.stack(seen).mean(0), [(layer.keys, layer.values) for layer in layers]


def _members(spans: Spans, call: AttentionCall) -> tuple[Float[Tensor, "_ key span"], Tensor]:
    """1 if a key lies in a span, else 0; and that as values, by which an attention's output is its weight on each."""
    begins, ends = torch.tensor(spans, device=call.key_positions.device).unbind(1)
    places = call.key_positions[..., None]
    members = ((places >= begins) & (places < ends)).to(call.value)
    return members, members[:, None].expand(*call.value.shape[:3], -1)


def _dummy_tokens(model: HuggingFaceModel, dummy: str | Sequence[int]) -> Int[Tensor, "token"]:
    """A dummy's text in tokens."""
    if isinstance(dummy, str) and model.tokenizer is None:
        raise UsageError(f"attention_calibration: {model.no_tokenizer}; allowed is a dummy in token ids")
    ids = model.tokenizer(dummy, add_special_tokens=False)["input_ids"] if isinstance(dummy, str) else list(dummy)
    if not ids:
        raise UsageError(f"attention_calibration: dummy must have tokens, got {dummy!r}")
    checked_value("attention_calibration: dummy", ids, Sequence[Annotated[Natural, Lt(model.vocabulary_size)]])
    return model.token_tensor([ids])[0]
