"""What partial information reaches in position copy: each baseline is the loss of the model that knows just that."""

import itertools

import numpy as np
import pytest

from posbias_papers.liu2026.partial_information import partial_information_losses


@pytest.mark.parametrize(("context", "vocabulary"), [(2, 2), (4, 3), (5, 3), (3, 6)])
def test_baselines_agree_with_going_through_every_context(context: int, vocabulary: int) -> None:
    """The Bayes loss of each kind of knowledge, from all V^C contexts, target at place 0."""
    knowledge = {
        "nothing": lambda tokens: (),
        "counts_and_own": lambda tokens: (tuple(sorted(tokens)), tokens[-1]),
    }
    losses = partial_information_losses(context, vocabulary)
    contexts = list(itertools.product(range(vocabulary), repeat=context))
    for name, known in knowledge.items():
        table: dict[object, np.ndarray] = {}
        for tokens in contexts:
            table.setdefault(known(tokens), np.zeros(vocabulary))[tokens[0]] += 1
        entropy = 0.0
        for counts in table.values():
            chances = counts[counts > 0] / counts.sum()
            entropy -= counts.sum() / len(contexts) * float(chances @ np.log(chances))
        assert losses[name] == pytest.approx(entropy, abs=1e-12), name


@pytest.mark.parametrize(("context", "vocabulary"), [(4, 3), (5, 3), (3, 6)])
def test_the_linear_readout_of_counts_is_the_best_weight_on_every_context(context: int, vocabulary: int) -> None:
    contexts = np.array(list(itertools.product(range(vocabulary), repeat=context)))
    counts = np.stack([(contexts == token).sum(1) for token in range(vocabulary)], axis=1)

    def loss(weight: float) -> float:
        logits = weight * counts
        own = logits[np.arange(len(contexts)), contexts[:, 0]]
        return float((np.log(np.exp(logits).sum(1)) - own).mean())

    scanned = min(loss(weight) for weight in np.linspace(0, 8, 8001))
    assert partial_information_losses(context, vocabulary)["counts_linear"] == pytest.approx(scanned, abs=1e-6)


@pytest.mark.parametrize(("context", "vocabulary"), [(2, 2), (10, 10), (30, 7), (7, 100)])
def test_who_knows_more_loses_less(context: int, vocabulary: int) -> None:
    losses = partial_information_losses(context, vocabulary)
    assert losses["nothing"] >= losses["counts_linear"] >= losses["counts_and_own"]


def test_baselines_of_the_published_setting() -> None:
    losses = partial_information_losses(10, 10)
    assert losses == pytest.approx({"nothing": 2.3026, "counts_and_own": 1.7145, "counts_linear": 1.9135}, abs=5e-5)
