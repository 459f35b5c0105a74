"""The shared direction: exact where gradients have nothing else, the diagonal form where it is left out."""

from collections.abc import Callable

import numpy as np
import pytest
import torch

import posbias as pb
from posbias.architecture import Architecture
from posbias.errors import UsageError
from posbias.models.hugging_face import HuggingFaceModel
from posbias.models.reference.config import ReferenceConfig
from posbias.models.reference.network import ReferenceTransformer
from posbias.prompts.loading import load_prompts
from posbias.prompts.prompts import Prompts
from posbias.theory.power_rollout import SharedDirection
from posbias.theory.power_rollout.rollout import trace_model
from posbias.theory.power_rollout.signed_walks import along_shared, shared_direction_of
from posbias.theory.power_rollout.walk import BACK_PROPAGATION, THEORY
from theory_calls import power_rollout, shared_direction_rollout

Build = Callable[..., HuggingFaceModel]
Draw = Callable[..., np.ndarray]
EVERYTHING = 10**6
REFERENCE = ReferenceConfig(
    Architecture(2, 2), width=8, vocabulary_size=10, norm="pre", mlp=True, residual="added", attention="content"
)


def normal(*shape: int, seed: int = 2) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("name", ["llama", "gemma3_text", "opt-350m", "bloom", "phi", "mixtral"])
def test_with_every_direction_it_is_back_propagation(name: str, tiny_model: Build, random_ids: Draw) -> None:
    trace = trace_model(tiny_model(name), random_ids())
    vectors = normal(2, len(trace.state))
    found = shared_direction_of(trace, vectors, directions=EVERYTHING)
    exact = trace.pull(vectors, BACK_PROPAGATION).square().sum(-1).mean(0).sqrt().numpy()
    np.testing.assert_allclose(found.profile, exact / exact.sum(), rtol=1e-8)
    np.testing.assert_allclose(found.own + found.shared, 1)


def test_reference_models_with_every_direction() -> None:
    model = ReferenceTransformer(REFERENCE)
    trace = trace_model(model, load_prompts("synthetic", model, n_positions=7, count=1).token_ids[0])
    vectors = normal(2, 8).to(trace.state)
    exact = trace.pull(vectors, BACK_PROPAGATION).double().square().sum(-1).mean(0).sqrt().numpy()
    found = shared_direction_of(trace, vectors, directions=EVERYTHING)
    np.testing.assert_allclose(found.profile, exact / exact.sum(), rtol=1e-4)


@pytest.mark.parametrize("name", ["llama", "bloom", "gemma3_text", "gptj"])
def test_without_a_direction_the_last_position_alone_keeps_its_gradient(
    name: str, tiny_model: Build, random_ids: Draw
) -> None:
    trace = trace_model(tiny_model(name), random_ids(), target="logprob")
    assert trace.score_gradient is not None
    vectors = trace.score_gradient[None]
    kept, energy = trace.pull_start(vectors, BACK_PROPAGATION), torch.zeros(21, 32, dtype=torch.float64)
    for block in (2, 1, 0):
        pulled, energy = trace.pull_block(block, kept, BACK_PROPAGATION), trace.pull_block(block, energy, THEORY)
        energy *= pulled[0, -1].square().sum() / trace.pull_block(block, kept[0].square(), THEORY)[-1].sum()
        energy[:-1] += pulled[0, :-1].square()
        kept = torch.zeros_like(pulled)
        kept[:, -1] = pulled[:, -1]
    total = trace.pull_end(kept, BACK_PROPAGATION)[0].square() + trace.pull_end(energy, THEORY)
    expected = total.sum(-1).sqrt().numpy()
    found = shared_direction_of(trace, vectors, directions=0)
    np.testing.assert_allclose(found.profile, expected / expected.sum(), rtol=1e-8)
    assert not found.shared.any()


def test_the_last_positions_own_share_is_exact(tiny_model: Build, random_ids: Draw) -> None:
    """It alone reads itself, whatever becomes of the others: its gradient is that of back-propagation."""
    trace = trace_model(tiny_model("llama"), random_ids())
    vectors = normal(2, len(trace.state))
    exact = trace.pull(vectors, BACK_PROPAGATION).square().sum(-1).mean(0)
    found = shared_direction_of(trace, vectors)
    everything = shared_direction_of(trace, vectors, directions=EVERYTHING)
    np.testing.assert_allclose(everything.own[0], exact[-1] / exact.sum(), rtol=1e-8)
    assert found.own[0] == pytest.approx(found.profile[-1] ** 2 / np.square(found.profile).sum(), rel=1e-8)


