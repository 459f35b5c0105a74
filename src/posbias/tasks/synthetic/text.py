"""Key-value retrieval inside text: a small language model that is also asked for a pair that stood in its text (ours).

Windows of the default corpus, folded to a to z and the space, with pairs of a key and a value (one symbol each pair)
inserted at slots, a slot every few characters. After the text one key is asked for, every slot as likely as the others.
The loss is that of the last characters of the text, each from what stands before it, and of the value. Training reads
the first nine tenths of every file of the corpus, evaluation the last tenth.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import ClassVar

import torch
from jaxtyping import Bool, Int64
from torch import Tensor

from posbias.checks import check_size, checked
from posbias.errors import UsageError
from posbias.limits import ITEMS
from posbias.prompts.sources import default_corpus
from posbias.tasks.synthetic.base import (
    IGNORED,
    SYNTHETIC_TASKS,
    Batch,
    Draws,
    Predict,
    Purpose,
    SyntheticTask,
    TaskStack,
    cross_entropy,
    right_answers,
)

LETTERS = " abcdefghijklmnopqrstuvwxyz"
TRAINED_TENTHS = 9
"""Tenths of every file that training reads; evaluation reads the rest."""

Tokens = Int64[Tensor, "member batch position"]


@checked
@SYNTHETIC_TASKS.register("text_with_pairs")
@dataclass(frozen=True)
class TextWithPairs(SyntheticTask):
    """Go on with a text, and name the value of a pair that stands in it, its slot uniform."""

    needs_causal: ClassVar[bool] = True
    context: int = 8
    """Slots (>= 1)."""
    spacing: int = 4
    """Positions from slot to slot (>= 2): a slot, then characters; slot s is position s * spacing."""
    pairs: int = 4
    """Pairs in a text (1 ... context), at different slots; a slot without a pair holds a character."""
    vocabulary: int = 8
    """Different values (>= 2)."""
    keys: int = 8
    """Different keys there are (>= pairs); none stands twice in a text."""
    read: int = 8
    """Last characters of a text that are scored (1 ... context * spacing - 1)."""

    def __post_init__(self) -> None:
        for name, least in (("context", 1), ("spacing", 2), ("pairs", 1), ("vocabulary", 2), ("read", 1)):
            check_size(f"{self.name}: {name}", getattr(self, name), ITEMS, least=least)
        for name, most in (("pairs", self.context), ("read", self.length - 1)):
            if getattr(self, name) > most:
                raise UsageError(f"{self.name}: {name} must lie in 1 ... {most}, got {getattr(self, name)}")
        check_size(f"{self.name}: keys", self.keys, ITEMS, least=self.pairs)
        self._follows(
            n_positions=self.length + 1,
            n_outputs=len(LETTERS) + self.vocabulary,
            vocabulary_size=len(LETTERS) + self.keys * (self.vocabulary + 1),
            rows=(*range(self.length - 1 - self.read, self.length - 1), self.length),
            stack_key=(self.name, self.context, self.spacing, self.pairs, self.vocabulary, self.keys, self.read),
        )

    @property
    def length(self) -> int:
        """Positions of the text with its pairs, before the key that is asked for."""
        return self.context * self.spacing

    def stack(self, tasks: Sequence["TextWithPairs"], seeds: Sequence[int], device: torch.device) -> TaskStack:
        """Members differ in their seeds alone."""
        return TextWithPairsStack(tasks[0], Draws.of(self.name, seeds, device))


@cache
def folded_corpus(purpose: Purpose) -> Int64[Tensor, "character"]:
    """The part of the default corpus that a purpose reads: numbers in `LETTERS`, a space for anything else."""
    parts = []
    for group in default_corpus():
        documents = " ".join(str(document) for segment in group.segments for document in segment())
        text = re.sub("[^a-z]+", " ", documents.lower())
        cut = len(text) * TRAINED_TENTHS // 10
        parts.append(text[cut:] if purpose is Purpose.EVALUATION else text[:cut])
    return torch.tensor([LETTERS.index(letter) for letter in "".join(parts)])


@dataclass(frozen=True)
class Inserted:
    """Pairs by number and where they go; the first is the one asked for."""

    keys: Int64[Tensor, "member batch pair"]
    values: Int64[Tensor, "member batch pair"]
    slots: Int64[Tensor, "member batch slot"]
    """A random order of all slots; pair number p stands at the p-th."""
    starts: Int64[Tensor, "member batch one"]
    """First character of the text in the corpus."""

    def asked_at(self, slot: int) -> "Inserted":
        """The pair asked for moved to another slot, whose pair goes to the slot that becomes free."""
        first = self.slots[..., :1]
        exchanged = torch.where(self.slots == slot, first, self.slots)[..., 1:]
        slots = torch.cat((torch.full_like(first, slot), exchanged), dim=2)
        return Inserted(self.keys, self.values, slots, self.starts)


@dataclass(frozen=True)
class TextWithPairsStack(TaskStack):
    """Character number c is c; then key k with value v is k * `vocabulary` + v, then k asks for key k.

    Outputs are the characters, then the values.
    """

    task: TextWithPairs
    draws: Draws

    def drawn(self, purpose: Purpose, index: int, size: int) -> Batch:
        """Windows, pairs and slots, all uniform and independent."""
        return self._batch(purpose, self._inserted(purpose, index, size))

    def scores(self, predict: Predict, index: int, size: int) -> Iterator[tuple[str, Tensor]]:
        """`accuracy_by_position` [slot], each text asked for all of them; `loss`, `text_loss` (nats), `accuracy`."""
        inserted, right = self._inserted(Purpose.EVALUATION, index, size), []
        for slot in range(self.task.context):
            batch = self._batch(Purpose.EVALUATION, inserted.asked_at(slot))
            right.append(right_answers(predict(batch.inputs)[:, :, -1:], batch.targets[..., -1]))
        yield "accuracy_by_position", torch.stack(right, dim=-1)
        batch = self._batch(Purpose.EVALUATION, inserted)
        logits = predict(batch.inputs)
        yield "loss", cross_entropy(logits.double(), batch.targets) * size
        yield "text_loss", cross_entropy(logits[:, :, :-1].double(), batch.targets[..., :-1]) * size
        yield "accuracy", right_answers(logits[:, :, -1:], batch.targets[..., -1])

    def _inserted(self, purpose: Purpose, index: int, size: int) -> Inserted:
        task = self.task
        raw = self.draws.integers(purpose, index, (size, task.keys + task.pairs + task.context + 1))
        keys, values, slots, starts = raw.split_with_sizes([task.keys, task.pairs, task.context, 1], dim=-1)
        windows = len(folded_corpus(purpose)) - task.length
        return Inserted(
            keys.argsort(-1)[..., : task.pairs], values % task.vocabulary, slots.argsort(-1), starts % windows
        )

    def _batch(self, purpose: Purpose, inserted: Inserted) -> Batch:
        task, device = self.task, inserted.starts.device
        places = inserted.slots[..., : task.pairs] * task.spacing
        occupied: Bool[Tensor, "member batch position"] = torch.zeros(
            *places.shape[:2], task.length, dtype=torch.bool, device=device
        ).scatter(2, places, True)
        characters = inserted.starts + torch.arange(task.length, device=device) - occupied.cumsum(-1)
        text = folded_corpus(purpose).to(device)[characters.clamp(min=0)]
        letters = len(LETTERS)
        text = text.scatter(2, places, letters + inserted.keys * task.vocabulary + inserted.values)
        ask = letters + task.keys * task.vocabulary + inserted.keys[..., :1]
        scored = torch.where(occupied, IGNORED, text)[..., -task.read :]
        return Batch(torch.cat((text, ask), dim=2), torch.cat((scored, letters + inserted.values[..., :1]), dim=2))
