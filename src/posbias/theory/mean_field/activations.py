"""Gaussian averages of an activation: F = E[phi(a) phi(b)] and F' = E[phi'(a) phi'(b)], (a, b) jointly Gaussian.

Smooth activations by normalised Hermite expansion: phi(sqrt(q) z) = sum_k c_k(q) h_k(z) gives
F = sum_k c_k(q_i) c_k(q_j) rho^k, and F' needs no derivative, since E[phi'(sqrt(q) z) h_k] = sqrt((k+1)/q) c_{k+1}.
relu and its square by the arc-cosine kernels.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import numpy as np
from jaxtyping import Float64
from scipy.special import erf, expit

from posbias.errors import UsageError
from posbias.theory.mean_field.bins import Kernel

MAX_TERMS = 64
"""Longest Hermite expansion; gelu and silu need 10 to 30 terms at variances below 4."""
TAIL = 1e-12
"""The expansion stops when all further terms together weigh less than this share of E[phi^2]."""
NODES = 160
"""Gauss-Hermite nodes for the coefficients: exact for products of degree below 320."""
SMALLEST_VARIANCE = 1e-12
"""Below this the activation is linear to double precision, and c_1/sqrt(q) would lose its digits."""

Values = Float64[np.ndarray, "..."]
Function = Callable[[Values], Values]


@dataclass(frozen=True)
class Activation:
    """An elementwise nonlinearity with its two Gaussian kernels."""

    value: Function
    closed: Callable[[Kernel], tuple[Kernel, Kernel]] | None = None
    """Its kernels in closed form; None: the Hermite expansion, whose coefficients must decay fast."""

    def kernels(self, covariance: Kernel) -> tuple[Kernel, Kernel]:
        """F and F' for pre-activations with this covariance; variances are `covariance.same` (> 0)."""
        if self.closed is not None:
            return self.closed(covariance)
        variance = np.maximum(covariance.same, SMALLEST_VARIANCE)
        coefficients = self.coefficients(variance)
        slopes = coefficients[1:] * np.sqrt(np.arange(1, len(coefficients)))[:, None] / np.sqrt(variance)
        deviation = np.sqrt(variance)
        forward, backward = np.empty_like(covariance.block), np.empty_like(covariance.block)
        rows = max(1, 2**16 // len(variance))  # a strip of rows stays in the cache over all terms
        for first in range(0, len(variance), rows):
            strip = slice(first, first + rows)
            correlation = covariance.block[strip] / deviation[strip, None] / deviation[None, :]
            forward[strip] = _series(coefficients, correlation, strip)
            backward[strip] = _series(slopes, correlation, strip)
        correlation = covariance.same / variance
        return (
            Kernel(forward, _diagonal_series(coefficients, correlation)),
            Kernel(backward, _diagonal_series(slopes, correlation)),
        )

    def coefficients(self, variance: Float64[np.ndarray, "position"]) -> Float64[np.ndarray, "term position"]:
        """c_k(q) = E[phi(sqrt(q) z) h_k(z)] at every variance q, as many terms as the tail asks for."""
        nodes, weights, polynomials = _hermite()
        values = self.value(nodes[:, None] * np.sqrt(variance)[None, :])
        coefficients = (polynomials * weights) @ values
        power = np.max(coefficients**2, axis=1) * np.arange(1, len(coefficients) + 1)  # as F' weighs them
        tail = np.cumsum(power[::-1])[::-1]
        needed = int(np.count_nonzero(tail > TAIL * power.sum()))
        return np.asarray(coefficients[: max(needed, 2)])


def relu_kernels(covariance: Kernel) -> tuple[Kernel, Kernel]:
    """Kernels of max(x, 0), t the angle: F = sqrt(q q') (sin t + (pi - t) cos t) / 2 pi, F' = (pi - t) / 2 pi.

    Source: arc-cosine kernels of degree 1 and 0 (Cho and Saul 2009).
    """
    scale, cosine, angle = _angles(covariance)
    forward = scale * _first_order(cosine, angle)
    backward = (np.pi - angle) / (2 * np.pi)
    return Kernel(forward, covariance.same / 2), Kernel(backward, np.full_like(covariance.same, 0.5))


def squared_relu_kernels(covariance: Kernel) -> tuple[Kernel, Kernel]:
    """Kernels of max(x, 0)^2: F = q q' (3 sin t cos t + (pi - t) (1 + 2 cos^2 t)) / 2 pi, F' four times F of relu.

    Source: arc-cosine kernels of degree 2 and 1 (Cho and Saul 2009).
    """
    scale, cosine, angle = _angles(covariance)
    second_order = 3 * np.sqrt(1 - cosine**2) * cosine + (np.pi - angle) * (1 + 2 * cosine**2)
    forward = scale**2 * second_order / (2 * np.pi)
    backward = 4 * scale * _first_order(cosine, angle)
    return Kernel(forward, 1.5 * covariance.same**2), Kernel(backward, 2 * covariance.same)


def _angles(covariance: Kernel) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """sqrt(q q'), cos t and t."""
    deviation = np.sqrt(np.maximum(covariance.same, SMALLEST_VARIANCE))
    cosine = np.clip(covariance.block / deviation[:, None] / deviation[None, :], -1.0, 1.0)  # round-off only
    return deviation[:, None] * deviation[None, :], cosine, np.arccos(cosine)


def _first_order(cosine: Values, angle: Values) -> Values:
    """(sin t + (pi - t) cos t) / 2 pi."""
    return np.asarray((np.sqrt(1 - cosine**2) + (np.pi - angle) * cosine) / (2 * np.pi))


ACTIVATIONS: dict[str, Activation] = {
    "relu": Activation(lambda x: np.asarray(np.maximum(x, 0.0)), relu_kernels),
    "relu2": Activation(lambda x: np.asarray(np.maximum(x, 0.0) ** 2), squared_relu_kernels),
    "gelu": Activation(lambda x: np.asarray(0.5 * x * (1 + erf(x / np.sqrt(2))))),
    "gelu_tanh": Activation(lambda x: np.asarray(0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3))))),
    "quick_gelu": Activation(lambda x: np.asarray(x * expit(1.702 * x))),
    "silu": Activation(lambda x: np.asarray(x * expit(x))),
    "tanh": Activation(np.tanh),
    "sigmoid": Activation(lambda x: np.asarray(expit(x))),
    "identity": Activation(lambda x: x),
}
"""Activations by name; `gelu_tanh` is the form of GPT-2, BLOOM and Gemma."""
PROBE_POINTS = np.linspace(-4.0, 4.0, 81)
MATCH_TOLERANCE = 1e-4
"""Float32 activations agree with ours to 1e-6; the two gelus differ by 5e-4."""


