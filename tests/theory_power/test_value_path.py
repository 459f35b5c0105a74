"""The value path is the gradient with attention weights detached; shares are ratios of exact Jacobian norms."""

from collections.abc import Callable

import numpy as np
import pytest
import torch

from posbias.errors import UsageError
from posbias.models.hugging_face import HuggingFaceModel
from posbias.prompts.prompts import Prompts
from posbias.theory.power_rollout import signed_walks
from posbias.theory.power_rollout.rollout import trace_model
from posbias.theory.power_rollout.signed_walks import CONSTANT_ATTENTION
from theory_calls import value_path_share

Build = Callable[..., HuggingFaceModel]
Draw = Callable[..., np.ndarray]


def own_jacobian(model: HuggingFaceModel, ids: np.ndarray) -> torch.Tensor:
    """dh_last/dx, [state, position, width], by autograd through the model itself."""
    embeddings = model.embed(torch.as_tensor(ids)[None]).detach().requires_grad_(True)
    hidden = model.last(embeddings).hidden[0]
    rows = [torch.autograd.grad(value, embeddings, retain_graph=True)[0][0] for value in hidden]
    return torch.stack(rows)


@pytest.fixture
def constant_attention(monkeypatch: pytest.MonkeyPatch, keep_double: None) -> None:
    """Eager attention whose softmax passes no gradient."""
    softmax = torch.nn.functional.softmax

    def detached(*positional: object, **named: object) -> torch.Tensor:
        return softmax(*positional, **named).detach()

    monkeypatch.setattr(torch.nn.functional, "softmax", detached)


@pytest.mark.parametrize("name", ["llama", "gpt2", "gpt_neox", "gemma2", "gemma3_text", "bloom", "phi"])
@pytest.mark.usefixtures("constant_attention")
def test_the_value_path_is_the_gradient_at_constant_attention(name: str, tiny_model: Build, random_ids: Draw) -> None:
    model, ids = tiny_model(name, implementation="eager"), random_ids()
    expected = own_jacobian(model, ids)
    trace = trace_model(model, ids)
    found = trace.pull(torch.eye(len(trace.state), dtype=torch.float64), CONSTANT_ATTENTION)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-10 * float(expected.abs().max()))


def exact_norms(model: HuggingFaceModel, ids: np.ndarray) -> np.ndarray:
    """||J_j||_F, ||J_value_j||_F and ||(J - J_value)_j||_F, [position, quantity]."""
    whole = own_jacobian(model, ids)
    trace = trace_model(model, ids)
    value = trace.pull(torch.eye(len(trace.state), dtype=torch.float64), CONSTANT_ATTENTION)
    return torch.stack([part.square().sum((0, 2)).sqrt() for part in (whole, value, whole - value)], -1).numpy()


def test_shares_are_those_of_the_exact_jacobians_within_their_errors(
    tiny_model: Build, random_ids: Draw, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(signed_walks, "AT_ONCE", 200)
    model = tiny_model("qwen2")
    prompts = Prompts(np.stack([random_ids(seed) for seed in range(3)]))
    result = value_path_share(model, prompts, probes=200, seed=1)
    norms = np.sqrt(result.details["squares"].mean(1))
    share_error, total_error = result.details["share_error"], result.details["total_error"]
    shares, totals = result.arrays["score_path/per_prompt"], result.arrays["score_path/total"]
    for index, ids in enumerate(prompts.token_ids):
        exact = exact_norms(model, ids)
        np.testing.assert_allclose(norms[index], exact, rtol=0.2)
        share, total = exact[:, 2] / exact[:, 0], np.sqrt((exact[:, 2] ** 2).sum() / (exact[:, 0] ** 2).sum())
        assert np.all(np.abs(shares[index] - share) < 5 * share_error[index])
        assert abs(totals[index] - total) < 4 * total_error[index]
        assert total > 0.05
    # 200 probes of 32 channels: errors of a few percent, neither nothing nor everything.
    assert np.all((share_error > 1e-4) & (share_error < 0.2))
    low, mean, high = (result.arrays[f"score_path/{name}"] for name in ("low", "value", "high"))
    np.testing.assert_allclose(mean, shares.mean(0))
    assert np.all((low <= mean) & (mean <= high))
    total = result.found["score_path_share"]
    assert total.value == pytest.approx(totals.mean())
    assert total.low < total.value < total.high


def test_errors_shrink_with_the_root_of_the_probes(
    tiny_model: Build, random_ids: Draw, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(signed_walks, "AT_ONCE", 200)
    model, prompts = tiny_model("gpt_neox"), Prompts(random_ids()[None])
    few, many = (value_path_share(model, prompts, probes=probes).details["share_error"] for probes in (25, 400))
    assert float(np.median(few / many)) == pytest.approx(4, rel=0.35)


def test_a_score_has_one_exact_gradient(tiny_model: Build, random_ids: Draw) -> None:
    model, ids = tiny_model("llama"), random_ids()
    result = value_path_share(model, Prompts(ids[None]), target="logprob", seed=5)
    embeddings = model.embed(torch.as_tensor(ids)[None]).detach().requires_grad_(True)
    score = model.last(embeddings).logits[0].log_softmax(-1).max()
    (gradient,) = torch.autograd.grad(score, embeddings)
    np.testing.assert_allclose(
        np.sqrt(result.details["squares"][0, 0, :, 0]), gradient[0].norm(dim=-1).numpy(), rtol=1e-4
    )
    assert not result.details["share_error"].any()
    assert not result.details["total_error"].any()
    again = value_path_share(model, Prompts(ids[None]), target="logprob")
    np.testing.assert_array_equal(again.arrays["score_path/per_prompt"], result.arrays["score_path/per_prompt"])


def test_at_one_position_attention_is_constant(tiny_model: Build, random_ids: Draw) -> None:
    """A softmax over one key does not move: the score path is nothing but round-off."""
    result = value_path_share(tiny_model("llama"), Prompts(random_ids(0, 1)[None]), probes=2)
    assert result.arrays["score_path/total"][0] < 1e-12


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"probes": 1}, "probes must be a whole number >= 2, got 1"),
        ({"target": "loss"}, "unknown target 'loss' .* known: jacobian"),
    ],
)
def test_wrong_options_are_refused(
    options: dict[str, object], message: str, tiny_model: Build, random_ids: Draw
) -> None:
    with pytest.raises(UsageError, match=message):
        value_path_share(tiny_model("llama"), Prompts(random_ids()[None]), **options)
