"""Claims of 2025 and 2026, read from abstracts and published code: the papers were not at hand.

A verdict is on our reading. RoPE in long contexts (arXiv 2605.15514); value aggregation at initialisation (arXiv
2605.06611); contraction of untrained networks (arXiv 2602.05927); absolute position in RoPE attention (arXiv
2606.06160); what sinks do to perturbations (arXiv 2504.02732) and to gradients (arXiv 2603.17771); sinks of trained
networks (arXiv 2603.11487 and 2504.20966); distractors (arXiv 2506.15156); demands of recall (arXiv
2510.10276); scrambled prompts (arXiv 2601.04098).
"""

from posbias_papers.later2026 import (  # noqa: F401 (claims)
    absolute,
    aggregation,
    birth,
    distractors,
    recall,
    rope_length,
    scrambling,
    sinks,
    triggers,
)
