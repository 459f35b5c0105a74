"""Absolute position in RoPE attention (arXiv 2606.06160): by the mask's denominator, and by the first token's stream.

A pattern of tokens repeats after a first token, so that two queries, some periods apart, see equal tokens at equal
distances. RoPE alone then gives equal logits; whatever differs knows where the query stands.
"""

from typing import NamedTuple

import numpy as np
from jaxtyping import Float64

from posbias.architecture import Causal, Mask, SlidingWindow
from posbias.statistics import mean_of
from posbias.theory.kernels import masked_softmax
from posbias_papers.claims import Claim, curves
from posbias_papers.kernels import normed
from posbias_papers.pages.verify import CLAIMS, Finding

NETWORKS, WIDTH, HEADS = 40, 64, 4
PERIOD, FIRST_QUERY, LATER = 12, 36, (48, 72, 144)
"""Queries: one after three periods, and others one, three and nine periods further on."""
NEAR = 8
"""Distances at which the two queries' weights and logits are compared: less than a period."""
WINDOW = 10
"""Keys that a query of the changed mask sees, fewer over two layers than lie before the first query."""
EXACT = 1e-10
LEAKS = 0.01
"""Relative difference that counts as a leak."""

Stream = Float64[np.ndarray, "position feature"]


def rotated(features: Float64[np.ndarray, "head position feature"]) -> Float64[np.ndarray, "head position feature"]:
    """RoPE of base 10,000, half against half."""
    half = features.shape[-1] // 2
    angles = np.arange(features.shape[1])[:, None] * 1e4 ** (-np.arange(half) / half)
    first, second = features[..., :half], features[..., half:]
    turned = [first * np.cos(angles) - second * np.sin(angles), second * np.cos(angles) + first * np.sin(angles)]
    return np.concatenate(turned, axis=-1)


def layer(
    stream: Stream, weights: Float64[np.ndarray, "4 width width"], mask: Mask
) -> tuple[Float64[np.ndarray, "head query key"], Float64[np.ndarray, "head query key"], Stream]:
    """Logits, attention, and the stream after one layer."""
    read = normed(stream)
    query, key, value = ((read @ matrix).reshape(len(stream), HEADS, -1).transpose(1, 0, 2) for matrix in weights[:3])
    logits = rotated(query) @ rotated(key).transpose(0, 2, 1) / np.sqrt(WIDTH // HEADS)
    attention = np.stack([masked_softmax(mask.visible(len(stream)), head) for head in logits])
    output = (attention @ value).transpose(1, 0, 2).reshape(stream.shape)
    return logits, attention, stream + output @ weights[3]


def differences(table: Float64[np.ndarray, "head query key"]) -> Float64[np.ndarray, "later"]:
    """Root mean square difference of the later queries' rows from the first's at equal near distances, relative."""
    near = -np.arange(NEAR)
    first = table[:, FIRST_QUERY, FIRST_QUERY + near]
    gaps = [np.square(table[:, query, query + near] - first).mean() for query in LATER]
    return np.asarray(np.sqrt(gaps / np.square(first).mean()))


class Leaks(NamedTuple):
    """Differences of one random network."""

    weights: Float64[np.ndarray, "later"]
    """Of the first layer's attention."""
    logits: float
    """Of the first layer's logits, the largest."""
    deeper: Float64[np.ndarray, "later"]
    """Of the second layer's logits."""
    ratios: Float64[np.ndarray, "head near"]
    """First-layer weights of the last query over the first's."""
    replaced: float
    """Change of the second layer's difference with another first token, relative."""


def leaks(generator: np.random.Generator, mask: Mask) -> Leaks:
    """The rows of queries with equal surroundings in both layers of a random network, for two first tokens."""
    maps = generator.standard_normal((2, 4, WIDTH, WIDTH)) / np.sqrt(WIDTH)
    tokens = generator.standard_normal((PERIOD, WIDTH))[np.resize(np.arange(PERIOD), LATER[-1])]
    first, last = (query - np.arange(NEAR) for query in (FIRST_QUERY, LATER[-1]))
    found, gaps = [], []
    for first_token in generator.standard_normal((2, 1, WIDTH)):
        logits, attention, stream = layer(np.concatenate([first_token, tokens]), maps[0], mask)
        deeper, _, _ = layer(stream, maps[1], mask)
        found.append((logits, attention, deeper))
        gaps.append(deeper[:, LATER[-1], last] - deeper[:, FIRST_QUERY, first])
    logits, attention, deeper = found[0]
    change = float(np.linalg.norm(gaps[0] - gaps[1]))
    return Leaks(
        weights=differences(attention),
        logits=float(differences(logits).max()),
        deeper=differences(deeper),
        ratios=attention[:, LATER[-1], last] / attention[:, FIRST_QUERY, first],
        replaced=change / max(float(np.linalg.norm(gaps[0])), EXACT),
    )


@CLAIMS.register("position-2606.06160/leaks")
class AbsolutePositionLeaks(Claim):
    """RoPE attention knows absolute positions by the mask and by what the first token became."""

    paper = "Where does Absolute Position come from in decoder-only Transformers?, arXiv 2606.06160v1"
    source = "abstract (its 40 % for a replaced first token is of trained models and not tested: random ones here)"
    statement = (
        "RoPE attention tells absolute positions, by the causal softmax's denominator and, deeper, by the stream, into "
        "which the first token enters."
    )
    assumptions = ("causal attention reaches back to the first token", "RoPE", "random weights of 1/sqrt(width)")
    broken_by = f"a window of {WINDOW} keys, so that two layers do not reach the first token"
    computed = (
        "relative difference of first-layer weights at equal distances, nine periods on (95 % {low:.3f} to {high:.3f}; "
        "logits {logits:.0e}); second-layer logits {deeper:.3f} ({deeper_low:.3f} to {deeper_high:.3f})"
    )
    sharper = (
        "first-layer weights at equal distances differ by one factor, the ratio of denominators (to {factor:.0e}; "
        "{ratio:.2f} against {even:.2f} for even attention). Another first token changes {replaced:.2f} of the "
        "second layer's difference"
    )

    def examine(self, generator: np.random.Generator, *, broken: bool) -> Finding:
        """The leaks of random networks."""
        mask: Mask = SlidingWindow(width=WINDOW) if broken else Causal()
        found = [leaks(generator, mask) for _ in range(NETWORKS)]
        weights, deeper, ratios, replaced = (
            np.stack([getattr(network, name) for network in found])
            for name in ("weights", "deeper", "ratios", "replaced")
        )
        logits = max(network.logits for network in found)
        leak, stream, change = (mean_of(rows).interval(least=0.0) for rows in (weights[:, -1], deeper[:, -1], replaced))
        return Finding(
            value=leak.value,
            as_stated=logits < EXACT and min(leak.low, stream.low, change.low) > LEAKS,
            figure=curves(
                "distance of the two queries",
                "relative difference at equal distances of the keys",
                np.array(LATER) - FIRST_QUERY,
                {"first layer, weights": weights.mean(axis=0), "second layer, logits": deeper.mean(axis=0)},
            ),
            numbers={
                "low": leak.low,
                "high": leak.high,
                "logits": logits,
                "deeper": stream.value,
                "deeper_low": stream.low,
                "deeper_high": stream.high,
                "factor": float(np.ptp(ratios / ratios.mean(axis=2, keepdims=True), axis=2).max()),
                "ratio": float(ratios.mean()),
                "even": (FIRST_QUERY + 1) / (LATER[-1] + 1),
                "replaced": change.value,
            },
            instances=NETWORKS,
        )
