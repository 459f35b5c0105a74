"""Attention calibrated by passage, and what methods share that know where the passages of a prompt stand.

Numbers are added to the logits of whole passages, carried by further features of queries and keys, so that caches,
windows, grouped heads and every kernel go on as they are.
"""

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

import torch
from annotated_types import Lt
from jaxtyping import Float, Int
from torch import Tensor, nn

from posbias.checks import Natural, Positive, checked_value
from posbias.errors import UsageError
from posbias.interventions.attention import (
    Attended,
    AttentionCall,
    PerCache,
    attending,
    cached_length,
    named_arguments,
    padded_slots,
)
from posbias.interventions.base import hooked
from posbias.interventions.keys import Begins
from posbias.mitigation.methods.base import MITIGATIONS, Mitigation, Places, Spans
from posbias.mitigation.methods.question import Question
from posbias.models.hugging_face import HuggingFaceModel

UNSEEN = 1e-30
"""Attention on a passage below which it counts as not seen, as one that a window hides."""
LEAST_FACTOR = 1e-35
"""Of a passage's attention; the smallest, whose logarithm is finite, and which is 0 beside any other weight."""


@MITIGATIONS.register("attention_calibration")
@dataclass(frozen=True)
class AttentionCalibration(Mitigation):
    """Queries after the passages attend to each of them by its relevance, not by its place.

    rel(k) = attention to document k minus attention to a dummy at its place, per token, mean over all layers and heads
    of the unchanged model; in the layers from `first_layer` on, tokens of document k get alpha_k / A_k times what they
    had, alpha = softmax(rel / t), A_k a head's own attention to k per token, times what keeps the sum over all
    documents. With a strength s, each weight is (1 - s) times the old one plus s times this.

    rel is every query's own, so that nothing depends on tokens behind it. The dummies replace one document at a time,
    in K further passes per prompt, which begin where they first differ from the prompt's own, and read what is decoded
    with it in one batch; `together` (ours) replaces all at once, in one pass. One prompt at a time, without padding.

    Source: found-in-the-middle, arXiv 2406.16008, equations 4 to 6 and appendix B (no code is released; the paper has
    no estimate with fewer passes, and does not say what its dummy reads).
    """

    needs_passages = True
    shares_cache = False

    temperature: Positive = 5e-5
    """Temperature of the softmax over documents, in attention per token, > 0."""
    first_layer: Natural | None = None
    """The first layer that is changed, 0 nearest the input; None: the upper half is."""
    dummy: str | tuple[int, ...] = "This document is empty.\n"
    """Text of a dummy, repeated to the document's length, or token ids for a model without a tokenizer."""
    together: bool = False
    """Use one pass in which all documents are dummies, not one pass for each."""

    in_every_layer: ClassVar[bool] = True

    @contextmanager
    def apply(self, model: HuggingFaceModel, passages: Spans) -> Iterator[None]:
        """Rescale attention on passages in the upper layers, query by query."""
        spans = tuple(passages)
        depth = model.family.depth(model.config)
        first = depth // 2 if self.first_layer is None else self.first_layer
        if first >= depth:
            raise UsageError(f"attention_calibration: first_layer must be below the {depth} layers, got {first}")
        dummies = _DummyPasses(model, spans, _dummy_tokens(model, self.dummy), together=self.together)

        def attend(call: AttentionCall) -> Attended:
            if dummies.running:
                return dummies.watch(call)
            relevance = None if dummies.passes.current is None else dummies.passes.current.relevance
            if call.layer < first or relevance is None or len(spans) == 1:
                return call.run()
            members = _members(spans, call.key_positions, like=call.query)
            mass = call.run_on(_as_values(members, call))[0].transpose(1, 2).to(relevance)
            visible = mass >= UNSEEN
            shares = (relevance / self.temperature).log_softmax(-1) + _lengths(spans, relevance).log()
            shares = shares.masked_fill(~visible, torch.finfo(shares.dtype).min).softmax(-1)
            target = mass.sum(-1, keepdim=True) * shares
            factor = 1 + self.strength * (target / mass.clamp(min=UNSEEN) - 1)
            behind = (call.query_positions >= spans[-1][1])[:, None, :, None]
            added = torch.where(behind & visible, factor, 1.0).clamp(min=LEAST_FACTOR).log()
            return call.run_grouped(added, members)

        with dummies.passes.followed(model.network), attending(model, self, attend):
            yield


@dataclass
class _Passes:
    """The tokens that were read of a prompt, and the passes beside it."""

    model: HuggingFaceModel
    read: Float[Tensor, "one token feature"]
    caches: list[tuple[Tensor, Tensor]]
    """Keys and values of every layer, in one batch the prompt's own pass and those with dummies; empty before them."""
    relevance: Tensor | None = None
    """rel of the tokens that the network is now given, [1 1 query document]; None if no query is behind."""


