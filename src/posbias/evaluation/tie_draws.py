"""Bootstrap draws of the contents behind several ties: contents that ties share are drawn together, others alone.

Two models that were asked the same contents do not give independent evidence about contents, so one draw decides for
both; runs of different contents are independent samples.
"""

from collections.abc import Sequence

import numpy as np
from jaxtyping import Float64

from posbias.statistics import draw_weights

Weights = Float64[np.ndarray, "_ _"]
"""One row per draw, one column per content, each row summing to 1."""
Names = tuple[str, ...]


def drawn_together(samples: Sequence[Names | int], *, generator: np.random.Generator) -> list[Weights]:
    """Weights of the contents of every sample, row by row belonging to the same draw.

    Args:
        samples: Names of the contents of each, or how many where none is shared.
        generator: Of the draws.

    Returns:
        For every sample the plain mean in the first row, then the draws; a draw that takes none of a sample's contents
        has NaN there. No draws at all where a sample has a single content and shares none.
    """
    named = [_own(number, sample) for number, sample in enumerate(samples)]
    weights: dict[int, Weights] = {}
    for members in _connected(named):
        together = list(dict.fromkeys(name for member in members for name in named[member]))
        columns = {name: column for column, name in enumerate(together)}
        drawn = draw_weights(len(together), generator=generator)
        for member in members:
            weights[member] = _with_mean(drawn[:, [columns[name] for name in named[member]]])
    fewest = min(len(rows) for rows in weights.values())
    return [weights[number][:fewest] for number in range(len(named))]


def _own(number: int, sample: Names | int) -> Sequence[object]:
    """The names of a sample's contents; numbered ones of its own where it has none."""
    return [(number, row) for row in range(sample)] if isinstance(sample, int) else sample


def _connected(named: Sequence[Sequence[object]]) -> list[list[int]]:
    """Numbers of samples that share contents, directly or by way of others."""
    parts: list[tuple[set[object], list[int]]] = []
    for number, names in enumerate(named):
        own, members = set(names), [number]
        for part in [part for part in parts if part[0] & own]:
            parts.remove(part)
            own, members = own | part[0], [*part[1], *members]
        parts.append((own, members))
    return [sorted(members) for _, members in parts]


def _with_mean(drawn: Weights) -> Weights:
    """The plain mean first, then the draws, each made to sum to 1."""
    totals = drawn.sum(axis=1, keepdims=True)
    shares = np.divide(drawn, totals, out=np.full_like(drawn, np.nan), where=totals > 0)
    return np.concatenate([np.full((1, drawn.shape[1]), 1 / drawn.shape[1]), shares])
