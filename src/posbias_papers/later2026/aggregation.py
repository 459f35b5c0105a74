"""Value aggregation at initialisation (arXiv 2605.06611): variance by position, and a mask that moves it.

o_i = sum_j A_ij W_V x_j of independent tokens has variance sum_j A_ij^2 times that of a token. Weights of the usual
small size leave attention even, so that a query with n visible keys has 1/n: the first query 1, and a later one too if
a mask lets it see itself alone.
"""

import numpy as np
from jaxtyping import Float64

from posbias.architecture import Causal
from posbias.statistics import mean_of
from posbias.theory.kernels import masked_softmax
from posbias_papers.claims import Claim, curves
from posbias_papers.pages.verify import CLAIMS, Finding

N_POSITIONS = 64
WIDTH = 64
NETWORKS = 200
RESTART = 40
"""Query that the changed mask lets see itself alone."""
SMALL = 0.02
"""Standard deviation of weights, as language models are initialised."""
SHARED = 3.0
"""Size of the direction that all tokens share if independence is violated; each one's own part has size 1."""
TOLERANCE = 0.1
"""Relative error of a position's mean variance; the noise of 200 networks is 0.015."""


def aggregated_variance(
    generator: np.random.Generator, *, weight: float, shared: float = 0.0
) -> Float64[np.ndarray, "networks masks n_positions"]:
    """Mean squares of aggregated values over the network's mean square of values, causal and with the restart.

    Args:
        generator: Source of tokens and weights.
        weight: Standard deviation of query, key and value weights.
        shared: Size of a direction that all tokens of a network share.
    """
    causal = Causal().visible(N_POSITIONS)
    restarted = causal.copy()
    restarted[RESTART] = np.arange(N_POSITIONS) == RESTART
    variance = np.empty((NETWORKS, 2, N_POSITIONS))
    for network in range(NETWORKS):
        tokens = generator.standard_normal((N_POSITIONS, WIDTH)) + shared * generator.standard_normal(WIDTH)
        query, key, value = tokens @ (weight * generator.standard_normal((3, WIDTH, WIDTH)))
        for index, visible in enumerate((causal, restarted)):
            outputs = masked_softmax(visible, query @ key.T / np.sqrt(WIDTH)) @ value
            variance[network, index] = np.square(outputs).mean(axis=1) / np.square(value).mean()
    return variance


@CLAIMS.register("aggregation-2605.06611/variance")
class VarianceByPosition(Claim):
    """Aggregation favours the first position in variance, or whichever a mask isolates."""

    paper = (
        "The Structural Origin of Attention Sink: Variance Discrepancy, Super Neurons, and Dimension Disparity, arXiv "
        "2605.06611v1"
    )
    source = "abstract (its sinks are of trained models: here the first link alone, at initialisation)"
    statement = (
        "Aggregated values vary most at the first position; a mask that isolates another gives it the same variance."
    )
    assumptions = ("initialisation: one layer, small weights", "independent tokens")
    broken_by = f"all tokens share a direction {SHARED:g} times their own size"
    computed = (
        "largest relative error of variance = 1 / visible keys, over positions and both masks (position {restart:.0f} "
        "isolated: {isolated:.3f} of a value's variance, 95 % {isolated_low:.3f} to {isolated_high:.3f}; the last: "
        "{last:.4f}, {last_low:.4f} to {last_high:.4f})"
    )
    sharper = (
        "weights of 1/sqrt(d) give the last position {large_last:.3f}, e/N + 1/d = {large_formula:.3f}: uneven weights "
        "average less, and values follow the query"
    )

    def examine(self, generator: np.random.Generator, *, broken: bool) -> Finding:
        """Mean squares of one layer's outputs over random networks, beside 1 / visible keys."""
        variance = aggregated_variance(generator, weight=SMALL, shared=SHARED if broken else 0.0)
        visible = np.tile(np.arange(1, N_POSITIONS + 1), (2, 1))
        visible[1, RESTART] = 1
        mean = variance.mean(axis=0)
        error = float(np.abs(mean * visible - 1).max())
        isolated, last = (mean_of(units).interval(least=0.0) for units in (variance[:, 1, RESTART], variance[:, 0, -1]))
        large = aggregated_variance(generator, weight=1 / np.sqrt(WIDTH))[:, 0, -1].mean()
        return Finding(
            value=error,
            as_stated=error <= TOLERANCE,
            figure=curves(
                "position",
                "variance over a value's",
                np.arange(N_POSITIONS),
                {"causal": mean[0], f"position {RESTART} isolated": mean[1], "1 / visible keys": 1 / visible[1]},
                log_y=True,
            ),
            numbers={
                "restart": RESTART,
                "isolated": isolated.value,
                "isolated_low": isolated.low,
                "isolated_high": isolated.high,
                "last": last.value,
                "last_low": last.low,
                "last_high": last.high,
                "large_last": float(large),
                "large_formula": np.e / N_POSITIONS + 1 / WIDTH,
            },
            instances=NETWORKS,
        )