class _DummyPasses:
    """Passes of the unchanged network beside a prompt's own: the prompt as it is, and with dummies for documents.

    They keep caches of their own, which are cut back if the prompt's own goes on from an earlier token.
    """

    def __init__(self, model: HuggingFaceModel, spans: Spans, dummy: Int[Tensor, "token"], *, together: bool) -> None:
        self.model, self.spans, self.behind = model, spans, spans[-1][1]
        tokens = torch.cat([dummy[torch.arange(end - begin, device=dummy.device) % len(dummy)] for begin, end in spans])
        self.places = torch.cat([torch.arange(begin, end, device=dummy.device) for begin, end in spans])
        self.tokens, self.together = tokens, together
        self.running = False
        self.passes: PerCache[_Passes] = PerCache(self._follow, copied=True)
        self._attention: Tensor | None = None

    def _follow(self, network: nn.Module, arguments: dict[str, Any], before: _Passes | None) -> _Passes | None:
        """Run the tokens that the network is about to read beside it."""
        if self.running:
            return None
        model = self.model if network is self.model.network else self._of_copy(network)
        entering = arguments.get("inputs_embeds")
        new: Tensor = model.embed(arguments["input_ids"]) if entering is None else entering
        past = cached_length(arguments)
        if len(new) != 1 or padded_slots(arguments) is not None:
            raise UsageError(f"attention_calibration: one prompt at a time without padding is allowed, got {len(new)}")
        if past and (before is None or past > before.read.shape[1]):
            raise UsageError(
                f"attention_calibration: {past} tokens were cached without it; use a cache that was filled under it"
            )
        state = _Passes(model, new, [])
        if before is not None:
            state.read = torch.cat([before.read[:, :past], new], 1)
            if past >= self.behind:  # up to there the passes read different tokens, and begin anew
                state.caches = [(k[:, :, :past], v[:, :, :past]) for k, v in before.caches]
        if state.read.shape[1] > self.behind:
            self.running = True
            try:
                state.relevance = self._run(state)[None, None, -new.shape[1] :]
            finally:
                self.running = False
        return state

    def _of_copy(self, network: nn.Module) -> HuggingFaceModel:
        """The model with a copy of its network."""
        model = copy.copy(self.model)
        model.network = network
        return model

    def watch(self, call: AttentionCall) -> Attended:
        """The output of one layer; attention to every document, per token, is added to that of the layers below it."""
        members, width = _members(self.spans, call.key_positions, like=call.query), call.value.shape[-1]
        output, weights = call.run_on(torch.cat([call.value, _as_values(members, call)], -1))
        mass = output[..., width:].to(members)
        attention = mass.mean(2) / _lengths(self.spans, mass)
        self._attention = attention if self._attention is None else self._attention + attention.to(self._attention)
        return output[..., :width], weights

    def _run(self, passes: _Passes) -> Float[Tensor, "new document"]:
        """rel of the tokens that are new to the passes; of those in front of a document, 0 for it."""
        if passes.caches:
            n_passes, _, first, _ = passes.caches[0][0].shape
            attention = self._go_on(passes, passes.read[:, first:].expand(n_passes, -1, -1))
        else:
            attention = self._begin(passes)
        prompt_itself, with_dummies = attention[0], attention[1:]
        return prompt_itself - (with_dummies[0] if self.together else with_dummies.diagonal(dim1=0, dim2=2))

    def _begin(self, passes: _Passes) -> Float[Tensor, "pass token document"]:
        """Run each pass from its first difference to the prompt's own, which is run first."""
        whole = passes.read
        dummies = whole.clone()
        dummies[:, self.places] = passes.model.embed(self.tokens[None]).to(whole)
        attention: list[Tensor] = []
        caches: list[list[tuple[Tensor, Tensor]]] = []
        for replaced in [[], *([self.spans] if self.together else [[span] for span in self.spans])]:
            start = replaced[0][0] if replaced else 0
            changed = torch.zeros(whole.shape[1], dtype=torch.bool, device=whole.device)
            for begin, end in replaced:
                changed[begin:end] = True
            passes.caches = [(k[:, :, :start], v[:, :, :start]) for k, v in caches[0]] if start else []
            of_new = self._go_on(passes, torch.where(changed[:, None], dummies, whole)[:, start:])
            attention.append(torch.nn.functional.pad(of_new, (0, 0, start, 0)))
            caches.append(passes.caches)
        passes.caches = []
        while caches[0]:  # layer by layer, so that no cache is held twice as a whole
            keys, values = zip(*(layers.pop(0) for layers in caches), strict=True)
            passes.caches.append((torch.cat(keys), torch.cat(values)))
        return torch.cat(attention)

    def _go_on(
        self, passes: _Passes, entering: Float[Tensor, "pass new feature"]
    ) -> Float[Tensor, "pass new document"]:
        """Run passes on tokens that follow their caches."""
        from transformers import DynamicCache

        cache = DynamicCache(passes.caches) if passes.caches else DynamicCache()
        self._attention = None
        passes.model.outputs(entering, [entering.shape[1] - 1], cache=cache)
        layers: Any = cache.layers
        passes.caches = [(layer.keys, layer.values) for layer in layers]
        attention: Tensor | None = self._attention
        assert attention is not None
        return attention / len(layers)


