"""Everything that this package offers; importing it registers each paper's claims, experiment and pages."""

from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules

from posbias_papers.claims import CLAIMS, MODEL_CLAIMS, Verdict, claims_record, tally, verify
from posbias_papers.kernels import centre_nodes
from posbias_papers.on_models import verify_model
from posbias_papers.reproduction import PAPERS, Experiment, Reproduction, reproduce
from posbias_papers.wu2025.masks import spelled_mask, verify_mask

for _found in iter_modules([str(Path(__file__).parent)]):
    if _found.ispkg:  # a folder per paper, which registers its claims and its experiment
        import_module(f"posbias_papers.{_found.name}")

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
