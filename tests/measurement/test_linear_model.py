"""Measurement against theory: on a linear attention-only model the Jacobian profile is the rollout."""

from typing import Any

import numpy as np
import pytest

from posbias import Architecture, measure
from posbias.models.reference.network import ReferenceTransformer
from posbias.prompts import Prompts
from posbias.theory import rollout_profile

TOLERANCE = 1e-10
"""The issue's bound; both sides are float64 and differ by round-off of L N operations."""
N_POSITIONS = 24

ARCHITECTURES: dict[str, dict[str, Any]] = {
    "causal": {"depth": 4, "heads": 2, "mixing": 0.4},
    "no residual": {"depth": 3, "mixing": 1.0},
    "no mixing": {"depth": 2, "mixing": [0.0, 0.3]},
    "window": {"depth": 5, "mask": "sliding_window(width=5)", "mixing": [0.6, 0.3, 0.2, 0.15, 0.12]},
    "prefix": {"depth": 3, "mask": "prefix(length=6)", "mixing": 0.5},
    "full": {"depth": 3, "mask": "full", "encoding": "decay(rate=0.7)", "mixing": 0.5},
    "alibi": {"depth": 4, "heads": 3, "encoding": "alibi", "mixing": [0.2, 0.37, 0.53, 0.7]},
    "decay": {"depth": 4, "encoding": "decay(rate=0.8)", "mixing": 0.3},
    "rope": {"depth": 3, "heads": 2, "encoding": "rope(base=100.0, head_dim=8)", "mixing": 0.6},
    "content": {"depth": 3, "heads": 2, "mixing": 0.5, "content": [[-30.0, 2.0], [0.5, 260.0], [1.0, -1.0]]},
    "window and alibi, mixed layers": {
        "depth": 3,
        "heads": 2,
        "mask": ["causal", "sliding_window(width=4)", ["causal", "prefix(length=3)"]],
        "encoding": ["alibi", "none", ["decay(rate=0.9)", "alibi"]],
        "mixing": [0.2, 0.9, 0.5],
    },
}


def _prompts(count=1):
    return Prompts(np.random.default_rng(0).integers(0, 64, (count, N_POSITIONS)))


@pytest.mark.parametrize("name", list(ARCHITECTURES))
def test_exact_jacobian_is_the_rollout(name):
    architecture = Architecture(**ARCHITECTURES[name])
    measured = measure(ReferenceTransformer(architecture), _prompts(), kinds="jacobian(exact=True)")
    expected = rollout_profile(architecture, n_positions=N_POSITIONS)
    np.testing.assert_allclose(measured.profiles["jacobian"].influence, expected, rtol=TOLERANCE, atol=1e-18)


@pytest.mark.parametrize("kind", ["jacobian(probes=1)", "probability", "logprob", "logit"])
def test_every_kind_is_the_rollout_when_positions_only_rescale_the_same_map(kind):
    """J_j = rollout_j times the identity: whatever covector is pulled back, its length cancels."""
    architecture = Architecture(**ARCHITECTURES["alibi"])
    measured = measure(ReferenceTransformer(architecture), _prompts(2), kinds=[kind])
    expected = rollout_profile(architecture, n_positions=N_POSITIONS)
    (profile,) = measured.profiles.values()
    np.testing.assert_allclose(profile.influence, expected, rtol=TOLERANCE)
