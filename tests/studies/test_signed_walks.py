"""Signed walks of the study of trained models: everything along shared directions is back-propagation."""

import importlib
from pathlib import Path

import numpy as np
import pytest
import torch

from posbias.theory.power_rollout.local_maps import BACK_PROPAGATION
from posbias.theory.power_rollout.rollout import trace_model
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
