"""Synthetic tasks: what is drawn, the same alone or in a stack; scores of models that copy or guess; refusals."""

import itertools
import math

import numpy as np
import pytest
import torch

from conftest import refused
from posbias import UsageError
from posbias.tasks.synthetic import (
    SYNTHETIC_TASKS,
    CuedCopy,
    Draws,
    KeyValueRetrieval,
    PositionCopy,
    Purpose,
    cross_entropy,
    stack_tasks,
)
from posbias_papers.wu2025.retrieval import InContextRetrieval

SMALL = {"pairs": 4, "features": 8, "classes": 40, "labels": 5, "burstiness": 2}
VARIED = {
    "mixture": [InContextRetrieval(**SMALL), InContextRetrieval("last", **SMALL, noise=0.1)],
    "fixed": [InContextRetrieval("middle", **SMALL, items="fixed"), InContextRetrieval(**SMALL, items="fixed")],
    "copy": [PositionCopy(0), PositionCopy(7)],
    "cued": [CuedCopy(6), CuedCopy(6)],
    "keys": [KeyValueRetrieval(6), KeyValueRetrieval(6)],
}
"""Members of one stack, their parameters as unlike as a stack allows."""


@pytest.mark.parametrize("tasks", VARIED.values(), ids=VARIED)
@pytest.mark.parametrize(("step", "size"), [(0, 1), (3, 7), (1_000_000, 32)])
def test_members_see_the_same_bits_alone_and_stacked(tasks: list, step: int, size: int) -> None:
    seeds = list(range(5, 5 + len(tasks)))
    together = stack_tasks(tasks, seeds).batch(step, size)
    for member, (task, seed) in enumerate(zip(tasks, seeds, strict=True)):
        alone = stack_tasks([task], [seed]).batch(step, size)
        assert torch.equal(alone.inputs[0], together.inputs[member])
        assert torch.equal(alone.targets[0], together.targets[member])


@pytest.mark.parametrize("tasks", VARIED.values(), ids=VARIED)
def test_steps_seeds_and_sizes_give_other_data_and_repeats_the_same(tasks: list) -> None:
    stack = stack_tasks(tasks[:1] * 2, [1, 2])
    first, again, later = stack.batch(0, 16), stack.batch(0, 16), stack.batch(1, 16)
    assert torch.equal(first.inputs, again.inputs)
    assert not torch.equal(first.inputs, later.inputs)
    assert not torch.equal(first.inputs[0], first.inputs[1])


@pytest.mark.parametrize("tasks", VARIED.values(), ids=VARIED)
def test_batches_have_the_shapes_that_the_task_states(tasks: list) -> None:
    task = tasks[0]
    batch = stack_tasks(tasks, [0] * len(tasks)).batch(2, 6)
    features = () if task.width is None else (task.width,)
    assert batch.inputs.shape == (len(tasks), 6, task.n_positions, *features)
    assert batch.targets.shape == (len(tasks), 6, len(task.rows))
    assert max(task.rows) < task.n_positions
    assert batch.targets.min() >= 0
    assert batch.targets.max() < task.n_outputs
    if task.vocabulary_size is not None:
        assert batch.inputs.min() >= 0
        assert batch.inputs.max() < task.vocabulary_size


@pytest.mark.parametrize("tasks", VARIED.values(), ids=VARIED)
def test_no_evaluation_batch_is_a_training_batch(tasks: list) -> None:
    stack = stack_tasks(tasks[:1], [0])
    seen: list[torch.Tensor] = []

    def predict(inputs: torch.Tensor) -> torch.Tensor:
        seen.append(inputs.clone())
        return torch.zeros(*inputs.shape[:2], len(tasks[0].rows), tasks[0].n_outputs)

    stack.evaluate(predict, examples=20)
    for step in range(30):
        trained = stack.batch(step, 20).inputs
        assert not any(torch.equal(trained, inputs) for inputs in seen)


