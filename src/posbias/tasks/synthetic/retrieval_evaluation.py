"""Accuracy of in-context retrieval by place of the answer, on classes never seen in training.

Two designs. The published one: a context in bursts, place b's item overwritten by a copy of place a's, only a's label
taken for right; the query's class, and the right label, then often stand elsewhere too, even at b (`confounds` gives
the exact shares, the evaluation measures them). The unconfounded one: the query's class stands at the asked place
alone (and, for gaps, its item's copy at b under another label), and the right label stands nowhere else; the other
places keep their bursts.

Every sequence draws classes of its own, around new centres (a fixed vocabulary keeps its shared direction), and the
six published sets share all draws, so their differences are paired.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from jaxtyping import Bool, Float, Float32, Float64, Int64
from torch import Tensor

from posbias.tasks.synthetic.base import Predict, evaluation_sizes
from posbias.tasks.synthetic.draws import Purpose, distinct, ranks
from posbias.tasks.synthetic.member_tables import per_member, rows_of

if TYPE_CHECKING:
    from posbias.tasks.synthetic.retrieval import InContextRetrieval, RetrievalStack

PAIRS = (("first", "middle"), ("first", "last"), ("middle", "last"))
"""Places (a, b) of the gaps acc[a right, b] - acc[b right, a]; above 0, the earlier place is preferred."""
CONTRASTS = tuple(pair for first, second in PAIRS for pair in ((first, second), (second, first)))
"""The six published evaluation sets: (place whose label is right, place overwritten by a copy)."""
STREAMS = 4
"""Evaluation streams per batch: trained classes, novel classes (the six sets too), places, gaps."""


@dataclass(frozen=True)
class Contexts:
    """Novel contexts of one evaluation batch, still without a query."""

    slots: Int64[Tensor, "member batch pair"]
    """Which of the sequence's classes stands at each place."""
    labels: Int64[Tensor, "member batch pair"]
    """The label at each place."""
    items: Float32[Tensor, "member batch pair feature"]
    centres: Float32[Tensor, "member batch class feature"]
    """Class vectors without within-class noise."""
    query_noise: Float32[Tensor, "member batch feature"]


def evaluate_retrieval(stack: "RetrievalStack", predict: Predict, *, examples: int) -> dict[str, np.ndarray]:
    """Every score of a stack of trained members.

    Args:
        stack: The members' data.
        predict: Their logits at the query.
        examples: Sequences per evaluation set.

    Returns:
        Per member (axis 0): `accuracy_trained_classes` and `accuracy_novel_classes` (answers at any place);
        `accuracy_by_place` [pair] (unconfounded); `contrast_accuracy` [set] in the order of `CONTRASTS` and
        `gaps` [pair of places] in the order of `PAIRS` (published design); `unconfounded_gaps` [pair of places];
        `class_elsewhere`, `label_elsewhere`, `overwritten_also_right` [set]: measured shares of the published sets,
        as in `confounds`.
    """
    tally: dict[str, Tensor] = {}
    for index, size in enumerate(evaluation_sizes(examples)):
        for name, counts in _scores(stack, predict, index, size):
            tally[name] = tally.get(name, torch.zeros_like(counts)) + counts
    shares = {name: (counts / examples).cpu().numpy() for name, counts in tally.items()}
    shares["gaps"] = shares["contrast_accuracy"][:, 0::2] - shares["contrast_accuracy"][:, 1::2]
    return shares


def confounds(task: "InContextRetrieval") -> dict[str, float]:
    """Exact shares of the published evaluation sequences in which more than place a gives the right answer away.

    With n places, bursts of B and L labels, after b is overwritten: the query's class stands at a third place unless
    all its B - 1 other copies were at b; a label is right wherever the class stood or by chance 1 / L per class. Where
    b's label is right too, [a right, b] and [b right, a] are equally likely inputs with the same target, so no model's
    expected gap exceeds 1 - `overwritten_also_right` (.554 in the paper's setting: answering by place reaches it).

    Returns:
        `class_elsewhere`: an item of the query's class (not the copy at b) stands at a place other than a;
        `label_elsewhere`: the right label stands at a place other than a;
        `overwritten_also_right`: the label at b is the right one too, so the pair tells nothing.
    """
    others, copies, chance = task.pairs - 1, task.burstiness - 1, 1 / task.labels
    at_overwritten = copies / others
    elsewhere = {0: 0.0, 1: 1 - at_overwritten}.get(copies, 1.0)
    by_chance = 1 - (1 - chance) ** (task.distinct_classes - 1)
    return {
        "class_elsewhere": elsewhere,
        "label_elsewhere": 1.0 if copies else by_chance,
        "overwritten_also_right": at_overwritten + (1 - at_overwritten) * chance,
    }


