"""In-context retrieval: n pairs of an item and its label, then a query item whose class's label is to be named.

Items are drawn around class centres (a Gaussian mixture), or are the class vectors themselves (a fixed vocabulary with
a direction in common); classes come in bursts. Training may prefer some places of the answer. How trained models are
examined is in `retrieval_evaluation`.

Source: Wu et al., arXiv 2502.01951, section 5 and appendices J-L, after Reddy 2024.
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float32, Int64
from torch import Tensor

from posbias.checks import check_whole, checked
from posbias.errors import UsageError
from posbias.tasks.synthetic.base import (
    SYNTHETIC_TASKS,
    Batch,
    Predict,
    SyntheticTask,
    TaskStack,
    check_step,
)
from posbias.tasks.synthetic.draws import Draws, Purpose, distinct, ranks
from posbias.tasks.synthetic.member_tables import per_member, rows_of
from posbias.tasks.synthetic.retrieval_evaluation import confounds, evaluate_retrieval

ITEMS = ("mixture", "fixed")
DIRECTIONS = ("trained", "fresh")
SCALES = ("variance", "deviation")
PLACES = ("any", "first", "middle", "last", "first_and_last")


@checked
@SYNTHETIC_TASKS.register("in_context_retrieval")
@dataclass(frozen=True)
class InContextRetrieval(SyntheticTask):
    """Name the label of the query's class, which stands beside the items of that class in the context."""

    answers: str | tuple[int, ...] | list[int] = "any"
    """Where in training the query's item is copied from: any, first, middle, last, first_and_last, or a list of pair
    numbers (0 ... pairs - 1), each as likely as the others. Middle is pair number pairs // 2, as in their code."""
    pairs: int = 8
    """Pairs of item and label (>= 3, so that first, middle and last differ)."""
    features: int = 64
    """Features of an item or a label."""
    classes: int = 2048
    """Classes of items, K (>= labels)."""
    labels: int = 32
    """Labels, L (>= 3); every class gets one at random."""
    burstiness: int = 4
    """Times that every class of a context occurs in it (divides pairs)."""
    noise: float = 0.75
    """Spread within a class against the spread of the centres (mixture), or weight of the direction that all class
    vectors share (fixed); >= 0."""
    items: str = "mixture"
    """mixture: (centre + noise * fresh) / sqrt(1 + noise^2); fixed: (centre + noise * shared) / sqrt(1 + noise^2)."""
    evaluation_direction: str = "trained"
    """Which direction the novel items of a fixed vocabulary share: trained (the paper), or fresh (their code, whose
    test sets draw it anew)."""
    scale: str = "variance"
    """variance: components have variance 1 / features, so items have norm 1 (the paper); deviation: components have
    standard deviation 1 / features, so items have norm 1 / sqrt(features) (their code)."""

    def __post_init__(self) -> None:
        own = "in_context_retrieval"
        for parameter, least in (("pairs", 3), ("features", 1), ("labels", 3), ("classes", 1), ("burstiness", 1)):
            check_whole(f"{own}: {parameter}", getattr(self, parameter), least=least)
        if self.pairs % self.burstiness:
            raise UsageError(f"{own}: burstiness must divide pairs = {self.pairs}, got {self.burstiness}")
        if self.classes < self.labels:
            raise UsageError(f"{own}: classes must be at least labels = {self.labels}, got {self.classes}")
        if self.classes < self.distinct_classes:
            raise UsageError(
                f"{own}: a context holds {self.distinct_classes} different classes, got classes = {self.classes}"
            )
        if isinstance(self.noise, bool) or not isinstance(self.noise, int | float) or not 0 <= self.noise < np.inf:
            raise UsageError(f"{own}: noise must be a finite number >= 0, got {self.noise!r}")
        _check_choice("items", self.items, ITEMS)
        _check_choice("evaluation_direction", self.evaluation_direction, DIRECTIONS)
        _check_choice("scale", self.scale, SCALES)
        if isinstance(self.answers, list):
            object.__setattr__(self, "answers", tuple(self.answers))
        _check_answers(self.answers, self.pairs)

    @property
    def n_positions(self) -> int:
        """Items, labels and the query."""
        return 2 * self.pairs + 1

    @property
    def n_outputs(self) -> int:
        """The labels."""
        return self.labels

    @property
    def vocabulary_size(self) -> int | None:
        """Inputs are vectors."""
        return None

    @property
    def width(self) -> int | None:
        """The features."""
        return self.features

    @property
    def rows(self) -> tuple[int, ...]:
        """The query answers."""
        return (2 * self.pairs,)

    @property
    def stack_key(self) -> Hashable:
        """Answer places, noise and scale may differ within a stack."""
        return (self.name, self.pairs, self.features, self.classes, self.labels, self.burstiness, self.items)

    @property
    def distinct_classes(self) -> int:
        """Different classes in one context."""
        return self.pairs // self.burstiness

    @property
    def deviation(self) -> float:
        """Standard deviation of a component of a centre or a label."""
        return float(self.features**-0.5 if self.scale == "variance" else 1 / self.features)

    @property
    def named_places(self) -> dict[str, int]:
        """Pair numbers of first, middle and last."""
        return {"first": 0, "middle": self.pairs // 2, "last": self.pairs - 1}

    @property
    def answer_places(self) -> tuple[int, ...]:
        """Pair numbers that `answers` stands for."""
        if isinstance(self.answers, str):
            if self.answers == "any":
                return tuple(range(self.pairs))
            return tuple(self.named_places[name] for name in self.answers.split("_and_"))
        return tuple(self.answers)

    def confounds(self) -> dict[str, float]:
        """Exact shares of the published evaluation sequences whose answer stands elsewhere too."""
        return confounds(self)

    def stack(self, tasks: Sequence["InContextRetrieval"], seeds: Sequence[int], device: torch.device) -> TaskStack:
        """Draws every member's class centres, labels and label vectors once."""
        return RetrievalStack.of(tuple(tasks), Draws.of(self.name, seeds, device))


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
    """The direction that all items have in common, weighted and normalised; 0 in a mixture."""
    evaluated_shared: Float32[Tensor, "member feature"]
    """The same for the novel items of evaluations."""

    @classmethod
    def of(cls, tasks: tuple[InContextRetrieval, ...], draws: Draws) -> "RetrievalStack":
        """Draw what the members keep."""
        task = tasks[0]
        raw, normals = draws.mixed(
            Purpose.FIXED, 0, integers=(task.classes,), normals=(task.classes + task.labels + 2, task.features)
        )
        normals *= per_member([member.deviation for member in tasks], draws.device)
        weight = per_member([member.noise for member in tasks], draws.device)
        norm = (1 + weight**2).sqrt()
        shared = weight / norm * normals[:, -2:] * (task.items == "fixed")
        fresh = torch.tensor([member.evaluation_direction == "fresh" for member in tasks], device=draws.device)
        vectors = normals[:, :-2].clone()
        vectors[:, : task.classes] = vectors[:, : task.classes] / norm + shared[:, :1]
        evaluated = torch.where(fresh[:, None], shared[:, 1], shared[:, 0])
        return cls(tasks, draws, vectors, raw % task.labels, shared[:, 0], evaluated)

    def batch(self, step: int, size: int) -> Batch:
        """Contexts of the trained classes."""
        check_step(step, size)
        return self.drawn(Purpose.TRAINING, step, size)

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
        query = context.gather(2, self._answers(raw[..., -1:]))
        tokens = self._tokens(context, query)
        inputs = rows_of(self.vectors, tokens)
        if mixture:
            inputs[:, :, ::2] += noise.mul_(self.noise_scale[..., None])
        return Batch(inputs, rows_of(self.labels[..., None], query)[..., 0])

    @property
    def noise_scale(self) -> Float32[Tensor, "member one two"]:
        """What a standard normal is multiplied with to become within-class noise (0 in a fixed vocabulary)."""
        scales = [
            task.deviation * task.noise / (1 + task.noise**2) ** 0.5 * (task.items == "mixture") for task in self.tasks
        ]
        return per_member(scales, self.draws.device)

    def item_vectors(self) -> Float32[Tensor, "member item feature"]:
        """Vectors of classes, then of labels."""
        return self.vectors

    def evaluate(self, predict: Predict, *, examples: int) -> dict[str, np.ndarray]:
        """See `retrieval_evaluation`."""
        return evaluate_retrieval(self, predict, examples=examples)

    def _answers(self, raw: Int64[Tensor, "member batch one"]) -> Int64[Tensor, "member batch one"]:
        """Pair numbers of the answers, uniform over every member's answer places."""
        places = [task.answer_places for task in self.tasks]
        longest = max(map(len, places))
        table = torch.tensor([place + (0,) * (longest - len(place)) for place in places], device=raw.device)
        counts = torch.tensor([len(place) for place in places], device=raw.device)
        return table.gather(1, (raw[..., 0] % counts[:, None]))[..., None]

    def _tokens(
        self, context: Int64[Tensor, "member batch pair"], query: Int64[Tensor, "member batch one"]
    ) -> Int64[Tensor, "member batch position"]:
        """Rows of `vectors`: item, label, item, label ..., query."""
        classes = self.tasks[0].classes
        tokens = context.new_empty(*context.shape[:2], 2 * context.shape[2] + 1)
        tokens[..., :-1:2] = context
        tokens[..., 1::2] = rows_of(self.labels[..., None], context)[..., 0] + classes
        tokens[..., -1:] = query
        return tokens


def _check_choice(parameter: str, value: object, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise UsageError(f"in_context_retrieval: {parameter} must be one of {', '.join(allowed)}, got {value!r}")


def _check_answers(answers: object, pairs: int) -> None:
    """Names, or different pair numbers within the context."""
    if isinstance(answers, str):
        return _check_choice("answers", answers, PLACES)
    if not isinstance(answers, tuple) or not answers:
        raise UsageError(
            f"in_context_retrieval: answers must be one of {', '.join(PLACES)} or a list of pair numbers,"
            f" got {answers!r}"
        )
    for place in answers:
        if isinstance(place, bool) or not isinstance(place, int) or not 0 <= place < pairs:
            raise UsageError(f"in_context_retrieval: answers must lie in 0 ... {pairs - 1}, got {place!r}")
    if len(set(answers)) != len(answers):
        raise UsageError(f"in_context_retrieval: answers must name every pair at most once, got {list(answers)}")
    return None
