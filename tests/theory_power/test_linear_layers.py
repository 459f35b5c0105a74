"""Linear layers in theory: the power rollout through their own gates, and the rollout of their decays."""

import numpy as np

from posbias import Architecture
from posbias.prompts.prompts import Prompts
from posbias.theory import rollout_profile
from tiny_families import VOCABULARY

N = 24
DECAYS = "recurrent(slopes=[0.006, 0.015, 0.028, 0.051, 0.094, 0.175, 0.346, 0.801])"
"""Quantiles of those of 16 heads of Mamba 2 at birth: rates 1 ... 16 times steps, log-uniform from 0.001 to 0.1."""


def prompts(count: int, n_positions: int = N) -> Prompts:
    return Prompts(np.random.default_rng(1).integers(3, VOCABULARY, (count, n_positions)))


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
