"""RoPE in long contexts (arXiv 2605.15514): do near keys still score higher, and the same token at every distance?

The score of a key k at distance d is s(d) = sum_l Re(q_l conj(k_l) e^(i d theta_l)), theta_l = base^(-l/L) for L
feature pairs. Once the slowest pair has turned many times, phases at two distances are independent and evenly spread:
s(near) and s(far) are exchangeable, and so are both signs of a difference of two keys' scores. Either order then has
probability 1/2, whatever q and k.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from jaxtyping import Complex128, Float64
from scipy.special import ndtr

from posbias.statistics import Interval, mean_of
from posbias_papers.claims import Claim, curves
from posbias_papers.pages.verify import CLAIMS, Finding

PAPER = "RoPE Distinguishes Neither Positions Nor Tokens in Long Contexts, Provably, arXiv 2605.15514v1"
SOURCE = "abstract (the theorems were not at hand: random content and distances are our reading)"
CONTENT = "Gaussian query; a key equal to it or of correlation 0.5"
DISTANCES = "near: the first quarter of the context; much farther: its last quarter"

PAIRS = 64
"""Feature pairs of a head of 128."""
CONTENTS = 200
"""Queries with their keys; intervals are over them."""
DRAWS = 40
"""Pairs of distances per content."""
ALIGNMENTS = (1.0, 0.5)
"""Correlations of key and query: without any no distance is favoured at any length."""
BASE = 1e4
LENGTHS = tuple(2**power for power in (9, 12, 15, 18, 21))
"""Contexts, from a hundredth to forty times the slowest pair's wavelength."""
EVEN = 0.03
"""How far the ends of an interval may lie from 1/2 to count as 1/2."""
TRADED_LENGTH = 2**14
POWERS, BROKEN_POWERS = (1.0, 2.0, 3.0, 4.0), (0.25, 0.5, 0.75, 1.0)
"""Bases, as powers of the context length."""

Heads = Complex128[np.ndarray, "contents pairs"]
Shares = Float64[np.ndarray, "contents"]


def frequencies(base: float) -> Float64[np.ndarray, "pairs"]:
    """Turning angles per position, fastest first."""
    return np.asarray(base ** (-np.arange(PAIRS) / PAIRS))


@dataclass(frozen=True, eq=False)
class Contents:
    """Queries, a key of some correlation with each, an unrelated key, and places in the two quarters (0 to 1)."""

    query: Heads
    keys: Complex128[np.ndarray, "2 contents pairs"]
    near: Float64[np.ndarray, "contents draws"]
    far: Float64[np.ndarray, "contents draws"]

    def failures(self, n_positions: int, base: float) -> tuple[Shares, Shares]:
        """Shares of distance pairs at which the near key scores no higher, and at which the two keys' order turns."""
        quarter = n_positions // 4
        near = self._scores(np.floor(self.near * quarter), base)
        far = self._scores(np.floor(self.far * quarter) + n_positions - quarter, base)
        turned = (near[0] > near[1]) != (far[0] > far[1])
        return (near[0] <= far[0]).mean(axis=1), turned.mean(axis=1)

    def _scores(
        self, distance: Float64[np.ndarray, "contents draws"], base: float
    ) -> Float64[np.ndarray, "2 contents draws"]:
        """Both keys' scores."""
        products = np.swapaxes(self.query * self.keys.conj(), 0, 1)
        angles = frequencies(base)[:, None] * distance[:, None]
        return np.swapaxes(products.real @ np.cos(angles) - products.imag @ np.sin(angles), 0, 1)


def draw_contents(generator: np.random.Generator, alignment: float) -> Contents:
    """Gaussian queries and keys, E |q_l|^2 = 1."""
    parts = generator.standard_normal((3, CONTENTS, PAIRS, 2)) @ np.array([1, 1j]) / np.sqrt(2)
    key = alignment * parts[0] + np.sqrt(1 - alignment**2) * parts[1]
    return Contents(parts[0], np.stack([key, parts[2]]), *generator.random((2, CONTENTS, DRAWS)))