def recognise(function: Function) -> Activation:
    """The known activation that takes the same values as `function` on [-4, 4].

    Raises:
        UsageError: no known activation does; the message lists them.
    """
    values = function(PROBE_POINTS)
    for activation in ACTIVATIONS.values():
        if np.max(np.abs(activation.value(PROBE_POINTS) - values)) < MATCH_TOLERANCE:
            return activation
    raise UsageError(f"mean field knows no kernel for this activation; known: {', '.join(sorted(ACTIVATIONS))}")


@cache
def _hermite() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Gauss-Hermite nodes, probability weights and normalised Hermite polynomials [term, node] at the nodes."""
    nodes, weights = np.polynomial.hermite_e.hermegauss(NODES)
    weights = weights / weights.sum()
    polynomials = np.empty((MAX_TERMS, NODES))
    polynomials[0], polynomials[1] = 1.0, nodes
    for k in range(1, MAX_TERMS - 1):
        polynomials[k + 1] = (nodes * polynomials[k] - np.sqrt(k) * polynomials[k - 1]) / np.sqrt(k + 1)
    return nodes, weights, polynomials


def _series(
    coefficients: Float64[np.ndarray, "term bin"], correlation: Float64[np.ndarray, "row bin"], rows: slice
) -> Float64[np.ndarray, "row bin"]:
    """sum_k c_k(i) c_k(j) rho_ij^k by Horner's rule for a strip of rows."""
    total = np.zeros_like(correlation)
    for terms in coefficients[::-1]:
        total *= correlation
        total += terms[rows, None] * terms[None, :]
    return total


def _diagonal_series(
    coefficients: Float64[np.ndarray, "term bin"], correlation: Float64[np.ndarray, "bin"]
) -> Float64[np.ndarray, "bin"]:
    """sum_k c_k(i)^2 rho_ii^k (rho_ii is 1 but for vanishing variances)."""
    powers = correlation[None, :] ** np.arange(len(coefficients))[:, None]
    return np.asarray((coefficients**2 * powers).sum(axis=0))
