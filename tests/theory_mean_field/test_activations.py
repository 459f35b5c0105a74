"""Gaussian kernels of activations against two-dimensional quadrature and Monte Carlo."""

from functools import cache

import numpy as np
import pytest

from posbias import UsageError
from posbias.theory.mean_field.bins import ACTIVATIONS, Kernel, recognise

SMOOTH = ["gelu", "gelu_tanh", "silu"]
QUADRATURE_TOLERANCE = 1e-7
"""Of a 200-node rule; the derivative is taken by central differences of step 1e-4."""


def pair(first: float, second: float, correlation: float) -> Kernel:
    covariance = correlation * np.sqrt(first * second)
    return Kernel(np.array([[first, covariance], [covariance, second]]), np.array([first, second]))


@cache
def gauss_rule() -> tuple[np.ndarray, np.ndarray]:
    nodes, weights = np.polynomial.hermite_e.hermegauss(200)
    return nodes, weights / weights.sum()


def quadrature(function, first: float, second: float, correlation: float) -> float:
    nodes, weights = gauss_rule()
    x, y = np.meshgrid(nodes, nodes, indexing="ij")
    left = function(np.sqrt(first) * x)
    right = function(np.sqrt(second) * (correlation * x + np.sqrt(1 - correlation**2) * y))
    return float(weights @ (left * right) @ weights)


@pytest.mark.parametrize("name", SMOOTH)
@pytest.mark.parametrize(
    ("first", "second", "correlation"),
    [(0.1, 0.1, -0.7), (0.1, 0.1, 0.95), (0.09, 0.1, 0.3), (1.0, 0.6, 0.0), (3.0, 2.0, -0.7), (3.0, 2.0, 0.95)],
)
def test_hermite_kernels_equal_quadrature(name, first, second, correlation):
    activation, tolerance = ACTIVATIONS[name], QUADRATURE_TOLERANCE
    forward, backward = activation.kernels(pair(first, second, correlation))

    def slope(x):
        return (activation.value(x + 1e-4) - activation.value(x - 1e-4)) / 2e-4

    expected = quadrature(activation.value, first, second, correlation)
    assert forward.block[0, 1] == pytest.approx(expected, abs=tolerance)
    expected = quadrature(slope, first, second, correlation)
    assert backward.block[0, 1] == pytest.approx(expected, abs=tolerance)
    assert forward.same[0] == pytest.approx(quadrature(activation.value, first, first, 1.0), abs=tolerance)
    assert backward.same[1] == pytest.approx(quadrature(slope, second, second, 1.0), abs=tolerance)


RELUS = {
    # name: (phi, its slope, E[phi^2] and E[slope^2] by variance)
    "relu": (lambda x: np.maximum(x, 0), lambda x: 1.0 * (x > 0), lambda q: q / 2, lambda q: 0.5),
    "relu2": (lambda x: np.maximum(x, 0) ** 2, lambda x: 2 * np.maximum(x, 0), lambda q: 1.5 * q**2, lambda q: 2 * q),
}


@pytest.mark.parametrize("name", RELUS)
@pytest.mark.parametrize("correlation", [-0.5, 0.0, 0.8])
def test_kernels_of_relu_and_its_square_equal_monte_carlo(name, correlation):
    value, slope, power, power_of_slope = RELUS[name]
    first, second = 0.4, 1.5
    generator = np.random.default_rng(0)
    x, z = generator.standard_normal((2, 2_000_000))
    a, b = np.sqrt(first) * x, np.sqrt(second) * (correlation * x + np.sqrt(1 - correlation**2) * z)
    forward, backward = ACTIVATIONS[name].kernels(pair(first, second, correlation))
    for kernel, products in ((forward, value(a) * value(b)), (backward, slope(a) * slope(b))):
        tolerance = 5 * products.std() / np.sqrt(len(products))
        assert kernel.block[0, 1] == pytest.approx(products.mean(), abs=tolerance)
    assert forward.same == pytest.approx([power(first), power(second)])
    assert backward.same == pytest.approx([power_of_slope(first), power_of_slope(second)])


def test_activations_are_recognised_by_their_values():
    for name, activation in ACTIVATIONS.items():
        assert recognise(lambda x, known=activation: known.value(x)) is activation, name
    with pytest.raises(UsageError, match="known: gelu"):
        recognise(np.sin)
