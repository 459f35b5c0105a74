"""Published work on position bias put to the test, a folder for each paper: its claims, its experiments, its numbers;
and our own theorems on design, under the same tests.

`verify` runs a paper's statements as numerical experiments, `verify_model` those that one model can meet on that model,
`reproduce` a paper's own experiment.
"""

# Each folder registers its claims and its experiment.
from posbias.papers import birth2603, design_claims, later2026, liu2026, rollout2602, wu2025  # noqa: F401
from posbias.papers.claims import Claim, claims_record, tally, verify
from posbias.papers.kernels import centre_nodes
from posbias.papers.model_claims import ModelClaim, verify_model, verify_source
from posbias.papers.reproduction import Experiment, reproduce, reproduction_record
from posbias.papers.wu2025.graphs import read_mask, verify_mask
from posbias.report.reproduce import PAPERS
from posbias.report.verify import CLAIMS, MODEL_CLAIMS, Verdict

__all__ = [
    "CLAIMS",
    "MODEL_CLAIMS",
    "PAPERS",
    "Claim",
    "Experiment",
    "ModelClaim",
    "Verdict",
    "centre_nodes",
    "claims_record",
    "read_mask",
    "reproduce",
    "reproduction_record",
    "tally",
    "verify",
    "verify_mask",
    "verify_model",
    "verify_source",
]