def normal_failure(n_positions: int, base: float, alignment: float) -> float:
    """P(s(near) <= s(far)) if s(near) - s(far) were normal, with its exact mean and variance over content and distance.

    The mean is alignment * sum_l of the difference of the mean cosines; second moments of cosines are cosines at sums
    and differences of frequencies; E |q_l|^4 = 2.
    """
    theta, quarter = frequencies(base), n_positions // 4
    spans = ((0, quarter), (n_positions - quarter, n_positions))
    near, far = (_mean_turn(theta, *span) for span in spans)
    differences, sums = theta[:, None] - theta, theta[:, None] + theta
    moments = sum((_mean_turn(differences, *span) + _mean_turn(sums, *span)).real / 2 for span in spans)
    moments -= np.outer(near.real, far.real) + np.outer(far.real, near.real)
    mean = alignment * (near - far).real.sum()
    noise = (1 - alignment**2) * (1 - (near * far.conj()).real).sum()
    variance = alignment**2 * (moments.sum() + np.trace(moments)) - mean**2 + noise
    return float(ndtr(-mean / np.sqrt(variance)))


def _mean_turn(theta: Float64[np.ndarray, "*values"], first: int, end: int) -> Complex128[np.ndarray, "*values"]:
    """The mean of e^(i d theta) over d = first ... end - 1, a geometric series."""
    half, count = theta / 2, end - first
    still = np.abs(np.sin(half)) < 1e-15
    ratio = np.where(still, 1.0, np.sin(count * half) / np.where(still, 1.0, count * np.sin(half)))
    return np.asarray(np.exp(1j * half * (first + end - 1)) * ratio)


class LostWithLength(Claim):
    """A failure whose probability tends to 1/2 as the context grows."""

    paper = PAPER
    source = SOURCE
    assumptions: ClassVar[tuple[str, ...]] = ("a base that does not grow with the context", CONTENT, DISTANCES)
    broken_by = "the base grows as the square of the context length"
    computed = (
        "distance of the failure's share from 1/2 at {longest:.0f} positions, the larger of two contents (share "
        "{last_share:.3f}, 95 % {last_low:.3f} to {last_high:.3f}; at {shortest:.0f} positions {first_share:.3f}, "
        "{first_low:.3f} to {first_high:.3f})"
    )

    failure: ClassVar[int]
    """Which of `Contents.failures`."""

    def facts(self, found: Mapping[float, Sequence[Interval]], bases: Sequence[float]) -> dict[str, float]:
        """Further numbers of the sharper statement."""
        return {}

    def examine(self, generator: np.random.Generator, *, broken: bool) -> Finding:
        """The failure's share, with its interval over contents, at every length."""
        bases = [float(length) ** 2 if broken else BASE for length in LENGTHS]
        found: dict[float, list[Interval]] = {}
        for alignment in ALIGNMENTS:
            contents = draw_contents(generator, alignment)
            found[alignment] = [
                mean_of(contents.failures(length, base)[self.failure]).interval(least=0.0, most=1.0)
                for length, base in zip(LENGTHS, bases, strict=True)
            ]
        lost = all(shares[-1].low >= 0.5 - EVEN and shares[-1].high <= 0.5 + EVEN for shares in found.values())
        first, *_, last = max(found.values(), key=lambda shares: abs(shares[-1].value - 0.5))
        ends = {"first": first, "last": last}
        numbers = {f"{end}_{name}": getattr(share, name) for end, share in ends.items() for name in ("low", "high")}
        numbers |= {f"{end}_share": share.value for end, share in ends.items()}
        return Finding(
            value=abs(last.value - 0.5),
            as_stated=lost and all(shares[0].high < 0.5 - EVEN for shares in found.values()),
            figure=curves(
                "context length (positions)",
                "share of failures",
                LENGTHS,
                {f"correlation {key:g}": [share.value for share in shares] for key, shares in found.items()},
                log_x=True,
            ),
            numbers={**numbers, "shortest": LENGTHS[0], "longest": LENGTHS[-1], **self.facts(found, bases)},
            instances=CONTENTS * len(ALIGNMENTS),
        )


