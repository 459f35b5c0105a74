"""Each ingredient left out changes exactly what it says it changes."""

from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np
import pytest
import torch

from posbias import UsageError
from posbias.models.hugging_face import HuggingFaceModel
from posbias.prompts.prompts import Prompts
from posbias.theory.power_rollout import INGREDIENTS, WHOLE, PowerRollout, ingredients, power_rollout_prompt
from posbias.theory.power_rollout.attention import attention_blocks, attention_of, attention_pull, unprepare_keys
from posbias.theory.power_rollout.local_maps import mlp_pull, norm_pull
from posbias.theory.power_rollout.rollout import PromptTrace, ingredients_of, trace_model
from posbias.theory.power_rollout.trace import LayerDescription, LayerTrace
from posbias.theory.power_rollout.walk import THEORY, Walk

Build = Callable[..., HuggingFaceModel]
Draw = Callable[..., np.ndarray]
N_POSITIONS = 21


def traced(model: HuggingFaceModel, ids: np.ndarray) -> PromptTrace:
    trace = trace_model(model, ids)
    assert isinstance(trace, PromptTrace)
    return trace


def start_energy(trace: PromptTrace) -> torch.Tensor:
    return trace.pull_start(torch.ones_like(trace.state), THEORY)


def layers_down(trace: PromptTrace) -> Iterator[tuple[LayerDescription, LayerTrace]]:
    return zip(reversed(trace.description.layers), reversed(trace.layers), strict=True)


def normalised(energy: torch.Tensor) -> np.ndarray:
    roots = energy.sum(-1).sqrt().numpy()
    return np.asarray(roots / roots.sum())


@pytest.mark.parametrize("name", ["llama", "gpt_neox", "opt", "bloom", "gemma3_text"])
@pytest.mark.parametrize("target", ["jacobian", "probability"])
def test_every_ingredient_matters(name: str, target: str, tiny_model: Build, random_ids: Draw) -> None:
    profiles = ingredients_of(trace_model(tiny_model(name), random_ids(), target=target))
    assert list(profiles) == [WHOLE, *INGREDIENTS]
    for profile in profiles.values():
        assert profile.min() > 0
        assert profile.sum() == pytest.approx(1)
    whole = profiles.pop(WHOLE)
    for without in profiles.values():
        assert np.abs(without - whole).max() > 1e-4


def test_whole_and_key_path_are_the_power_rollouts_own(tiny_model: Build, random_ids: Draw) -> None:
    model, ids = tiny_model("glm"), random_ids()
    profiles = ingredients_of(trace_model(model, ids), ["key_path"])
    assert list(profiles) == [WHOLE, "key_path"]
    np.testing.assert_array_equal(profiles[WHOLE], power_rollout_prompt(model, ids))
    expected = power_rollout_prompt(model, ids, PowerRollout(key_path=False))
    np.testing.assert_array_equal(profiles["key_path"], expected)


def test_without_residual_every_path_takes_every_branch(tiny_model: Build, random_ids: Draw) -> None:
    trace = traced(tiny_model("qwen3"), random_ids())
    energy = start_energy(trace)
    for layer, kept in layers_down(trace):
        energy = attention_pull(layer, kept, mlp_pull(layer, kept, energy, THEORY), THEORY)
    found = ingredients_of(trace, ["residual"])["residual"]
    np.testing.assert_allclose(found, normalised(energy), rtol=1e-9)


def test_without_mlp_only_attention_and_the_stream_are_left(tiny_model: Build, random_ids: Draw) -> None:
    trace = traced(tiny_model("gpt_neox"), random_ids())
    energy = start_energy(trace)
    for layer, kept in layers_down(trace):
        energy = energy + attention_pull(layer, kept, energy, THEORY)
    np.testing.assert_allclose(ingredients_of(trace, ["mlp"])["mlp"], normalised(energy), rtol=1e-9)


def test_even_norms_are_the_models_own_where_positions_agree(tiny_model: Build) -> None:
    """The same token everywhere and no learned position: attention averages equal values, all positions are equal."""
    ids = np.full(9, 5)
    profiles = ingredients_of(trace_model(tiny_model("llama"), ids), ["norm_position"])
    np.testing.assert_allclose(profiles["norm_position"], profiles[WHOLE], rtol=1e-9)


@pytest.mark.parametrize("name", ["llama-biases", "gemma3_text", "mpt"])
def test_even_heads_is_the_theory_of_a_model_whose_heads_have_the_same_gain(
    name: str, tiny_model: Build, random_ids: Draw
) -> None:
    trace = traced(tiny_model(name), random_ids())
    layer, kept = trace.description.layers[1], trace.layers[1]
    parts = layer.parts
    group = parts.heads // parts.key_heads

    def gains(output: torch.Tensor) -> torch.Tensor:
        post, pre = layer.attention_post_norm, layer.attention_norm
        left = output * (1 if post is None else post.gain)[:, None] if post is not None else output
        right = parts.value if pre is None else parts.value * pre.gain
        left = left.square().sum(0).reshape(parts.heads, -1)
        right = right.square().sum(1).reshape(parts.key_heads, -1).repeat_interleave(group, 0)
        return (left * right).sum(-1)

    before = gains(parts.output)
    scale = (before.mean() / before).sqrt().repeat_interleave(parts.head_dim)
    rescaled = replace(layer, parts=replace(parts, output=parts.output * scale))
    torch.testing.assert_close(gains(parts.output * scale), before.mean().expand(parts.heads))
    energy = torch.rand(N_POSITIONS, 32, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    expected = attention_pull(rescaled, kept, energy, THEORY)
    found = attention_pull(layer, kept, energy, replace(THEORY, even_heads=True))
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=0)  # gains are summed in float32


