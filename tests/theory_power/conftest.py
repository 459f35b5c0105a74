"""Tiny random models of every described family, and a way to run transformers in double precision throughout."""

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch

from posbias.models.hugging_face import HuggingFaceModel
from tiny_families import VOCABULARY, shaken_model


@pytest.fixture(scope="session")
def tiny_model() -> Callable[..., HuggingFaceModel]:
    """A random model of a family, every weight, norm gain and bias moved away from special values; each built once."""
    return cache(shaken_model)


@pytest.fixture(scope="session")
def random_ids() -> Callable[..., np.ndarray]:
    """random_ids(seed=0, n_positions=21): one prompt of random token ids, special tokens left out."""
    return lambda seed=0, n_positions=21: np.random.default_rng(seed).integers(3, VOCABULARY, n_positions)


@pytest.fixture
def keep_double(monkeypatch: pytest.MonkeyPatch) -> None:
    """Norms, softmaxes, routers and GPT-J's attention compute in float32 in transformers; here they stay in float64."""
    to, single, softmax, of_type = torch.Tensor.to, torch.Tensor.float, torch.nn.functional.softmax, torch.Tensor.type

    def keep(tensor: torch.Tensor, *positional: Any, **named: Any) -> torch.Tensor:
        lowers = torch.float32 in positional or named.get("dtype") == torch.float32
        return tensor if lowers and tensor.dtype == torch.float64 else to(tensor, *positional, **named)

    def plain_softmax(values: torch.Tensor, dim: int, dtype: torch.dtype | None = None, **_: Any) -> torch.Tensor:
        return softmax(values, dim=dim, dtype=None if values.dtype == torch.float64 else dtype)

    def typed(tensor: torch.Tensor, *wanted: Any) -> Any:
        return tensor if wanted == (torch.float32,) and tensor.dtype == torch.float64 else of_type(tensor, *wanted)

    plain_softmax.__name__ = softmax.__name__  # by which eager attention is seen
    monkeypatch.setattr(torch.Tensor, "to", keep)
    monkeypatch.setattr(torch.Tensor, "type", typed)
    monkeypatch.setattr(
        torch.Tensor, "float", lambda values: values if values.dtype == torch.float64 else single(values)
    )
    monkeypatch.setattr(torch.nn.functional, "softmax", plain_softmax)
