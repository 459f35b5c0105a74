"""Every kind of influence against its definition: central differences, exact Jacobians, expectations over probes."""

from collections.abc import Callable

import numpy as np
import pytest
import torch

from posbias import UsageError
from posbias.measurement.kinds import KINDS, Jacobian, Kind, Logit, LogProbability, Probability, resolve_kinds
from posbias.measurement.outputs import Influence, PassOptions, Reading
from posbias.measurement.prompt import influence_of_positions
from posbias.models.model import Model, Outputs

TOKENS = np.array([3, 1, 4, 1, 5, 9, 2, 6])
STEP = 1e-5
"""Central differences in float64: truncation of order step^2, round-off of order 1e-16 / step."""


def _influence(model: Model, kinds: list[Kind], *, seed: int = 0) -> dict[str, Influence]:
    return influence_of_positions(model, TOKENS[None], kinds=kinds, keys=[(seed, 0)], options=PassOptions())[0]


def _norms(model: Model, kind: Kind, *, seed: int = 0) -> np.ndarray:
    return _influence(model, [kind], seed=seed)[kind.name].norms


def _differences(model: Model, score: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> np.ndarray:
    """d score(hidden, logits)/dx [outputs, position, feature] by central differences."""
    start = model.embed(model.token_tensor([TOKENS.tolist()])).detach()
    shifts = STEP * torch.eye(start.numel(), dtype=start.dtype).view(-1, *start.shape[1:])

    def run(sign: int) -> torch.Tensor:
        with torch.no_grad():
            output = model.last(start + sign * shifts)
        return score(output.hidden, output.logits)

    slope = (run(1) - run(-1)) / (2 * STEP)
    return slope.T.reshape(-1, *start.shape[1:]).numpy()


def _predicted(model: Model) -> int:
    return int(model.last(model.embed(model.token_tensor([TOKENS.tolist()]))).logits[0].argmax())


@pytest.mark.parametrize(
    ("kind", "score"),
    [
        (Logit(), lambda logits, token: logits[:, token]),
        (LogProbability(), lambda logits, token: logits.log_softmax(dim=1)[:, token]),
        (Probability(), lambda logits, token: logits.softmax(dim=1)[:, token]),
    ],
    ids=lambda value: getattr(value, "name", ""),
)
def test_scores_agree_with_central_differences(gpt2_64: Model, kind: Kind, score: Callable) -> None:
    token = _predicted(gpt2_64)
    expected = np.linalg.norm(_differences(gpt2_64, lambda _hidden, logits: score(logits, token)[:, None])[0], axis=1)
    np.testing.assert_allclose(_norms(gpt2_64, kind), expected, rtol=1e-6)


def test_exact_jacobian_agrees_with_central_differences(gpt2_64: Model) -> None:
    jacobian = _differences(gpt2_64, lambda hidden, _logits: hidden)
    expected = np.sqrt((jacobian**2).sum(axis=(0, 2)))
    np.testing.assert_allclose(_norms(gpt2_64, Jacobian(exact=True)), expected, rtol=1e-6)


def test_probes_are_unbiased(gpt2_64: Model) -> None:
    exact = _norms(gpt2_64, Jacobian(exact=True))
    kind = Jacobian(probes=2000)
    result = _influence(gpt2_64, [kind])["jacobian"]
    _within_standard_errors(result.norms, exact, result.standard_errors)


def _within_standard_errors(estimate: np.ndarray, truth: np.ndarray, standard_errors: np.ndarray | None) -> None:
    """The errors are of the size claimed: none beyond 4 standard errors, and the errors themselves below 3 %."""
    assert standard_errors is not None
    assert np.all(standard_errors < 0.03 * truth)
    assert np.all(np.abs(estimate - truth) < 4 * standard_errors)


def test_standard_errors_cover_over_repetitions(gpt2_64: Model) -> None:
    exact = _norms(gpt2_64, Jacobian(exact=True))
    kind = Jacobian(probes=32)
    scores = []
    for seed in range(60):
        result = _influence(gpt2_64, [kind], seed=seed)["jacobian"]
        scores.append((result.norms - exact) / result.standard_errors)
    # Standard normal up to the sampling of 60 draws per position (positions are dependent): sd of the mean is 0.13.
    assert np.all(np.abs(np.mean(scores, axis=0)) < 0.6)
    assert 0.75 < np.std(scores) < 1.3


def test_all_ones_probe_is_blind_on_an_untrained_gpt2(untrained_gpt2: Model) -> None:
    """LayerNorm (weight 1, bias 0) removes the mean, so 1'h_last is constant: the published surrogate is round-off."""
    ones = _norms(untrained_gpt2, Jacobian(probe="ones"))
    random = _norms(untrained_gpt2, Jacobian(probes=1))
    assert np.all(ones <= 1e-5 * random)


def test_all_ones_probe_is_the_gradient_of_the_sum(gpt2_64: Model) -> None:
    expected = _differences(gpt2_64, lambda hidden, _logits: hidden.sum(dim=1, keepdim=True))[0]
    np.testing.assert_allclose(_norms(gpt2_64, Jacobian(probe="ones")), np.linalg.norm(expected, axis=1), rtol=1e-6)


def test_one_probe_has_an_infinite_standard_error(llama: Model) -> None:
    result = _influence(llama, [Jacobian(probes=1)])["jacobian"]
    assert result.standard_errors is not None
    assert np.all(np.isinf(result.standard_errors))


def test_a_sure_prediction_keeps_its_digits() -> None:
    """p_t rounds to 1, yet its gradient p_t (1 - p_t) is 1e-20, not 0."""
    logits = torch.tensor([[46.0, 0.0, 0.0]], dtype=torch.float64)
    output = Outputs(hidden=torch.zeros(1, 1, 2, dtype=torch.float64), logits=logits[None])
    reading = Reading(np.array([0]), 1, (0,), 1.0)
    (((gradient,),),) = Probability().covectors(output, reading, [torch.Generator()]).numpy()
    np.testing.assert_allclose(gradient, np.exp(-46.0) * np.array([2.0, -1.0, -1.0]), rtol=1e-12)


def test_kinds_are_parsed_and_spelled() -> None:
    kinds = resolve_kinds(["jacobian(probes=8)", Logit(), "probability"])
    assert kinds == (Jacobian(probes=8), Logit(), Probability())
    assert [str(kind) for kind in kinds] == ["jacobian(probes=8)", "logit", "probability"]
    assert resolve_kinds("jacobian(exact=True)") == (Jacobian(exact=True),)


@pytest.mark.parametrize("name", list(KINDS))
def test_every_registered_kind_measures_with_its_defaults(llama: Model, name: str) -> None:
    kind = KINDS.parse(name)
    result = _influence(llama, [kind])[name]
    assert result.norms.dtype == np.float64
    assert np.all(result.norms > 0)
    assert (result.standard_errors is not None) == kind.sampled


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
def test_wrong_kinds_are_refused(kinds: list[str], words: str) -> None:
    with pytest.raises(UsageError) as caught:
        resolve_kinds(kinds)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)
