"""How few tokens a set of prompts needs: what begins alike is run once, in the order that makes this possible.

In lexicographic order of their tokens, prompts that share a beginning stand together, and what a prompt shares with
all earlier ones it shares with the one just before. So one cache, cut back and continued, runs each distinct beginning
exactly once: n - shared tokens per prompt, in sum the number of distinct prefixes, which no method that reuses
prefixes can go below.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Int64


@dataclass(frozen=True)
class TokenCount:
    """Tokens of a set of prompts."""

    plain: int
    """Every prompt run whole."""
    floor: int
    """Distinct prefixes: every beginning run once. A prompt that repeats another, or is the beginning of one, still
    runs its last token, whose output is wanted."""


def shared_length(first: Int64[np.ndarray, "_"], second: Int64[np.ndarray, "_"]) -> int:
    """How many tokens two sequences have in common before they first differ."""
    shorter = min(len(first), len(second))
    different = np.flatnonzero(first[:shorter] != second[:shorter])
    return int(different[0]) if len(different) else shorter


def visiting_order(prompts: Sequence[Int64[np.ndarray, "_"]]) -> list[int]:
    """Indices in lexicographic order of the tokens; equal ones keep their order."""
    # Big-endian bytes of non-negative numbers compare as the numbers do.
    return sorted(range(len(prompts)), key=lambda index: prompts[index].astype(">i8").tobytes())


def count_tokens(prompts: Sequence[Int64[np.ndarray, "_"]]) -> TokenCount:
    """What running all prompts takes, whole and with every beginning run once."""
    floor, previous = 0, np.zeros(0, dtype=np.int64)
    for index in visiting_order(prompts):
        floor += len(prompts[index]) - min(shared_length(previous, prompts[index]), len(prompts[index]) - 1)
        previous = prompts[index]
    return TokenCount(plain=sum(len(prompt) for prompt in prompts), floor=floor)
