"""Free recall and running span: sequences, and the scores of models that recall by a rule."""

import math

import numpy as np
import pytest
import torch

from posbias import Architecture, UsageError
from posbias.architecture import Causal, Full, Prefix, SlidingWindow
from posbias.models.reference.config import ReferenceConfig
from posbias.tasks.synthetic import (
    IGNORED,
    FreeRecall,
    PositionCopy,
    RecallAndSpan,
    RunningSpan,
    cross_entropy,
    stack_tasks,
)
from posbias.training import Member

ITEMS, VOCABULARY, SPAN = 5, 9, 2
FREE, CUE_OF_SPAN, FILLER = VOCABULARY, VOCABULARY + 1, VOCABULARY + 2


class Recalls:
    """Knows the list: uniform over items not yet named (after the cue of free recall), or the span in order."""

    def __init__(self, spans: list[int]) -> None:
        self.spans = spans

    def __call__(self, inputs: torch.Tensor) -> torch.Tensor:
        studied, recalled = inputs[..., :ITEMS], inputs[..., ITEMS + 1 :]
        logits = torch.full((*inputs.shape[:2], ITEMS, VOCABULARY + 3), -torch.inf, dtype=torch.float64)
        for row in range(ITEMS):
            open_items = ~(studied[..., None] == recalled[..., None, :row]).any(-1)
            values = torch.where(open_items, 0.0, -torch.inf).double()
            logits[:, :, row].scatter_(2, studied, values)
        for member, span in enumerate(self.spans):
            wanted = studied[member][:, [ITEMS - span + row if row < span else 0 for row in range(ITEMS)]]
            fixed = torch.nn.functional.one_hot(wanted, VOCABULARY + 3).double().log()
            logits[member] = torch.where((inputs[member, :, ITEMS] == FREE)[:, None, None], logits[member], fixed)
        return logits.clamp(min=-1e4)


def test_free_recall_asks_for_every_item_once_in_any_order() -> None:
    batch = stack_tasks([FreeRecall(ITEMS, VOCABULARY)], [0]).batch(0, 6000)
    studied, targets = batch.inputs[0, :, :ITEMS], batch.targets[0]
    assert torch.equal(studied.sort(-1).values, targets.sort(-1).values)
    assert (studied.sort(-1).values.diff(dim=-1) > 0).all()
    assert (batch.inputs[0, :, ITEMS] == FREE).all()
    assert torch.equal(batch.inputs[0, :, ITEMS + 1 :], targets[:, :-1])
    first = (studied == targets[:, :1]).sum(0)
    assert ((first - 1200).abs() < 5 * 1200**0.5).all()


def test_an_order_of_recall_changes_targets_and_what_stands_before_them_alone() -> None:
    tasks = [FreeRecall(ITEMS, VOCABULARY, order) for order in ("listed", "reversed", "random")]
    batch = stack_tasks(tasks, [4, 4, 4]).batch(0, 50)
    studied = batch.inputs[:, :, :ITEMS]
    assert (studied == studied[:1]).all()
    assert torch.equal(batch.targets[0], studied[0])
    assert torch.equal(batch.targets[1], studied[1].flip(-1))
    alone = stack_tasks([FreeRecall(ITEMS, VOCABULARY)], [4]).batch(0, 50)
    assert torch.equal(batch.targets[2], alone.targets[0])
    assert torch.equal(batch.inputs[:, :, ITEMS + 1 :], batch.targets[:, :, :-1])


def test_running_span_asks_for_the_last_items_in_order() -> None:
    batch = stack_tasks([RunningSpan(ITEMS, VOCABULARY, SPAN)], [0]).batch(0, 50)
    studied, targets = batch.inputs[0, :, :ITEMS], batch.targets[0]
    assert torch.equal(targets[:, :SPAN], studied[:, -SPAN:])
    assert (targets[:, SPAN:] == IGNORED).all()
    assert (batch.inputs[0, :, ITEMS] == CUE_OF_SPAN).all()
    assert torch.equal(batch.inputs[0, :, ITEMS + 1 : ITEMS + 1 + SPAN], targets[:, :SPAN])
    assert (batch.inputs[0, :, ITEMS + 1 + SPAN :] == FILLER).all()


