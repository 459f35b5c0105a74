"""The local maps, walked with their signs, are back-propagation; squared, they are the squares of exact Jacobians."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch.autograd.functional import jacobian

from posbias.models.attention import rotary_forward
from posbias.models.families.base import Norm
from posbias.models.hugging_face import HuggingFaceModel
from posbias.theory.power_rollout import SUPPORTED, attention
from posbias.theory.power_rollout.attention import Paths, attention_blocks, attention_pull, recompute_attention
from posbias.theory.power_rollout.description import Description, describe_model
from posbias.theory.power_rollout.diagonal import pull_layers
from posbias.theory.power_rollout.isotropic import attention_energy, mlp_gain
from posbias.theory.power_rollout.local_maps import mlp_pull, norm_pull, rotary_pull
from posbias.theory.power_rollout.trace import Trace, trace_prompt

Build = Callable[..., HuggingFaceModel]
Draw = Callable[..., np.ndarray]
N_POSITIONS = 21
VALUES_ONLY, EVERY_PATH = Paths(key=False), Paths(key=True, query=True)


def traced(model: HuggingFaceModel, ids: np.ndarray) -> tuple[Description, Trace]:
    description = describe_model(model, n_positions=len(ids))
    return description, trace_prompt(model, description, torch.as_tensor(ids))


def normal(*shape: int, seed: int = 2) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("kind", SUPPORTED)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-8), (torch.float32, 1e-4)])
def test_signed_pull_is_back_propagation(
    kind: str, dtype: torch.dtype, tolerance: float, tiny_model: Build, random_ids: Draw
) -> None:
    model, ids = tiny_model(kind, dtype), random_ids()
    description, trace = traced(model, ids)
    probe = normal(model.width).to(dtype)

    start = torch.zeros_like(trace.layers[0].stream)
    start[-1] = norm_pull(description.final_norm, trace.final_stream, probe, 1)
    gradient = pull_layers(description, trace, start, paths=EVERY_PATH, power=1)

    embeddings = model.embed(torch.as_tensor(ids)[None]).detach().requires_grad_(True)
    (expected,) = torch.autograd.grad(model.last(embeddings).hidden[0] @ probe, embeddings)
    torch.testing.assert_close(gradient, expected[0], rtol=0, atol=tolerance * float(expected.abs().max()))


@pytest.mark.parametrize("left_out", ["key", "query"])
def test_a_signed_pull_without_a_path_is_not_back_propagation(
    left_out: str, tiny_model: Build, random_ids: Draw
) -> None:
    model, ids = tiny_model("llama"), random_ids()
    description, trace = traced(model, ids)
    start = torch.zeros_like(trace.layers[0].stream)
    start[-1] = normal(model.width)
    full = pull_layers(description, trace, start, paths=EVERY_PATH, power=1)
    partial = pull_layers(description, trace, start, paths=replace(EVERY_PATH, **{left_out: False}), power=1)
    assert float((full - partial).abs().max()) > 1e-2 * float(full.abs().max())


@pytest.mark.parametrize("kind", SUPPORTED)
def test_recomputed_attention_is_the_models_own(
    kind: str, tiny_model: Build, random_ids: Draw, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention, "BLOCK_QUERIES", 4)  # several blocks, the last one short
    model, ids = tiny_model(kind, attention="eager"), random_ids()
    description, trace = traced(model, ids)
    expected = model.network(torch.as_tensor(ids)[None], output_attentions=True).attentions
    assert len(expected) == len(description.layers)
    for layer, kept, truth in zip(description.layers, trace.layers, expected, strict=True):
        recomputed = torch.zeros_like(truth[0])
        for block in attention_blocks(layer, recompute_attention(layer, kept)):
            recomputed[:, block.queries, block.keys] = block.weights.flatten(0, 1)
        torch.testing.assert_close(recomputed, truth[0], rtol=0, atol=1e-6)  # eager softmaxes in float32
        torch.testing.assert_close(recomputed.sum(-1), torch.ones_like(recomputed[..., 0]), rtol=1e-12, atol=0)


def test_norm_pull_squares_the_norms_jacobian() -> None:
    values, gain, energy = normal(9), normal(9, seed=3), normal(9, seed=4).square()
    norm = Norm(kind="rms", gain=gain, bias=None, epsilon=0.1)
    exact = jacobian(lambda x: gain * x * (x.square().mean() + norm.epsilon).rsqrt(), values)
    torch.testing.assert_close(norm_pull(norm, values, energy, 2), exact.square().T @ energy)
    torch.testing.assert_close(norm_pull(norm, values, energy, 1), exact.T @ energy)


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
    exact = jacobian(lambda x: rotary_forward(x, cosine, sine), normal(3, 8, seed=6)).reshape(24, 24)
    for power in (1, 2):
        expected = (exact.pow(power).T @ energy.flatten()).reshape(3, 8)
        torch.testing.assert_close(rotary_pull(energy, cosine, sine, power), expected)


def test_mlp_pull_squares_the_gated_layers_jacobian(tiny_model: Build, random_ids: Draw) -> None:
    """The map into the hidden layer is squared exactly, cross term of gate and up included."""
    description, trace = traced(tiny_model("llama"), random_ids())
    layer, kept = replace(description.layers[1], mlp_norm=None), trace.layers[1]
    parts, read, energy = layer.mlp, kept.middle[7], normal(N_POSITIONS, 32).square()
    assert parts.gate is not None
    hidden = jacobian(
        lambda x: parts.activation(parts.gate @ x + parts.gate_bias) * (parts.up @ x + parts.up_bias), read
    )
    for power in (1, 2):
        expected = hidden.pow(power).T @ (parts.down.pow(power).T @ energy[7])
        torch.testing.assert_close(mlp_pull(layer, kept, energy, power)[7], expected)


@pytest.mark.parametrize("kind", ["gemma3_text", "qwen2", "smollm3"])
@pytest.mark.parametrize("index", [0, 1])
def test_attention_pull_is_its_dense_formula(kind: str, index: int, tiny_model: Build, random_ids: Draw) -> None:
    """Against section 5 written with full arrays [head, query, key, feature] and rotation matrices."""
    description, trace = traced(tiny_model(kind), random_ids())
    layer, kept = description.layers[index], trace.layers[index]
    energy = normal(N_POSITIONS, 32).square()
    for paths in (VALUES_ONLY, Paths(key=True)):
        expected = dense_attention_pull(layer, kept, energy, paths)
        torch.testing.assert_close(attention_pull(layer, kept, energy, 2, paths), expected, rtol=1e-10, atol=1e-12)


def dense_attention_pull(layer, trace, energy: torch.Tensor, paths: Paths) -> torch.Tensor:
    parts, state = layer.attention, recompute_attention(layer, trace)
    group = parts.heads // parts.key_heads
    if trace.attention_branch is not None:
        energy = norm_pull(layer.attention_post_norm, trace.attention_branch, energy, 2)
    received = (energy @ parts.output.square()).reshape(N_POSITIONS, parts.heads, parts.head_dim).transpose(0, 1)
    query = state.query.flatten(0, 1)
    key, value = (values.repeat_interleave(group, 0) for values in (state.key, state.value))
    logits = parts.scale * query @ key.transpose(1, 2)
    place = torch.arange(N_POSITIONS)
    behind = place[:, None] - place[None, :]
    logits = logits.masked_fill((behind < 0) | (behind >= (layer.reach or N_POSITIONS)), -torch.inf)
    weights = logits.softmax(-1)
    reached = torch.einsum("hij,hic->hjc", weights.square(), received)
    pulled = torch.einsum("hjc,hcb->jb", reached, by_head(parts.value, parts).square())
    if paths.key:
        moved = value[:, None, :, :] - (weights @ value)[:, :, None, :]
        scores = (parts.scale * weights).square() * torch.einsum("hic,hijc->hij", received, moved.square())
        keys = torch.einsum("hij,hic->hjc", scores, query.square())
        if trace.cosine is not None:
            unit = torch.eye(parts.head_dim, dtype=torch.float64)[:, None].expand(-1, N_POSITIONS, -1)
            rotation = rotary_forward(unit, trace.cosine, trace.sine)  # [feature in, position, feature out]
            keys = torch.einsum("ajc,hjc->hja", rotation.square(), keys)
        if parts.key_norm is not None:
            raw = state.raw_key.reshape(N_POSITIONS, parts.key_heads, -1).repeat_interleave(group, 1).transpose(0, 1)
            keys = norm_pull(parts.key_norm, raw, keys, 2)
        pulled = pulled + torch.einsum("hjc,hcb->jb", keys, by_head(parts.key, parts).square())
    return norm_pull(layer.attention_norm, trace.stream, pulled, 2)


def by_head(weight: torch.Tensor, parts) -> torch.Tensor:
    """A key or value map as one matrix per query head."""
    heads = weight.reshape(parts.key_heads, parts.head_dim, -1)
    return heads.repeat_interleave(parts.heads // parts.key_heads, 0)


def test_isotropic_mlp_gain_is_the_jacobians_norm(
    tiny_model: Build, random_ids: Draw, monkeypatch: pytest.MonkeyPatch
) -> None:
    from posbias.theory.power_rollout import isotropic

    monkeypatch.setattr(isotropic, "PROBES", 400)
    description, trace = traced(tiny_model("gemma3_text"), random_ids())
    layer, kept = description.layers[2], trace.layers[2]
    gain = mlp_gain(layer, kept, torch.Generator().manual_seed(0))
    for place in (0, 13):
        read = kept.middle[place][None]
        block = layer.block

        def branch(x: torch.Tensor, block=block) -> torch.Tensor:
            return block.mlp_post_norm(block.mlp(block.mlp_norm(x)))

        expected = jacobian(branch, read).square().sum() / 32
        assert float(gain[place]) == pytest.approx(float(expected), rel=0.15)  # 400 probes of 32 features


def test_isotropic_attention_is_the_frobenius_norm_of_every_path(tiny_model: Build, random_ids: Draw) -> None:
    """One query's energy reaches key j with sum_h A^2 ||W_O W_V diag(w)||^2 / (d sigma^2), built from full matrices."""
    description, trace = traced(tiny_model("qwen2"), random_ids())
    layer, kept, parts = description.layers[1], trace.layers[1], description.layers[1].attention
    energy = torch.zeros(N_POSITIONS, dtype=torch.float64)
    energy[-1] = 3.0
    (last, *_) = attention_blocks(layer, recompute_attention(layer, kept))
    weights = last.weights.flatten(0, 1)[:, -1]
    gain = layer.attention_norm.gain
    maps = parts.output.reshape(32, parts.heads, -1).transpose(0, 1) @ by_head(parts.value * gain, parts)
    size = kept.stream.square().mean(-1) + layer.attention_norm.epsilon
    expected = 3.0 * (weights.square() * maps.square().sum((1, 2))[:, None]).sum(0) / 32 / size
    torch.testing.assert_close(attention_energy(layer, kept, energy, VALUES_ONLY), expected)
    assert bool((attention_energy(layer, kept, energy, Paths(key=True)) >= expected).all())
