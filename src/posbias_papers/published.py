"""Everything that this package offers; importing it registers each paper's claims, experiment and pages."""

# Each folder registers its claims and its experiment.
from posbias_papers import birth2603, liu2026, rollout2602, wu2025  # noqa: F401
from posbias_papers.claims import CLAIMS, MODEL_CLAIMS, Verdict, claims_record, tally, verify
from posbias_papers.kernels import centre_nodes
from posbias_papers.on_models import verify_model
from posbias_papers.reproduction import PAPERS, Experiment, Reproduction, reproduce
from posbias_papers.wu2025.masks import spelled_mask, verify_mask

__all__ = [
    "CLAIMS",
    "MODEL_CLAIMS",
    "PAPERS",
    "Experiment",
    "Reproduction",
    "Verdict",
    "centre_nodes",
    "claims_record",
    "reproduce",
    "spelled_mask",
    "tally",
    "verify",
    "verify_mask",
    "verify_model",
]