@pytest.mark.parametrize("name", ["qwen2", "gemma2", "gpt2"])
def test_without_squares_amplitudes_add_over_positions_heads_and_paths(
    name: str, tiny_model: Build, random_ids: Draw
) -> None:
    """Full arrays: sqrt(energy) at a channel is the sum over queries, heads, values and keys of each one's own."""
    trace = traced(tiny_model(name), random_ids())
    layer, kept = trace.description.layers[1], trace.layers[1]
    parts, attention = layer.parts, attention_of(layer, kept)
    state = attention.state
    energy = torch.rand(N_POSITIONS, 32, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    (block,) = attention_blocks(layer, state)
    slope = 1.0
    if parts.softcap is not None:
        logits = parts.scale * torch.einsum("kgic,kjc->kgij", state.query, state.key)
        slope = 1 - (logits / parts.softcap).tanh().square()
    received = norm_pull(layer.attention_post_norm, kept.attention_branch, energy, 2) @ parts.output.square()
    received = received.reshape(N_POSITIONS, parts.key_heads, -1, parts.head_dim).permute(1, 2, 0, 3)
    moved = state.value[:, None, None] - torch.einsum("kgij,kjc->kgic", block.weights, state.value)[:, :, :, None]
    score = torch.einsum("kgic,kgijc->kgij", received, moved.square()).sqrt() * block.weights * slope * parts.scale
    values = torch.einsum("kgij,kgic->kjc", block.weights, received.sqrt()).square()
    keys = torch.einsum("kgij,kgic->kjc", score, state.query.abs()).square()
    keys = unprepare_keys(keys, attention, parts, 2)
    by_head = [
        (reached[head] @ weight.square().reshape(parts.key_heads, parts.head_dim, 32)[head]).sqrt()
        for reached, weight in ((values, parts.value), (keys, parts.key))
        for head in range(parts.key_heads)
    ]
    expected = norm_pull(layer.attention_norm, kept.stream, torch.stack(by_head).sum(0).square(), 2)
    found = attention_pull(layer, kept, energy, Walk(amplitudes=True))
    torch.testing.assert_close(found, expected, rtol=1e-8, atol=1e-12)


def test_without_squares_branches_add_amplitudes_too() -> None:
    one, other = torch.tensor([[4.0, 9.0]]), torch.tensor([[16.0, 1.0]])
    torch.testing.assert_close(Walk(amplitudes=True).meet(one, other), torch.tensor([[36.0, 16.0]]))
    torch.testing.assert_close(Walk().meet(one, other), one + other)
    torch.testing.assert_close(Walk(residual=False).meet(one, other), other)
    torch.testing.assert_close(Walk(residual=False).meet(one), one)  # no branch to take: the stream passes


def test_a_set_of_prompts_is_each_of_its_prompts(tiny_model: Build, random_ids: Draw) -> None:
    model = tiny_model("phi")
    prompts = Prompts(np.stack([random_ids(seed) for seed in range(2)]))
    table = ingredients(model, prompts, names=["mlp", "squares"], target="logprob")
    assert list(table) == [WHOLE, "mlp", "squares"]
    own = [ingredients_of(trace_model(model, ids, target="logprob"), ["mlp", "squares"]) for ids in prompts.token_ids]
    for name, rows in table.items():
        np.testing.assert_array_equal(rows, [profiles[name] for profiles in own])


def test_a_single_position_has_all_influence(tiny_model: Build, random_ids: Draw) -> None:
    for profile in ingredients_of(trace_model(tiny_model("gemma3_text"), random_ids(0, 1))).values():
        assert profile.tolist() == [1.0]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"names": ["mlp", "norm"]}, "unknown ingredient 'norm' .* known: residual, mlp"),
        ({"target": "loss"}, "unknown target 'loss' .* known: jacobian"),
    ],
)
def test_wrong_options_are_refused(
    options: dict[str, object], message: str, tiny_model: Build, random_ids: Draw
) -> None:
    with pytest.raises(UsageError, match=message):
        ingredients(tiny_model("llama"), Prompts(random_ids()[None]), **options)


def test_no_residual_in_parallel_blocks_leaves_the_sum_of_both_branches(tiny_model: Build, random_ids: Draw) -> None:
    trace = traced(tiny_model("phi"), random_ids())
    energy = start_energy(trace)
    for layer, kept in layers_down(trace):
        assert layer.parallel
        energy = mlp_pull(layer, kept, energy, THEORY) + attention_pull(layer, kept, energy, THEORY)
    found = trace.diagonal(Walk(residual=False)).numpy()
    np.testing.assert_allclose(found / found.sum(), normalised(energy), rtol=1e-9)
