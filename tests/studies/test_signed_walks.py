"""Signed walks of the study of trained models: random signs, constant attention and shared directions, each exact.

Random signs give, on average, the squared norms of all paths; everything along shared directions is back-propagation.
"""

import importlib
import itertools
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.autograd.functional import jacobian
from transformers import LlamaConfig, LlamaForCausalLM

import posbias as pb
from posbias import Architecture, load_prompts
from posbias.models.hugging_face import HuggingFaceModel
from posbias.models.layout import turned_by
from posbias.models.reference.config import ReferenceConfig
from posbias.models.reference.network import ReferenceTransformer
from posbias.theory.power_rollout.local_maps import BACK_PROPAGATION, Walk, affine, attention_of, norm_forward
from posbias.theory.power_rollout.rollout import PromptTrace, trace_model
from posbias.theory.power_rollout.trace import LayerDescription, LayerTrace
from theory_calls import power_rollout
from tiny_families import VOCABULARY, shaken_model

STUDY = Path(__file__).parents[2] / "studies" / "trained_models"
WIDTH = 8
EVERYTHING = 10**6
IDS = np.random.default_rng(0).integers(3, VOCABULARY, 21)


@pytest.fixture
def walks(monkeypatch):
    """The study's module."""
    monkeypatch.syspath_prepend(str(STUDY))
    return importlib.import_module("signed_walks")


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def normal(*shape: int, seed: int = 2) -> torch.Tensor:
    return torch.randn(*shape, generator=seeded(seed), dtype=torch.float64)


def small_llama(depth: int, heads: int) -> HuggingFaceModel:
    """Heads that share one key head, weights large enough that every path counts."""
    sizes = {"hidden_size": WIDTH, "intermediate_size": 12, "num_hidden_layers": depth, "vocab_size": 20}
    network = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=heads, num_key_value_heads=1)).double()
    generator = seeded(3)
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.copy_(0.6 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
    return HuggingFaceModel(network)


def energies(trace: PromptTrace, covector: torch.Tensor, *, draws: int, signs: object) -> torch.Tensor:
    walk = Walk(power=1, query=True, signs=signs)
    return trace.pull(covector.expand(draws, -1), walk).square().sum(-1)


def head_outputs(layer: LayerDescription, kept: LayerTrace, *inputs: torch.Tensor) -> torch.Tensor:
    """What each head adds to the stream, [head, query, feature], from what its queries, keys and values read."""
    parts, attention = layer.parts, attention_of(layer, kept)
    assert attention.cosine is not None
    assert attention.sine is not None
    pairs = attention.cosine.shape[-1] // 2
    turn = partial(turned_by, cosine=attention.cosine[:, :pairs], sine=attention.sine[:, :pairs])
    weights, biases = (parts.query, parts.key, parts.value), (parts.query_bias, parts.key_bias, parts.value_bias)
    query, key, value = (
        affine(norm_forward(layer.attention_norm, read), weight, bias).reshape(len(read), -1, parts.head_dim)
        for read, weight, bias in zip(inputs, weights, biases, strict=True)
    )
    query, key = (turn(x.transpose(0, 1)) for x in (query, key))
    logits = parts.scale * query @ key.transpose(1, 2)
    attention = logits.masked_fill(torch.ones_like(logits).triu(1).bool(), -torch.inf).softmax(-1)
    output = parts.output.reshape(WIDTH, parts.heads, parts.head_dim).permute(1, 2, 0)
    return attention @ value.transpose(0, 1) @ output


def sum_over_paths(trace: PromptTrace, covector: torch.Tensor) -> torch.Tensor:
    """The sum over paths of squared norms, by covariances: C_j <- C_j + sum over terms T from i to j of T' C_i T."""
    stream = trace.pull_start(covector, BACK_PROPAGATION)
    covariance = torch.einsum("ia,ib->iab", stream, stream)
    for layer, kept in zip(reversed(trace.description.layers), reversed(trace.layers), strict=True):
        block, norm = layer.inputs["stream"], layer.inputs["middle"]
        mlp = [jacobian(lambda x, block=block, norm=norm: block.mlp(norm(x)), row) for row in kept.middle]
        covariance = covariance + torch.stack([m.T @ c @ m for m, c in zip(mlp, covariance, strict=True)])
        query, key, value = jacobian(partial(head_outputs, layer, kept), (kept.stream,) * 3)
        branches = sum(torch.einsum("hiajb,iac,hicjd->jbd", part, covariance, part) for part in (query, key, value))
        covariance = covariance + branches
    return torch.einsum("jaa->j", covariance)


def test_the_mean_over_all_signs_is_the_sum_over_paths() -> None:
    """One layer, one head, two positions: each of the 2^10 sets of signs once, no randomness left."""
    trace, covector = trace_model(small_llama(1, 1), np.arange(3, 5)), normal(WIDTH, seed=4)
    asked: list[tuple[int, ...]] = []

    def count(shape: tuple[int, ...], like: torch.Tensor) -> torch.Tensor:
        asked.append(shape[1:])
        return torch.ones(shape, dtype=like.dtype)

    plus = energies(trace, covector, draws=1, signs=count)
    torch.testing.assert_close(plus[0], trace.pull(covector, BACK_PROPAGATION).square().sum(-1))
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


@pytest.mark.parametrize("name", ["llama", "gemma3_text", "phi"])
def test_with_every_direction_it_is_back_propagation(name: str, walks) -> None:
    trace = trace_model(shaken_model(name), IDS)
    vectors = normal(2, len(trace.state))
    exact = trace.pull(vectors, BACK_PROPAGATION).square().sum(-1).mean(0)
    everything = walks.shared_direction_of(trace, vectors, directions=EVERYTHING)
    np.testing.assert_allclose(everything.profile, exact.sqrt() / exact.sqrt().sum(), rtol=1e-8)
    np.testing.assert_allclose(everything.own + everything.shared, 1)
    # The last position alone reads itself, whatever becomes of the others.
    one = walks.shared_direction_of(trace, vectors)
    np.testing.assert_allclose(everything.own[0], exact[-1] / exact.sum(), rtol=1e-8)
    assert one.own[0] == pytest.approx(one.profile[-1] ** 2 / np.square(one.profile).sum(), rel=1e-8)


def test_exact_where_all_positions_share_their_direction(walks) -> None:
    """Every map a multiple of the identity: gradients have rank one, and the rollout is the truth."""
    architecture = Architecture(3, mixing=0.5)
    sizes = {"width": 32, "vocabulary_size": 10, "dtype": "float64"}
    model = ReferenceTransformer(ReferenceConfig(architecture, values="gaussian", output_map=False, **sizes))
    for block in model.network.blocks:
        block.get_parameter("value").data.copy_(torch.eye(32))
    prompts = load_prompts("synthetic", model, n_positions=9, count=1)
    truth = pb.predict(architecture, 9, theory="rollout").profile.influence
    trace = trace_model(model, prompts.token_ids[0])
    prompt = walks.shared_direction_of(trace, normal(2, 32))
    np.testing.assert_allclose(prompt.profile, truth, rtol=1e-5)
    np.testing.assert_allclose(prompt.own + prompt.shared, 1, rtol=1e-6)
    assert np.abs(power_rollout(model, prompts).per_prompt[0] - truth).max() > 0.01
