"""The local maps, walked with their signs, are back-propagation; squared, they are the squares of exact Jacobians."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from torch.autograd.functional import jacobian

from posbias.models.hugging_face import HuggingFaceModel
from posbias.models.layout import Norm, turned_by
from posbias.theory.power_rollout.local_maps import (
    BACK_PROPAGATION,
    THEORY,
    LayerDescription,
    LayerTrace,
    Walk,
    affine,
    attention_of,
    attention_pull,
    mlp_pull,
    norm_forward,
    norm_pull,
    rotary_pull,
)
from posbias.theory.power_rollout.rollout import trace_model
from tiny_families import CONFIGS

Build = Callable[..., HuggingFaceModel]
Draw = Callable[..., np.ndarray]
N_POSITIONS = 21
VALUES_ONLY = Walk(key=False)


def normal(*shape: int, seed: int = 2) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def own_gradient(model: HuggingFaceModel, ids: np.ndarray, covector: torch.Tensor) -> torch.Tensor:
    """By autograd, through the model itself."""
    embeddings = model.embed(torch.as_tensor(ids)[None]).detach().requires_grad_(True)
    (gradient,) = torch.autograd.grad(model.last(embeddings).hidden[0] @ covector, embeddings)
    return gradient[0]


@pytest.mark.parametrize("name", sorted(CONFIGS))
@pytest.mark.usefixtures("keep_double")
def test_signed_pull_is_back_propagation(name: str, tiny_model: Build, random_ids: Draw) -> None:
    """Two covectors in one batch."""
    model, ids = tiny_model(name), random_ids()
    trace = trace_model(model, ids)
    covectors = normal(2, len(trace.state))
    for covector, gradient in zip(covectors, trace.pull(covectors, BACK_PROPAGATION), strict=True):
        expected = own_gradient(model, ids, covector)
        torch.testing.assert_close(gradient, expected, rtol=0, atol=1e-10 * float(expected.abs().max()))


@pytest.mark.parametrize("kind", ["rms", "layer"])
@pytest.mark.parametrize("rows", [(), (3, 2)])
def test_norm_pull_squares_the_norms_jacobian(kind: str, rows: tuple[int, ...]) -> None:
    """Exactly, element by element, whatever the gain and bias; each row of a batch by its own values."""
    norm = Norm(kind=kind, gain=normal(9), bias=normal(9, seed=3), epsilon=0.1)
    values, energy = normal(*rows, 9, seed=4), normal(*rows, 9, seed=5).square()
    for power in (1, 2):
        pulled = norm_pull(norm, values, energy, power)
        for row in np.ndindex(rows):
            exact = jacobian(lambda x: norm_forward(norm, x), values[row])
            torch.testing.assert_close(pulled[row], exact.pow(power).T @ energy[row])


def test_norm_pull_never_goes_negative_when_one_feature_carries_the_norm() -> None:
    values = torch.full((1, 64), 1e-6)
    values[0, 0] = 1e4
    norm = Norm(kind="rms", gain=torch.ones(64), bias=None, epsilon=1e-6)
    assert float(norm_pull(norm, values, torch.eye(64)[:1], 2).min()) >= 0


@pytest.mark.parametrize("rotary", [4, 8])
def test_rotary_pull_squares_the_rotation(rotary: int) -> None:
    angle = normal(3, rotary // 2).repeat(1, 2)
    cosine, sine = angle.cos(), angle.sin()
    energy = normal(3, 8, seed=5).square()
    pairs = rotary // 2
    turned = partial(turned_by, cosine=cosine[:, :pairs], sine=sine[:, :pairs])
    exact = jacobian(turned, normal(3, 8, seed=6)).reshape(24, 24)
    for power in (1, 2):
        expected = (exact.pow(power).T @ energy.flatten()).reshape(3, 8)
        torch.testing.assert_close(rotary_pull(energy, cosine, sine, power), expected)


@pytest.mark.parametrize("name", ["llama-biases", "phi3", "gpt2", "opt", "falcon-new", "gpt_neox"])
def test_mlp_pull_squares_the_hidden_layers_jacobian(name: str, tiny_model: Build, random_ids: Draw) -> None:
    """The map into the hidden layer is squared exactly: cross term of gate and up, any activation, plain too."""
    trace = trace_model(tiny_model(name), random_ids())
    layer, kept = replace(trace.description.layers[1], mlp_norm=None), trace.layers[1]
    parts, read, energy = layer.mlp, kept.middle[7], normal(N_POSITIONS, 32).square()

    def hidden_layer(x: torch.Tensor) -> torch.Tensor:
        up = torch.nn.functional.linear(x, *parts.up)
        if parts.gate is None:
            return parts.activation(up)
        return parts.activation(torch.nn.functional.linear(x, *parts.gate)) * up

    hidden = jacobian(hidden_layer, read)
    for walk in (BACK_PROPAGATION, THEORY):
        expected = hidden.pow(walk.power).T @ (parts.down.weight.pow(walk.power).T @ energy[7])
        torch.testing.assert_close(mlp_pull(layer, kept, energy, walk)[7], expected)


@pytest.mark.parametrize(
    "name",
    ["gemma3_text", "gemma2", "qwen2", "smollm3", "phi-norms", "mpt", "bloom", "falcon-new"],
)
@pytest.mark.parametrize("index", [0, 1])
def test_attention_pull_is_its_dense_formula(name: str, index: int, tiny_model: Build, random_ids: Draw) -> None:
    """Against section 5 written with full arrays [head, query, key, feature] and rotation matrices."""
    trace = trace_model(tiny_model(name), random_ids())
    layer, kept = trace.description.layers[index], trace.layers[index]
    energy = normal(N_POSITIONS, 32).square()
    for walk in (VALUES_ONLY, THEORY):
        expected = dense_attention_pull(layer, kept, energy, walk)
        torch.testing.assert_close(attention_pull(layer, kept, energy, walk), expected, rtol=1e-9, atol=1e-12)


def dense_attention_pull(layer: LayerDescription, trace: LayerTrace, energy: torch.Tensor, walk: Walk) -> torch.Tensor:
    parts, attention = layer.parts, attention_of(layer, trace)
    state = attention.state
    group = parts.heads // parts.key_heads
    if trace.attention_branch is not None:
        energy = norm_pull(layer.attention_post_norm, trace.attention_branch, energy, 2)
    received = (energy @ parts.output.weight.square()).reshape(N_POSITIONS, parts.heads, parts.head_dim).transpose(0, 1)
    query = state.query.flatten(0, 1)
    key, value = (values.repeat_interleave(group, 0) for values in (state.key, state.value))
    logits = (parts.scale * query @ key.transpose(1, 2)).requires_grad_(True)
    capped = logits if parts.softcap is None else parts.softcap * torch.tanh(logits / parts.softcap)
    (slope,) = torch.autograd.grad(capped.sum(), logits)
    index = torch.arange(N_POSITIONS)
    outside = (index > index[:, None]) | (index < state.first[:, None])
    given = capped.detach() + (0 if state.added is None else state.added) if state.logits is None else state.logits
    weights = given.masked_fill(outside, -torch.inf).softmax(-1)
    reached = torch.einsum("hij,hic->hjc", weights.square(), received)
    pulled = torch.einsum("hjc,hcb->jb", reached, by_head(parts.value.weight, parts).square())
    if walk.key:
        moved = value[:, None, :, :] - (weights @ value)[:, :, None, :]
        scores = (parts.scale * slope * weights).square() * torch.einsum("hic,hijc->hij", received, moved.square())
        keys = torch.einsum("hij,hic->hjc", scores, query.square())
        if attention.cosine is not None:
            unit = torch.eye(parts.head_dim, dtype=torch.float64)[:, None].expand(-1, N_POSITIONS, -1)
            pairs = attention.cosine.shape[-1] // 2  # of [feature in, position, feature out]
            rotation = turned_by(unit, attention.cosine[:, :pairs], attention.sine[:, :pairs])
            keys = torch.einsum("ajc,hjc->hja", rotation.square(), keys)
        raw = (
            affine(attention.read, parts.key)
            .reshape(N_POSITIONS, parts.key_heads, -1)
            .repeat_interleave(group, 1)
            .transpose(0, 1)
        )
        keys = norm_pull(parts.key_norm, raw, keys, 2)
        pulled = pulled + torch.einsum("hjc,hcb->jb", keys, by_head(parts.key.weight, parts).square())
    return norm_pull(layer.attention_norm, trace.stream, pulled, 2)


def by_head(weight: torch.Tensor, parts) -> torch.Tensor:
    """A key or value map as one matrix per query head."""
    heads = weight.reshape(parts.key_heads, parts.head_dim, -1)
    return heads.repeat_interleave(parts.heads // parts.key_heads, 0)
