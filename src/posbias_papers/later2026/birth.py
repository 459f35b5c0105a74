"""Untrained networks contract (arXiv 2602.05927): states of unrelated sequences share a direction that the seed draws.

MLPs with an activation that is not odd add the same vector, on average, whatever they read; attention averages what
tokens have of their own, and leaves what they share. Without attention the cosine of two states follows from the
arc-cosine kernel of relu, rho -> (K rho + g F(rho)) / (K + g F(1)), K -> K + g F(1), F of one half at equal inputs.
"""

from collections.abc import Callable

import numpy as np
from jaxtyping import Float64

from posbias.architecture import Causal
from posbias.statistics import mean_of
from posbias_papers.claims import Claim, curves
from posbias_papers.kernels import even_kernel, normed
from posbias_papers.pages.verify import CLAIMS, Finding

NETWORKS, SEQUENCES, N_POSITIONS = 24, 12, 32
WIDTH, HIDDEN, DEPTH = 64, 256, 6
ODD = 0.05
"""Cosines below this count as no shared direction: unrelated vectors of 64 features have 0.125 either way, the mean of
66 pairs and 24 networks 0.01."""

States = Float64[np.ndarray, "depth sequences width"]


def last_states(
    generator: np.random.Generator, activation: Callable[[np.ndarray], np.ndarray], *, attends: bool
) -> States:
    """States of the last position after each block of one network, for unrelated sequences."""
    stream = generator.standard_normal((SEQUENCES, N_POSITIONS, WIDTH))
    mean = even_kernel(Causal().visible(N_POSITIONS))
    states = []
    for _ in range(DEPTH):
        value, up, down = (
            generator.standard_normal((rows, columns)) / np.sqrt(rows)
            for rows, columns in ((WIDTH, WIDTH), (WIDTH, HIDDEN), (HIDDEN, WIDTH))
        )
        if attends:
            stream = stream + mean @ normed(stream) @ value
        stream = stream + activation(normed(stream) @ up) @ down
        states.append(stream[:, -1])
    return np.stack(states)


def mean_cosine(states: States) -> Float64[np.ndarray, "depth"]:
    """Mean cosine of two sequences' states."""
    unit = states / np.linalg.norm(states, axis=-1, keepdims=True)
    total = np.square(unit.sum(axis=1)).sum(axis=-1)
    return np.asarray((total - SEQUENCES) / (SEQUENCES * (SEQUENCES - 1)))


def relu_cosine() -> Float64[np.ndarray, "depth"]:
    """The cosine after each MLP without attention, in the limit of wide networks."""
    power, shared, cosines = 1.0, 0.0, []
    for _ in range(DEPTH):
        angle = np.arccos(shared / power)
        shared += (np.sin(angle) + (np.pi - angle) * np.cos(angle)) / (2 * np.pi)
        power += 0.5
        cosines.append(shared / power)
    return np.array(cosines)


@CLAIMS.register("birth-2602.05927/contraction")
class Contraction(Claim):
    """Unrelated sequences come to look alike before any training."""

    paper = (
        "Transformers Are Born Biased: Structural Inductive Biases at Random Initialization and Their Practical "
        "Consequences, arXiv 2602.05927v1"
    )
    source = "abstract (preferred tokens, persistence through training and the link to sinks are not tested)"
    statement = (
        "Untrained, states of unrelated sequences share a direction that depends on the seed; attention strengthens it."
    )
    assumptions = ("an activation that is not odd (relu)", "even attention, one causal mean per block")
    broken_by = "an odd activation (tanh)"
    computed = (
        "mean cosine of the last states of two sequences, {depth:.0f} blocks (95 % {low:.3f} to {high:.3f}); without "
        "attention {alone:.3f} ({alone_low:.3f} to {alone_high:.3f}); of two networks' mean states {between:.3f}"
    )
    sharper = "without attention the arc-cosine kernel gives {formula:.3f}: the MLPs' part needs no simulation"

    def examine(self, generator: np.random.Generator, *, broken: bool) -> Finding:
        """Cosines within random networks, with and without attention, and between networks."""
        activation: Callable[[np.ndarray], np.ndarray] = np.tanh if broken else lambda x: np.maximum(x, 0.0)
        found = {}
        for attends in (True, False):
            runs = [last_states(generator, activation, attends=attends) for _ in range(NETWORKS)]
            found[attends] = np.stack([mean_cosine(states) for states in runs])
            if attends:
                directions = np.stack([states[-1].mean(axis=0) for states in runs])
        directions /= np.linalg.norm(directions, axis=1, keepdims=True)
        between = (directions @ directions.T)[np.triu_indices(NETWORKS, 1)]
        whole, alone = (mean_of(found[attends][:, -1]).interval() for attends in (True, False))
        return Finding(
            value=whole.value,
            as_stated=alone.low > ODD and whole.low > alone.high and abs(float(between.mean())) < ODD,
            figure=curves(
                "block",
                "cosine of two sequences' states",
                np.arange(1, DEPTH + 1),
                {
                    "with attention": found[True].mean(axis=0),
                    "without": found[False].mean(axis=0),
                    "relu, arc-cosine": relu_cosine(),
                },
            ),
            numbers={
                "depth": DEPTH,
                "low": whole.low,
                "high": whole.high,
                "alone": alone.value,
                "alone_low": alone.low,
                "alone_high": alone.high,
                "between": float(between.mean()),
                "formula": float(relu_cosine()[-1]),
            },
            instances=2 * NETWORKS,
        )
