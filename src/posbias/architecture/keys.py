"""Key biases: every query adds b_j to the logit of key j, whatever the query and the content.

Attention of a causal head without content is then A_ij = w_j / W_i with w_j = exp(b_j) and W_i = w_0 + ... + w_i. All
that a rollout needs of it are the shares r_j = w_j / W_j (docs/theory, section 7).
"""

from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float64, Int64

from posbias.architecture.encodings import ENCODINGS, Encoding
from posbias.errors import UsageError

MAX_BIAS = 300.0
"""Largest key bias: weights of any two keys must both be normal float64 numbers."""
MAX_ALPHA = 1e12
"""Largest exponent of a gamma key: its shares alpha / (j + alpha) stay exact, whatever the weights would be."""

Shares = tuple[Float64[np.ndarray, "n heads"], Float64[np.ndarray, "n heads"]]
"""r_j and 1 - r_j, each to a few units of the last digit."""
KeyShares = Callable[[int, int], Shares]
"""Shares of the positions low ... high - 1."""


class KeyEncoding(Encoding):
    """An encoding whose bias depends on the key alone."""

    relative = False

    @abstractmethod
    def key_logits(self, n_positions: int, heads: int) -> Float64[np.ndarray, "heads n"]:
        """The bias b_j of the first `n_positions` keys, for each head.

        Raises:
            UsageError: a key that has no bias.
        """

    @abstractmethod
    def parameters(self, heads: int) -> Float64[np.ndarray, "heads parameters"]:
        """What decides each head's bias: heads with equal rows are equal."""

    def key_shares(self, heads: Sequence[int], n_positions: int, n_heads: int) -> KeyShares:
        """The share r_j of a key among the keys up to it, and what it leaves, of some heads by position.

        From running sums of the weights, kept for all positions.
        """
        values = self.key_logits(n_positions, n_heads)[heads].T.astype(np.longdouble)
        weights = np.exp(values - values.max(axis=0))
        total = np.cumsum(weights, axis=0)
        before = np.concatenate([np.zeros_like(total[:1]), total[:-1]])
        share, kept = (weights / total).astype(np.float64), (before / total).astype(np.float64)
        return lambda low, high: (share[low:high], kept[low:high])

    def logits(self, distance: Int64[np.ndarray, "n"], heads: int) -> Float64[np.ndarray, "heads n"]:
        """Refused: distance does not decide."""
        raise UsageError(f"encoding {self.name} depends on the key's position, not on the distance")

    def pair_logits(
        self, query: Int64[np.ndarray, "n_queries"], key: Int64[np.ndarray, "n_keys"], heads: int
    ) -> Float64[np.ndarray, "heads n_queries n_keys"]:
        """The key's bias, for every query."""
        bias = self.key_logits(int(key.max()) + 1 if key.size else 0, heads)[:, key]
        return np.broadcast_to(bias[:, None, :], (heads, len(query), len(key)))


