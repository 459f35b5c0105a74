"""BLOOM-176B at 256 positions: the rollout from measured mixing against the published influence (arXiv 2602.16837)."""

from functools import cache
from typing import Any

import numpy as np
import pytest

from posbias import Architecture, predict
from posbias.architecture.published_models import read_data


@cache
def reference(name: str) -> dict[str, Any]:
    return read_data(name)


def wasserstein(one: np.ndarray, other: np.ndarray) -> float:
    """W1 on positions / (N - 1)."""
    return float(np.abs(np.cumsum(one - other))[:-1].sum() / (len(one) - 1))


def influence() -> np.ndarray:
    values = np.array(reference("influence_bloom")["influence"])
    return values / values.sum()


def predicted(theory: str, content: Any = 0.0) -> np.ndarray:
    measured = reference("measured_bloom")
    architecture = Architecture(
        depth=measured["depth"],
        heads=measured["heads"],
        encoding=f"alibi(slopes={measured['slopes_as_published']})",
        mixing=measured["mixing"],
        content=content,
    )
    return predict(architecture, measured["length"], theory=theory).profile.influence


def test_rollout_without_content() -> None:
    profile = predicted("rollout")
    assert profile[0] == pytest.approx(0.02029, abs=5e-6)
    assert profile[-1] == pytest.approx(0.02523, abs=5e-6)
    assert profile.argmin() == 61
    assert wasserstein(profile, influence()) == pytest.approx(0.0790, abs=1e-4)


def test_baselines() -> None:
    assert wasserstein(predicted("attention_only"), influence()) == pytest.approx(0.651, abs=5e-4)
    assert wasserstein(np.full(256, 1 / 256), influence()) == pytest.approx(0.152, abs=5e-4)


def test_content_as_published_and_as_the_model_scales_it() -> None:
    """The published fit leaves out 1/sqrt(head_dim); with it, content adds little (docs/theory, section 6)."""
    measured = reference("measured_bloom")
    content = np.array(measured["content_diagonal_unscaled"])
    scaled = content / np.sqrt(measured["head_dim"])
    assert wasserstein(predicted("rollout_content", content), influence()) == pytest.approx(0.016, abs=5e-4)
    assert wasserstein(predicted("rollout_content", scaled), influence()) == pytest.approx(0.068, abs=5e-4)
