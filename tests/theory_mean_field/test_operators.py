"""Cumulative sums equal dense products; bins conserve probability and mass."""

import numpy as np
import pytest

from posbias import UsageError
from posbias.architecture import (
    Alibi,
    Causal,
    Full,
    GammaKey,
    HeadGroup,
    LogSpline,
    NoEncoding,
    Rope,
    SlidingWindow,
)
from posbias.theory.kernels import dense_heads
from posbias.theory.mean_field.bins import (
    Kernel,
    growing_bins,
    head_operators,
    unit_bins,
)

MASKS = [Causal(), SlidingWindow(width=5)]


def dense(mask, encoding, n) -> np.ndarray:
    return dense_heads(HeadGroup(mask, encoding, np.arange(4), 4, np.zeros(4), np.full(4, -np.inf)), n)


def uniform_operator(mask, bins):
    ((share, operator),) = head_operators(mask, NoEncoding(), 4, bins)
    assert share == 1
    return operator


@pytest.mark.parametrize("mask", MASKS, ids=str)
def test_uniform_operator_is_the_normalised_mask(mask):
    n = 17
    visible = mask.visible(n)
    expected = visible / visible.sum(axis=1, keepdims=True)
    operator = uniform_operator(mask, unit_bins(n))
    np.testing.assert_allclose(operator.matrix, expected, rtol=1e-12)
    values = np.random.default_rng(0).standard_normal((n, n))
    symmetric = values @ values.T
    np.testing.assert_allclose(operator.left(values), expected @ values, rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(operator.pull(values), expected.T @ values, rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(operator.average(symmetric), expected @ symmetric @ expected.T, rtol=1e-11, atol=1e-12)
    np.testing.assert_allclose(operator.gather(symmetric), expected.T @ symmetric @ expected, rtol=1e-11, atol=1e-12)


def test_alibi_operators_are_the_softmax_of_their_bias():
    n = 11
    query, key = np.indices((n, n))
    operators = [operator for _, operator in head_operators(Causal(), Alibi(), 4, unit_bins(n))]
    symmetric = np.minimum(query, key) + 1.0
    for slope, operator in zip(Alibi().linear_slopes(4), operators, strict=True):
        weights = np.exp(-slope * np.abs(query - key)) * Causal().visible(n)
        expected = weights / weights.sum(axis=1, keepdims=True)
        np.testing.assert_allclose(operator.matrix, expected, rtol=1e-12)
        np.testing.assert_allclose(operator.average(symmetric), expected @ symmetric @ expected.T, rtol=1e-12)
        np.testing.assert_allclose(operator.gather(symmetric), expected.T @ symmetric @ expected, rtol=1e-12)


@pytest.mark.parametrize(
    ("mask", "encoding", "said"),
    [
        (Full(), NoEncoding(), "causal masks and windows, got full"),
        (Causal(), Rope(), "slopes or key biases, got rope"),
        (SlidingWindow(5), Alibi(), r"slopes without windows, got alibi with sliding_window\(width=5\)"),
        (Causal(), GammaKey(1000.0), r"at most 700 nats; gamma_key\(alpha=1000.0\) spans 963 over 512 positions"),
        (SlidingWindow(5), GammaKey(1000.0), "at most 700 nats"),
    ],
    ids=str,
)
def test_other_attention_is_refused(mask, encoding, said):
    with pytest.raises(UsageError, match=said):
        head_operators(mask, encoding, 4, unit_bins(512))


@pytest.mark.parametrize("mask", MASKS, ids=str)
def test_key_biases_are_the_softmax_of_their_bias_and_equal_heads_are_one(mask):
    n = 11
    keys = GammaKey((3.0, 0.4, 3.0, 3.0))
    operators = head_operators(mask, keys, 4, unit_bins(n))
    mean = sum(share * operator.matrix for share, operator in operators)
    expected = dense(mask, keys, n).mean(axis=0)
    np.testing.assert_allclose(mean, expected, rtol=1e-12)
    symmetric = np.add.outer(np.arange(n), np.arange(n)) - 5.0
    pulled = sum(share * operator.pull(symmetric) for share, operator in operators)
    np.testing.assert_allclose(pulled, expected.T @ symmetric, rtol=1e-12, atol=1e-12)
    if mask == Causal():
        assert sorted(share for share, _ in operators) == [0.25, 0.75]


@pytest.mark.parametrize("mask", MASKS, ids=str)
def test_binned_attention_averages_the_exact_one(mask):
    bins = growing_bins(60, relative_width=0.2)
    assert bins.n_positions == 60
    assert bins.sizes[-1] == 1
    exact = uniform_operator(mask, unit_bins(60)).matrix
    binned = uniform_operator(mask, bins).matrix
    np.testing.assert_allclose(binned.sum(axis=1), 1, rtol=1e-12)
    for a in (0, bins.count // 2, bins.count - 1):
        inside = slice(bins.starts[a], bins.starts[a] + bins.sizes[a])
        by_bin = np.add.reduceat(exact[inside].mean(axis=0), bins.starts)
        np.testing.assert_allclose(binned[a], by_bin, rtol=1e-12, atol=1e-15)


def test_mass_counts_every_pair_of_positions():
    bins = growing_bins(40, relative_width=0.3)
    kernel = Kernel(np.ones((bins.count, bins.count)), np.full(bins.count, 3.0))
    assert kernel.mass(bins).sum() == pytest.approx(40 * 40 + 2 * 40)


def test_spreading_keeps_the_last_position_apart():
    bins = growing_bins(100, relative_width=0.2)
    values = np.ones(bins.count)
    values[-1] = 50
    spread = bins.spread(values)
    assert spread[-1] == 50
    np.testing.assert_allclose(spread[:-1], 1)


@pytest.mark.parametrize("mask", [Causal(), SlidingWindow(width=20)], ids=str)
@pytest.mark.parametrize("bias", [GammaKey(3.0), GammaKey(0.2), LogSpline([0.0, 4.0, -1.0], [0, 7, 63])], ids=str)
def test_smooth_key_biases_on_bins_are_the_mean_rows_of_the_exact_attention(mask, bias):
    check_on_bins(mask, bias)


def test_a_key_bias_with_slopes_keeps_them_apart_on_bins_and_positions():
    check_on_bins(Causal(), GammaKey(2.0, Alibi().linear_slopes(4).tolist()))
    check_on_bins(Causal(), GammaKey(2.0, -3.0))
    # 700 nats over the context: weights by key alone would underflow.
    ((share, operator),) = head_operators(Causal(), GammaKey(2.0, 4.0), 4, unit_bins(200))
    assert share == 1
    np.testing.assert_allclose(operator.matrix.sum(axis=1), 1, rtol=1e-12)


def check_on_bins(mask, bias) -> None:
    n = 90
    bins = growing_bins(n, relative_width=0.2)
    inside = np.repeat(np.arange(bins.count), bins.sizes)[:, None] == np.arange(bins.count)
    operators = head_operators(mask, bias, 4, bins)
    found = [operator.matrix for share, operator in operators for _ in range(round(4 * share))]
    for matrix, exact in zip(found, dense(mask, bias, n), strict=True):
        np.testing.assert_allclose(matrix, inside.T @ exact @ inside / bins.sizes[:, None], rtol=1e-11, atol=1e-15)