@ENCODINGS.register("key_bias")
@dataclass(frozen=True)
class KeyBias(KeyEncoding):
    """One number per key: logit `values[j]` for key j; contexts are at most as long as the list."""

    values: Sequence[float] | Sequence[Sequence[float]]
    """[position], or [head][position]; natural-log units, each in [-300, 300]."""

    def __post_init__(self) -> None:
        try:
            values = np.asarray(self.values, dtype=np.float64)
        except (TypeError, ValueError):
            values = np.zeros(0)
        if values.ndim not in {1, 2} or values.size == 0:
            raise UsageError("key_bias: values must be a list of numbers, one per position, or [head][position]")
        wrong = values[~(np.abs(values) <= MAX_BIAS)]
        if wrong.size:
            raise UsageError(f"key_bias: values must lie in [-{MAX_BIAS:g}, {MAX_BIAS:g}], got {wrong[0]}")
        plain = tuple(map(tuple, values.tolist())) if values.ndim == 2 else tuple(values.tolist())
        object.__setattr__(self, "values", plain)

    def check_heads(self, heads: int) -> None:
        """Values given per head must be one list per head."""
        if np.ndim(self.values) == 2 and len(self.values) != heads:
            raise UsageError(
                f"key_bias: {len(self.values)} lists of values given for {heads} heads; give one or {heads}"
            )

    def key_logits(self, n_positions: int, heads: int) -> Float64[np.ndarray, "heads n"]:
        """The beginning of the list."""
        self.check_heads(heads)
        values = np.atleast_2d(np.asarray(self.values))
        if n_positions > values.shape[1]:
            raise UsageError(f"key_bias: {values.shape[1]} values given for {n_positions} positions; give one for each")
        return np.broadcast_to(values[:, :n_positions], (heads, n_positions))

    def parameters(self, heads: int) -> Float64[np.ndarray, "heads parameters"]:
        """The values themselves."""
        values = np.atleast_2d(np.asarray(self.values))
        return np.broadcast_to(values, (heads, values.shape[1]))


@ENCODINGS.register("gamma_key")
@dataclass(frozen=True)
class GammaKey(KeyEncoding):
    """Gamma means: w_j = Gamma(j + alpha) / (Gamma(alpha) j!), nearly (j + 1)^(alpha - 1); alpha 1 is no bias.

    A_ij is then a Hausdorff matrix with moments alpha / (alpha + s): such layers commute, and with
    alpha_{l+1} = alpha_l / (1 - m_l), alpha_0 = 1, every row of their rollout is flat at every length
    (docs/theory, section 7).
    """

    alpha: float | Sequence[float]
    """Exponent, > 0 and <= 1e12: above 1 later keys weigh more, below 1 earlier ones; one number, or one per head."""

    def __post_init__(self) -> None:
        try:
            alpha = np.asarray(self.alpha, dtype=np.float64)
        except (TypeError, ValueError):
            alpha = np.full(1, np.nan)
        if alpha.ndim > 1 or not alpha.size or not np.all((alpha > 0) & (alpha <= MAX_ALPHA)):
            raise UsageError(f"gamma_key: alpha must lie in (0, {MAX_ALPHA:g}], one or one per head, got {self.alpha}")
        object.__setattr__(self, "alpha", tuple(alpha.tolist()) if alpha.ndim else float(alpha))

    def check_heads(self, heads: int) -> None:
        """Exponents given as a list must be one per head."""
        if np.ndim(self.alpha) and np.size(self.alpha) != heads:
            raise UsageError(f"gamma_key: {np.size(self.alpha)} alphas given for {heads} heads; give one or {heads}")

    def key_logits(self, n_positions: int, heads: int) -> Float64[np.ndarray, "heads n"]:
        """ln w_j as the sum of ln(1 + (alpha - 1) / k), k = 1 ... j: no difference of two large log-gammas."""
        steps = np.log1p((self.parameters(heads) - 1) / np.arange(1, max(n_positions, 1)))
        logits = np.concatenate([np.zeros((heads, 1)), np.cumsum(steps, axis=1, dtype=np.longdouble)], axis=1)
        return np.asarray(logits[:, :n_positions], dtype=np.float64)

    def parameters(self, heads: int) -> Float64[np.ndarray, "heads parameters"]:
        """alpha, as a column."""
        self.check_heads(heads)
        return np.broadcast_to(np.asarray(self.alpha, dtype=np.float64), (heads,))[:, None]

    def key_shares(self, heads: Sequence[int], n_positions: int, n_heads: int) -> KeyShares:
        """alpha / (j + alpha) and j / (j + alpha)."""
        alpha = self.parameters(n_heads)[heads, 0]

        def shares(low: int, high: int) -> Shares:
            position = np.arange(low, high, dtype=np.float64)[:, None]
            inverse = 1 / (position + alpha)
            return alpha * inverse, position * inverse

        return shares
