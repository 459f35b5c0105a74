"""Position copy, cued copy and key-value retrieval: what is drawn, and the scores of models that copy or guess."""

import math

import pytest
import torch

from posbias import UsageError
from posbias.tasks.synthetic import CuedCopy, KeyValueRetrieval, PositionCopy, stack_tasks


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
