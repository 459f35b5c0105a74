"""The input kernel: which positions start with equal vectors.

Different tokens have independent embeddings, equal tokens the same one; learned positions add their variance at i = j,
sinusoids the mean cosine over their frequencies. Of a model of vector inputs the vectors themselves are known.
"""

from typing import Any

import numpy as np
from jaxtyping import Float64, Int

from posbias.errors import UsageError
from posbias.theory.mean_field.bins import Bins, Kernel
from posbias.theory.mean_field.spec import MeanFieldSpec

SINUSOID_BASE = 10000.0


def input_kernel(spec: MeanFieldSpec, bins: Bins, *, token_ids: Int[np.ndarray, "n_positions"] | None = None) -> Kernel:
    """Kernel of the vectors entering the first block (before the embedding norm, if any).

    Args:
        spec: The model.
        bins: Positions in bins.
        token_ids: One prompt of bins.n_positions tokens; None means all tokens differ.
    """
    equal = np.zeros((bins.count, bins.count)) if token_ids is None else _equal_tokens(token_ids, bins)
    block = spec.embedding * equal
    if spec.sinusoidal:
        block = block + _sinusoid_gram(spec.width, bins)
    same = np.full(bins.count, spec.input_power)
    if spec.added is not None:
        # In wide bins the vectors of the position in the middle stand for all.
        middle = spec.added.vectors_at(bins.starts + (bins.sizes - 1) // 2)
        gram = middle @ middle.T / spec.width
        block, same = block + gram, same + np.diagonal(gram)
    if bins.exact:
        np.fill_diagonal(block, same)
    return Kernel(block, same)


def vector_kernel(spec: MeanFieldSpec, bins: Bins, vectors: Float64[np.ndarray, "position feature"]) -> Kernel:
    """Kernel of one prompt of given vectors, which only the network's weights are random beside.

    Args:
        spec: The model.
        bins: One per position.
        vectors: What enters the network, before positions are added to it.

    Raises:
        UsageError: bins of several positions: more than 512 of them.
    """
    if not bins.exact:
        raise UsageError(f"mean field takes given vectors at up to 512 positions, got {bins.n_positions}")
    if spec.added is not None:
        vectors = vectors + spec.added.vectors_at(np.arange(bins.n_positions))
    block = vectors @ vectors.T / spec.width + (spec.input_power - spec.embedding) * np.eye(bins.n_positions)
    return Kernel(block, np.diagonal(block).copy())


def _equal_tokens(token_ids: Int[np.ndarray, "n_positions"], bins: Bins) -> Float64[np.ndarray, "bin bin"]:
    """Share of pairs of different positions from two bins that hold the same token."""
    from scipy.sparse import csr_array

    _, token = np.unique(token_ids, return_inverse=True)
    bin_of = np.repeat(np.arange(bins.count), bins.sizes)
    counts = csr_array((np.ones(len(token)), (bin_of, token)), shape=(bins.count, int(token.max()) + 1))
    counts.sum_duplicates()
    pairs: Any = (counts @ counts.T).toarray()
    possible = bins.sizes[:, None] * bins.sizes[None, :].astype(np.float64)
    inner = np.diagonal(pairs) - bins.sizes
    np.fill_diagonal(pairs, inner)
    np.fill_diagonal(possible, np.maximum(np.diagonal(possible) - bins.sizes, 1))
    return np.asarray(pairs / possible)


def _sinusoid_gram(width: int, bins: Bins) -> Float64[np.ndarray, "bin bin"]:
    """Mean over features of sin sin + cos cos: half the mean cosine of distance times frequency."""
    centres = bins.starts + (bins.sizes - 1) / 2
    frequency = SINUSOID_BASE ** (-2 * np.arange(width // 2) / width)
    waves = np.concatenate([np.sin(centres[:, None] * frequency), np.cos(centres[:, None] * frequency)], axis=1)
    return np.asarray(waves @ waves.T / width)
