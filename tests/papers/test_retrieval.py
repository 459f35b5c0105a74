"""In-context retrieval: what contexts hold, and who answers what."""

import numpy as np
import pytest
import torch

from posbias import UsageError
from posbias.tasks.synthetic import Draws, Purpose, stack_tasks
from posbias.training.members import TrainingSchedule
from posbias.training.options import TrainOptions
from posbias.training.trainer import train_members
from posbias_papers.wu2025.retrieval import CONTRASTS, InContextRetrieval, distinct, ranks
from training_cases import copier, retriever

FIVE_SIGMA = 5.0
CONTEXTS = 4000


def stacked(*tasks):
    return stack_tasks(tasks, [0] * len(tasks))


def label_numbers(stack, vectors):
    """Which label each label vector of the inputs is."""
    known = stack.vectors[:, stack.tasks[0].classes :]
    return (vectors[:, :, :, None] - known[:, None, None]).abs().sum(-1).argmin(-1)


class AnswersPlace:
    """A model that names the label at one place, whatever the query."""

    def __init__(self, stack, place):
        self.stack, self.place = stack, place

    def __call__(self, inputs):
        labels = label_numbers(self.stack, inputs[:, :, 2 * self.place + 1, None])
        return torch.nn.functional.one_hot(labels, self.stack.tasks[0].labels).float()


class AnswersNearest:
    """A model that names the label of the item nearest to the query; of equally near ones the first, or the last."""

    def __init__(self, stack, *, latest):
        self.stack, self.latest = stack, latest

    def __call__(self, inputs):
        distances = (inputs[:, :, :-1:2] - inputs[:, :, -1:]).square().sum(-1)
        tied = torch.arange(distances.shape[-1]) * (-1e-6 if self.latest else 1e-6)
        place = (distances + tied).argmin(-1)
        labels = label_numbers(self.stack, inputs[:, :, 1::2]).gather(2, place[..., None])
        return torch.nn.functional.one_hot(labels, self.stack.tasks[0].labels).float()


def test_a_context_holds_each_of_its_classes_as_often_as_burstiness_says():
    """17 tokens, burstiness 4: two classes, four items each, and the query is of one of them (noise 0: equal)."""
    stack = stacked(InContextRetrieval(noise=0))
    batch = stack.batch(0, 200)
    assert batch.inputs.shape == (1, 200, 17, 64)
    same = (batch.inputs[:, :, :-1:2, None] == batch.inputs[:, :, None, :-1:2]).all(-1)
    assert (same.sum(-1) == 4).all()
    assert ((batch.inputs[:, :, :-1:2] == batch.inputs[:, :, -1:]).all(-1).sum(-1) == 4).all()


@pytest.mark.parametrize("items", ["mixture", "fixed"])
@pytest.mark.parametrize("answers", ["any", "first", "middle", "last", "first_and_last"])
def test_answers_come_from_the_places_asked_for_equally_often(answers, items):
    task = InContextRetrieval(answers, burstiness=1, noise=0.0, features=16, classes=400, items=items)
    stack = stacked(task)
    batch = stack.batch(0, CONTEXTS)
    where = (batch.inputs[:, :, :-1:2] == batch.inputs[:, :, -1:]).all(-1)[0]
    assert (where.sum(-1) == 1).all()
    counts = where.sum(0)
    expected = torch.zeros(8)
    expected[list(task.answer_places)] = CONTEXTS / len(task.answer_places)
    assert ((counts - expected).abs() <= FIVE_SIGMA * expected.sqrt() * (len(task.answer_places) > 1)).all()
    labels = label_numbers(stack, batch.inputs[:, :, 1::2])
    right = labels.gather(2, where.long().argmax(-1)[None, :, None])
    assert torch.equal(right, batch.targets)


def test_items_of_a_class_correlate_as_the_noise_says():
    """Mixture: <x, x'> = 1 / (1 + noise^2) within a class, 0 between. Fixed: noise^2 / (1 + noise^2) between, |w|=1."""
    noise = 0.75
    mixed = stacked(InContextRetrieval(noise=noise, burstiness=4)).batch(0, 2000).inputs[0]
    cosines = torch.einsum("bif,bjf->bij", mixed[:, ::2], mixed[:, ::2])
    off = cosines[:, ~torch.eye(9, dtype=torch.bool)]
    within = 1 / (1 + noise**2)
    assert off[off > within / 2].mean().item() == pytest.approx(within, abs=0.01)
    assert off[off < within / 2].mean().item() == pytest.approx(0, abs=0.01)
    stack = stacked(*(InContextRetrieval(noise=noise, items="fixed", classes=300, features=400),) * 2)
    between = stack.vectors[0, :300] @ stack.vectors[0, :300].T
    expected = noise**2 / (1 + noise**2) * (stack.shared[0].square().sum() * (1 + noise**2) / noise**2)
    assert between[~torch.eye(300, dtype=torch.bool)].mean().item() == pytest.approx(expected.item(), abs=0.01)


