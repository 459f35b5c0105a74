"""Published claims on position bias, put to the test: `verify` runs them, one module per paper."""

# Imported for their claims, which register themselves.
from posbias.theory.claims import (  # noqa: F401
    birth2603,
    birth2603_gradient,
    linear_networks,
    rollout2602,
    rollout2602_depth,
    rollout2602_lemmas,
    wu2025_decay,
    wu2025_graphs,
    wu2025_masks,
    wu2025_rope,
)
from posbias.theory.claims.claim import CLAIMS, Claim, Figure, Finding, Series, Verdict, verify
from posbias.theory.claims.graphs import centre_nodes
from posbias.theory.claims.wu2025_graphs import verify_mask

__all__ = ["CLAIMS", "Claim", "Figure", "Finding", "Series", "Verdict", "centre_nodes", "verify", "verify_mask"]
