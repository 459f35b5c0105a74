"""Reference transformers in the power rollout: signed walks are back-propagation, energies those of single paths."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from posbias import Architecture, RunError, UsageError, load_prompts
from posbias.models.reference.config import ReferenceConfig
from posbias.models.reference.network import ReferenceTransformer
from posbias.theory.power_rollout.local_maps import BACK_PROPAGATION, Walk
from posbias.theory.power_rollout.rollout import trace_model
from published_networks import copy_network, retrieval_network
from theory_calls import power_rollout

N = 7
GAUSSIAN = {"attention": "content", "values": "gaussian"}
CONFIGS = {
    "retrieval": retrieval_network(Architecture(3), width=8, labels=5),
    "retrieval-residual-rope": retrieval_network(Architecture(2, encoding="rope"), width=8, labels=5, residual=True),
    "retrieval-window-decay": retrieval_network(
        Architecture(2, mask="sliding_window(width=3)", encoding="decay(rate=0.8)"), width=8, labels=5
    ),
    "retrieval-sinusoidal": retrieval_network(
        Architecture(2, mask="prefix(length=4)", encoding="sinusoidal(width=8)"), width=8, labels=5, residual=True
    ),
    "copy": copy_network(Architecture(2), residual=True, mlp=True),
    "copy-without-residual": copy_network(Architecture(2), mlp=True),
    "pre-norm": ReferenceConfig(Architecture(2, 2), width=8, norm="pre", mlp=True, residual="added", **GAUSSIAN),
    "mixed heads": ReferenceConfig(
        Architecture(2, 4, encoding=[["rope", "none", "alibi", "rope"]] * 2),
        width=16,
        norm="pre",
        mlp=True,
        residual="mixed",
        **GAUSSIAN,
    ),
    "full-mask-joined-heads": ReferenceConfig(
        Architecture(2, 2, mask="full", mixing=0.3), width=8, output_map=False, **GAUSSIAN
    ),
}


def build(config: ReferenceConfig, seed: int = 3) -> ReferenceTransformer:
    config = replace(config, dtype="float64", seed=seed)
    items = None
    if config.vocabulary_size is None:
        items = torch.randn(20, config.width, generator=torch.Generator().manual_seed(7), dtype=torch.float64)
    model = ReferenceTransformer(config, items=items)
    generator = torch.Generator().manual_seed(5)
    for name, value in model.network.named_parameters():  # as after training: gains, shifts and biases of their own
        if name.endswith(("gain", "shift", "bias")):
            value.data += 0.3 * torch.randn(value.shape, generator=generator, dtype=torch.float64)
    return model


def token_ids(model: ReferenceTransformer, n_positions: int = N) -> np.ndarray:
    return np.random.default_rng(1).integers(0, model.vocabulary_size, n_positions)


def own_gradient(model: ReferenceTransformer, ids: np.ndarray, covector: torch.Tensor) -> torch.Tensor:
    embeddings = model.embed(torch.as_tensor(ids)[None]).detach().requires_grad_(True)
    (gradient,) = torch.autograd.grad(model.last(embeddings).hidden[0] @ covector, embeddings)
    return gradient[0]


@pytest.mark.parametrize("name", CONFIGS)
def test_signed_walk_is_back_propagation(name: str) -> None:
    """Two covectors in one batch."""
    model = build(CONFIGS[name])
    ids = token_ids(model)
    trace = trace_model(model, ids)
    expected_state = model.last(model.embed(torch.as_tensor(ids)[None])).hidden[0]
    torch.testing.assert_close(trace.state, expected_state, rtol=1e-12, atol=1e-12)
    covectors = torch.randn(2, model.width, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    for covector, gradient in zip(covectors, trace.pull(covectors, BACK_PROPAGATION), strict=True):
        expected = own_gradient(model, ids, covector)
        torch.testing.assert_close(gradient, expected, rtol=0, atol=1e-10 * float(expected.abs().max()))


@pytest.mark.parametrize("name", CONFIGS)
def test_values_alone_are_back_propagation_with_constant_attention(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = build(CONFIGS[name])
    ids, softmax = token_ids(model), torch.softmax
    covector = torch.randn(model.width, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    found = trace_model(model, ids).pull(covector, Walk(power=1, key=False))
    monkeypatch.setattr(torch, "softmax", lambda values, dim: softmax(values.detach(), dim=dim))
    expected = own_gradient(model, ids, covector)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-10 * float(expected.abs().max()))


def test_one_layer_of_values_has_the_norms_of_its_jacobian() -> None:
    """Without output map a layer is one matrix per pair, whose squares are exact."""
    config = replace(CONFIGS["retrieval"], architecture=Architecture(1), mlp=False)
    model = build(config)
    ids = token_ids(model)
    rows = [
        own_gradient_of_values(model, ids, covector).square().sum(-1)
        for covector in torch.eye(model.width, dtype=torch.float64)
    ]
    exact = torch.stack(rows).sum(0).sqrt()
    found = trace_model(model, ids).diagonal(Walk(key=False))
    torch.testing.assert_close(found / found.sum(), exact / exact.sum(), rtol=1e-10, atol=0)


def own_gradient_of_values(model: ReferenceTransformer, ids: np.ndarray, covector: torch.Tensor) -> torch.Tensor:
    return trace_model(model, ids).pull(covector, Walk(power=1, key=False))


@pytest.mark.parametrize("target", ["probability", "logprob"])
@pytest.mark.parametrize("name", ["retrieval-residual-rope", "copy"])
def test_targets_start_from_the_scores_own_gradient(name: str, target: str) -> None:
    """The readout's MLP included."""
    model = build(CONFIGS[name])
    ids = token_ids(model)
    trace = trace_model(model, ids, target=target)
    embeddings = model.embed(torch.as_tensor(ids)[None]).detach().requires_grad_(True)
    log_probability = model.last(embeddings).logits[0].log_softmax(-1).max()
    score = log_probability if target == "logprob" else log_probability.exp()
    (expected,) = torch.autograd.grad(score, embeddings)
    assert trace.score_gradient is not None
    found = trace.pull(trace.score_gradient, BACK_PROPAGATION)
    torch.testing.assert_close(found, expected[0], rtol=0, atol=1e-10 * float(expected.abs().max()))


