"""In-context retrieval: what contexts hold, who answers what, and how confounded the published sets are."""

import numpy as np
import pytest
import torch

from posbias.tasks.synthetic import CONTRASTS, InContextRetrieval, stack_tasks
from posbias.tasks.synthetic.retrieval import RetrievalStack

FIVE_SIGMA = 5.0
CONTEXTS = 4000


def stacked(*tasks: InContextRetrieval, seed: int = 0) -> RetrievalStack:
    stack = stack_tasks(tasks, [seed] * len(tasks))
    assert isinstance(stack, RetrievalStack)
    return stack


def label_numbers(stack: RetrievalStack, vectors: torch.Tensor) -> torch.Tensor:
    """Which label each label vector of the inputs is."""
    known = stack.vectors[:, stack.tasks[0].classes :]
    return (vectors[:, :, :, None] - known[:, None, None]).abs().sum(-1).argmin(-1)


class AnswersPlace:
    """A model that names the label at one place, whatever the query."""

    def __init__(self, stack: RetrievalStack, place: int) -> None:
        self.stack, self.place = stack, place

    def __call__(self, inputs: torch.Tensor) -> torch.Tensor:
        labels = label_numbers(self.stack, inputs[:, :, 2 * self.place + 1, None])
        return torch.nn.functional.one_hot(labels, self.stack.tasks[0].labels).float()


class AnswersNearest:
    """A model that names the label of the item nearest to the query; of equally near ones the first, or the last."""

    def __init__(self, stack: RetrievalStack, *, latest: bool) -> None:
        self.stack, self.latest = stack, latest

    def __call__(self, inputs: torch.Tensor) -> torch.Tensor:
        distances = (inputs[:, :, :-1:2] - inputs[:, :, -1:]).square().sum(-1)
        tied = torch.arange(distances.shape[-1]) * (-1e-6 if self.latest else 1e-6)
        place = (distances + tied).argmin(-1)
        labels = label_numbers(self.stack, inputs[:, :, 1::2]).gather(2, place[..., None])
        return torch.nn.functional.one_hot(labels, self.stack.tasks[0].labels).float()


def test_a_context_holds_each_of_its_classes_as_often_as_burstiness_says() -> None:
    """17 tokens, burstiness 4: two classes, four items each, and the query is of one of them (noise 0: equal)."""
    stack = stacked(InContextRetrieval(noise=0))
    batch = stack.batch(0, 200)
    assert batch.inputs.shape == (1, 200, 17, 64)
    same = (batch.inputs[:, :, :-1:2, None] == batch.inputs[:, :, None, :-1:2]).all(-1)
    assert (same.sum(-1) == 4).all()
    assert ((batch.inputs[:, :, :-1:2] == batch.inputs[:, :, -1:]).all(-1).sum(-1) == 4).all()


@pytest.mark.parametrize("items", ["mixture", "fixed"])
@pytest.mark.parametrize("answers", ["any", "first", "middle", "last", "first_and_last", (1, 2, 5)])
def test_answers_come_from_the_places_asked_for_equally_often(answers: str | tuple[int, ...], items: str) -> None:
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


def test_named_places_are_first_middle_and_last_pairs() -> None:
    assert InContextRetrieval("first_and_last").answer_places == (0, 7)
    assert InContextRetrieval("middle").answer_places == (4,)
    assert InContextRetrieval("any").answer_places == tuple(range(8))
    assert InContextRetrieval([3, 1]).answer_places == (3, 1)


@pytest.mark.parametrize(("scale", "norm"), [("variance", 1.0), ("deviation", 1 / 8)])
@pytest.mark.parametrize("items", ["mixture", "fixed"])
def test_items_and_labels_have_the_norm_of_their_scale(scale: str, norm: float, items: str) -> None:
    """Every token: components of variance 1/64 (norm 1), or of standard deviation 1/64 (norm 1/8)."""
    stack = stacked(*(InContextRetrieval(scale=scale, items=items, classes=200),) * 40)
    squares = stack_tasks(stack.tasks, list(range(40))).batch(0, 50).inputs.square().sum(-1) / norm**2
    assert squares[:, :, 1::2].mean().item() == pytest.approx(1, abs=0.03)
    assert squares[:, :, ::2].mean().item() == pytest.approx(1, abs=0.06)


def test_items_of_a_class_correlate_as_the_noise_says() -> None:
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


def test_labels_of_classes_are_uniform_and_kept_through_training() -> None:
    stack = stacked(InContextRetrieval(classes=8000, features=2, labels=8))
    counts = stack.labels[0].bincount(minlength=8)
    assert ((counts - 1000).abs() < FIVE_SIGMA * 1000**0.5).all()
    assert torch.equal(stack.labels, stacked(InContextRetrieval("last", classes=8000, features=2, labels=8)).labels)


def confounds(task: InContextRetrieval) -> dict[str, float]:
    """Exact shares of the published evaluation sequences in which more than place a gives the right answer away.

    With n places, bursts of B and L labels, after b is overwritten: the query's class stands at a third place unless
    all its B - 1 other copies were at b; a label is right wherever the class stood or by chance 1 / L per class. Where
    b's label is right too, [a right, b] and [b right, a] are equally likely inputs with the same target, so no model's
    expected gap exceeds 1 - `overwritten_also_right` (.554 in the paper's setting: answering by place reaches it).
    """
    copies, chance = task.burstiness - 1, 1 / task.labels
    at_overwritten = copies / (task.pairs - 1)
    by_chance = 1 - (1 - chance) ** (task.distinct_classes - 1)
    return {
        "class_elsewhere": {0: 0.0, 1: 1 - at_overwritten}.get(copies, 1.0),
        "label_elsewhere": 1.0 if copies else by_chance,
        "overwritten_also_right": at_overwritten + (1 - at_overwritten) * chance,
    }


