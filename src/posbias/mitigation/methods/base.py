"""A mitigation: a change of a finished model, or of the requests put to it, made against its position bias.

No weight is touched. Every method has a strength from 0 (the model as it is) to 1 (the method as described).
"""

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from pkgutil import iter_modules
from typing import Annotated, Any, ClassVar

import torch
from annotated_types import Interval
from torch import Tensor

from posbias.errors import UsageError
from posbias.evaluation.responders import Reply, Request, Responder
from posbias.interventions.base import entering
from posbias.interventions.keys import Begins
from posbias.models.attention import beyond_attention
from posbias.models.hugging_face import HuggingFaceModel
from posbias.registry import Registry, Spelled

LEFT = {
    "attention_sorting": "it helped with one task of three",
    "head_scales": "it was the control of one study",
    "initial_token": "it helped in 2 of 9 places, and in none by generated answers",
    "ordered": "it helped in none of 9 places; `posbias place` says an order",
    "parallel_windows": "it did harm in 8 of 9 places",
    "rotary_bases": "it did harm in 6 of 9 places",
    "shifted_distances": "it changed nothing in 9 of 9 places",
}
"""Methods that posbias had, and what was found of them (studies/mitigation, studies/adapters)."""
MITIGATIONS: Registry["Method"] = Registry(
    "mitigation",
    left=LEFT,
    homes={
        module.name: f"{__package__}.{module.name}"
        for module in iter_modules([str(Path(__file__).parent)])
        if module.name not in ("applying", "base", "recipe")
    },
)
"""Methods by name, each in the file of its name beside this one."""

LONGEST = 120
"""Characters of a method that it shows of itself; a fitted one has thousands."""
Spans = Sequence[tuple[int, int]]
"""First token and one past the last of every passage of a prompt, in order."""
Places = Spans | Begins
"""Passages; or what says where the question begins in every prompt that is read."""


@dataclass(frozen=True, repr=False)
class Method(Spelled, ABC):
    """Anything that a trial can judge: it makes a responder answer otherwise, by its strength."""

    needs_passages: ClassVar[bool] = False
    """Prompts must say where their passages begin and end."""
    needs_question: ClassVar[bool] = False
    """The place where the question begins is enough: prompts that are read together may each have their own."""
    strength: Annotated[float, Interval(ge=0, le=1)] = field(default=1.0, kw_only=True)
    """0 (the model as it is) ... 1 (the method as described)."""

    def __repr__(self) -> str:
        text = str(self)
        return text if len(text) <= LONGEST else f"{text[: LONGEST - 3]}..."


@dataclass(frozen=True, repr=False)
class Mitigation(Method):
    """A change inside a model, without training; one list of passages serves all prompts of a batch."""

    single: ClassVar[bool] = False
    """Prompts are read one at a time, without padding."""
    every_layer: ClassVar[bool] = False
    """It would pass by the linear layers of a model, which is refused then."""
    fitted_to: Mapping[str, Any] = field(default_factory=dict, repr=False, compare=False, kw_only=True)
    """`identity` of the model that it was fitted to, checked where it is resolved; empty if it is not known."""

    @abstractmethod
    def apply(self, model: HuggingFaceModel, passages: Spans) -> AbstractContextManager[None]:
        """Within the context the network computes with the method, whose strength is above 0.

        Raises:
            UsageError: on entry, the model or the passages do not allow it; the message says why.
        """

    def known(self, passages: Spans, prompt: Sequence[int]) -> Spans:
        """Of a prompt in tokens, the passages that the method is to know."""
        return passages

    def in_text(self, length: int) -> Spans | None:
        """What stands for passages in a text of so many tokens, which has none; None: it leaves text as it is."""
        return None if self.needs_passages else ()

    def check(self, model: HuggingFaceModel, passages: Places) -> None:
        """Refuse a model, or a prompt without passages, that the method cannot serve."""
        if self.needs_passages and not passages:
            raise UsageError(f"{self.name} needs the passages of the prompt: passages=[(first token, one past last)]")
        if self.every_layer and beyond_attention(model.network):
            raise UsageError(
                f"{self.name}: {model.model_type} models have linear layers, which it does not reach; allowed are "
                "models with attention in every layer"
            )