def test_the_mixture_is_each_task_under_its_cue_with_its_share() -> None:
    """One seed sees the same lists in all three tasks, so every mixed sequence is one of the two pure ones."""
    tasks = [FreeRecall(ITEMS, VOCABULARY), RunningSpan(ITEMS, VOCABULARY, SPAN)]
    mixed = RecallAndSpan(ITEMS, VOCABULARY, SPAN, 0.25)
    batch = stack_tasks([*tasks, mixed], [3, 3, 3]).batch(5, 8000)
    free = batch.inputs[2, :, ITEMS] == FREE
    assert abs(free.float().mean().item() - 0.25) < 5 * (0.25 * 0.75 / 8000) ** 0.5
    assert torch.equal(batch.inputs[2], torch.where(free[:, None], batch.inputs[0], batch.inputs[1]))
    assert torch.equal(batch.targets[2], torch.where(free[:, None], batch.targets[0], batch.targets[1]))


def test_a_perfect_memory_reaches_the_optimal_loss_and_recalls_everything_asked() -> None:
    tasks = [FreeRecall(ITEMS, VOCABULARY), RunningSpan(ITEMS, VOCABULARY, SPAN), RecallAndSpan(ITEMS, VOCABULARY, 3)]
    stack = stack_tasks(tasks, [0, 1, 2])
    perfect = Recalls([SPAN, SPAN, 3])
    losses = cross_entropy(perfect(stack.batch(0, 4000).inputs), stack.batch(0, 4000).targets)
    assert losses[0].item() == pytest.approx(math.log(math.factorial(ITEMS)) / ITEMS, abs=1e-9)
    assert losses[1].item() == pytest.approx(0, abs=1e-9)
    for task, loss in zip(tasks, losses, strict=True):
        span, free = task.cues
        optimal = free * math.lgamma(ITEMS + 1) / (free * ITEMS + (1 - free) * span)
        assert loss.item() == pytest.approx(optimal, abs=0.02)
    scores = stack.evaluate(perfect, examples=200)
    np.testing.assert_array_equal(scores["free_recalled"][[0, 2]], 1)
    np.testing.assert_array_equal(scores["span_recalled"][1], np.arange(ITEMS) >= ITEMS - SPAN)
    np.testing.assert_array_equal(scores["recalled"][2], 0.5 + 0.5 * (np.arange(ITEMS) >= ITEMS - 3))
    np.testing.assert_allclose(scores["free_first"][[0, 2]], 1 / ITEMS, atol=1e-9)
    np.testing.assert_array_equal(scores["span_first"][1], np.arange(ITEMS) == ITEMS - SPAN)
    harmonic = sum(1 / k for k in range(1, ITEMS + 1)) / ITEMS
    assert np.nanmean(scores["free_probability"][0]) == pytest.approx(harmonic, abs=0.02)
    assert np.isnan(scores["span_recalled"][0]).all()
    assert np.isnan(scores["free_first"][1]).all()


def test_scores_by_place_show_who_is_remembered() -> None:
    """A model that names only the first item: recalled there, nowhere else; chance is 1 - (1 - 1/12)^5 when flat."""
    stack = stack_tasks([FreeRecall(ITEMS, VOCABULARY)], [0])

    def only_first(inputs: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.one_hot(inputs[..., :1].expand(-1, -1, ITEMS), VOCABULARY + 3).double() * 1e4

    scores = stack.evaluate(only_first, examples=100)
    np.testing.assert_array_equal(scores["free_recalled"][0], np.arange(ITEMS) == 0)
    np.testing.assert_array_equal(scores["free_first"][0], np.arange(ITEMS) == 0)
    np.testing.assert_array_equal(scores["free_probability"][0], np.arange(ITEMS) == 0)

    flat = stack.evaluate(lambda inputs: torch.zeros(*inputs.shape[:2], ITEMS, 12), examples=3000)
    chance = 1 - (11 / 12) ** ITEMS
    assert np.abs(flat["free_recalled"] - chance).max() < 5 * (chance * (1 - chance) / 3000) ** 0.5


def test_masks_that_show_the_answers_are_refused() -> None:
    """The cue is position 5: a prefix may reach it, not pass it."""
    task = RunningSpan(ITEMS, VOCABULARY, SPAN)
    for mask in (Causal(), SlidingWindow(2), Prefix(ITEMS + 1)):
        task.check_mask(mask)
    for mask, mutual in ((Prefix(ITEMS + 2), ITEMS + 2), (Full(), 2 * ITEMS)):
        with pytest.raises(UsageError, match=f"the first {mutual} do"):
            task.check_mask(mask)
    PositionCopy(0).check_mask(Full())


def test_a_member_whose_mask_shows_the_answers_is_refused_before_training() -> None:
    task = FreeRecall(ITEMS, VOCABULARY)

    def member(mask: str) -> Member:
        config = ReferenceConfig(Architecture(1, mask=mask), width=8, vocabulary_size=task.vocabulary_size)
        return Member("recall", config, task)

    member("causal").check()
    with pytest.raises(UsageError, match="answers stand after position 5"):
        member("full").check()
