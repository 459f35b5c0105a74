"""Attention masks as graphs: which positions reach every query, directly or through others.

A centre node (Wu et al. 2025, definition 3.1) is a key that every query reaches in some number of layers. Seen from
the walk that starts at a query and steps to keys, the centre nodes are the one closed class, if there is only one.
"""

import numpy as np
from jaxtyping import Bool, Int64

from posbias.errors import UsageError


def centre_nodes(visible: Bool[np.ndarray, "query key"]) -> Int64[np.ndarray, "n_centres"]:
    """Positions that every query attends to, directly or indirectly.

    Args:
        visible: visible[i, j] is true where query i may attend to key j.

    Returns:
        Ascending positions; empty if the mask has no centre (several groups that never look at each other).

    Raises:
        UsageError: the mask is not square, or some query sees no key.
    """
    return np.flatnonzero(reachable(visible).all(axis=0)).astype(np.int64)


def closed_positions(visible: Bool[np.ndarray, "query key"]) -> Int64[np.ndarray, "n_closed"]:
    """Positions whose every reachable key reaches back: where all mass ends, centre or not."""
    closure = reachable(visible)
    returns = (~closure | closure.T).all(axis=1) & closure.diagonal()
    return np.flatnonzero(returns).astype(np.int64)


def reachable(visible: Bool[np.ndarray, "query key"]) -> Bool[np.ndarray, "query key"]:
    """Whether query i reaches key j in one or more layers (the transitive closure, by repeated squaring).

    Raises:
        UsageError: the mask is not square, or some query sees no key.
    """
    if visible.shape[0] != visible.shape[1] or visible.size == 0:
        raise UsageError(f"a mask needs one row and one column per position, got shape {list(visible.shape)}")
    if not visible.any(axis=1).all():
        raise UsageError(f"a mask needs a key for every query; query {int(np.argmin(visible.any(axis=1)))} sees none")
    closure = visible
    while True:
        weights = closure.astype(np.float64)
        wider = closure | (weights @ weights > 0)
        if np.array_equal(wider, closure):
            return np.asarray(closure)
        closure = wider
