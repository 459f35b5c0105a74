"""Key biases: every query adds b_j to the logit of key j, whatever the query and the content.

Attention of a causal head without content is then A_ij = w_j / W_i with w_j = exp(b_j) and W_i = w_0 + ... + w_i. All
that a rollout needs of it are the shares r_j = w_j / W_j (docs/theory, section 7).
"""

from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np
from annotated_types import Interval, MinLen
from jaxtyping import Float64, Int64

from posbias.architecture.encodings import ENCODINGS, MAX_SLOPE, Encoding
from posbias.errors import UsageError

MAX_BIAS = 300.0
"""Largest key bias: weights of any two keys must both be normal float64 numbers."""
MAX_ALPHA = 1e12
"""Largest exponent of a gamma key: its shares alpha / (j + alpha) stay exact, whatever the weights would be."""
Biases = Annotated[tuple[Annotated[float, Interval(ge=-MAX_BIAS, le=MAX_BIAS)], ...], MinLen(1)]
Alpha = Annotated[float, Interval(gt=0, le=MAX_ALPHA)]
Slope = Annotated[float, Interval(ge=-MAX_SLOPE, le=MAX_SLOPE)]
MAX_SPAN = 10_000.0
"""Most nats between the weights of two keys that are summed: an extended float holds e^-11355."""

Vector = Float64[np.ndarray, "heads"]
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
        """The numbers that decide each head's bias: heads with equal rows are equal."""

    def bias_and_slopes(self, n_positions: int, heads: int) -> tuple[Float64[np.ndarray, "heads n"], Vector]:
        """The bias of each head as b_j + slope j, for recursions over keys that take a slope as ALiBi's."""
        return self.key_logits(n_positions, heads), np.zeros(heads)

    def key_shares(self, heads: Sequence[int], n_positions: int, n_heads: int) -> KeyShares:
        """The share r_j of a key among the keys up to it, and the rest 1 - r_j, of some heads by position.

        They come from running sums of the weights, kept for all positions.
        """
        values = self.key_logits(n_positions, n_heads)[heads].T.astype(np.longdouble)
        weights = np.exp(values - values.max(axis=0))
        total = np.cumsum(weights, axis=0)
        before = np.concatenate([np.zeros_like(total[:1]), total[:-1]])
        share, remainder = (weights / total).astype(np.float64), (before / total).astype(np.float64)
        return lambda low, high: (share[low:high], remainder[low:high])

    def pair_logits(
        self, query: Int64[np.ndarray, "n_queries"], key: Int64[np.ndarray, "n_keys"], heads: int
    ) -> Float64[np.ndarray, "heads n_queries n_keys"]:
        """The key's bias, for every query."""
        bias = self.key_logits(int(key.max()) + 1 if key.size else 0, heads)[:, key]
        return np.broadcast_to(bias[:, None, :], (heads, len(query), len(key)))


def _of_heads(values: Any, heads: int) -> Float64[np.ndarray, "heads values"]:
    """One row per head, from one list for all heads or one list for each."""
    table = np.atleast_2d(np.asarray(values))
    return np.broadcast_to(table, (heads, table.shape[1]))


@ENCODINGS.register("key_bias")
@dataclass(frozen=True)
class KeyBias(KeyEncoding):
    """One number per key: logit `values[j]` for key j; contexts are at most as long as the list."""

    by_head = (("values", 2),)
    values: Biases | Annotated[tuple[Biases, ...], MinLen(1)]
    """[position], or [head][position]; natural-log units, each in [-300, 300]."""

    def __post_init__(self) -> None:
        if len({np.size(row) for row in self.values}) > 1:
            raise UsageError("key_bias: values must be one per position, as many for every head")

    def key_logits(self, n_positions: int, heads: int) -> Float64[np.ndarray, "heads n"]:
        """The beginning of the list."""
        values = self.parameters(heads)
        if n_positions > values.shape[1]:
            raise UsageError(f"key_bias: {values.shape[1]} values given for {n_positions} positions; give one for each")
        return values[:, :n_positions]

    def parameters(self, heads: int) -> Float64[np.ndarray, "heads parameters"]:
        """The values themselves."""
        self.check_heads(heads)
        return _of_heads(self.values, heads)


