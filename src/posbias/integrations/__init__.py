"""Placement in retrieval pipelines: components of LangChain, LlamaIndex and Haystack, each a module of its own.

Each takes the place of the package's own reordering and gives passages the order of `posbias.place` for the model that
will read them, by a finished run of `posbias evaluate` on it.
"""

import math
from collections.abc import Sequence

from scipy.special import expit

from posbias.errors import UsageError
from posbias.evaluation import place


def placed_order(scores: Sequence[float | None], run: str) -> tuple[int, ...]:
    """The order in which passages should stand, first to last, as indices of the given ones.

    Args:
        scores: Relevance of every passage, in the order of retrieval. Numbers that are all >= 0 are taken as they are.
            If any is below 0 they are log-odds, as rerankers give them, and become probabilities. If any is None the
            order of retrieval alone counts (1, 1/2, 1/3 ...).
        run: Directory of a run of `posbias evaluate` on the model that reads the passages.

    Raises:
        UsageError: a score that is not a finite number, or a run that cannot be used.
    """
    known = [score for score in scores if score is not None]
    wrong = [score for score in known if not math.isfinite(score)]
    if wrong:
        raise UsageError(f"relevance must be finite numbers, got {wrong[0]}")
    if len(known) < len(scores):
        relevance = [1 / rank for rank in range(1, len(scores) + 1)]
    elif min(known, default=0.0) < 0:
        relevance = expit(known).tolist()
    else:
        relevance = known
    return tuple(place(relevance, run).order) if relevance else ()
