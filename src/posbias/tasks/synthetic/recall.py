"""Free recall, running span and both: a study list, a cue, then the recalled items, one after the other.

A list of different items is shown, then a cue. After the cue of free recall all items are to be named, in any order,
each once: the order to learn is drawn uniformly, so every item is asked for equally (a long-term demand). After the
cue of running span the last `span` items are to be named in the order shown (a short-term demand). Positions: list
0 ... n - 1, cue n, then the items recalled so far (teacher forcing in training); rows n ... 2n - 1 are scored, a row
past the span is ignored. The next item can be read off later inputs, so the mask must be causal from the cue on.

Source: the behavioural account of arXiv 2510.10276 (recall of everything gives primacy, of the last items recency, both
a U). The paper is known to us by its abstract: lengths, vocabulary, order and scoring are our definitions.
"""

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch

from posbias.checks import check_whole, checked
from posbias.errors import UsageError
from posbias.tasks.synthetic.base import SYNTHETIC_TASKS, SyntheticTask, TaskStack
from posbias.tasks.synthetic.draws import Draws
from posbias.tasks.synthetic.recall_stack import RecallStack

CUES = 3
"""Tokens beside the items: cue of free recall, cue of running span, filler after a finished span."""


class RecallTask(SyntheticTask):
    """Shapes that the three tasks share, so that they stack together and see the same lists for one seed."""

    needs_causal: ClassVar[bool] = True
    items: int
    vocabulary: int

    @property
    def recall_span(self) -> int:
        """Items asked for after the cue of running span (1 where that cue does not occur)."""
        return 1

    @property
    def share_of_free_recall(self) -> float:
        """Probability that a training sequence has the cue of free recall."""
        return 1.0

    @property
    def n_positions(self) -> int:
        """List, cue, and all recalled items but the last."""
        return 2 * self.items

    @property
    def n_outputs(self) -> int:
        """Items and cues; cues are never a target."""
        return self.vocabulary + CUES

    @property
    def vocabulary_size(self) -> int | None:
        """Items and cues."""
        return self.vocabulary + CUES

    @property
    def width(self) -> int | None:
        """Inputs are tokens."""
        return None

    @property
    def rows(self) -> tuple[int, ...]:
        """The cue and the recalled items."""
        return tuple(range(self.items, 2 * self.items))

    @property
    def stack_key(self) -> Hashable:
        """All three tasks of one list length and vocabulary go together."""
        return ("recall", self.items, self.vocabulary)

    def optimal_loss(self) -> float:
        """Least mean loss per scored row in nats: ln(n!) over the n rows of free recall, 0 over those of the span."""
        free = self.share_of_free_recall
        scored = free * self.items + (1 - free) * self.recall_span
        return free * math.lgamma(self.items + 1) / scored

    def stack(self, tasks: Sequence["RecallTask"], seeds: Sequence[int], device: torch.device) -> TaskStack:
        """Members may differ in the task, the span and the share of free recall."""
        return RecallStack(
            items=self.items,
            vocabulary=self.vocabulary,
            spans=tuple(task.recall_span for task in tasks),
            free_shares=tuple(task.share_of_free_recall for task in tasks),
            draws=Draws.of("recall", seeds, device),
        )


@checked
@SYNTHETIC_TASKS.register("free_recall")
@dataclass(frozen=True)
class FreeRecall(RecallTask):
    """Name every item of the list, in any order."""

    items: int = 12
    """Length of the list (>= 2)."""
    vocabulary: int = 32
    """Different items there are (>= items)."""

    def __post_init__(self) -> None:
        _check_list(self)


@checked
@SYNTHETIC_TASKS.register("running_span")
@dataclass(frozen=True)
class RunningSpan(RecallTask):
    """Name the last items of the list, in order."""

    items: int = 12
    """Length of the list (>= 2)."""
    vocabulary: int = 32
    """Different items there are (>= items)."""
    span: int = 4
    """Items asked for (1 ... items)."""

    def __post_init__(self) -> None:
        _check_list(self)
        _check_span(self, self.span)

    @property
    def recall_span(self) -> int:
        """The span."""
        return self.span

    @property
    def share_of_free_recall(self) -> float:
        """None."""
        return 0.0


@checked
@SYNTHETIC_TASKS.register("recall_and_span")
@dataclass(frozen=True)
class RecallAndSpan(RecallTask):
    """Free recall of some lists, running span of the others, as the cue says."""

    items: int = 12
    """Length of the list (>= 2)."""
    vocabulary: int = 32
    """Different items there are (>= items)."""
    span: int = 4
    """Items asked for after the cue of running span (1 ... items)."""
    free_share: float = 0.5
    """Share of the lists with free recall (strictly between 0 and 1)."""

    def __post_init__(self) -> None:
        _check_list(self)
        _check_span(self, self.span)
        share = self.free_share
        if isinstance(share, bool) or not isinstance(share, int | float) or not 0 < share < 1:
            raise UsageError(f"recall_and_span: free_share must lie strictly between 0 and 1, got {share!r}")

    @property
    def recall_span(self) -> int:
        """The span."""
        return self.span

    @property
    def share_of_free_recall(self) -> float:
        """The share."""
        return self.free_share


def _check_list(task: RecallTask) -> None:
    check_whole(f"{task.name}: items", task.items, least=2)
    check_whole(f"{task.name}: vocabulary", task.vocabulary, least=2)
    if task.vocabulary < task.items:
        raise UsageError(
            f"{task.name}: vocabulary must be at least items = {task.items}, as a list repeats none,"
            f" got {task.vocabulary}"
        )


def _check_span(task: RecallTask, span: object) -> None:
    check_whole(f"{task.name}: span", span, least=1)
    if isinstance(span, int) and span > task.items:
        raise UsageError(f"{task.name}: span must lie in 1 ... items = {task.items}, got {span}")