@ENCODINGS.register("gamma_key")
@dataclass(frozen=True)
class GammaKey(KeyEncoding):
    """Gamma means: w_j = Gamma(j + alpha) / (Gamma(alpha) j!), nearly (j + 1)^(alpha - 1); alpha 1 is no bias.

    A_ij is then a Hausdorff matrix with moments alpha / (alpha + s): such layers commute, and with
    alpha_{l+1} = alpha_l / (1 - m_l), alpha_0 = 1, every row of their rollout is flat at every length
    (docs/theory, section 7).
    """

    by_head = (("alpha", 1), ("slope", 1))
    alpha: Alpha | Annotated[tuple[Alpha, ...], MinLen(1)]
    """Exponent, > 0 and <= 1e12: above 1 later keys weigh more, below 1 earlier ones; one number, or one per head."""
    slope: Slope | Annotated[tuple[Slope, ...], MinLen(1)] = 0.0
    """Added per position, in [-700, 700]: a positive one is ALiBi's, minus ALiBi's takes it away; or one per head."""

    def key_logits(self, n_positions: int, heads: int) -> Float64[np.ndarray, "heads n"]:
        """ln w_j + slope j.

        Raises:
            UsageError: a slope so steep that weights of two keys differ by more than 10,000 nats.
        """
        bias, slopes = self.bias_and_slopes(n_positions, heads)
        if n_positions * np.abs(slopes).max() > MAX_SPAN:
            raise UsageError(
                f"gamma_key: slope {slopes[np.abs(slopes).argmax()]:g} over {n_positions} keys is more than "
                f"{MAX_SPAN:g} nats"
            )
        return bias + slopes[:, None] * np.arange(n_positions)

    def bias_and_slopes(self, n_positions: int, heads: int) -> tuple[Float64[np.ndarray, "heads n"], Vector]:
        """ln w_j as the sum of ln(1 + (alpha - 1) / k), k = 1 ... j: no difference of two large log-gammas."""
        alpha, slopes = self.parameters(heads).T
        steps = np.log1p((alpha[:, None] - 1) / np.arange(1, max(n_positions, 1)))
        logits = np.concatenate([np.zeros((heads, 1)), np.cumsum(steps, axis=1, dtype=np.longdouble)], axis=1)
        return np.asarray(logits[:, :n_positions], dtype=np.float64), slopes

    def parameters(self, heads: int) -> Float64[np.ndarray, "heads parameters"]:
        """alpha beside slope."""
        self.check_heads(heads)
        return np.column_stack([np.broadcast_to(np.asarray(column), (heads,)) for column in (self.alpha, self.slope)])

    def key_shares(self, heads: Sequence[int], n_positions: int, n_heads: int) -> KeyShares:
        """alpha / (j + alpha) and j / (j + alpha); with a slope from running sums."""
        if np.any(self.slope):
            return super().key_shares(heads, n_positions, n_heads)
        alpha = self.parameters(n_heads)[heads, 0]

        def shares(low: int, high: int) -> Shares:
            position = np.arange(low, high, dtype=np.float64)[:, None]
            inverse = 1 / (position + alpha)
            return alpha * inverse, position * inverse

        return shares


@ENCODINGS.register("log_spline")
@dataclass(frozen=True)
class LogSpline(KeyEncoding):
    """A natural cubic spline of ln(1 + j): the bias of key j passes through `values[k]` at key `knots[k]`.

    Beyond the last knot it goes on as a straight line in ln(1 + j), a power law, so that it is defined at every length.
    """

    by_head = (("values", 2),)
    values: Biases | Annotated[tuple[Biases, ...], MinLen(1)]
    """[knot], or [head][knot]; natural-log units, each in [-300, 300]."""
    knots: Annotated[tuple[int, ...], MinLen(2)]
    """Keys, rising, at least two; the first is 0."""

    def __post_init__(self) -> None:
        if self.knots[0] != 0 or np.any(np.diff(self.knots) < 1):
            raise UsageError(f"log_spline: knots must be at least two rising whole numbers from 0, got {self.knots}")
        rows = self.values if isinstance(self.values[0], tuple) else (self.values,)
        if any(np.size(row) != len(self.knots) for row in rows):
            raise UsageError(f"log_spline: values must be {len(self.knots)} numbers, one per knot, or [head][knot]")

    def key_logits(self, n_positions: int, heads: int) -> Float64[np.ndarray, "heads n"]:
        """The spline at every key.

        Raises:
            UsageError: two keys' biases differ by more than 600.
        """
        logits = np.asarray(self.parameters(heads) @ log_spline_basis(self.knots, n_positions).T)
        span = float(np.ptp(logits, axis=1).max(initial=0.0))
        if span > 2 * MAX_BIAS:
            raise UsageError(f"log_spline: biases of {n_positions} keys span {span:.4g}; allowed: {2 * MAX_BIAS:g}")
        return logits

    def parameters(self, heads: int) -> Float64[np.ndarray, "heads knots"]:
        """The values."""
        self.check_heads(heads)
        return _of_heads(self.values, heads)


def log_spline_basis(knots: Sequence[int], n_positions: int) -> Float64[np.ndarray, "n knots"]:
    """Natural cubic splines of ln(1 + j), each 1 at one knot and 0 at the others, at the keys 0 ... n - 1."""
    from scipy.interpolate import CubicSpline

    at = np.log1p(np.asarray(knots, dtype=np.float64))
    spline = CubicSpline(at, np.eye(len(at)), bc_type="natural")
    along = np.log1p(np.arange(n_positions))
    beyond = np.maximum(along - at[-1], 0.0)[:, None]
    return np.asarray(spline(np.minimum(along, at[-1])) + beyond * spline(at[-1], 1))