@CLAIMS.register("rope-2605.15514/locality")
class LostLocality(LostWithLength):
    """Near keys lose their advantage."""

    failure = 0
    statement = "RoPE, growing context: a near key scores no higher than a much farther one with probability -> 1/2."
    sharper = (
        "s(near) - s(far) is near normal: with its exact mean and variance the share is met within {formula_error:.3f} "
        "at every length; advantage lasts to about the slowest pair's wavelength 2 pi base, {wavelength:.0f} positions"
    )

    def facts(self, found: Mapping[float, Sequence[Interval]], bases: Sequence[float]) -> dict[str, float]:
        """The closed form's largest error."""
        errors = [
            abs(share.value - normal_failure(length, base, alignment))
            for alignment, shares in found.items()
            for share, length, base in zip(shares, LENGTHS, bases, strict=True)
        ]
        return {"formula_error": max(errors), "wavelength": 2 * np.pi / float(frequencies(bases[-1])[-1])}


@CLAIMS.register("rope-2605.15514/tokens")
class LostTokens(LostWithLength):
    """A key that wins at one distance loses at another."""

    failure = 1
    statement = "RoPE, growing context: the order of two keys near and far away differs with probability -> 1/2."
    assumptions = (*LostWithLength.assumptions, "the other key is unrelated to the query")


@CLAIMS.register("rope-2605.15514/base")
class BaseTradesPositionsForTokens(Claim):
    """A larger base keeps tokens apart and lets go of positions."""

    paper = PAPER
    source = SOURCE
    statement = "RoPE, a larger base: two tokens change their order less often, near keys fail to win more often."
    assumptions = ("bases of at least the context length", CONTENT, DISTANCES)
    broken_by = "bases below the context length, up to it"
    computed = (
        "change of the share of near keys that score no higher, least of two contents (95 % {low:.3f} to {high:.3f}), "
        "as the base goes from N^{first_power:g} to N^{last_power:g} at N = {length:.0f}; changed orders: "
        "{tokens_first:.3f} to {tokens_last:.3f}"
    )
    sharper = (
        "up to the context length a larger base helps near keys: if the key equals the query the share (normal, exact "
        "moments) is {formula_root:.3f} at base N^0.5, {formula_length:.3f} at N, and {formula_square:.3f} at N^2"
    )

    def examine(self, generator: np.random.Generator, *, broken: bool) -> Finding:
        """Both failures at bases on the same contents and distances, and the intervals of their changes."""
        powers = BROKEN_POWERS if broken else POWERS
        bases = [float(TRADED_LENGTH) ** power for power in powers]
        changes, means = [], []
        for alignment in ALIGNMENTS:
            contents = draw_contents(generator, alignment)
            shares = np.array([contents.failures(TRADED_LENGTH, base) for base in bases])
            changes.append([mean_of(change).interval() for change in shares[-1] - shares[0]])
            means.append(shares.mean(axis=-1))
        least = min(range(len(changes)), key=lambda content: changes[content][0].value)
        positions, tokens = changes[least][0], means[least][:, 1]
        formula = {
            f"formula_{name}": normal_failure(TRADED_LENGTH, float(TRADED_LENGTH) ** power, 1.0)
            for name, power in (("root", 0.5), ("length", 1.0), ("square", 2.0))
        }
        return Finding(
            value=positions.value,
            as_stated=all(position.low > 0 and token.high < 0 for position, token in changes),
            figure=curves(
                "base",
                f"share of failures at {TRADED_LENGTH} positions",
                bases,
                {
                    f"{kind}, correlation {alignment:g}": mean[:, column]
                    for alignment, mean in zip(ALIGNMENTS, means, strict=True)
                    for column, kind in enumerate(("positions", "tokens"))
                },
                log_x=True,
            ),
            numbers={
                "low": positions.low,
                "high": positions.high,
                "length": TRADED_LENGTH,
                "first_power": powers[0],
                "last_power": powers[-1],
                "tokens_first": float(tokens[0]),
                "tokens_last": float(tokens[-1]),
                **formula,
            },
            instances=CONTENTS * len(ALIGNMENTS),
        )
