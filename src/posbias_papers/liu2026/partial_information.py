"""Least losses of position copy with partial information, exactly and without sampling.

Tokens are independent and uniform over V, the target is one of C places. Measured losses that lie on one of these lines
say what a model has extracted: nothing, which tokens occur, how often, or how often beside its own.
"""

import math
from collections.abc import Iterator

import numpy as np
from jaxtyping import Float64

from posbias.checks import check_size
from posbias.limits import ITEMS

LONGEST_ENUMERATED = 30
"""Contexts up to here have at most 5604 multisets up to renaming of tokens, few enough to go through."""
BISECTIONS = 60
"""Halvings of the bracket around the best weight of the counts: far below rounding."""


def partial_information_losses(context: int, vocabulary: int) -> dict[str, float]:
    """Least expected cross-entropy for a target before the last place, by what the model knows.

    Args:
        context: Tokens in the context, C >= 2.
        vocabulary: Different tokens, V >= 2.

    Returns:
        `nothing`: ln V.
        `set`: which tokens occur; E ln D with D the number of different tokens (the target is any of them).
        `counts`: how often each occurs; E ln(C / c), with c = 1 + Binomial(C - 1, 1 / V) the target's own count.
        `counts_and_own`: the counts and which token is the last; E ln((C - 1) / c), c = 1 + Binomial(C - 2, 1 / V).
        `counts_linear` (contexts up to 30): the best softmax of logits linear in the counts, as one layer of uniform
        attention without MLP gives them; min over a of E[ln sum_v exp(a c_v) - a c_target].
        Each knows at least as much as the one before, so
        nothing >= set >= counts >= counts_and_own, and nothing >= counts_linear >= counts.

    Raises:
        UsageError: context or vocabulary is below 2.
    """
    check_size("position_copy: context", context, ITEMS, least=2)
    check_size("position_copy: vocabulary", vocabulary, ITEMS, least=2)
    losses = {
        "nothing": math.log(vocabulary),
        "set": float(_distinct_tokens(context, vocabulary) @ np.log(np.arange(1, context + 1))),
        "counts": _counted(context, vocabulary),
        "counts_and_own": _counted(context - 1, vocabulary),
    }
    if context <= LONGEST_ENUMERATED:
        losses["counts_linear"] = _linear_in_counts(context, vocabulary)
    return losses


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


def _distinct_tokens(context: int, vocabulary: int) -> Float64[np.ndarray, "context"]:
    """Probability of 1 ... context different tokens: after each token, the count stays or grows by one."""
    chances = np.zeros(context + 1)
    chances[0] = 1
    counts = np.arange(context + 1)
    for _ in range(context):
        grown = np.roll(chances * np.maximum(0, vocabulary - counts) / vocabulary, 1)
        chances = chances * np.minimum(counts, vocabulary) / vocabulary + grown
    return chances[1:]


def _linear_in_counts(context: int, vocabulary: int) -> float:
    """The convex minimum over the one weight that symmetry leaves, by bisection of its derivative."""
    parts = list(_partitions(context, vocabulary))
    counts = np.array([part + (0,) * (vocabulary - len(part)) for part in parts], dtype=np.float64)
    chances = np.array([_multiset_chance(part, context, vocabulary) for part in parts])

    def loss_and_slope(weight: float) -> tuple[float, float]:
        logits = weight * counts
        partition = np.exp(logits - logits.max(1, keepdims=True))
        total = partition.sum(1, keepdims=True)
        normaliser = (np.log(total) + logits.max(1, keepdims=True))[:, 0]
        squares = (counts**2).sum(1) / context
        expected = (partition / total * counts).sum(1)
        return float(chances @ (normaliser - weight * squares)), float(chances @ (expected - squares))

    low, high = 0.0, 1.0
    while loss_and_slope(high)[1] < 0:
        low, high = high, 2 * high
    for _ in range(BISECTIONS):
        middle = (low + high) / 2
        low, high = (middle, high) if loss_and_slope(middle)[1] < 0 else (low, middle)
    return loss_and_slope((low + high) / 2)[0]


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
