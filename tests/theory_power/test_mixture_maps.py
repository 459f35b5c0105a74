"""Mixtures of experts: energies of every path against Jacobians by autograd; the choice is the model's own."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from torch.autograd.functional import jacobian

from posbias.models.attention import affine
from posbias.models.families.parts import MixtureParts, MlpParts
from posbias.models.hugging_face import HuggingFaceModel
from posbias.prompts.prompts import Prompts
from posbias.theory.power_rollout import WHOLE, ingredients
from posbias.theory.power_rollout.local_maps import mixture_pull
from posbias.theory.power_rollout.rollout import trace_model
from posbias.theory.power_rollout.trace import describe_model
from posbias.theory.power_rollout.walk import BACK_PROPAGATION, THEORY
from tiny_families import MIXTURES

Build = Callable[..., HuggingFaceModel]
Draw = Callable[..., np.ndarray]
RENORMALISED = ("gpt_oss", "mixtral", "mixtral-full", "qwen3_moe-normalised")
NAMES = [*sorted(MIXTURES), "phimoe"]


def normal(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def router_logits(mixture: MixtureParts, read: torch.Tensor) -> torch.Tensor:
    bias = 0 if mixture.router_bias is None else mixture.router_bias
    return mixture.router @ read + bias


def weights_of(name: str, logits: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
    """Written anew: softmax over all, over the chosen, or for each choice over those that nearly won it."""
    if name == "phimoe":
        first, second = chosen.tolist()
        rest = [expert for expert in range(len(logits)) if expert != first]
        of_all = nearly(logits, first, list(range(len(logits))))
        return torch.stack([of_all[first], nearly(logits, second, rest)[second]])
    share = logits.softmax(-1)[chosen]
    return share / share.sum() if name in RENORMALISED else share


def nearly(logits: torch.Tensor, best: int, candidates: list[int]) -> torch.Tensor:
    """A softmax over the candidates within 0.8 of the best one's lead, by the larger of the two sizes."""
    sizes = logits.abs().maximum(logits[best])
    near = [one for one in candidates if logits[best] - logits[one] <= 0.8 * sizes[one]]
    mask = torch.zeros_like(logits)
    mask[near] = 1
    return logits.exp() * mask / (logits.exp() * mask).sum()


def expert_output(mixture: MixtureParts, expert: int, read: torch.Tensor) -> torch.Tensor:
    parts = mixture.experts[expert]
    bias = 0 if parts.down_bias is None else parts.down_bias
    return parts.down @ hidden_of(parts, read) + bias


def hidden_of(parts: MlpParts, read: torch.Tensor) -> torch.Tensor:
    """Gated, with biases and an activation of `up` where there are any."""
    assert parts.gate is not None
    gate_bias, up_bias = (0 if bias is None else bias for bias in (parts.gate_bias, parts.up_bias))
    up = parts.up @ read + up_bias
    return torch.as_tensor(
        parts.activation(parts.gate @ read + gate_bias)
        * (up if parts.up_activation is None else parts.up_activation(up))
    )


@pytest.mark.parametrize("name", NAMES)
def test_energies_add_over_experts_and_the_router(name: str, tiny_model: Build) -> None:
    model = tiny_model(name)
    description = describe_model(model, n_positions=5)
    mixture = description.layers[0].mlp
    assert isinstance(mixture, MixtureParts)
    read, energy = normal(5, 32, seed=3), normal(5, 32, seed=4).square()
    chosen = affine(read, mixture.router, mixture.router_bias).topk(2).indices
    pulled = mixture_pull(mixture, read, chosen, energy, THEORY)
    for position in range(5):
        x, own = read[position], chosen[position]
        logits = router_logits(mixture, x)
        weights = weights_of(name, logits, own)
        expected = torch.zeros(32, dtype=torch.float64)
        for weight, expert in zip(weights, own.tolist(), strict=True):
            parts = mixture.experts[expert]
            slopes = jacobian(partial(hidden_of, parts), x)
            expected += slopes.square().T @ (parts.down.square().T @ (weight**2 * energy[position]))
        results = torch.stack([expert_output(mixture, expert, x) for expert in own.tolist()])

        def weighed(logits: torch.Tensor, own: torch.Tensor = own, results: torch.Tensor = results) -> torch.Tensor:
            return weights_of(name, logits, own) @ results

        moved = jacobian(weighed, logits)
        expected += mixture.router.square().T @ (moved.square().T @ energy[position])
        torch.testing.assert_close(pulled[position], expected)


