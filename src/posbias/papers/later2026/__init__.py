"""Claims of 2026, read from abstracts alone: their papers were not at hand, and a verdict is on our reading.

RoPE in long contexts (arXiv 2605.15514); value aggregation at initialisation (arXiv 2605.06611).
"""

from posbias.papers.later2026 import aggregation, rope_length  # noqa: F401 (registered where they are defined)
