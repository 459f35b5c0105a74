"""Greedy decoding after prompts that have been run: the most probable token at each step, until an end.

Prompts of one length go on together, as one batch, without padding; a sequence that has ended leaves the batch.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Float, Int64
from torch import Tensor

from posbias.evaluation.responders.base import Request, Response
from posbias.evaluation.responders.running import Kept, LiveCache, Runner, cache_of, chosen, joined, layers_of


@dataclass(frozen=True)
class Ending:
    """When a sequence ends."""

    tokenizer: Any
    end_tokens: Collection[int]

    def reached(self, generated: Sequence[int], request: Request) -> bool:
        """After an end token, `max_tokens`, or a stop text."""
        if generated[-1] in self.end_tokens or len(generated) >= request.max_tokens:
            return True
        return bool(request.stop) and any(text in self.text(generated) for text in request.stop)

    def text(self, generated: Sequence[int]) -> str:
        """The tokens as text, without special ones."""
        return str(self.tokenizer.decode(list(generated), skip_special_tokens=True))

    def response(self, generated: Sequence[int], request: Request, prompt_tokens: int) -> Response:
        """What was generated, cut where a stop text begins."""
        text = self.text(generated)
        cuts = [text.index(stop) for stop in request.stop if stop in text]
        stopped = bool(cuts) or generated[-1] in self.end_tokens
        return Response(
            text=text[: min(cuts)] if cuts else text,
            finish="stop" if stopped else "length",
            prompt_tokens=prompt_tokens,
            tokens=len(generated),
            token_ids=tuple(generated),
        )


@dataclass(frozen=True)
class Started:
    """A prompt that has been run and is to be continued."""

    index: int
    request: Request
    prompt: Int64[np.ndarray, "_"]
    logits: Float[Tensor, "vocabulary"]
    """After the prompt's last token."""
    kept: Kept | None
    """Its keys and values; None where it will be continued through the runner itself."""


def decode_alone(runner: Runner, started: Started, ending: Ending) -> list[int]:
    """The continuation of one prompt; a live cache that has just run it goes on from there."""
    generated = [int(started.logits.argmax())]
    while not ending.reached(generated, started.request):
        sequence = np.concatenate([started.prompt, np.array(generated, dtype=np.int64)])
        generated.append(int(runner.run(sequence, rows=1)[0].argmax()))
    return generated


def decode_together(runner: LiveCache, batch: Sequence[Started], ending: Ending) -> list[list[int]]:
    """The continuations of prompts of one length, whose keys and values have been kept."""
    generated = [[int(started.logits.argmax())] for started in batch]
    active = _unfinished(range(len(batch)), generated, batch, ending)
    kept = [batch[index].kept for index in active]
    cache = cache_of(joined([prompt for prompt in kept if prompt is not None]) if kept else [])
    while active:
        last = np.array([[generated[index][-1]] for index in active], dtype=np.int64)
        choices = runner.step(last, cache).argmax(dim=-1).tolist()
        for index, choice in zip(active, choices, strict=True):
            generated[index].append(int(choice))
        left = _unfinished(active, generated, batch, ending)
        if left and len(left) < len(active):
            cache = cache_of(chosen(layers_of(cache), [active.index(index) for index in left]))
        active = left
    return generated


def _unfinished(
    indices: Sequence[int], generated: Sequence[Sequence[int]], batch: Sequence[Started], ending: Ending
) -> list[int]:
    return [index for index in indices if not ending.reached(generated[index], batch[index].request)]
