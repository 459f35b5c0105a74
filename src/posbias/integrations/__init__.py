"""Placement in retrieval pipelines: components of LangChain, LlamaIndex and Haystack, each a module of its own.

Each takes the place of the package's own reordering and gives passages the order of `posbias.place` for the model that
will read them, by a finished run of `posbias evaluate` on it.
"""

import math
from collections.abc import Sequence

import numpy as np
from scipy.special import log_expit

from posbias.errors import UsageError
from posbias.evaluation.place import place


def placed_order(scores: Sequence[float | None], run: str) -> tuple[int, ...]:
    """The order in which passages should stand, first to last, as indices of the given ones.

    Args:
        scores: Relevance of every passage, in the order of retrieval. Numbers that are all >= 0 are taken as they are.
            If any is below 0 they are log-odds, as rerankers give them; they rank passages however large they are, and
            become probabilities for what an order is worth. If any is None the order of retrieval alone counts (1,
            1/2, 1/3 ...).
        run: Directory of a run of `posbias evaluate` on the model that reads the passages.

    Returns:
        `Placement.order`: best first unless another order is shown to be better, so passages given best first stay.

    Raises:
        UsageError: a score that is not a finite number, or a run that cannot be used.
    """
    known = [score for score in scores if score is not None]
    wrong = [score for score in known if not math.isfinite(score)]
    if wrong:
        raise UsageError(f"relevance must be finite numbers, got {wrong[0]}")
    if not scores:
        return ()
    relevance = np.array(known) if len(known) == len(scores) else 1 / np.arange(1.0, len(scores) + 1)
    ranks = np.argsort(-relevance, kind="stable")  # probabilities near 1 would tie
    if relevance.min() < 0:
        log_probability = log_expit(relevance)
        relevance = np.exp(log_probability - log_probability.max())
    order = place(relevance[ranks].tolist(), run).order
    return tuple(int(ranks[index]) for index in order)
