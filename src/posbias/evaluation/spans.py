"""Places of the items of a prompt in its tokens, for influence that is summed over items.

The items other than the answer's keep their order, so where they stand in one prompt is known from the answer's own
tokens in the others: with the answer behind it, position p begins where the answer begins when it stands at p; with the
answer before it, position p ends where the answer ends when it stands at p.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from jaxtyping import Int64

from posbias.errors import UsageError
from posbias.evaluation.options import EvaluateOptions
from posbias.evaluation.responders.base import Request
from posbias.evaluation.responders.local import WITHIN_THOUGHTS, encode_requests
from posbias.evaluation.samples import samples_of
from posbias.tasks.language import Example, LanguageTask


@dataclass(frozen=True, eq=False)
class SampleSpans:
    """The prompts of one sample, with the answer at each of the chosen positions and at their neighbours."""

    examples: dict[int, Example]
    """Prompts by position of the answer."""
    positions: tuple[int, ...]
    """The chosen positions, ascending."""

    def spans(self, gold: int) -> list[tuple[int, int]]:
        """Begin and end in tokens of every chosen position, in the prompt with the answer at `gold`."""
        spans = []
        for position in self.positions:
            begin, end = self._gold_span(position)
            if position < gold:
                end = self._gold_span(position + 1)[0]
            elif position > gold:
                begin = self._gold_span(position - 1)[1]
            spans.append((begin, end))
        return spans

    def _gold_span(self, position: int) -> tuple[int, int]:
        """Begin and end of the answer's item when it stands at a position."""
        example = self.examples[position]
        if example.gold_token is None or example.gold_end is None:
            raise UsageError(
                "the places of items in tokens are not known: they need a tokenizer with character offsets and a task "
                "with a moved item"
            )
        return example.gold_token, example.gold_end


def spans_of(task: LanguageTask, tokenizer: Any, options: EvaluateOptions) -> Iterator[SampleSpans]:
    """Every sample of a task, located."""
    positions = options.positions_of(task)
    around = {position + step for position in positions for step in (-1, 0, 1)}
    placed = sorted(position for position in around if 0 <= position < task.n_items)
    for sample in samples_of(task, tokenizer, replace(options, positions=placed)):
        if any(example.cluster for example in sample.examples):
            raise UsageError(f"{task}: influence is correlated over independent samples; leave out groups and repeats")
        if any(example.gold_position is None for example in sample.examples):
            raise UsageError(f"{task}: no item holds the answer, so there is no influence of one to measure")
        yield SampleSpans(dict(zip(placed, sample.examples, strict=True)), positions)


def encoded_prompt(example: Example, tokenizer: Any) -> tuple[Int64[np.ndarray, "_"], int]:
    """The tokens of a prompt, and the right answer's first token; UsageError if thoughts come before it."""
    request = Request(prompt=example.prompt, answer=example.target, own_control=example.own_control)
    (encoded,) = encode_requests(tokenizer, [request])
    if encoded.thinks:
        raise UsageError(f"there is no influence on the answer: {WITHIN_THOUGHTS}")
    return encoded.prompt, int(encoded.answer[0])
