"""Positional encodings as logit biases, by the distance query - key or by both positions.

With content held constant, a relative encoding adds `logits(distance)` to the attention logits of each head. Those that
fall off linearly (none, ALiBi, decay) say so through `linear_slopes`, which gives theory an O(N) pull.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Annotated, ClassVar

import numpy as np
from annotated_types import Ge, Gt, Interval
from jaxtyping import Float64, Int64

from posbias.checks import CELLS, Count
from posbias.errors import UsageError, check_most
from posbias.registry import Registry, Spelled

LEFT = dict.fromkeys(
    ("kerple_log", "kerple_power", "t5_buckets", "learned"),
    "no published model whose rollout is known has it; alibi, decay, rope, sinusoidal and key_bias stay",
) | {"recurrent": "alibi(slopes=[...]), one for each head, weighs keys by the same decays"}
"""Encodings that posbias had."""
ENCODINGS: Registry["Encoding"] = Registry("encoding", left=LEFT)

MAX_SLOPE = 700.0
"""Steepest slope: exp(-slope) must stay a normal float64."""
Slope = Annotated[float, Interval(ge=0, le=MAX_SLOPE)]


class Encoding(Spelled, ABC):
    """A bias on attention logits by position, one row per head."""

    relative: ClassVar[bool] = True
    """True if the bias depends on the distance alone."""
    by_head: ClassVar[tuple[tuple[str, int], ...]] = ()
    """Parameters that may be listed per head, by name, with the number of axes that they have then."""

    def logits(self, distance: Int64[np.ndarray, "n"], heads: int) -> Float64[np.ndarray, "heads n"]:
        """The bias at each signed distance query - key, for each head; refused unless the distance decides."""
        raise UsageError(f"encoding {self.name} depends on positions, not on their distance alone")

    def pair_logits(
        self, query: Int64[np.ndarray, "n_queries"], key: Int64[np.ndarray, "n_keys"], heads: int
    ) -> Float64[np.ndarray, "heads n_queries n_keys"]:
        """The bias of every pair of positions, for each head."""
        distance = query[:, None] - key[None, :]
        return self.logits(distance.ravel(), heads).reshape(heads, len(query), len(key))

    def linear_slopes(self, heads: int) -> Float64[np.ndarray, "heads"] | None:
        """Slopes s with logits = -s |distance| for each head, or None if the bias is not linear."""
        return None

    def check_heads(self, heads: int) -> None:
        """Raise UsageError if parameters are listed for another number of heads."""
        for name, ndim in self.by_head:
            listed = getattr(self, name)
            if np.ndim(listed) == ndim and len(listed) != heads:
                raise UsageError(f"{self.name}: {len(listed)} {name} given for {heads} heads; give one per head")


class LinearEncoding(Encoding):
    """An encoding whose bias falls off linearly with distance."""

    @abstractmethod
    def linear_slopes(self, heads: int) -> Float64[np.ndarray, "heads"]:
        """The slope of each head, >= 0, in logits per position."""

    def logits(self, distance: Int64[np.ndarray, "n"], heads: int) -> Float64[np.ndarray, "heads n"]:
        """Minus slope times |distance|."""
        fall: Float64[np.ndarray, "heads n"] = self.linear_slopes(heads)[:, None] * np.abs(distance)[None, :]
        return -fall


@ENCODINGS.register("none")
@dataclass(frozen=True)
class NoEncoding(LinearEncoding):
    """No position information: equal logits, uniform attention over the visible keys."""

    def linear_slopes(self, heads: int) -> Float64[np.ndarray, "heads"]:
        """Zero for every head."""
        return np.zeros(heads)


@ENCODINGS.register("alibi")
@dataclass(frozen=True)
class Alibi(LinearEncoding):
    """ALiBi: head h subtracts slope_h times the distance (arXiv 2108.12409)."""

    by_head = (("slopes", 1),)
    slopes: tuple[Slope, ...] | None = None
    """One per head, in [0, 700] logits per position; None takes the published scheme for any head count."""

    def linear_slopes(self, heads: int) -> Float64[np.ndarray, "heads"]:
        """The given slopes, or the published ones."""
        self.check_heads(heads)
        return np.array(published_alibi_slopes(heads) if self.slopes is None else self.slopes)


@ENCODINGS.register("decay")
@dataclass(frozen=True)
class Decay(LinearEncoding):
    """Every head weighs a key by `rate ** distance` before normalising (the decay mask of arXiv 2502.01951)."""

    rate: Annotated[float, Interval(ge=1e-300, le=1)]
    """Weight kept per position, e^-slope, in (0, 1]; 1 is no encoding."""

    def linear_slopes(self, heads: int) -> Float64[np.ndarray, "heads"]:
        """Minus log of the rate, the same for every head."""
        return np.full(heads, max(0.0, -np.log(self.rate)))


@ENCODINGS.register("rope")
@dataclass(frozen=True)
class Rope(Encoding):
    """Rotary encoding with constant content: logit * mean_k cos(distance * base^(-2k / head_dim) + angle)."""

    base: Annotated[float, Gt(1)] = 10000.0
    """Base of the geometric series of frequencies (> 1)."""
    head_dim: Annotated[Count, Ge(2)] = 64
    """Feature pairs come from this many features (even, >= 2)."""
    logit: Annotated[float, Interval(ge=-MAX_SLOPE / 2, le=MAX_SLOPE / 2)] = 1.0
    """Content logit q.k / sqrt(head_dim) of a query with a key at distance 0 and angle 0."""
    angle: float = 0.0
    """Angle between query and key in every feature pair, before rotation (radians)."""

    def __post_init__(self) -> None:
        if self.head_dim % 2:
            raise UsageError(f"rope: head_dim must be an even number >= 2, got {self.head_dim}")

    def logits(self, distance: Int64[np.ndarray, "n"], heads: int) -> Float64[np.ndarray, "heads n"]:
        """The mean cosine over feature pairs, the same for every head."""
        total = np.zeros(len(distance))
        for pair in range(self.head_dim // 2):
            total += np.cos(distance * self.base ** (-2 * pair / self.head_dim) + self.angle)
        return np.broadcast_to(self.logit * total / (self.head_dim // 2), (heads, len(distance)))


def published_alibi_slopes(heads: int) -> list[float]:
    """ALiBi's slopes for any head count: 2^(-8h/H) for powers of two, else filled up from the next power.

    Source: Press et al. 2022 (their code's `get_slopes`); BLOOM and MPT use the same set.
    """
    power = 2 ** int(np.floor(np.log2(heads)))
    slopes = [2.0 ** (-8 * (head + 1) / power) for head in range(power)]
    extra = [2.0 ** (-8 * (head + 1) / (2 * power)) for head in range(0, 2 * power, 2)]
    return slopes + extra[: heads - power]


@ENCODINGS.register("sinusoidal")
@dataclass(frozen=True)
class Sinusoidal(Encoding):
    """Sines and cosines of the position at `width / 2` frequencies base^(-2k / width) (arXiv 1706.03762).

    They are vectors added to the input: queries and keys without content have the logit p_i.p_j / sqrt(width).
    """

    relative = False
    width: Annotated[Count, Ge(2)] = 64
    """Features (even, >= 2)."""
    base: Annotated[float, Gt(1)] = 10000.0
    """Base of the geometric series of frequencies (> 1)."""

    def __post_init__(self) -> None:
        if self.width % 2:
            raise UsageError(f"sinusoidal: width must be an even number >= 2, got {self.width}")

    def vectors_at(self, positions: Int64[np.ndarray, "n"]) -> Float64[np.ndarray, "n feature"]:
        """The vector added to the input at each position: [sin, cos] pairs side by side, frequency by frequency."""
        check_most("sinusoidal: positions x width", len(positions) * self.width, CELLS)
        angles = positions[:, None] * self.base ** (-2 * np.arange(self.width // 2) / self.width)
        return np.stack([np.sin(angles), np.cos(angles)], axis=-1).reshape(len(positions), self.width)

    def pair_logits(
        self, query: Int64[np.ndarray, "n_queries"], key: Int64[np.ndarray, "n_keys"], heads: int
    ) -> Float64[np.ndarray, "heads n_queries n_keys"]:
        """p_i.p_j / sqrt(width), the same for every head."""
        products = self.width**-0.5 * self.vectors_at(query) @ self.vectors_at(key).T
        return np.broadcast_to(products, (heads, len(query), len(key)))
