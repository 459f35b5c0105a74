"""Sinks of trained attention: weights by their formulas, a layer written by hand, and both claims in small."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from posbias_papers.claims import claim_generator
from posbias_papers.later2026.triggers import (
    NORMALISATIONS,
    SoftmaxSinks,
    SoftpickSinks,
    SomeHeadSinks,
    Training,
    cancelling_heads,
    first_token,
    mean_at_trigger,
    running_mean,
)

SMALL = Training(seeds=3, length=6, width=8, batch=24, steps=180, learning_rate=3e-2)
HIDDEN = torch.ones(6, 6, dtype=torch.bool).triu(1)


def test_weights_are_those_of_the_papers() -> None:
    logits = torch.randn(1, 1, 2, 6, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    weights_by_name = {name: NORMALISATIONS[name](logits, HIDDEN)[0, 0] for name in NORMALISATIONS}
    for sample, query in np.ndindex(2, 6):
        row = logits[0, 0, sample, query, : query + 1].numpy()
        raised = np.exp(row) - 1
        expected = {
            "softmax": np.exp(row) / np.exp(row).sum(),
            "relu": np.maximum(row, 0) / max(query, 1),
            "softpick": np.maximum(raised, 0) / np.abs(raised).sum(),
        }
        for name, weights in weights_by_name.items():
            np.testing.assert_allclose(weights[sample, query, : query + 1], expected[name], rtol=1e-6)
            assert not weights[sample, query, query + 1 :].any()


@pytest.mark.parametrize("name", ["relu", "softpick"])
def test_without_a_sum_of_one_a_layer_by_hand_does_the_task_and_has_no_sink(name: str) -> None:
    """Its logit is 1 from the trigger to every token after the marker, 0 elsewhere; values pass through."""
    tokens, trigger = SMALL.sequences(4, torch.Generator().manual_seed(0), marked=True)
    logits = trigger[..., None].float() * (tokens[..., 1] + tokens[..., -1])[:, :, None]
    weights = NORMALISATIONS[name](logits[:, None], HIDDEN)[:, 0]
    torch.testing.assert_close(weights @ tokens, mean_at_trigger(tokens, trigger))
    assert not weights[..., 0].any()


def test_two_softmax_heads_by_hand_do_it_too_since_they_cancel() -> None:
    tokens, trigger = SMALL.sequences(4, torch.Generator().manual_seed(0), marked=True)
    weights, output = cancelling_heads(tokens, trigger, HIDDEN)
    torch.testing.assert_close(output, mean_at_trigger(tokens, trigger))
    even = (1 / torch.arange(1, 7)).expand_as(trigger)
    for head in (0, 1):
        torch.testing.assert_close(weights[:, head, :, :, 0][~trigger], even[~trigger])


def test_tasks() -> None:
    tokens, trigger = SMALL.sequences(50, torch.Generator().manual_seed(0), marked=True)
    marker = torch.eye(8)[0]
    assert (tokens[:, :, 0] == marker).all()
    assert (trigger.sum(-1) == 1).all()
    assert not trigger[..., :2].any()
    assert torch.equal(tokens[:, :, 1:, -1], 1 - tokens[:, :, 1:, 1])
    means = running_mean(tokens, trigger)
    torch.testing.assert_close(means[0, 0, 4], tokens[0, 0, 1:5].mean(0))
    assert not means[:, :, 0].any()
    assert torch.equal(mean_at_trigger(tokens, trigger)[trigger], means[trigger])
    content = SMALL.sequences(2, torch.Generator().manual_seed(0), marked=False)
    assert torch.equal(first_token(*content)[:, :, 5], content[0][:, :, 0])
    assert content[0][:, :, 0, 2:-1].all()


@pytest.mark.parametrize("claim", [SoftmaxSinks, SoftpickSinks])
def test_trained_in_small_each_holds_and_breaks(claim: type[SoftmaxSinks | SoftpickSinks]) -> None:
    verdict = claim(SMALL).check(claim_generator(claim.name, 0))
    assert verdict.verdict == "holds"
    assert verdict.finding.numbers.get("share", 1) <= 1
    assert claim(SMALL).check(claim_generator(claim.name, 0), broken=True).verdict == "fails as stated"


def test_before_training_no_claim_on_sinks_holds() -> None:
    small = replace(SMALL, steps=1, depth=2, heads=2)
    for claim in (SoftmaxSinks, SomeHeadSinks, SoftpickSinks):
        verdict = claim(small).check(claim_generator(claim.name, 0))
        assert verdict.verdict == "fails as stated"
        assert verdict.computed
