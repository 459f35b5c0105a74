"""Retrieval in context: n pairs of an item and its label, then a query item whose class's label is to be named.

Items are drawn around class centres (a Gaussian mixture), or are the class vectors themselves (a fixed vocabulary with
a direction in common); classes come in bursts. Training may prefer some places of the answer.

Trained models are evaluated by place of the answer, on classes never seen in training: every sequence draws classes of
its own, around new centres (a fixed vocabulary keeps its shared direction). Of the published sets one place's item is a
copy of another's, and only the other's label is taken for right; the query's class, and the right label, then often
stand elsewhere too. The six sets share all draws, so their differences are paired. Accuracy by place is of other
contexts: the query's class and the right label stand at the asked place alone.

Source: Wu et al., arXiv 2502.01951, section 5 and appendices J-L, after Reddy 2024.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated

import numpy as np
import torch
from annotated_types import Ge
from jaxtyping import Float32, Float64, Int64
from torch import Tensor

from posbias.checks import CELLS, Count, NonNegative, OneOf
from posbias.errors import UsageError, check_most
from posbias.tasks.synthetic import (
    SYNTHETIC_TASKS,
    Batch,
    Draws,
    Predict,
    Purpose,
    SyntheticTask,
    TaskStack,
    right_answers,
)

ITEMS = ("mixture", "fixed")
PLACES = ("any", "first", "middle", "last", "first_and_last")
PAIRS = (("first", "middle"), ("first", "last"), ("middle", "last"))
"""Places (a, b) of the gaps acc[a right, b] - acc[b right, a]; above 0, the earlier place is preferred."""
CONTRASTS = tuple(pair for first, second in PAIRS for pair in ((first, second), (second, first)))
"""The six published evaluation sets: (place whose label is right, place overwritten by a copy)."""
STREAMS = 4
"""Evaluation streams per batch: trained classes, novel classes (the six sets too), places, and one that is not read."""


@SYNTHETIC_TASKS.register("in_context_retrieval")
@dataclass(frozen=True)
class InContextRetrieval(SyntheticTask):
    """Name the label of the query's class, which stands beside the items of that class in the context."""

    answers: Annotated[str, OneOf(*PLACES)] = "any"
    """Places from which training copies the query's item, each as likely as the others: any, first, middle, last or
    first_and_last. Middle is pair number pairs // 2, as in their code."""
    pairs: Annotated[Count, Ge(3)] = 8
    """Pairs of item and label (>= 3, so that first, middle and last differ)."""
    features: Count = 64
    """Features of an item or a label."""
    classes: Count = 2048
    """Classes of items, K (>= labels)."""
    labels: Annotated[Count, Ge(3)] = 32
    """Labels, L (>= 3); every class gets one at random."""
    burstiness: Count = 4
    """Times that every class of a context occurs in it (divides pairs)."""
    noise: NonNegative = 0.75
    """Spread within a class against the spread of the centres (mixture), or weight of the direction that all class
    vectors share (fixed); >= 0."""
    items: Annotated[str, OneOf(*ITEMS)] = "mixture"
    """mixture: (centre + noise * fresh) / sqrt(1 + noise^2); fixed: (centre + noise * shared) / sqrt(1 + noise^2)."""

    def __post_init__(self) -> None:
        check_most(f"{self.name}: classes x features", self.classes * self.features, CELLS)
        if self.pairs % self.burstiness:
            raise UsageError(f"{self.name}: burstiness must divide pairs = {self.pairs}, got {self.burstiness}")
        if self.classes < self.labels:
            raise UsageError(f"{self.name}: classes must be at least labels = {self.labels}, got {self.classes}")
        if self.classes < self.distinct_classes:
            raise UsageError(
                f"{self.name}: a context holds {self.distinct_classes} different classes, got classes = {self.classes}"
            )
        self._follows(
            n_positions=2 * self.pairs + 1,  # items, labels and the query
            n_outputs=self.labels,
            width=self.features,
            rows=(2 * self.pairs,),
            stack_key=(self.name, self.pairs, self.features, self.classes, self.labels, self.burstiness, self.items),
        )

    @property
    def distinct_classes(self) -> int:
        """Different classes in one context."""
        return self.pairs // self.burstiness

    @property
    def deviation(self) -> float:
        """Standard deviation of a component of a centre or a label, so that they have norm 1."""
        return float(self.features**-0.5)

    @property
    def named_places(self) -> dict[str, int]:
        """Pair numbers of first, middle and last."""
        return {"first": 0, "middle": self.pairs // 2, "last": self.pairs - 1}

    @property
    def answer_places(self) -> tuple[int, ...]:
        """Pair numbers that `answers` stands for."""
        if self.answers == "any":
            return tuple(range(self.pairs))
        return tuple(self.named_places[name] for name in self.answers.split("_and_"))

    def stack(self, tasks: Sequence["InContextRetrieval"], draws: Draws) -> TaskStack:
        """Draws every member's class centres, labels and label vectors once."""
        return RetrievalStack.of(tuple(tasks), draws)


@dataclass(frozen=True, eq=False)
class RetrievalStack(TaskStack):
    """Contexts of every member, around its own class centres."""

    tasks: tuple[InContextRetrieval, ...]
    draws: Draws
    vectors: Float32[Tensor, "member class_or_label feature"]
    """Class vectors (without within-class noise, but normalised for it), then label vectors."""
    labels: Int64[Tensor, "member class"]
    """The label of every class."""
    shared: Float32[Tensor, "member feature"]
    """The direction that all items have in common, novel ones too, weighted and normalised; 0 in a mixture."""

    @classmethod
    def of(cls, tasks: tuple[InContextRetrieval, ...], draws: Draws) -> "RetrievalStack":
        """Draw what the members keep."""
        task = tasks[0]
        raw, normals = draws.mixed(
            Purpose.FIXED, 0, integers=(task.classes,), normals=(task.classes + task.labels + 2, task.features)
        )
        normals *= task.deviation
        weight = per_member([member.noise for member in tasks], draws.device)
        norm = (1 + weight**2).sqrt()
        shared = weight / norm * normals[:, -2:-1] * (task.items == "fixed")  # the last draw is not read
        vectors = normals[:, :-2].clone()
        vectors[:, : task.classes] = vectors[:, : task.classes] / norm + shared
        return cls(tasks, draws, vectors, raw % task.labels, shared[:, 0])

    def drawn(self, purpose: Purpose, index: int, size: int) -> Batch:
        """Contexts of trained classes, the query taken from the answer places."""
        task = self.tasks[0]
        chosen, pairs = task.distinct_classes, task.pairs
        mixture = task.items == "mixture"
        raw, noise = self.draws.mixed(
            purpose,
            index,
            integers=(size, chosen + pairs + 1),
            normals=(size, pairs + 1, task.features) if mixture else (),
        )
        classes = distinct(raw[..., :chosen], task.classes)
        context = classes.gather(2, ranks(raw[..., chosen:-1]) % chosen)
        # Uniform over every member's answer places.
        places = [member.answer_places for member in self.tasks]
        longest = max(map(len, places))
        table = torch.tensor([place + (0,) * (longest - len(place)) for place in places], device=raw.device)
        counts = torch.tensor([len(place) for place in places], device=raw.device)
        query = context.gather(2, table.gather(1, raw[..., -1] % counts[:, None])[..., None])
        # Rows of `vectors`: item, label, item, label ..., query.
        tokens = context.new_empty(*context.shape[:2], task.n_positions)
        tokens[..., :-1:2] = context
        tokens[..., 1::2] = rows_of(self.labels[..., None], context)[..., 0] + task.classes
        tokens[..., -1:] = query
        inputs = rows_of(self.vectors, tokens)
        if mixture:
            inputs[:, :, ::2] += noise.mul_(self.noise_scale[..., None])
        return Batch(inputs, rows_of(self.labels[..., None], query)[..., 0])

    @property
    def noise_scale(self) -> Float32[Tensor, "member one two"]:
        """Factor that makes a standard normal within-class noise (0 in a fixed vocabulary)."""
        scales = [
            task.deviation * task.noise / (1 + task.noise**2) ** 0.5 * (task.items == "mixture") for task in self.tasks
        ]
        return per_member(scales, self.draws.device)

    def item_vectors(self) -> Float32[Tensor, "member item feature"]:
        """Vectors of classes, then of labels."""
        return self.vectors

    def evaluate(self, predict: Predict, *, examples: int) -> dict[str, np.ndarray]:
        """Accuracy and gaps of a stack of trained members.

        Returns:
            Per member (axis 0): `accuracy_trained_classes` and `accuracy_novel_classes` (answers at any place);
            `accuracy_by_place` [pair]; `contrast_accuracy` [set] in the order of `CONTRASTS` and `gaps` [pair of
            places] in the order of `PAIRS` (published design).
        """
        shares = super().evaluate(predict, examples=examples)
        shares["gaps"] = shares["contrast_accuracy"][:, 0::2] - shares["contrast_accuracy"][:, 1::2]
        return shares

    def scores(self, predict: Predict, index: int, size: int) -> Iterator[tuple[str, Tensor]]:
        """Sums over one batch of every set: trained classes, the paper's sets, and by place.

        Novel classes are of the paper's contexts with nothing overwritten. By place the query's class and its label
        stand at that place alone.
        """
        task, stream = self.tasks[0], STREAMS * index
        batch = self.drawn(Purpose.EVALUATION, stream, size)
        yield "accuracy_trained_classes", right_answers(predict(batch.inputs), batch.targets[..., 0])
        chosen, named, pairs = task.distinct_classes, task.named_places, task.pairs
        novel, raw = Novel.drawn(self, stream + 1, size, classes=chosen, extra=chosen + 1)
        slots, labels = ranks(raw[..., :pairs]) % chosen, raw[..., pairs:-1] % task.labels
        yield "accuracy_novel_classes", novel.asked(predict, slots, labels, raw[..., -1:] % pairs)
        right = [novel.asked(predict, slots, labels, named[place], named[other]) for place, other in CONTRASTS]
        yield "contrast_accuracy", torch.stack(right, -1)
        classes = 1 + -(-(pairs - 1) // task.burstiness)
        novel, raw = Novel.drawn(self, stream + 2, size, classes=classes, extra=classes)
        order = ranks(raw[..., :pairs])
        first, later = raw[..., pairs : pairs + 1] % task.labels, raw[..., pairs + 1 :] % (task.labels - 1)
        labels = torch.cat((first, later + (later >= first)), dim=-1)  # the asked one's stands nowhere else
        right = [novel.asked(predict, _alone(order, place, task.burstiness), labels, place) for place in range(pairs)]
        yield "accuracy_by_place", torch.stack(right, -1)


@dataclass(frozen=True)
class Novel:
    """Novel classes for the sequences of one evaluation batch."""

    stack: RetrievalStack
    centres: Float32[Tensor, "member batch class feature"]
    """Class vectors without within-class noise."""
    noise: Float32[Tensor, "member batch pair_or_query feature"]
    """Of the item at every place, and of the query."""

    @classmethod
    def drawn(
        cls, stack: RetrievalStack, index: int, size: int, *, classes: int, extra: int
    ) -> tuple["Novel", Int64[Tensor, "member batch draw"]]:
        """`classes` classes per sequence, and whole numbers: a permutation of places, then `extra`."""
        task, draws = stack.tasks[0], stack.draws
        integers, normals = (size, task.pairs + extra), (size, classes + task.pairs + 1, task.features)
        raw, vectors = draws.mixed(Purpose.EVALUATION, index, integers=integers, normals=normals)
        scales = [member.deviation / (1 + member.noise**2) ** 0.5 for member in stack.tasks]
        centres = vectors[:, :, :classes] * per_member(scales, draws.device)[..., None] + stack.shared[:, None, None]
        return cls(stack, centres, vectors[:, :, classes:] * stack.noise_scale[..., None]), raw

    def asked(
        self,
        predict: Predict,
        slots: Int64[Tensor, "member batch pair"],
        labels: Int64[Tensor, "member batch class"],
        place: int | Int64[Tensor, "member batch one"],
        overwritten: int | None = None,
    ) -> Float64[Tensor, "member"]:
        """Right answers where the query is of the class at a place, with noise of its own.

        Args:
            predict: The models.
            slots: Number of the sequence's class that stands at each place.
            labels: Of the sequence's classes.
            place: That holds the right label.
            overwritten: The place that holds a copy of the item at `place`, which is a number then.
        """
        if isinstance(place, int):
            place = torch.full_like(slots[..., :1], place)
        items = self.centres.take_along_dim(slots[..., None], dim=2) + self.noise[:, :, :-1]
        query = self.centres.take_along_dim(slots.gather(2, place)[..., None], dim=2) + self.noise[:, :, -1:]
        if overwritten is not None:
            items[:, :, overwritten] = items.take_along_dim(place[..., None], dim=2)[:, :, 0]
        placed = labels.gather(2, slots)
        beside = rows_of(self.stack.vectors, placed + self.stack.tasks[0].classes)
        inputs = torch.cat((torch.stack((items, beside), dim=3).flatten(2, 3), query), dim=2)
        return right_answers(predict(inputs), placed.gather(2, place)[..., 0])


def _alone(
    order: Int64[Tensor, "member batch pair"], place: int, burstiness: int
) -> Int64[Tensor, "member batch pair"]:
    """Class 0 at `place` alone; other classes, in random order, in bursts of `burstiness`."""
    remaining = order.clone()
    remaining[..., place] = order.shape[-1]
    slots = 1 + ranks(remaining) // burstiness
    slots[..., place] = 0
    return slots


def ranks(raw: Int64[Tensor, "*batch place"]) -> Int64[Tensor, "*batch place"]:
    """Uniform random permutations from raw draws: the rank of each among its own (ties, of chance 2^-63, by place)."""
    return raw.argsort(dim=-1, stable=True).argsort(dim=-1)


def distinct(raw: Int64[Tensor, "*batch chosen"], among: int) -> Int64[Tensor, "*batch chosen"]:
    """Uniform draws without replacement from 0 ... among - 1, in order of drawing.

    The i-th is drawn from the among - i left over and stepped past the ones taken.
    """
    values: list[Tensor] = []
    for position in range(raw.shape[-1]):
        value = raw[..., position] % (among - position)
        if values:
            for earlier in torch.stack(values).sort(dim=0).values:
                value = value + (value >= earlier)
        values.append(value)
    return torch.stack(values, dim=-1)


def per_member(values: Sequence[float], device: torch.device) -> Float32[Tensor, "member one two"]:
    """A number per member, to multiply [member, ., .] with."""
    return torch.tensor(values, dtype=torch.float32, device=device)[:, None, None]


def rows_of(table: Tensor, index: Int64[Tensor, "member *batch"]) -> Tensor:
    """table[member, index[member, ...]] for all members at once: [member, *batch, feature]."""
    offsets = torch.arange(len(table), device=table.device) * table.shape[1]
    flat = (index + offsets.view(-1, *[1] * (index.dim() - 1))).flatten()
    return table.reshape(-1, table.shape[2]).index_select(0, flat).view(*index.shape, table.shape[2])