@dataclass(frozen=True, repr=False)
class PromptMitigation(Method):
    """A change of the requests that are put to a model, or of their number; most servers take it, too.

    The strength is the share of requests that are changed. A request is changed if a hash of its group falls below the
    strength: the same groups at every position, and those of a smaller strength among those of a larger one.
    """

    needs_passages: ClassVar[bool] = True

    def rewritten(self, request: Request) -> list[Request]:
        """The requests, at least one, that are asked in place of a request that is changed."""
        return [request]

    def combined(self, replies: Sequence[Reply]) -> Reply:
        """The reply that stands for those to the rewritten requests."""
        return replies[0]

    def replies(self, inner: Responder, requests: Sequence[Request], **how: Any) -> list[Reply]:
        """One reply to each request, combined from a responder's replies to its variants."""
        variants = [self.asked(request) for request in requests]
        replies = iter(inner.respond([request for several in variants for request in several], **how))
        grouped = [[next(replies) for _ in several] for several in variants]
        return [group[0] if len(group) == 1 else self.combined(group) for group in grouped]

    def asked(self, request: Request) -> list[Request]:
        """The request itself, or its rewritten ones if it is among the share that is changed."""
        digest = hashlib.sha256((request.group or request.text).encode()).digest()
        if int.from_bytes(digest[:8], "big") / 2**64 >= self.strength:
            return [request]
        if self.needs_passages and not request.passages:
            raise UsageError(f"{self.name} needs prompts that list passages; this one lists none")
        return self.rewritten(request)


class Under(Responder):
    """A responder under a method, by which it has the replies of the inner one, described and counted as that."""

    def __init__(self, method: Method, inner: Any, replies: Callable[..., list[Reply]]) -> None:
        self.method, self.inner, self._replies = method, inner, replies
        self.tokenizer, self.max_positions, self.renders = inner.tokenizer, inner.max_positions, inner.renders

    def respond(self, requests: Sequence[Request], *, generate: bool = True, score: bool = False) -> list[Reply]:
        """The replies under the method, like those of `Responder.respond`."""
        return self._replies(self.inner, requests, generate=generate, score=score)

    def describe(self) -> dict[str, Any]:
        """The description of the inner responder, with the method."""
        return {**self.inner.describe(), "method": str(self.method)}

    def learnt(self) -> dict[str, Any]:
        """Facts that the inner responder has learnt, and whether prompts were answered one at a time."""
        method = self.method
        alone = isinstance(method, Mitigation) and method.needs_passages and not method.needs_question
        return {**self.inner.learnt(), **({"together": "nothing"} if alone else {})}

    def counts(self) -> dict[str, float]:
        """Counts of the inner responder."""
        counts: dict[str, float] = self.inner.counts()
        return counts


def check_spans(name: str, passages: Spans) -> tuple[tuple[int, int], ...]:
    """Passages in order, none empty; a token that two of them share is the first one's."""
    spans: list[tuple[int, int]] = []
    for span in passages:
        begin, end = span
        before, last = spans[-1] if spans else (0, 0)
        if not before <= begin < end or end <= last:
            raise UsageError(
                f"{name}: passages must be in order, each (first token, one past its last), got {span} behind {last}"
            )
        spans.append((max(begin, last), end))
    return tuple(spans)


def question_begins(model: HuggingFaceModel, places: Places) -> Begins:
    """What says the first token of the question in every prompt that is read: the one behind the last passage."""
    if callable(places):
        return places
    begins = torch.tensor([[places[-1][1]]], device=model.device)
    return lambda: begins


def check_one_list(arguments: Mapping[str, Any], name: str, *, single: bool) -> None:
    """Refuse a call that reads prompts of several lengths, as one list of passages serves all; `single`: any batch."""
    mask, padded = arguments.get("attention_mask"), False
    if isinstance(mask, Tensor) and mask.ndim == 2:
        lengths = mask.sum(-1)
        padded = bool((lengths != (mask.shape[1] if single else lengths[0])).any())
    if padded or (single and len(entering(arguments)) > 1):
        allowed = "one prompt at a time, without padding" if single else "prompts of one length"
        raise UsageError(f"{name}: passages= is one list for all prompts that are read; allowed: {allowed}")
