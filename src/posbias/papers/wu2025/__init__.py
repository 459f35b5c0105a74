"""On the Emergence of Position Bias in Transformers (Wu et al., ICML 2025, arXiv 2502.01951).

Its theorems on where attention collapses, as claims; its in-context retrieval, trained again.
"""

from typing import Any

from posbias.papers.reproduction import PAPERS, Reproduction
from posbias.papers.wu2025 import decay, graphs, masks, on_models, rope  # noqa: F401 (their claims register themselves)


@PAPERS.register("icl-2502.01951")
def in_context_retrieval(settings: Any) -> Reproduction:
    """On the Emergence of Position Bias in Transformers: in-context retrieval by depth, encoding, mask and data."""
    from posbias.papers.wu2025.icl import reproduce_icl

    return reproduce_icl(settings)
