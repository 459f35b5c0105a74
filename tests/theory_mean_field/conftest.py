"""Small random models and their measured Jacobians, by plain automatic differentiation."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from posbias.models.hugging_face import HuggingFaceModel, Origin
from posbias.models.model import Model
from posbias.models.networks import random_network

PROBES = 8
SIZES = {
    "hidden_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 4,
    "intermediate_size": 512,
    "vocab_size": 256,
    "max_position_embeddings": 128,
    "pad_token_id": None,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


@pytest.fixture(scope="session")
def fresh() -> Callable[..., HuggingFaceModel]:
    """A tiny model of a family with the weights of one seed."""

    def build(model_type: str, seed: int = 0, **settings: Any) -> HuggingFaceModel:
        from transformers import AutoConfig

        config = AutoConfig.for_model(model_type, **{**SIZES, **settings})
        return HuggingFaceModel(random_network(config, seed=seed), origin=Origin("random", init_seed=seed))

    return build


@pytest.fixture(scope="session")
def births() -> Callable[..., np.ndarray]:
    """Squared Jacobian norms of models of several seeds, one row each, on the given or on distinct random tokens."""

    def measure(
        build: Callable[[int], Model], n_positions: int, seeds: int, ids: np.ndarray | None = None
    ) -> np.ndarray:
        return np.stack([_squares(build(seed), n_positions, seed, ids) for seed in range(seeds)])

    return measure


@pytest.fixture(scope="session")
def jacobians(births: Callable[..., np.ndarray]) -> Callable[..., np.ndarray]:
    """Root mean squares over seeds, of what `births` measures."""
    return lambda *arguments: np.sqrt(births(*arguments).mean(axis=0))


def _squares(model: Model, n_positions: int, seed: int, ids: np.ndarray | None) -> np.ndarray:
    generator = torch.Generator().manual_seed(seed)
    tokens = 3 + torch.randperm(model.vocabulary_size - 3, generator=generator)[:n_positions]
    tokens = tokens if ids is None else torch.as_tensor(ids)
    entry = model.embed(tokens[None]).detach().expand(PROBES, -1, -1).clone().requires_grad_(True)
    hidden = model.last(entry).hidden
    probes = torch.randn(hidden.shape, generator=generator, dtype=hidden.dtype)
    (gradient,) = torch.autograd.grad((hidden * probes).sum(), entry)
    return gradient.double().square().sum(dim=2).mean(dim=0).numpy()


def distance(predicted: np.ndarray, measured: np.ndarray) -> float:
    """Normalised Wasserstein distance of two profiles given up to scale."""
    gaps = np.cumsum(predicted / predicted.sum() - measured / measured.sum())[:-1]
    return float(np.abs(gaps).sum() / (len(predicted) - 1))


@pytest.fixture(scope="session")
def profile_distance() -> Callable[[np.ndarray, np.ndarray], float]:
    """Normalised Wasserstein distance of two profiles given up to scale."""
    return distance
