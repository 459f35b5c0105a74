"""A Structural Theory of Position Bias in Transformers (arXiv 2602.16837).

Its propositions on the residual-aware rollout, as claims; its Table 2, from the authors' measurements (`data/`).
"""

from typing import Any

from posbias.papers.reproduction import PAPERS, Reproduction
from posbias.papers.rollout2602 import claims, depth, on_models  # noqa: F401 (their claims register themselves)


@PAPERS.register("rollout-2602.16837")
def rollout(settings: Any) -> Reproduction:
    """A Structural Theory of Position Bias in Transformers: Table 2 from the measured mixing of five ALiBi models."""
    from posbias.papers.rollout2602.table import reproduce_rollout

    return reproduce_rollout(settings)