def test_streams_of_purposes_and_indices_never_share_a_seed_of_the_cpu_generator() -> None:
    from posbias.tasks import synthetic as draws

    base = Draws.of("position_copy", [3], torch.device("cpu")).bases[0]
    seeds = {
        draws._stream(base, purpose, index) & 0xFFFFFFFF
        for purpose, index in itertools.product(Purpose, [*range(5_000), 2**30 - 1, 2**29])
    }
    assert len(seeds) == 3 * 5_002


def test_threads_change_no_bit() -> None:
    tasks, seeds = [InContextRetrieval()] * 4, [0, 1, 2, 3]
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        alone = stack_tasks(tasks, seeds).batch(3, 128)
        torch.set_num_threads(3)
        shared = stack_tasks(tasks, seeds).batch(3, 128)
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(alone.inputs, shared.inputs)
    assert torch.equal(alone.targets, shared.targets)


def test_cross_entropy_is_the_mean_over_scored_rows_of_each_member() -> None:
    logits = torch.randn(2, 2, 2, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    targets = torch.tensor([[[0, 1], [2, 3]], [[0, 3], [3, 2]]])
    losses = cross_entropy(logits, targets)
    log = logits.log_softmax(-1)
    expected = -(log[1, 0, 0, 0] + log[1, 0, 1, 3] + log[1, 1, 0, 3] + log[1, 1, 1, 2]) / 4
    assert losses[1].item() == pytest.approx(expected.item(), abs=1e-12)
    assert losses[0].item() == cross_entropy(logits[:1], targets[:1])[0].item()


@pytest.mark.parametrize("name", list(SYNTHETIC_TASKS))
def test_every_task_is_spelled_as_it_is_parsed(name: str) -> None:
    task = SYNTHETIC_TASKS.parse("position_copy(target=3)" if name == "position_copy" else name)
    assert SYNTHETIC_TASKS.parse(str(task)) == task
    hash(task.stack_key)


@pytest.mark.parametrize(
    ("spelling", "complaint"),
    [
        ("position_copy(target=10)", "target must lie in the context, 0 ... 9, got 10"),
        ("position_copy(target=-1)", "target must be a whole number >= 0"),
        ("position_copy(target=1.5)", "target must be a whole number >= 0, got 1.5"),
        ("position_copy(target=0, vocabulary=1)", "vocabulary must be a whole number >= 2"),
        ("position_copy(target=0, context=0)", "context must be a whole number >= 1"),
        ("copy", "unknown synthetic task 'copy'; known: "),
        ("free_recall(items=3)", "synthetic task free_recall left posbias after 0.1.0: commit 573e2c34 has it"),
    ],
)
def test_bad_parameters_are_refused_in_one_line(spelling: str, complaint: str) -> None:
    with refused(complaint):
        SYNTHETIC_TASKS.parse(spelling)


@pytest.mark.parametrize("tasks", VARIED.values(), ids=VARIED)
def test_a_member_that_diverged_scores_nan_and_leaves_the_others_alone(tasks: list) -> None:
    task = tasks[0]
    stack = stack_tasks([task, task], [0, 1])

    def flat(inputs: torch.Tensor) -> torch.Tensor:
        return torch.zeros(*inputs.shape[:2], len(task.rows), task.n_outputs)

    def broken(inputs: torch.Tensor) -> torch.Tensor:
        logits = flat(inputs)
        logits[1] = torch.nan
        return logits

    sound, scores = stack.evaluate(flat, examples=10), stack.evaluate(broken, examples=10)
    for name, values in scores.items():
        assert len(values) == 2
        np.testing.assert_array_equal(values[0], sound[name][0])
        assert np.isnan(values[1]).all(), name


def test_the_target_is_the_token_at_its_place() -> None:
    stack = stack_tasks([PositionCopy(place) for place in range(10)], [4] * 10)
    batch = stack.batch(0, 50)
    for place in range(10):
        assert torch.equal(batch.targets[place, :, 0], batch.inputs[place, :, place])
        assert torch.equal(batch.inputs[place], batch.inputs[0])


def test_tokens_are_uniform_and_independent() -> None:
    tokens = stack_tasks([PositionCopy(0, vocabulary=5)], [0]).batch(0, 10_000).inputs[0]
    pairs = (tokens[:, 0::2] * 5 + tokens[:, 1::2]).flatten().bincount(minlength=25)
    assert ((pairs - 2000).abs() < 5 * 2000**0.5).all()


def test_a_model_that_copies_has_no_loss_and_a_flat_one_ln_v() -> None:
    stack = stack_tasks([PositionCopy(2), PositionCopy(9)], [0, 1])

    def predict(inputs: torch.Tensor) -> torch.Tensor:
        logits = torch.nn.functional.one_hot(inputs[:, :, 2:3], 10).float() * 100
        logits[1] = 0
        return logits

    scores = stack.evaluate(predict, examples=600)
    assert scores["loss"][0] == pytest.approx(0, abs=1e-12)
    assert scores["accuracy"][0] == 1
    assert scores["loss"][1] == pytest.approx(math.log(10), abs=1e-12)


def test_the_cue_names_every_position_alike_and_the_target_stands_there() -> None:
    batch = stack_tasks([CuedCopy(6, vocabulary=5, cues=9)], [3]).batch(0, 12_000)
    inputs, targets = batch.inputs[0], batch.targets[0, :, 0]
    asked = inputs[:, -1] - 5
    counts = asked.bincount(minlength=6)
    assert len(counts) == 6
    assert ((counts - 2000).abs() < 5 * 2000**0.5).all()
    assert torch.equal(targets, inputs.gather(1, asked[:, None])[:, 0])


def test_accuracy_by_position_is_that_of_a_model_that_knows_only_some() -> None:
    stack = stack_tasks([CuedCopy(6, vocabulary=5)], [3])

    def predict(inputs: torch.Tensor) -> torch.Tensor:
        asked = (inputs[:, :, -1:] - 5).clamp(max=2)  # beyond position 2 its answer is the token there
        return torch.nn.functional.one_hot(inputs.gather(2, asked), 5).float() * 100

    scores = stack.evaluate(predict, examples=600)
    assert (scores["accuracy_by_position"][0, :3] == 1).all()
    assert scores["accuracy_by_position"][0, 3:] == pytest.approx([0.2] * 3, abs=0.08)
    assert scores["accuracy"][0] == pytest.approx(0.6, abs=0.08)


def test_cues_that_do_not_reach_are_refused() -> None:
    with pytest.raises(UsageError, match="cued_copy: cues must be a whole number >= 16"):
        CuedCopy(16, cues=8)


def test_a_key_stands_once_anywhere_and_its_value_is_the_target() -> None:
    batch = stack_tasks([KeyValueRetrieval(6, vocabulary=5, keys=9)], [3]).batch(0, 12_000)
    pairs, asked, targets = batch.inputs[0, :, :-1], batch.inputs[0, :, -1:] - 45, batch.targets[0, :, 0]
    found = pairs // 5 == asked
    assert (found.sum(1) == 1).all()
    assert torch.equal((pairs % 5)[found], targets)
    for counts, each in ((found.sum(0), 6), (asked.flatten().bincount(), 9), (targets.bincount(), 5)):
        assert len(counts) == each
        assert ((counts - 12_000 / each).abs() < 5 * (12_000 / each) ** 0.5).all()


def test_a_model_that_reads_keys_is_right_at_every_position() -> None:
    stack = stack_tasks([KeyValueRetrieval(6, vocabulary=5, keys=9)], [3])

    def predict(inputs: torch.Tensor) -> torch.Tensor:
        matched = inputs[:, :, :-1] // 5 == inputs[:, :, -1:] - 45
        value = (inputs[:, :, :-1] % 5 * matched).sum(2, keepdim=True)
        return torch.nn.functional.one_hot(value, 5).float() * 100

    scores = stack.evaluate(predict, examples=50)
    assert (scores["accuracy_by_position"] == 1).all()
    assert scores["loss"][0] == pytest.approx(0, abs=1e-12)
