"""Position copy: what is drawn, and the scores of models that copy or guess."""

import math

import pytest
import torch

from posbias.tasks.synthetic import PositionCopy, stack_tasks


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