@pytest.mark.parametrize("residual", [False, True])
def test_networks_at_birth_are_near_the_measured(residual: bool) -> None:
    """What is missing beside the measured profile is coherence: weights are shared between positions."""
    from posbias import measure

    model = build(retrieval_network(Architecture(4), width=32, residual=residual))
    prompts = load_prompts("synthetic", model, n_positions=16, count=8)
    measured = measure(model, prompts, kinds=["jacobian"]).profiles["jacobian"].influence

    def distance(one: np.ndarray, other: np.ndarray) -> float:
        return float(np.abs(np.cumsum(one - other)).sum())

    flat = distance(measured, np.full(16, 1 / 16))
    predicted = power_rollout(model, prompts).profile.influence
    assert distance(predicted, measured) < 0.75 * flat


def test_what_cannot_be_walked_is_said() -> None:
    model = build(CONFIGS["mixed heads"])
    carried = build(ReferenceConfig(Architecture(2, 2, mixing=0.4), width=8, attention="content"))
    with pytest.raises(UsageError, match="values drawn for every head"):
        trace_model(carried, token_ids(carried))
    without_items = ReferenceTransformer(retrieval_network(Architecture(1), width=8))
    with pytest.raises(UsageError, match="takes vectors"):
        trace_model(without_items, np.zeros(3, dtype=np.int64))
    model.network.blocks[0].value.data.fill_(float("nan"))
    with pytest.raises(RunError, match="not finite"):
        trace_model(model, token_ids(model))
