"""Signed walks of the study of trained models: everything along shared directions is back-propagation."""

import importlib
from pathlib import Path

import numpy as np
import pytest
import torch

import posbias as pb
from posbias import Architecture, load_prompts
from posbias.models.reference.config import ReferenceConfig
from posbias.models.reference.network import ReferenceTransformer
from posbias.theory.power_rollout.local_maps import BACK_PROPAGATION
from posbias.theory.power_rollout.rollout import trace_model
from theory_calls import power_rollout
from tiny_families import VOCABULARY, shaken_model

STUDY = Path(__file__).parents[2] / "studies" / "trained_models"
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
