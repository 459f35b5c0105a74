"""Random signs on path terms: on average, the squared norms of all paths, each through its exact Jacobians."""

import itertools
from collections.abc import Callable
from functools import partial

import numpy as np
import pytest
import torch
from torch.autograd.functional import jacobian
from transformers import LlamaConfig, LlamaForCausalLM

from posbias.errors import RunError, UsageError
from posbias.models.attention import affine, norm_forward, rotary_forward
from posbias.models.hugging_face import HuggingFaceModel
from posbias.prompts.prompts import Prompts
from posbias.theory.power_rollout.rollout import PromptTrace, trace_model
from posbias.theory.power_rollout.trace import LayerDescription, LayerTrace
from posbias.theory.power_rollout.walk import BACK_PROPAGATION, Walk, draw_signs
from theory_calls import sign_randomised_rollout

WIDTH = 8


def small_llama(depth: int, heads: int) -> HuggingFaceModel:
    """Heads that share one key head, weights large enough that every path counts."""
    sizes = {"hidden_size": WIDTH, "intermediate_size": 12, "num_hidden_layers": depth, "vocab_size": 20}
    network = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=heads, num_key_value_heads=1)).double()
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.copy_(0.6 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
    return HuggingFaceModel(network)


def prepared(depth: int, n_positions: int, *, heads: int = 2) -> tuple[PromptTrace, torch.Tensor]:
    trace = trace_model(small_llama(depth, heads), np.arange(3, 3 + n_positions))
    assert isinstance(trace, PromptTrace)
    return trace, torch.randn(WIDTH, generator=torch.Generator().manual_seed(4), dtype=torch.float64)


def energies(trace: PromptTrace, covector: torch.Tensor, *, draws: int, signs: object) -> torch.Tensor:
    walk = Walk(power=1, query=True, signs=signs)
    return trace.pull(covector.expand(draws, -1), walk).square().sum(-1)


def head_outputs(layer: LayerDescription, kept: LayerTrace, *inputs: torch.Tensor) -> torch.Tensor:
    """What each head adds to the stream, [head, query, feature], from what its queries, keys and values read."""
    parts = layer.attention.parts
    weights, biases = (parts.query, parts.key, parts.value), (parts.query_bias, parts.key_bias, parts.value_bias)
    query, key, value = (
        affine(norm_forward(layer.attention_norm, read), weight, bias).reshape(len(read), -1, parts.head_dim)
        for read, weight, bias in zip(inputs, weights, biases, strict=True)
    )
    query, key = (rotary_forward(x.transpose(0, 1), kept.cosine, kept.sine) for x in (query, key))
    logits = parts.scale * query @ key.transpose(1, 2)
    attention = logits.masked_fill(torch.ones_like(logits).triu(1).bool(), -torch.inf).softmax(-1)
    output = parts.output.reshape(WIDTH, parts.heads, parts.head_dim).permute(1, 2, 0)
    return attention @ value.transpose(0, 1) @ output


def sum_over_paths(trace: PromptTrace, covector: torch.Tensor) -> torch.Tensor:
    """The sum over paths of squared norms, by covariances: C_j <- C_j + sum over terms T from i to j of T' C_i T."""
    stream = trace.pull_start(covector, BACK_PROPAGATION)
    covariance = torch.einsum("ia,ib->iab", stream, stream)
    for layer, kept in zip(reversed(trace.description.layers), reversed(trace.layers), strict=True):
        module = layer.block
        mlp = [jacobian(lambda x, module=module: module.mlp(module.mlp_norm(x)), row) for row in kept.middle]
        covariance = covariance + torch.stack([m.T @ c @ m for m, c in zip(mlp, covariance, strict=True)])
        query, key, value = jacobian(partial(head_outputs, layer, kept), (kept.stream,) * 3)
        branches = sum(torch.einsum("hiajb,iac,hicjd->jbd", part, covariance, part) for part in (query, key, value))
        covariance = covariance + branches
    return torch.einsum("jaa->j", covariance)


def test_the_mean_over_all_signs_is_the_sum_over_paths() -> None:
    """One layer, one head, two positions: each of the 2^10 sets of signs once, no randomness left."""
    trace, covector = prepared(1, 2, heads=1)
    asked: list[tuple[int, ...]] = []

    def count(shape: tuple[int, ...], like: torch.Tensor) -> torch.Tensor:
        asked.append(shape[1:])
        return torch.ones(shape, dtype=like.dtype)

    energies(trace, covector, draws=1, signs=count)
    # MLP of 2 positions; 2 queries by 2 keys, for values and for keys; 2 queries.
    assert asked == [(2, 1), (1, 2, 2), (1, 2, 2), (1, 2, 1)]
    free = 2 + 3 + 3 + 2  # the second key is hidden from the first query: its signs multiply zero
    table = torch.tensor(list(itertools.product([1.0, -1.0], repeat=free)), dtype=torch.float64)
    columns = iter(table.T)

    def scripted(shape: tuple[int, ...], like: torch.Tensor) -> torch.Tensor:
        signs = torch.zeros(shape, dtype=like.dtype)
        for query, key in itertools.product(range(shape[-2]), range(shape[-1])):
            if key <= query:
                signs[..., query, key] = next(columns).reshape(-1, *[1] * (len(shape) - 3))
        return signs

    mean = energies(trace, covector, draws=len(table), signs=scripted).mean(0)
    assert next(columns, None) is None
    torch.testing.assert_close(mean, sum_over_paths(trace, covector))


def test_many_draws_over_two_layers_approach_the_sum_over_paths() -> None:
    trace, covector = prepared(2, 3)
    draws = 20_000
    drawn = energies(
        trace, covector, draws=draws, signs=partial(draw_signs, generator=torch.Generator().manual_seed(5))
    )
    expected = sum_over_paths(trace, covector)
    error = drawn.std(0) / np.sqrt(draws)
    assert float((error / expected).max()) < 0.05
    assert float(((drawn.mean(0) - expected).abs() / error).max()) < 4


def test_without_random_signs_the_walk_is_the_gradient() -> None:
    trace, covector = prepared(2, 3)
    plus = energies(trace, covector, draws=1, signs=lambda shape, like: torch.ones(shape, dtype=like.dtype))
    exact = trace.pull(covector, BACK_PROPAGATION).square().sum(-1)
    torch.testing.assert_close(plus[0], exact)
    assert float((exact / sum_over_paths(trace, covector) - 1).abs().max()) > 0.1


@pytest.mark.parametrize("name", ["gemma2", "gptj", "opt-350m", "mpt-clip", "bloom"])
@pytest.mark.parametrize("target", ["jacobian", "probability"])
def test_a_set_of_prompts(name: str, target: str, tiny_model: Callable, random_ids: Callable) -> None:
    model = tiny_model(name)
    prompts = Prompts(np.stack([random_ids(seed) for seed in range(2)]))
    result = sign_randomised_rollout(model, prompts, draws=4, seed=7, target=target)
    drawn = result.arrays["draws/energies"]
    assert drawn.shape == (2, 4, 21)
    np.testing.assert_allclose(drawn.mean(1).sum(-1), 1)
    np.testing.assert_allclose(result.per_prompt.sum(-1), 1)
    roots = np.sqrt(drawn.mean(1))
    np.testing.assert_allclose(result.per_prompt, roots / roots.sum(-1, keepdims=True))
    np.testing.assert_allclose(result.profile.influence, result.per_prompt.mean(0))
    assert np.all(result.arrays["draws/low"] < result.arrays["draws/high"])
    again = sign_randomised_rollout(model, prompts, draws=4, seed=7, target=target)
    np.testing.assert_array_equal(again.arrays["draws/energies"], drawn)
    other = sign_randomised_rollout(model, prompts, draws=4, seed=8, target=target)
    assert np.abs(other.arrays["draws/energies"] - drawn).max() > 1e-3


def test_prompts_and_draws_have_signs_of_their_own(tiny_model: Callable, random_ids: Callable) -> None:
    prompts = Prompts(np.stack([random_ids(0)] * 2))
    energy = sign_randomised_rollout(tiny_model("llama"), prompts, draws=5).arrays["draws/energies"]
    flat = energy.reshape(10, -1)
    assert min(np.abs(a - b).max() for a, b in itertools.combinations(flat, 2)) > 1e-4


def test_a_single_position_has_all_influence(tiny_model: Callable, random_ids: Callable) -> None:
    result = sign_randomised_rollout(tiny_model("llama"), Prompts(random_ids(0, 1)[None]), draws=2)
    assert result.profile.influence.tolist() == [1.0]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"draws": 1}, "draws must be a whole number >= 2, got 1"),
        ({"draws": 3, "seed": -1}, "seed must be a whole number >= 0, got -1"),
        ({"target": "loss"}, "unknown target 'loss' .* known: jacobian"),
    ],
)
def test_wrong_options_are_refused(
    options: dict[str, object], message: str, tiny_model: Callable, random_ids: Callable
) -> None:
    with pytest.raises(UsageError, match=message):
        sign_randomised_rollout(tiny_model("llama"), Prompts(random_ids()[None]), **options)


def test_energies_that_overflow_are_a_run_error(tiny_model: Callable, random_ids: Callable) -> None:
    from tiny_families import shaken_model

    model = shaken_model("llama", dtype=torch.float32)
    with torch.no_grad():
        model.network.model.norm.weight.mul_(1e38)
        model.network.lm_head.weight.mul_(1e-38)
    with pytest.raises(RunError, match="not finite and positive"):
        sign_randomised_rollout(model, Prompts(random_ids()[None]), draws=2)