@contextmanager
def in_one_place(model: HuggingFaceModel, method: Mitigation, passages: Spans) -> Iterator[None]:
    """Within the context, a method that needs passages refuses batches whose prompts have them at different places.

    One list of spans serves all prompts of a batch; they count from every prompt's own first token, whatever padding
    stands before it. So prompts of several lengths have to read the same up to the end of the last passage.
    """
    if not method.needs_passages:
        yield
        return
    end = passages[-1][1]

    def check(network: nn.Module, positional: tuple[Any, ...], named: dict[str, Any]) -> None:
        arguments = named_arguments(network, positional, named)
        entering, mask = arguments.get("inputs_embeds"), arguments.get("attention_mask")
        read: Any = arguments.get("input_ids") if entering is None else entering
        if not isinstance(mask, Tensor) or mask.shape != read.shape[:2]:  # no padding, or what goes on from a cache
            return
        lengths = mask.sum(-1)
        if bool((lengths == lengths[0]).all()):
            return
        first = (mask.cumsum(-1) == 0).sum(-1, keepdim=True)
        slots = first + torch.arange(min(end, mask.shape[1] - int(first.max())), device=mask.device)
        beginnings = read[torch.arange(len(read), device=mask.device)[:, None], slots]
        if not torch.equal(beginnings, beginnings[:1].expand_as(beginnings)):
            raise UsageError(
                f"{method.name}: in a batch, prompts of several lengths must read the same up to the end of the last "
                f"passage, token {end}; these do not"
            )

    with hooked([model.network.register_forward_pre_hook(check, with_kwargs=True)]):
        yield


@contextmanager
def question_begins(model: HuggingFaceModel, method: Mitigation, passages: Places) -> Iterator[Begins]:
    """Within the context, the first token of the question in every prompt: behind the last passage, or found."""
    if isinstance(passages, Question):
        with passages.followed(model.network):
            yield passages.begins
        return
    begins = torch.tensor([[passages[-1][1] if method.needs_passages else 0]], device=model.device)
    with in_one_place(model, method, passages):
        yield lambda: begins


def windows_of(spans: Spans) -> Spans:
    """Passages with what stands before each, behind the last."""
    return [(spans[0][0] if index == 0 else spans[index - 1][1], end) for index, (_, end) in enumerate(spans)]


def _members(spans: Spans, positions: Int[Tensor, "_ token"], *, like: Tensor) -> Float[Tensor, "_ token span"]:
    """1 if a token lies in a span, else 0; in float32 at least."""
    begins, ends = torch.tensor(spans, device=positions.device).unbind(1)
    inside = (positions[..., None] >= begins) & (positions[..., None] < ends)
    return inside.to(torch.promote_types(like.dtype, torch.float32))


def _lengths(spans: Spans, like: Tensor) -> Float[Tensor, "span"]:
    """Tokens of every span."""
    return torch.tensor([end - begin for begin, end in spans]).to(like)


def _as_values(members: Float[Tensor, "_ key group"], call: AttentionCall) -> Tensor:
    """Membership as values, so that an attention's output is its weight on each group."""
    return members.to(call.value)[:, None].expand(*call.value.shape[:3], -1)


def _dummy_tokens(model: HuggingFaceModel, dummy: str | Sequence[int]) -> Int[Tensor, "token"]:
    """A dummy's text in tokens."""
    if isinstance(dummy, str) and model.tokenizer is None:
        raise UsageError(f"attention_calibration: {model.no_tokenizer}; allowed is a dummy in token ids")
    ids = model.tokenizer(dummy, add_special_tokens=False)["input_ids"] if isinstance(dummy, str) else list(dummy)
    if not ids:
        raise UsageError(f"attention_calibration: dummy must have tokens, got {dummy!r}")
    checked_value("attention_calibration: dummy", ids, Sequence[Annotated[Natural, Lt(model.vocabulary_size)]])
    return model.token_tensor([ids])[0]
