"""Where the question begins in the prompts that a network reads, found by the text with which questions begin.

So a method that acts from the question on can stay on a model for good: each prompt of a batch has its own place, and a
text without a question is left as it is.
"""

import re
from bisect import bisect_left
from collections.abc import Sequence
from itertools import takewhile
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor, nn

from posbias.errors import UsageError
from posbias.interventions.attention import cached_length, padded_slots, told
from posbias.tasks.language import Example

NOWHERE = torch.iinfo(torch.int64).max
"""The place of a question that is not there: no token stands behind it."""
SEARCHED = 16
"""Tokens at the end of a prompt in which a question is looked for first; then in twice as many, and so on."""


def question_text(examples: Sequence[Example]) -> str | None:
    """The text with which the questions of these prompts begin, and which stands last where they begin; None: none."""
    if not examples or not all(example.passages for example in examples):
        return None
    behind = [example.text[example.passages[-1][1] :] for example in examples]
    alike = takewhile(lambda letters: len(set(letters)) == 1, zip(*behind, strict=False))
    shared = "".join(letters[0] for letters in alike)
    if any(part[len(shared) : len(shared) + 1].isalnum() for part in behind):
        shared = re.sub(r"\w+$", "", shared)  # no part of a word that only these samples share
    label = shared[: shared.find(":") + 1]  # "Question:", which other questions have in common with these
    ends = [(example.text, example.passages[-1][1]) for example in examples]
    fitting = (each for each in (label, shared) if each.strip() and all(text.rfind(each) == end for text, end in ends))
    return next(fitting, None)


class Question:
    """The last place in every prompt where a text stands with which questions begin.

    It is looked for whenever a network reads several tokens at once, so that what is generated token by token moves
    nothing. A token that holds the end of a passage and the beginning of the question counts as the passage's.
    """

    def __init__(self, text: str, tokenizer: Any) -> None:
        if not isinstance(text, str) or not text.strip():
            raise UsageError(f"mitigated: question must be the text with which questions begin, got {text!r}")
        if tokenizer is None:
            raise UsageError("mitigated: question= needs tokenizer=")
        self._text, self._tokenizer = text, tokenizer
        self._ids = torch.zeros(0, 0, dtype=torch.int64)
        self._begins = torch.full((1, 1), NOWHERE)

    def begins(self) -> Int[Tensor, "prompt one"]:
        """The first token of the question, 0 the prompt's first, in every prompt that is now read."""
        return self._begins

    def read(self, network: nn.Module, given: tuple[Any, ...], named: dict[str, Any]) -> None:
        """A hook on the whole network."""
        arguments = told(network, given, named)
        new, past = arguments.get("input_ids"), cached_length(arguments)
        if not isinstance(new, Tensor):
            raise UsageError("mitigated: question= is looked for in token ids, got embeddings: give passages=")
        if past and (len(new) != len(self._ids) or past > self._ids.shape[1]):
            raise UsageError(f"mitigated: {past} tokens were cached without question=; allowed are caches of its own")
        self._ids = torch.cat([self._ids[:, :past], new.cpu()], 1) if past else new.cpu()
        if past and new.shape[1] == 1:
            return
        slots = padded_slots(arguments)
        skipped = [0] * len(new) if slots is None else slots.tolist()
        found = [self._begin(row[padding:].tolist()) for row, padding in zip(self._ids, skipped, strict=True)]
        self._begins = torch.tensor(found, device=new.device)[:, None]

    def _begin(self, ids: list[int]) -> int:
        """The first token at or behind the beginning of the last such text."""

        def behind(token: int) -> str:
            return str(self._tokenizer.decode(ids[token:], clean_up_tokenization_spaces=False))

        searched = SEARCHED
        while searched < len(ids) and self._text not in behind(len(ids) - searched):
            searched *= 2
        first = max(0, len(ids) - searched)
        without = bisect_left(range(first, len(ids)), 1, key=lambda token: self._text not in behind(token))
        if without == 0:
            return NOWHERE
        holds = first + without - 1  # the text begins in this token: at its beginning, or behind the end of a passage
        return holds if behind(holds).startswith(self._text) else holds + 1