def _scores(stack: "RetrievalStack", predict: Predict, index: int, size: int) -> Iterator[tuple[str, Tensor]]:
    """Counts per member of one batch of every set."""
    batch = stack.drawn(Purpose.EVALUATION, STREAMS * index, size)
    yield "accuracy_trained_classes", _right(predict(batch.inputs), batch.targets[..., 0])
    yield from _published(stack, predict, STREAMS * index + 1, size)
    yield "accuracy_by_place", _by_place(stack, predict, STREAMS * index + 2, size)
    yield "unconfounded_gaps", _unconfounded(stack, predict, STREAMS * index + 3, size)


def _published(stack: "RetrievalStack", predict: Predict, index: int, size: int) -> Iterator[tuple[str, Tensor]]:
    """The paper's sets, and how often they are confounded; accuracy on the same contexts with nothing overwritten."""
    task = stack.tasks[0]
    chosen = task.distinct_classes
    raw, contexts = _drawn(stack, index, size, classes=chosen, extra=chosen + 1)
    novel = contexts(ranks(raw[..., : task.pairs]) % chosen, raw[..., task.pairs : -1] % task.labels)
    anywhere = raw[..., -1:] % task.pairs
    right = novel.labels.gather(2, anywhere)[..., 0]
    query = _query(novel, novel.slots.gather(2, anywhere))
    yield "accuracy_novel_classes", _right(predict(_inputs(stack, novel.items, novel.labels, query)), right)
    results: dict[str, list[Tensor]] = {"contrast_accuracy": [], **{name: [] for name in confounds(task)}}
    for asked, overwritten in ((task.named_places[a], task.named_places[b]) for a, b in CONTRASTS):
        items = novel.items.clone()
        items[:, :, overwritten] = items[:, :, asked]
        query = _query(novel, novel.slots[..., asked : asked + 1])
        target = novel.labels[..., asked]
        logits = predict(_inputs(stack, items, novel.labels, query))
        results["contrast_accuracy"].append(_right(logits, target))
        same_class = _elsewhere(novel.slots == novel.slots[..., asked, None], asked)
        same_label = _elsewhere(novel.labels == target[..., None], asked)
        results["overwritten_also_right"].append(same_label[..., overwritten].double().sum(1))
        results["label_elsewhere"].append(same_label.any(-1).double().sum(1))
        same_class[..., overwritten] = False
        results["class_elsewhere"].append(same_class.any(-1).double().sum(1))
    yield from ((name, torch.stack(counts, -1)) for name, counts in results.items())


