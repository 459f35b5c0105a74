"""Published work on position bias put to the test, a folder for each paper: its claims, its experiments, its numbers.

`verify` runs a paper's statements as numerical experiments, `verify_model` those that one model can meet on that model,
`reproduce` a paper's own experiment. `posbias` knows nothing of this package, which imports from all of its rooms.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from posbias_papers.claims import Claim, claims_record, tally, verify
    from posbias_papers.kernels import centre_nodes
    from posbias_papers.model_claims import ModelClaim, verify_model, verify_source
    from posbias_papers.pages.reproduce import PAPERS
    from posbias_papers.pages.verify import CLAIMS, MODEL_CLAIMS, Verdict
    from posbias_papers.reproduction import Experiment, reproduce, reproduction_record
    from posbias_papers.wu2025.graphs import read_mask, verify_mask

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


def __getattr__(name: str) -> Any:
    """Import what is asked for when it is: `posbias --help` shows the commands of this package at once."""
    if name not in __all__:
        raise AttributeError(f"module 'posbias_papers' has no attribute {name!r}")
    return getattr(import_module("posbias_papers.published"), name)
