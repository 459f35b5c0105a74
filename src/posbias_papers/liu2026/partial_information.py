"""Least losses of position copy with partial information, exactly and without sampling.

Tokens are independent and uniform over V, the target is one of C places. Measured losses that lie on one of these lines
say what a model has extracted: nothing, how often each token occurs, or how often beside its own.
"""

import math
from collections.abc import Iterator

import numpy as np
from scipy.optimize import minimize_scalar
from scipy.special import logsumexp


def partial_information_losses(context: int, vocabulary: int) -> dict[str, float]:
    """Least expected cross-entropy for a target before the last place, by what the model knows.

    Args:
        context: Tokens in the context, C >= 2, up to 30: multisets of tokens are gone through.
        vocabulary: Different tokens, V >= 2.

    Returns:
        `nothing`: ln V.
        `counts_and_own`: how often each token occurs and which is the last; E ln((C - 1) / c) with c =
        1 + Binomial(C - 2, 1 / V) the target's own count.
        `counts_linear`: the best softmax of logits linear in the counts, as one layer of uniform attention without MLP
        gives them; min over a of E[ln sum_v exp(a c_v) - a c_target].
    """
    return {
        "nothing": math.log(vocabulary),
        "counts_and_own": _counted(context - 1, vocabulary),
        "counts_linear": _linear_in_counts(context, vocabulary),
    }


def _counted(places: int, vocabulary: int) -> float:
    """E ln(places / c), c = 1 + Binomial(places - 1, 1 / vocabulary)."""
    chance = 1 / vocabulary
    return math.fsum(
        math.comb(places - 1, repeats)
        * chance**repeats
        * (1 - chance) ** (places - 1 - repeats)
        * math.log(places / (1 + repeats))
        for repeats in range(places)
    )


def _linear_in_counts(context: int, vocabulary: int) -> float:
    """The convex minimum over the one weight that symmetry leaves."""
    parts = list(_partitions(context, vocabulary))
    counts = np.array([part + (0,) * (vocabulary - len(part)) for part in parts], dtype=np.float64)
    chances = np.array([_multiset_chance(part, context, vocabulary) for part in parts])
    squares = (counts**2).sum(1) / context
    return float(minimize_scalar(lambda weight: chances @ (logsumexp(weight * counts, axis=1) - weight * squares)).fun)


def _partitions(total: int, most_parts: int, largest: int | None = None) -> Iterator[tuple[int, ...]]:
    """Ways to write `total` as falling whole numbers >= 1, at most `most_parts` of them."""
    if total == 0:
        yield ()
        return
    if most_parts == 0:
        return
    for part in range(min(total, largest or total), 0, -1):
        for smaller in _partitions(total - part, most_parts - 1, part):
            yield (part, *smaller)


def _multiset_chance(part: tuple[int, ...], context: int, vocabulary: int) -> float:
    """Probability that the counts, sorted, are `part`: orders of the context times namings of the parts."""
    orders = math.factorial(context) // math.prod(map(math.factorial, part))
    repeats = math.prod(math.factorial(part.count(size)) for size in set(part))
    namings = math.perm(vocabulary, len(part)) // repeats
    return float(orders * namings / vocabulary**context)
