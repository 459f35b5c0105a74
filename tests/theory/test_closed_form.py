"""The closed form of uniform causal attention against exact rationals, many digits, and the pulls."""

from fractions import Fraction
from math import comb

import mpmath
import numpy as np
import pytest
from scipy import special

from posbias import Architecture, UsageError, closed_form
from posbias.theory import continuous_profile, rollout_profile
from posbias_papers.birth2603.claims import continuous_density

MIXINGS = {
    "constant": [0.125] * 12,
    "attention_only": [1.0] * 8,
    "rising": np.linspace(0, 1, 9).tolist(),
    "one_layer": [0.5],
    "identity": [0.0] * 3,
}


def hausdorff(n_positions: int, mixing: list[float]) -> list[float]:
    """C(n, j) sum_i (-1)^i C(n-j, i) mu_{j+i}, mu_k = prod_l (1 - m_l + m_l / (k+1)), in exact rationals, n = N - 1."""
    moments = []
    for order in range(n_positions):
        moment = Fraction(1)
        for value in map(Fraction, mixing):
            moment *= 1 - value + value / (order + 1)
        moments.append(moment)
    top = n_positions - 1
    return [
        float(comb(top, j) * sum((-1) ** i * comb(top - j, i) * moments[j + i] for i in range(top - j + 1)))
        for j in range(n_positions)
    ]


@pytest.mark.parametrize("mixing", MIXINGS.values(), ids=MIXINGS)
@pytest.mark.parametrize("n_positions", [1, 2, 3, 60])
def test_equals_the_hausdorff_sum_in_exact_rationals(n_positions: int, mixing: list[float]) -> None:
    got = closed_form(n_positions, range(n_positions), mixing)
    np.testing.assert_allclose(got, hausdorff(n_positions, mixing), rtol=2e-15 * len(mixing) + 1e-15, atol=0)


@pytest.mark.parametrize("mixing", [0.1, 1.0, [layer / 31 for layer in range(32)]])
def test_equals_the_pulls_to_thirteen_digits(mixing: object) -> None:
    architecture = Architecture(depth=32, mixing=mixing)
    pulled = rollout_profile(architecture, n_positions=4096)
    exact = closed_form(4096, np.arange(4096), architecture.layer_mixing)
    np.testing.assert_allclose(pulled, exact, rtol=1e-13, atol=0)


def in_many_digits(n_positions: int, position: int, mixing: list[float]) -> mpmath.mpf:
    """The same sum from polygamma differences at 80 digits."""
    depth = len(mixing)
    steps = [mpmath.mpf(1)]
    for value in map(mpmath.mpf, mixing):
        padded = [*steps, mpmath.mpf(0)]
        steps = [padded[k] * (1 - value) + (padded[k - 1] * value if k else mpmath.mpf(0)) for k in range(len(padded))]
    sums = [mpmath.digamma(n_positions + 1) - mpmath.digamma(position + 1)]
    sums += [mpmath.zeta(r, position + 1) - mpmath.zeta(r, n_positions + 1) for r in range(2, depth + 1)]
    homogeneous = [mpmath.mpf(1)]
    for n in range(1, depth):
        homogeneous.append(sum(sums[r - 1] * homogeneous[n - r] for r in range(1, n + 1)) / n)
    total = sum(steps[k] * homogeneous[k - 1] for k in range(1, depth + 1)) / n_positions
    return total + (steps[0] if position == n_positions - 1 else 0)


@pytest.mark.parametrize("n_positions", [10**6, 10**12, 10**15])
@pytest.mark.parametrize("mixing", [[0.1] * 32, [1.0] * 6], ids=["residual", "attention_only"])
def test_keeps_its_digits_at_any_length(n_positions: int, mixing: list[float]) -> None:
    positions = [0, 1, 50, 71, 72, 10**5, n_positions // 2, n_positions - 3, n_positions - 2, n_positions - 1]
    got = closed_form(n_positions, positions, mixing)
    with mpmath.workdps(120):
        expected = [float(in_many_digits(n_positions, position, mixing)) for position in positions]
    np.testing.assert_allclose(got, expected, rtol=1e-14, atol=0)


def test_published_first_token_masses() -> None:
    """docs/theory, section 2: 0.855 at 12 layers of pure attention over 2048 positions, 0.9999 at 24."""
    assert closed_form(2048, [0], [1.0] * 12)[0] == pytest.approx(0.855, abs=5e-4)
    assert closed_form(2048, [0], [1.0] * 24)[0] == pytest.approx(0.9999, abs=5e-5)


def test_density_is_the_published_laguerre_form() -> None:
    depth, mixing = 9, 0.2
    ratio = mixing / (1 - mixing)
    x = np.linspace(0.01, 1, 50)
    laguerre = special.eval_genlaguerre(depth - 1, 1, ratio * np.log(x))
    np.testing.assert_allclose(
        continuous_density(x, [mixing] * depth), (1 - mixing) ** depth * ratio * laguerre, rtol=1e-12
    )


def test_continuous_profile_integrates_the_density_and_carries_the_atom() -> None:
    mixing = [0.3] * 6
    profile = continuous_profile(200, mixing)
    assert profile.sum() == pytest.approx(1, abs=1e-14)
    assert profile[-1] > 0.7**6
    midpoints = (np.arange(200) + 0.5) / 200
    np.testing.assert_allclose(profile[20:-1], continuous_density(midpoints, mixing)[20:-1] / 200, rtol=1e-3)
    np.testing.assert_allclose(
        continuous_profile(10**5, mixing)[2:-1], closed_form(10**5, np.arange(2, 10**5 - 1), mixing), rtol=0.2
    )


@pytest.mark.parametrize(
    ("call", "complaint"),
    [
        (lambda: closed_form(0, [0], [0.1]), "n_positions must be a whole number >= 1"),
        (lambda: closed_form(5, [5], [0.1]), r"position must lie in 0 ... 4, got 5"),
        (lambda: closed_form(5, [0], [1.5]), r"mixing must lie in \[0, 1\], got 1.5"),
        (lambda: closed_form(5, [0], []), "one value per layer"),
        (lambda: continuous_density(np.array([0.0]), [0.1]), r"\(0, 1\]"),
        (lambda: continuous_profile(0, [0.1]), "n_positions must be a whole number >= 1"),
    ],
)
def test_bad_input_is_named(call: object, complaint: str) -> None:
    with pytest.raises(UsageError, match=complaint):
        call()  # type: ignore[operator]
