"""Where every place of a sample's items lies in the tokens of each of its prompts.

The items other than the answer's keep their order, so the places of one prompt are known from the answer's own place
in the others: with the answer behind it, place p begins where the answer begins when it stands at p; with the answer
before it, place p ends where the answer ends when it stands at p.
"""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Int64

from posbias.errors import UsageError
from posbias.evaluation.responders.base import Request
from posbias.evaluation.responders.local import encode_requests
from posbias.tasks.language import Example, LanguageTask


@dataclass(frozen=True, eq=False)
class SampleSpans:
    """The prompts of one sample, with the answer at each place and its neighbours."""

    examples: dict[int, Example]
    """By place of the answer; every one located in tokens."""
    places: tuple[int, ...]
    """Places that are looked at, ascending."""
    n_items: int
    tokenizer: Any

    def prompt(self, gold: int) -> tuple[Int64[np.ndarray, "_"], int]:
        """The tokens of the prompt with the answer at `gold`, and the right answer's first token."""
        example = self.examples[gold]
        (encoded,) = encode_requests(self.tokenizer, [Request(prompt=example.prompt, answer=example.target)])
        return encoded.prompt, int(encoded.answer[0])

    def spans(self, gold: int) -> list[tuple[int, int]]:
        """Begin and end in tokens of every place of `places`, in the prompt with the answer at `gold`."""
        return [self._span(gold, place) for place in self.places]

    def _span(self, gold: int, place: int) -> tuple[int, int]:
        begin, end = self._own(place)
        if place < gold:
            return begin, self._own(place + 1)[0]
        if place > gold:
            return self._own(place - 1)[1], end
        return begin, end

    def _own(self, place: int) -> tuple[int, int]:
        example = self.examples[place]
        if example.gold_token is None or example.gold_end is None:
            raise UsageError(
                "the places of items in tokens are not known: it takes a tokenizer with character offsets and a task "
                "with a moved item"
            )
        return example.gold_token, example.gold_end


def spans_of(
    task: LanguageTask, tokenizer: Any, *, places: Sequence[int], count: int, seed: int
) -> Iterator[SampleSpans]:
    """Every sample of a task, located.

    Raises:
        UsageError: a place cannot be located.
    """
    around = {place + step for place in places for step in (-1, 0, 1)}
    wanted = sorted(place for place in around if 0 <= place < task.n_items)
    drawn = task.examples(tokenizer, count=count, positions=wanted, seed=seed)
    for _, group in itertools.groupby(drawn, key=lambda example: example.sample):
        examples = list(group)
        if any(example.gold_position is None for example in examples):
            raise UsageError(f"{task}: no item holds the answer, so there is no influence of one to measure")
        by_place = dict(zip(wanted, examples, strict=True))
        yield SampleSpans(by_place, tuple(places), task.n_items, tokenizer)