def _by_place(stack: "RetrievalStack", predict: Predict, index: int, size: int) -> Float64[Tensor, "member pair"]:
    """Right answers for each place, the query's class and its label standing there alone."""
    task = stack.tasks[0]
    classes = 1 + -(-(task.pairs - 1) // task.burstiness)
    raw, contexts = _drawn(stack, index, size, classes=classes, extra=classes)
    order = ranks(raw[..., : task.pairs])
    labels = _unlike(raw[..., task.pairs :], 1, task.labels)
    right = []
    for place in range(task.pairs):
        novel = contexts(_bursts(order, (place,), task.burstiness), labels)
        query = _query(novel, novel.slots[..., place : place + 1])
        logits = predict(_inputs(stack, novel.items, novel.labels, query))
        right.append(_right(logits, novel.labels[..., place]))
    return torch.stack(right, -1)


def _unconfounded(stack: "RetrievalStack", predict: Predict, index: int, size: int) -> Float64[Tensor, "member gap"]:
    """Answers a's label minus answers b's, for one item at a and b under two labels that stand nowhere else.

    [a right, b] and [b right, a] are then the same inputs with other targets: one prediction serves both.
    """
    task = stack.tasks[0]
    classes = 2 + -(-(task.pairs - 2) // task.burstiness)
    raw, contexts = _drawn(stack, index, size, classes=classes, extra=classes)
    order = ranks(raw[..., : task.pairs])
    labels = _unlike(raw[..., task.pairs :], 2, task.labels)
    gaps = []
    for first, second in ((task.named_places[a], task.named_places[b]) for a, b in PAIRS):
        novel = contexts(_bursts(order, (first, second), task.burstiness), labels)
        items = novel.items.clone()
        items[:, :, second] = items[:, :, first]
        query = _query(novel, novel.slots[..., first : first + 1])
        logits = predict(_inputs(stack, items, novel.labels, query))
        gaps.append(_right(logits, novel.labels[..., first]) - _right(logits, novel.labels[..., second]))
    return torch.stack(gaps, -1)


def _drawn(
    stack: "RetrievalStack", index: int, size: int, *, classes: int, extra: int
) -> tuple[Int64[Tensor, "member batch draw"], Callable[[Tensor, Tensor], Contexts]]:
    """Whole numbers (a permutation of places, then `extra`), and contexts of `classes` novel classes per sequence."""
    task, device = stack.tasks[0], stack.draws.device
    raw, normals = stack.draws.mixed(
        Purpose.EVALUATION,
        index,
        integers=(size, task.pairs + extra),
        normals=(size, classes + task.pairs + 1, task.features),
    )
    scales = [member.deviation / (1 + member.noise**2) ** 0.5 for member in stack.tasks]
    centres = normals[:, :, :classes] * per_member(scales, device)[..., None] + stack.evaluated_shared[:, None, None]
    noise = normals[:, :, classes:] * stack.noise_scale[..., None]

    def contexts(slots: Tensor, labels: Tensor) -> Contexts:
        items = _vectors_at(centres, slots) + noise[:, :, :-1]
        return Contexts(slots, labels.gather(2, slots), items, centres, noise[:, :, -1])

    return raw, contexts


def _query(contexts: Contexts, slot: Int64[Tensor, "member batch one"]) -> Float32[Tensor, "member batch one feature"]:
    """An item of the class in `slot`, with noise of its own."""
    return _vectors_at(contexts.centres, slot) + contexts.query_noise[:, :, None]


def _inputs(
    stack: "RetrievalStack",
    items: Float32[Tensor, "member batch pair feature"],
    labels: Int64[Tensor, "member batch pair"],
    query: Float32[Tensor, "member batch one feature"],
) -> Float32[Tensor, "member batch position feature"]:
    """Item, label, item, label ..., query."""
    pairs = torch.stack((items, rows_of(stack.vectors, labels + stack.tasks[0].classes)), dim=3)
    return torch.cat((pairs.flatten(2, 3), query), dim=2)


def _vectors_at(
    vectors: Float32[Tensor, "member batch class feature"], slots: Int64[Tensor, "member batch place"]
) -> Float32[Tensor, "member batch place feature"]:
    """The vector of every slot."""
    return vectors.gather(2, slots[..., None].expand(-1, -1, -1, vectors.shape[-1]))


def _bursts(
    order: Int64[Tensor, "member batch pair"], alone: tuple[int, ...], burstiness: int
) -> Int64[Tensor, "member batch pair"]:
    """Classes 0, 1 ... at the places `alone`, one each; the others, in random order, in bursts of `burstiness`."""
    others = order.clone()
    others[..., list(alone)] = order.shape[-1]
    slots = len(alone) + ranks(others) // burstiness
    for slot, place in enumerate(alone):
        slots[..., place] = slot
    return slots


def _unlike(raw: Int64[Tensor, "member batch class"], leading: int, labels: int) -> Int64[Tensor, "member batch class"]:
    """Labels of classes: the leading ones all different, each of the rest unlike every leading one."""
    first = distinct(raw[..., :leading], labels)
    rest = raw[..., leading:] % (labels - leading)
    for taken in first.sort(dim=-1).values.unbind(-1):
        rest = rest + (rest >= taken[..., None])
    return torch.cat((first, rest), dim=-1)


def _elsewhere(same: Bool[Tensor, "member batch pair"], asked: int) -> Bool[Tensor, "member batch pair"]:
    """Places other than the asked one where something is the same."""
    elsewhere = same.clone()
    elsewhere[..., asked] = False
    return elsewhere


def _right(
    logits: Float[Tensor, "member batch one output"], targets: Int64[Tensor, "member batch"]
) -> Float64[Tensor, "member"]:
    """Right answers per member; NaN where a logit is not finite."""
    right = (logits[:, :, 0].argmax(-1) == targets).double()
    return torch.where(logits[:, :, 0].isfinite().all(-1), right, torch.nan).sum(1)
