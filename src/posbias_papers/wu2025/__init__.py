"""On the Emergence of Position Bias in Transformers (Wu et al., ICML 2025, arXiv 2502.01951).

Its theorems on where attention collapses, as claims; its in-context retrieval, trained again.
"""

from posbias_papers.wu2025 import encodings, icl, masks  # noqa: F401 (registered where they are defined)
