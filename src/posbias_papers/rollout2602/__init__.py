"""A Structural Theory of Position Bias in Transformers (arXiv 2602.16837).

Its propositions on the residual-aware rollout, as claims; its Table 2, from the authors' measurements (`data/`).
"""

from posbias_papers.rollout2602 import claims, table  # noqa: F401 (registered where they are defined)