def test_a_model_that_answers_by_place_has_the_accuracies_and_gaps_of_that_place() -> None:
    """It names the label at its place: right there always, elsewhere only where the published sets are confounded."""
    task = InContextRetrieval(features=16, classes=64)
    stack = stacked(task)
    shares = confounds(task)
    for name, place in task.named_places.items():
        scores = stack.evaluate(AnswersPlace(stack, place), examples=600)
        np.testing.assert_array_equal(scores["accuracy_by_place"][0], np.arange(8) == place)
        expected = {"first": [1, 1, 0], "middle": [-1, 0, 1], "last": [0, -1, -1]}[name]
        np.testing.assert_array_equal(scores["unconfounded_gaps"][0], expected)
        for number, (asked, overwritten) in enumerate(CONTRASTS):
            accuracy = scores["contrast_accuracy"][0, number]
            if asked == name:
                assert accuracy == 1
            else:
                assert abs(accuracy - shares["overwritten_also_right"]) < FIVE_SIGMA * (0.25 / 600) ** 0.5
            if overwritten == name:
                assert accuracy == scores["overwritten_also_right"][0, number]
            if asked == name and scores["unconfounded_gaps"][0, number // 2] == 1:
                largest = 1 - shares["overwritten_also_right"]
                assert abs(scores["gaps"][0, number // 2] - largest) < FIVE_SIGMA * (0.25 / 600) ** 0.5
        np.testing.assert_allclose(
            scores["gaps"], scores["contrast_accuracy"][:, 0::2] - scores["contrast_accuracy"][:, 1::2]
        )


@pytest.mark.parametrize(("latest", "sign"), [(False, 1), (True, -1)])
def test_a_model_that_matches_items_is_right_everywhere_and_shows_its_tie_break(latest: bool, sign: int) -> None:
    """With no within-class noise in doubt (noise .2), matching is always right; a copy is then an even match."""
    stack = stacked(InContextRetrieval(noise=0.2, features=32, classes=64))
    scores = stack.evaluate(AnswersNearest(stack, latest=latest), examples=300)
    assert scores["accuracy_trained_classes"][0] == scores["accuracy_novel_classes"][0] == 1
    np.testing.assert_array_equal(scores["accuracy_by_place"], 1)
    np.testing.assert_array_equal(scores["unconfounded_gaps"], sign)
    assert (np.sign(scores["gaps"]) == sign).all()


@pytest.mark.parametrize(("pairs", "burstiness", "labels"), [(8, 4, 32), (8, 2, 5), (8, 1, 4), (6, 3, 10)])
def test_the_measured_confounds_have_their_exact_shares(pairs: int, burstiness: int, labels: int) -> None:
    task = InContextRetrieval(pairs=pairs, burstiness=burstiness, labels=labels, classes=64, features=4)
    stack = stacked(task)
    examples = 4000
    measured = stack.evaluate(AnswersPlace(stack, 0), examples=examples)
    for name, share in confounds(task).items():
        deviation = FIVE_SIGMA * (share * (1 - share) / examples) ** 0.5
        assert (np.abs(measured[name][0] - share) <= deviation + 1e-12).all(), name


def test_the_papers_configuration_is_confounded_in_every_sequence_and_useless_in_45_percent() -> None:
    """17 tokens, burstiness 4: the query's class always stands elsewhere too; at the copy's place, 3/7 + 4/7/32."""
    shares = confounds(InContextRetrieval())
    assert shares["class_elsewhere"] == shares["label_elsewhere"] == 1
    assert shares["overwritten_also_right"] == pytest.approx(3 / 7 + 4 / 7 / 32)
    assert 1 - shares["overwritten_also_right"] == pytest.approx(0.554, abs=5e-4)


def test_novel_items_share_the_trained_direction_or_as_in_their_code_a_fresh_one() -> None:
    tasks = [InContextRetrieval(items="fixed", evaluation_direction=way, classes=64) for way in ("trained", "fresh")]
    stack = stacked(*tasks)
    items: list[torch.Tensor] = []

    def predict(inputs: torch.Tensor) -> torch.Tensor:
        items.append(inputs[:, :, -1])
        return torch.zeros(*inputs.shape[:2], 1, 32)

    stack.evaluate(predict, examples=400)
    novel = items[1].mean(1)
    cosine = torch.nn.functional.cosine_similarity(novel, stack.shared, dim=-1)
    assert cosine[0] > 0.95
    assert abs(cosine[1]) < FIVE_SIGMA / 8
    assert torch.equal(stack.vectors[0], stack.vectors[1])


def test_unconfounded_contexts_keep_their_bursts() -> None:
    """By place: the query's class once, seven others in bursts of four and three."""
    stack = stacked(InContextRetrieval(noise=0, features=16, classes=64))
    contexts: list[torch.Tensor] = []

    def predict(inputs: torch.Tensor) -> torch.Tensor:
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
