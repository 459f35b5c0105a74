"""Lost in the Middle at Birth: An Exact Theory of Transformer Position Bias (arXiv 2603.10123), and its critics.

Its closed form and its gradient, as claims; its comparison with untrained models, run again.
"""

from posbias_papers.birth2603 import claims, experiment  # noqa: F401 (registered where they are defined)