@pytest.mark.parametrize("name", NAMES)
def test_signed_pull_is_the_mixtures_jacobian_for_the_choice_it_is_given(name: str, tiny_model: Build) -> None:
    """Any choice, not only the largest: it is the caller's, as the model made it."""
    mixture = describe_model(tiny_model(name), n_positions=5).layers[0].mlp
    assert isinstance(mixture, MixtureParts)
    read, gradient, chosen = normal(5, 32, seed=3), normal(2, 5, 32, seed=4), torch.tensor([[0, 3]] * 5)
    pulled = mixture_pull(mixture, read, chosen, gradient, BACK_PROPAGATION)
    for position in range(5):

        def output(x: torch.Tensor) -> torch.Tensor:
            results = torch.stack([expert_output(mixture, expert, x) for expert in (0, 3)])
            return weights_of(name, router_logits(mixture, x), chosen[0]) @ results

        exact = jacobian(output, read[position])
        torch.testing.assert_close(pulled[:, position], gradient[:, position] @ exact)


def test_weights_on_what_experts_read_act_before_their_squares(tiny_model: Build) -> None:
    """Llama 4: experts of what the router has scaled, and the router through what they read; the shared one beside."""
    mixture = describe_model(tiny_model("llama4_text-two-experts"), n_positions=5).layers[0].mlp
    assert isinstance(mixture, MixtureParts)
    assert mixture.shared is not None
    read, energy = normal(5, 32, seed=3), normal(5, 32, seed=4).square()
    chosen = affine(read, mixture.router, None).topk(2).indices
    pulled = mixture_pull(mixture, read, chosen, energy, THEORY)

    def through(parts: MlpParts, x: torch.Tensor, arriving: torch.Tensor) -> torch.Tensor:
        return jacobian(partial(hidden_of, parts), x).square().T @ (parts.down.square().T @ arriving)

    for x, own, arriving, found in zip(read, chosen, energy, pulled, strict=True):
        expected = through(mixture.shared, x, arriving)
        for expert in own.tolist():
            weight = (mixture.router[expert] @ x).sigmoid()
            at_input = through(mixture.experts[expert], weight * x, arriving)
            by_router = (at_input * (weight * (1 - weight) * x).square()).sum() * mixture.router[expert].square()
            expected = expected + weight**2 * at_input + by_router
        torch.testing.assert_close(found, expected)


def test_the_choice_is_the_models_own(tiny_model: Build, random_ids: Draw) -> None:
    found = trace_model(tiny_model("qwen3_moe"), random_ids())
    assert [kept.chosen is None for kept in found.layers] == [False, True, False]
    for layer, kept in zip(found.description.layers, found.layers, strict=True):
        if isinstance(layer.mlp, MixtureParts):
            assert kept.chosen is not None
            assert kept.chosen.shape == (21, 2)


def test_half_precision_walks_the_experts_that_ran(tiny_model: Build, random_ids: Draw) -> None:
    """In bfloat16 some tokens go elsewhere than the same weights in float32 would send them."""
    found = trace_model(tiny_model("mixtral-full", torch.bfloat16), random_ids())
    gate = found.description.layers[0].mlp.router_module  # type: ignore[union-attr]
    chosen = []
    handle = gate.register_forward_hook(lambda _module, _args, output: chosen.append(output[-1]))
    model = tiny_model("mixtral-full", torch.bfloat16)
    model.last(model.embed(torch.as_tensor(random_ids())[None]))
    handle.remove()
    torch.testing.assert_close(found.layers[0].chosen, chosen[0])
    assert found.layers[0].stream.dtype == torch.float32


@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe"])
def test_ingredients_take_mixtures(name: str, tiny_model: Build, random_ids: Draw) -> None:
    model, prompts = tiny_model(name), Prompts(np.stack([random_ids(seed) for seed in range(2)]))
    table = ingredients(model, prompts)
    for profiles in table.values():
        np.testing.assert_allclose(profiles.sum(-1), 1)
    assert np.abs(table["mlp"] - table[WHOLE]).max() > 1e-4


def test_without_amplitudes_a_path_more_is_energy_more(tiny_model: Build) -> None:
    """Roots add to at least the root of the sum, and to more where two paths meet."""
    mixture = describe_model(tiny_model("mixtral"), n_positions=5).layers[0].mlp
    assert isinstance(mixture, MixtureParts)
    read, energy = normal(5, 32, seed=3), normal(5, 32, seed=4).square()
    chosen = affine(read, mixture.router, None).topk(2).indices
    energies = mixture_pull(mixture, read, chosen, energy, THEORY)
    amplitudes = mixture_pull(mixture, read, chosen, energy, replace(THEORY, amplitudes=True))
    assert bool((amplitudes > energies).all())
