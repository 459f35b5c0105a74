"""Lost in the Middle at Birth: An Exact Theory of Transformer Position Bias (arXiv 2603.10123), and its critics.

Its closed form and its gradient, as claims; its comparison with untrained models, run again.
"""

from typing import Any

from posbias.papers.birth2603 import claims, gradient  # noqa: F401 (their claims register themselves)
from posbias.papers.reproduction import PAPERS, Reproduction


@PAPERS.register("birth-2603.10123")
def birth(settings: Any) -> Reproduction:
    """Lost in the Middle at Birth: the closed form against untrained Qwen2- and GPT-2-shaped models."""
    from posbias.papers.birth2603.experiment import reproduce_birth

    return reproduce_birth(settings)
