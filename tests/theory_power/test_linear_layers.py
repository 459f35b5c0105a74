"""Linear layers in theory: the power rollout through their own gates, and the rollout of their decays."""

from dataclasses import replace

import numpy as np
import pytest
import torch
import transformers

import posbias as pb
from posbias import Architecture, UsageError
from posbias.models.hugging_face import HuggingFaceModel, Origin
from posbias.models.networks import random_network
from posbias.prompts.prompts import Prompts
from posbias.theory import predict, rollout_profile
from posbias.theory.power_rollout import PowerRollout, ingredients
from posbias.theory.power_rollout.linear import DRAWS, linear_pull, run_layer
from posbias.theory.power_rollout.rollout import trace_model
from posbias.theory.power_rollout.walk import THEORY
from tiny_families import COMMON, VOCABULARY, shaken_model

N = 24
DECAYS = "recurrent(slopes=[0.006, 0.015, 0.028, 0.051, 0.094, 0.175, 0.346, 0.801])"
"""Quantiles of those of 16 heads of Mamba 2 at birth: rates 1 ... 16 times steps, log-uniform from 0.001 to 0.1."""


def prompts(count: int, n_positions: int = N) -> Prompts:
    return Prompts(np.random.default_rng(1).integers(3, VOCABULARY, (count, n_positions)))


@pytest.mark.parametrize("name", ["qwen3_5_text", "mamba2", "lfm2"])
def test_energies_through_a_linear_layer_are_those_of_its_squared_jacobian(name: str) -> None:
    """Within the noise of the signs, and zero wherever no path leads."""
    model = shaken_model(name, dtype=torch.float64)
    trace = trace_model(model, prompts(1, 6).token_ids[0])
    layer, kept = replace(trace.description.layers[0], attention_norm=None), trace.layers[0]
    assert layer.mixer is None
    read = kept.stream / kept.stream.norm(dim=-1, keepdim=True)
    leaf = read.clone().requires_grad_()
    with torch.enable_grad():
        branch = run_layer(layer.block.linear.module, leaf, kept.call)
    energy, expected = torch.zeros_like(read), torch.zeros_like(read)
    for query, channel, size in [(2, 3, 0.5), (3, 3, 1.0), (4, 0, 0.2), (4, 7, 2.0)]:
        energy[query, channel] = size
        (row,) = torch.autograd.grad(branch[query, channel], leaf, retain_graph=True)
        expected += size * row.square()
    found = linear_pull(layer, replace(kept, stream=read), energy, THEORY)
    assert not found[5:].any(), "nothing looks ahead"
    by_position = (found.sum(-1) / expected.sum(-1))[:5]
    # A sum of d squares of normal numbers, DRAWS times over, if channels were one and the same.
    torch.testing.assert_close(by_position, torch.ones_like(by_position), rtol=0, atol=4 * (2 / DRAWS) ** 0.5)
    assert abs(float(found.sum() / expected.sum()) - 1) < 0.25


def test_walks_that_a_linear_layer_does_not_know_are_refused() -> None:
    model = shaken_model("mamba2", dtype=torch.float32)
    with pytest.raises(UsageError, match="isotropic power rollout has no linear layers"):
        predict(model, theory=PowerRollout(form="isotropic"), prompts=prompts(1))
    with pytest.raises(UsageError, match="cannot be walked without keys"):
        predict(model, theory=PowerRollout(key_path=False), prompts=prompts(1))
    with pytest.raises(UsageError, match="or by amplitudes"):
        ingredients(model, prompts(1), names=["squares"])


def distance(first: np.ndarray, second: np.ndarray) -> float:
    return float(np.abs(np.cumsum(first - second)).mean())


def test_the_power_rollout_holds_at_birth_for_a_state_space_model() -> None:
    """What a state writes and reads has random signs at birth, so that energies add, unlike attention's averages."""
    config = transformers.Mamba2Config(
        **COMMON, hidden_size=64, num_hidden_layers=2, num_heads=4, head_dim=32, state_size=16, n_groups=1
    )
    measured, predicted = [], []
    for seed in range(2):
        model = HuggingFaceModel(random_network(config, seed=seed), origin=Origin("born", init_seed=seed))
        one = Prompts(np.random.default_rng(seed).permutation(np.arange(3, VOCABULARY))[None, :N])
        measured.append(pb.measure(model, one, kinds="jacobian(probes=8)").profiles["jacobian"].influence)
        predicted.append(predict(model, theory="power_rollout", prompts=one).profile.influence)
    mean = np.mean(measured, axis=0)
    flat = distance(mean, np.full(N, 1 / N))
    assert distance(mean, np.mean(predicted, axis=0)) < 0.03 < flat / 5


def hybrid(attention: set[int], *, mixing: float, depth: int = 8, n_positions: int = 512) -> np.ndarray:
    """The rollout of layers of attention among linear ones."""
    encoding = ["none" if layer in attention else DECAYS for layer in range(depth)]
    architecture = Architecture(depth=depth, heads=8, encoding=encoding, mixing=mixing)
    return rollout_profile(architecture, n_positions=n_positions)


def test_linear_layers_are_recent_and_attention_above_them_brings_the_beginning_back() -> None:
    bare = hybrid(set(), mixing=0.3)
    assert bare[-51:].sum() > 0.5
    assert bare[:51].sum() < 0.02
    top, bottom = hybrid({7}, mixing=0.3), hybrid({0}, mixing=0.3)
    assert top[0] > 3 * bottom[0]
    assert top[:51].sum() > top[230:281].sum(), "a U"
    assert bottom[:51].sum() < bottom[230:281].sum(), "none"
    assert hybrid({6, 7}, mixing=0.1)[:51].sum() > hybrid({6, 7}, mixing=0.1)[230:281].sum()
    assert hybrid({7}, mixing=0.1)[:51].sum() < hybrid({7}, mixing=0.1)[230:281].sum()


def test_the_rollout_of_a_hybrid_model_has_its_own_decays() -> None:
    model = shaken_model("jamba", dtype=torch.float32)
    architecture = Architecture.from_model(model)
    slopes = [[group.linear_slopes() for group in groups] for groups in architecture.head_groups]
    decays = model.family.decays(model.family.blocks(model.network)[0].linear.module)
    assert len(decays) == 64 * 8, "channels times states"
    assert np.all(slopes[1][0] == 0)
    np.testing.assert_allclose(slopes[0][0], np.quantile(decays, [0.125, 0.375, 0.625, 0.875]))
    prediction = predict(model, theory="rollout", prompts=prompts(2))
    assert abs(prediction.profile.influence.sum() - 1) < 1e-12
    assert any("decays at bare gates" in caveat for caveat in prediction.caveats)
