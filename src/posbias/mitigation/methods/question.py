"""Where a method acts: from the question on, in every prompt that a network reads, or by the passages of one prompt.

The question is found by the text with which questions begin, so a method that acts from it on can stay on a model for
good: each prompt of a batch has its own place, and a text without a question is left as it is.
"""

import warnings
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from jaxtyping import Int
from torch import Tensor, nn

from posbias.errors import UsageError
from posbias.interventions.base import PerCache, cached_length, hooked, named_arguments, padded_slots
from posbias.interventions.keys import Begins
from posbias.models.hugging_face import HuggingFaceModel

Spans = Sequence[tuple[int, int]]
"""First token and one past the last of every passage of a prompt, in order."""
NOWHERE = torch.iinfo(torch.int64).max
"""The place of a question that is not there: no token stands behind it."""
CUT_CHARACTER = "\ufffd"
"""The character that stands for bytes which decode to none."""


class Question:
    """The last place in every prompt where a text stands with which questions begin.

    It is looked for whenever a network reads several tokens at once, so that what is generated token by token moves
    nothing; a prompt that is read in pieces must not be cut within the text. A token that holds the end of a passage
    and the beginning of the question counts as the passage's. What was read is known by the cache that holds it;
    without a cache, what was generated is searched, too. Where the first prompts hold the text nowhere, a warning says
    so: they, and any like them, are answered as by the plain model.
    """

    def __init__(self, text: str, tokenizer: Any) -> None:
        if not isinstance(text, str) or not text.strip():
            raise UsageError(f"mitigated: question must be the text with which questions begin, got {text!r}")
        if tokenizer is None:
            raise UsageError("mitigated: question= needs tokenizer=")
        self._text, self._tokenizer = text, tokenizer
        self._of: PerCache[_Read] = PerCache(self._read)
        self._matched: bool | None = None
        """Whether the first prompts hold the text; None: none was read."""

    def begins(self) -> Int[Tensor, "prompt one"]:
        """The first token of the question, 0 the prompt's first, in every prompt that this thread's network reads."""
        if self._of.current is None:
            raise UsageError("mitigated: under question= the whole network is called, not a part of it")
        return self._of.current.begins

    def followed(self, network: nn.Module) -> AbstractContextManager[None]:
        """Within the context, everything that the network reads is looked through."""
        return self._of.followed(network)

    def _read(self, network: nn.Module, arguments: dict[str, Any], before: "_Read | None") -> "_Read":
        """The place of the question in what the network is about to read."""
        new, past = arguments.get("input_ids"), cached_length(arguments)
        if not isinstance(new, Tensor):
            raise UsageError("mitigated: question= is looked for in token ids, got embeddings: give passages=")
        ids = new.detach().cpu().clone()
        if past:
            if before is None or len(new) != len(before.ids) or past > before.ids.shape[1]:
                raise UsageError(
                    f"mitigated: {past} tokens were cached without question=; use a cache that was filled under it"
                )
            ids = torch.cat([before.ids[:, :past], ids], 1)
            if new.shape[1] == 1 and past == before.ids.shape[1]:
                return _Read(ids, before.begins)
        slots = padded_slots(arguments)
        skipped = [0] * len(new) if slots is None else slots.tolist()
        begins = [self._begin(row[padding:].tolist()) for row, padding in zip(ids, skipped, strict=True)]
        if self._matched is None:
            self._matched = min(begins) < NOWHERE
            if not self._matched:
                warnings.warn(
                    f"mitigated: question={self._text!r} stands nowhere in the first prompt, so the method leaves it "
                    "as it is; give the text as the prompt has it, line breaks and signs included",
                    stacklevel=2,
                )
        return _Read(ids, torch.tensor(begins, device=new.device)[:, None])

    def _begin(self, ids: list[int]) -> int:
        """The first token at or behind the beginning of the last such text."""

        def behind(token: int) -> str:
            return str(self._tokenizer.decode(ids[token:], clean_up_tokenization_spaces=False))

        def without(token: int) -> bool:
            while token < len(ids) and behind(token).startswith(CUT_CHARACTER):
                token += 1  # bytes from within a character decode to nothing that can be read, with what follows
            return self._text not in behind(token)

        holding = bisect_left(range(len(ids)), 1, key=without)
        if holding == 0:
            return NOWHERE
        last = holding - 1  # the text begins in this token: at its beginning, or behind the end of a passage
        return last if behind(last).startswith(self._text) else last + 1


class _Read(NamedTuple):
    """The tokens that a network has read of every prompt, and where the question begins in each."""

    ids: Int[Tensor, "prompt token"]
    begins: Int[Tensor, "prompt one"]


Places = Spans | Question | Begins
"""Passages; or what says where the question begins, in every prompt that is read."""


@contextmanager
def question_begins(model: HuggingFaceModel, places: Places, *, name: str) -> Iterator[Begins]:
    """Within the context, the first token of the question in every prompt: behind the last passage, or found.

    Without passages it is the first token of all.
    """
    if isinstance(places, Question):
        with places.followed(model.network):
            yield places.begins
    elif callable(places):
        yield places
    else:
        begins = torch.tensor([[places[-1][1] if places else 0]], device=model.device)
        with unpadded(model, name, "prompts of one length, or question=") if places else nullcontext():
            yield lambda: begins


@contextmanager
def unpadded(model: HuggingFaceModel, name: str, allowed: str, *, single: bool = False) -> Iterator[None]:
    """Within the context, what `check_one_list` refuses is refused."""

    def check(network: nn.Module, positional: tuple[Any, ...], named: dict[str, Any]) -> None:
        check_one_list(named_arguments(network, positional, named), name, allowed, single=single)

    with hooked([model.network.register_forward_pre_hook(check, with_kwargs=True)]):
        yield


def check_one_list(arguments: dict[str, Any], name: str, allowed: str, *, single: bool) -> None:
    """Refuse prompts of several lengths, since one list of passages serves all of a batch.

    Args:
        arguments: Of a network's call.
        allowed: What is allowed, for the message.
        single: Refuse every batch of more than one prompt, and padding, too.
    """
    entering, mask = arguments.get("inputs_embeds"), arguments.get("attention_mask")
    read: Any = arguments.get("input_ids") if entering is None else entering
    padded = False
    if isinstance(mask, Tensor) and mask.ndim == 2:
        lengths = mask.sum(-1)
        padded = bool((lengths != (mask.shape[1] if single else lengths[0])).any())
    if padded or (single and len(read) > 1):
        raise UsageError(f"{name}: passages= is one list for all prompts that are read; allowed: {allowed}")