def test_a_model_that_answers_by_place_has_the_accuracies_and_gaps_of_that_place():
    """Right at its place always; at a copy of another place's item if that has the same label, by its class or by
    chance: 3 of 7 others are of one class, and one of 32 labels is equal."""
    stack = stacked(InContextRetrieval(features=16, classes=64))
    also_right = 3 / 7 + 4 / 7 / 32
    for name, place in stack.tasks[0].named_places.items():
        scores = stack.evaluate(AnswersPlace(stack, place), examples=600)
        np.testing.assert_array_equal(scores["accuracy_by_place"][0], np.arange(8) == place)
        for number, (asked, _) in enumerate(CONTRASTS):
            accuracy = scores["contrast_accuracy"][0, number]
            if asked == name:
                assert accuracy == 1
            else:
                assert abs(accuracy - also_right) < FIVE_SIGMA * (0.25 / 600) ** 0.5
        np.testing.assert_allclose(
            scores["gaps"], scores["contrast_accuracy"][:, 0::2] - scores["contrast_accuracy"][:, 1::2]
        )


@pytest.mark.parametrize(("latest", "sign"), [(False, 1), (True, -1)])
def test_a_model_that_matches_items_is_right_everywhere_and_shows_its_tie_break(latest, sign):
    """With no within-class noise in doubt (noise .2), matching is always right; a copy is then an even match."""
    stack = stacked(InContextRetrieval(noise=0.2, features=32, classes=64))
    scores = stack.evaluate(AnswersNearest(stack, latest=latest), examples=300)
    assert scores["accuracy_trained_classes"][0] == scores["accuracy_novel_classes"][0] == 1
    np.testing.assert_array_equal(scores["accuracy_by_place"], 1)
    assert (np.sign(scores["gaps"]) == sign).all()


def test_novel_items_share_the_trained_direction():
    stack = stacked(InContextRetrieval(items="fixed", classes=64))
    items = []

    def predict(inputs):
        items.append(inputs[:, :, -1])
        return torch.zeros(*inputs.shape[:2], 1, 32)

    stack.evaluate(predict, examples=400)
    assert torch.nn.functional.cosine_similarity(items[1].mean(1), stack.shared, dim=-1)[0] > 0.95


def test_contexts_asked_by_place_keep_their_bursts():
    """By place: the query's class once, seven others in bursts of four and three."""
    stack = stacked(InContextRetrieval(noise=0, features=16, classes=64))
    contexts = []

    def predict(inputs):
        contexts.append(inputs)
        return torch.zeros(*inputs.shape[:2], 1, 32)

    stack.evaluate(predict, examples=50)
    by_place = contexts[8:16]
    for place, inputs in enumerate(by_place):
        same = (inputs[0, :, :-1:2, None] == inputs[0, :, None, :-1:2]).all(-1).sum(-1)
        assert (same[:, place] == 1).all()
        assert torch.equal(same.sort(-1).values, torch.tensor([1, 3, 3, 3, 4, 4, 4, 4]).expand(50, 8))
        labels = label_numbers(stack, inputs[:, :, 1::2])[0]
        assert ((labels == labels[:, place, None]).sum(-1) == 1).all()


def test_ranks_are_permutations_each_equally_often():
    raw = Draws.of("x", [0], torch.device("cpu")).mixed(Purpose.TRAINING, 0, integers=(24_000, 4))[0]
    order = ranks(raw)
    assert torch.equal(order.sort(-1).values, torch.arange(4).expand_as(order))
    codes = (order * torch.tensor([64, 16, 4, 1])).sum(-1).flatten()
    _, counts = codes.unique(return_counts=True)
    assert len(counts) == 24
    assert ((counts - 1000).abs() < 5 * 1000**0.5).all()
    assert torch.equal(ranks(torch.tensor([7, 7, 3])), torch.tensor([1, 2, 0]))


def test_distinct_draws_every_ordered_subset_equally_often():
    raw = Draws.of("x", [1], torch.device("cpu")).mixed(Purpose.TRAINING, 0, integers=(60_000, 3))[0]
    drawn = distinct(raw, 5)[0]
    codes, counts = (drawn * torch.tensor([25, 5, 1])).sum(-1).unique(return_counts=True)
    assert len(codes) == 60
    assert (drawn.sort(-1).values.diff(dim=-1) > 0).all()
    assert ((counts - 1000).abs() < 5 * 1000**0.5).all()


@pytest.mark.parametrize(
    ("parameters", "complaint"),
    [
        ({"classes": 16}, "classes must be at least labels = 32, got 16"),
        ({"burstiness": 3}, "burstiness must divide pairs = 8, got 3"),
        ({"pairs": 8, "burstiness": 1, "labels": 3, "classes": 4}, "holds 8 different classes"),
        ({"labels": 2}, "labels must be a whole number >= 3"),
        ({"noise": -0.1}, "noise must be a finite number >= 0, got -0.1"),
        ({"items": "words"}, "items must be one of mixture, fixed, got 'words'"),
        ({"answers": "start"}, "answers must be one of any, first, middle, last, first_and_last"),
    ],
)
def test_bad_parameters_are_refused_in_one_line(parameters, complaint):
    with pytest.raises(UsageError) as raised:
        InContextRetrieval(**parameters)
    assert complaint in str(raised.value)
    assert "\n" not in str(raised.value)


def test_its_code_decides_whether_a_checkpoint_is_taken_up(tmp_path, monkeypatch):
    seen = []
    monkeypatch.setattr("posbias.training.trainer.made_by", lambda packages: seen.append(list(packages)) or {})
    for member in (copier(0), retriever(0)):
        schedule, options = TrainingSchedule(steps=2, batch=2, window=1), TrainOptions(directory=tmp_path / member.name)
        train_members([member], schedule, options=options)
    assert "posbias_papers.wu2025" not in seen[0]
    assert "posbias_papers.wu2025" in seen[-1]