def test_exact_where_all_positions_share_their_direction() -> None:
    """Every map a multiple of the identity: gradients have rank one, and the rollout is the truth."""
    architecture = Architecture(3, mixing=0.5)
    model = ReferenceTransformer(ReferenceConfig(architecture, width=32, vocabulary_size=10, dtype="float64"))
    prompts = load_prompts("synthetic", model, n_positions=9, count=1)
    truth = pb.predict(architecture, 9, theory="rollout").profile.influence
    found = shared_direction_rollout(model, prompts)
    np.testing.assert_allclose(found.per_prompt[0], truth, rtol=1e-5)
    np.testing.assert_allclose(found.details["own"] + found.details["shared"], 1, rtol=1e-6)
    assert np.abs(power_rollout(model, prompts).per_prompt[0] - truth).max() > 0.01


@pytest.mark.parametrize("shape", [(3, 6, 9), (2, 12, 5)])
def test_shared_directions_are_those_of_rows_of_root_length(shape: tuple[int, int, int]) -> None:
    """By the definition: the best subspace for the rows g / |g|^(1/2), the last row left out and left alone."""
    gradients = normal(*shape) * torch.arange(1, shape[1] + 1)[:, None]
    gradients[:, 1] = 0
    for count in (0, 1, 3, 20):
        kept = along_shared(gradients, count)
        torch.testing.assert_close(kept[:, -1], gradients[:, -1])
        for draw, found in zip(gradients, kept, strict=True):
            rows = torch.stack([row / row.norm() ** 0.5 if row.any() else row for row in draw[:-1]])
            basis = torch.linalg.svd(rows, full_matrices=False).Vh[:count]
            torch.testing.assert_close(found[:-1], draw[:-1] @ basis.T @ basis)


@pytest.mark.parametrize("target", ["jacobian", "probability"])
def test_a_set_of_prompts(target: str, tiny_model: Build, random_ids: Draw) -> None:
    model, prompts = tiny_model("qwen3"), Prompts(np.stack([random_ids(seed) for seed in range(3)]))
    found = shared_direction_rollout(model, prompts, target=target, seed=4)
    assert found.per_prompt.shape == (3, 21)
    own, shared = found.details["own"], found.details["shared"]
    assert shared.shape == (3, 3)
    assert np.all((own > 0) & (shared > 0) & (own + shared < 1))
    np.testing.assert_allclose(found.per_prompt.sum(1), 1)
    np.testing.assert_allclose(found.profile.influence, found.per_prompt.mean(0))
    again = shared_direction_rollout(model, prompts, target=target, seed=4)
    np.testing.assert_array_equal(found.per_prompt, again.per_prompt)
    other = shared_direction_rollout(model, prompts, target=target, seed=5)
    assert np.array_equal(found.per_prompt, other.per_prompt) == (target == "probability")


def test_it_is_a_theory(tiny_model: Build, random_ids: Draw) -> None:
    model, prompts = tiny_model("llama"), Prompts(random_ids()[None])
    expected = shared_direction_rollout(model, prompts, directions=2).per_prompt[0]
    for theory in ("shared_direction(directions=2)", SharedDirection(directions=2)):
        predicted = pb.predict(model, 21, theory=theory, prompts=prompts)
        np.testing.assert_array_equal(predicted.profile.influence, expected)
        assert predicted.spelled == "shared_direction(directions=2)"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"probes": 1}, "probes must be a whole number >= 2, got 1"),
        ({"directions": -1}, "directions must be a whole number >= 0, got -1"),
        ({"directions": True}, "directions must be a whole number >= 0, got True"),
        ({"seed": -1}, "seed must be a whole number >= 0, got -1"),
        ({"target": "entropy"}, "unknown target 'entropy'"),
    ],
)
def test_wrong_requests_are_refused(
    options: dict[str, object], message: str, tiny_model: Build, random_ids: Draw
) -> None:
    with pytest.raises(UsageError, match=message):
        shared_direction_rollout(tiny_model("llama"), Prompts(random_ids()[None]), **options)  # type: ignore[arg-type]
