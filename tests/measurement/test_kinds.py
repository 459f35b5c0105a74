"""Kinds of influence: probes are right on average, with errors of the size claimed; how kinds are spelled.

What each is by definition: `test_outputs.py`, against dense Jacobians.
"""

import numpy as np
import pytest
import torch

from measurement.test_experiments import measured
from posbias import UsageError
from posbias.measurement.kinds import KINDS, Jacobian, Logit, Probability, resolve_kinds
from posbias.measurement.outputs import Reading
from posbias.models.model import Outputs


def test_probes_are_unbiased_with_errors_of_the_size_claimed_and_infinite_for_one_probe(gpt2_64):
    exact, *_ = measured(gpt2_64, "jacobian(exact=True)")
    scores = []
    for seed in range(60):
        norms, errors, _ = measured(gpt2_64, "jacobian(probes=32)", seed=seed)
        scores.append((norms - exact) / errors)
    # Standard normal up to the sampling of 60 draws per position (positions are dependent): sd of the mean is 0.13.
    assert np.all(np.abs(np.mean(scores, axis=0)) < 0.6)
    assert 0.75 < np.std(scores) < 1.3
    for output in ("last", "at(position=4)"):  # which has no influence behind it
        assert np.all(np.isinf(measured(gpt2_64, "jacobian(probes=1)", output)[1]))


def test_a_sure_prediction_keeps_its_digits():
    """p_t rounds to 1, yet its gradient p_t (1 - p_t) is 1e-20, not 0."""
    logits = torch.tensor([[46.0, 0.0, 0.0]], dtype=torch.float64)
    output = Outputs(hidden=torch.zeros(1, 1, 2, dtype=torch.float64), logits=logits[None])
    reading = Reading(np.array([0]), 1, (0,), 1.0)
    (((gradient,),),) = Probability().covectors(output, reading, [torch.Generator()]).numpy()
    np.testing.assert_allclose(gradient, np.exp(-46.0) * np.array([2.0, -1.0, -1.0]), rtol=1e-12)


def test_kinds_are_parsed_and_spelled():
    kinds = resolve_kinds(["jacobian(probes=8)", Logit(), "probability"])
    assert kinds == (Jacobian(probes=8), Logit(), Probability())
    assert [str(kind) for kind in kinds] == ["jacobian(probes=8)", "logit", "probability"]
    assert resolve_kinds("jacobian(exact=True)") == (Jacobian(exact=True),)


@pytest.mark.parametrize("name", list(KINDS))
def test_every_registered_kind_measures_with_its_defaults(llama, name):
    norms, errors, _ = measured(llama, name)
    assert norms.dtype == np.float64
    assert np.all(norms > 0)
    assert (errors is not None) == KINDS.parse(name).sampled


@pytest.mark.parametrize(
    ("kinds", "words"),
    [
        (["gradient"], "unknown influence kind 'gradient'; known: integrated_gradients, jacobian"),
        (["jacobian(probes=0)"], "probes must be a whole number >= 1 and <= 1,000,000, got 0"),
        (["fisher(probes=2)"], "influence kind fisher left posbias after 0.1.0: probability, logprob and logit"),
        (["jacobian(probe='sobol')"], "rademacher, ones, got 'sobol'"),
        (["jacobian(count=3)"], "parameters of jacobian: probes, probe, exact"),
        (["logit", "logit"], "'logit' is given 2 times"),
        ([], "no influence kind given; known"),
    ],
)
def test_wrong_kinds_are_refused(kinds, words):
    with pytest.raises(UsageError) as caught:
        resolve_kinds(kinds)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)
