"""Stack of causal attention creates implicit positional embedding (Ziming Liu, 2026).

Its networks that copy one position, trained again and set beside its figures.
"""

from typing import Any

from posbias.papers.reproduction import PAPERS, Reproduction


@PAPERS.register("position-copy-liu2026")
def position_copy(settings: Any) -> Reproduction:
    """Stack of causal attention creates implicit positional embedding: small networks trained to copy one position."""
    from posbias.papers.liu2026.experiment import reproduce_position_copy

    return reproduce_position_copy(settings)
