"""The form of a curve: contrasts in closed form, calibration of the decisions by simulation, and the whole record."""

import json
from dataclasses import asdict

import numpy as np
import pytest
from scipy import stats

from posbias import UsageError
from posbias.evaluation.curve import (
    PositionCurve,
    contrast_of,
    end_weights,
    middle_loss,
    polynomial_weights,
    position_curve,
    shape_of,
)
from posbias.results.records import plain
from posbias.results.result import from_stored
from posbias.statistics import detectable

RUNS = 400
"""Simulated studies; a rate of 5 % then has a standard error of 1.1 %."""
SLACK = 3 * np.sqrt(0.05 * 0.95 / RUNS)
PLACES = 7


def studies(chances: list[float], *, n_samples: int, seed: int, runs: int = RUNS) -> list[str]:
    """What is decided about simulated answers of samples of different difficulty."""
    generator = np.random.default_rng(seed)
    labels = []
    for _ in range(runs):
        shifts = generator.uniform(-0.15, 0.15, size=(n_samples, 1))
        scores = (generator.random((n_samples, len(chances))) < np.array(chances) + shifts).astype(np.float64)
        labels.append(shape_of(scores).label)
    return labels


def test_contrasts_are_orthogonal_and_in_units_of_the_score() -> None:
    places = np.array([0.0, 4.0, 9.0, 14.0, 19.0, 24.0, 29.0])
    line, bend = polynomial_weights(places)
    scaled = 2 * places / 29 - 1
    assert line.sum() == pytest.approx(0, abs=1e-12)
    assert bend.sum() == pytest.approx(0, abs=1e-12)
    assert line @ bend == pytest.approx(0, abs=1e-12)
    assert line @ places == pytest.approx(29.0), "the change from first to last"
    assert bend @ places == pytest.approx(0, abs=1e-10), "a line has no bend"
    assert bend @ scaled**2 == pytest.approx(1.0), "the height of the ends over the centre"
    fitted = np.polynomial.polynomial.polyfit(scaled, np.cos(places), 2)
    assert bend @ np.cos(places) == pytest.approx(fitted[2])


def test_ends_and_middle_share_out_all_positions() -> None:
    assert end_weights(3).tolist() == [[1, -1, 0], [0, -1, 1]]
    first, last = end_weights(10)
    assert first == pytest.approx(np.r_[[1 / 2] * 2, [-1 / 6] * 6, 0, 0])
    assert last == pytest.approx(first[::-1])


def test_contrast_of_symmetric_samples_is_students_t_test_and_of_others_no_bolder() -> None:
    weights = np.array([1.0, -1.0, 0.5, -0.5])
    half = np.random.default_rng(0).normal(0.2, 1, size=(8, 4))
    scores = np.concatenate([half, 2 * half.mean(axis=0) - half])
    found, wanted = contrast_of(scores, weights), stats.ttest_1samp(scores @ weights, 0.0)
    assert found.p == pytest.approx(wanted.pvalue)
    assert (found.value.low, found.value.high) == pytest.approx(tuple(wanted.confidence_interval(0.95)))
    skewed, student = contrast_of(half, weights), stats.ttest_1samp(half @ weights, 0.0)
    assert skewed.p >= student.pvalue - 1e-12
    assert skewed.value.low <= student.confidence_interval(0.95).low + 1e-12
    assert found.p_one_sided(1) + found.p_one_sided(-1) == pytest.approx(1.0)


@pytest.mark.parametrize("level", [0.2, 0.5, 0.8])
def test_flat_curves_are_called_flat(level: float) -> None:
    labels = studies([level] * PLACES, n_samples=30, seed=1)
    assert 1 - labels.count("flat") / RUNS <= 0.05 + SLACK
    assert labels.count("u") / RUNS <= 0.05


@pytest.mark.parametrize(
    "chances",
    [
        [0.3, 0.3, 0.3, 0.3, 0.3, 0.3, 0.8],  # a leap at the end, where a fitted parabola would have a rising left arm
        [0.8, 0.4, 0.4, 0.4, 0.4, 0.4, 0.4],
        [0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8],
        [0.25, 0.26, 0.28, 0.32, 0.4, 0.55, 0.8],
        [0.3, 0.3, 0.3, 0.7, 0.7, 0.7, 0.7],
    ],
)
def test_monotone_curves_of_any_form_are_not_called_a_u(chances: list[float]) -> None:
    labels = studies(chances, n_samples=80, seed=2)
    assert labels.count("u") / RUNS <= 0.05 + SLACK
    assert labels.count("inverted_u") / RUNS <= 0.05 + SLACK
    trend = "rising" if chances[-1] > chances[0] else "falling"
    assert labels.count(trend) / RUNS > 0.7


def test_shapes_are_found_with_power() -> None:
    deep, wide = [0.8, 0.6, 0.5, 0.5, 0.5, 0.6, 0.75], 200
    assert studies(deep, n_samples=wide, seed=3, runs=100).count("u") > 90
    assert studies([1 - chance for chance in deep], n_samples=wide, seed=4, runs=100).count("inverted_u") > 90
    assert studies([0.4, 0.45, 0.5, 0.55, 0.6], n_samples=wide, seed=5, runs=100).count("rising") > 80
    assert studies([0.3, 0.7], n_samples=wide, seed=6, runs=20).count("rising") == 20, "two positions have a trend"


def test_middle_loss_covers_the_truth() -> None:
    generator, truth, covered, runs = np.random.default_rng(7), 0.25, 0, 300
    for _ in range(runs):
        chances = np.array([0.8, 0.5, 0.5, 0.5, 0.7]) + generator.uniform(-0.15, 0.15, size=(25, 1))
        scores = (generator.random((25, 5)) < chances).astype(np.float64)
        covered += not middle_loss(scores).value.excludes(truth)
    assert 0.91 <= covered / runs <= 0.99


def test_middle_loss_by_hand() -> None:
    scores = np.array([[1.0, 0.0, 1.0], [1.0, 1.0, 0.0]] * 4)
    found = middle_loss(scores)
    assert found.value.value == pytest.approx(0.25)  # samples lose 1 and -1/2
    assert found.p == pytest.approx(stats.ttest_1samp([1.0, -0.5] * 4, 0.0).pvalue)


def test_samples_that_all_agree_count_no_more_than_their_number() -> None:
    agreed = np.tile([1.0, 0.0, 0.0, 0.0, 1.0], (6, 1))
    found = shape_of(agreed)
    assert found.label == "flat", "2^-5 for each of two contrasts, twice that after Holm"
    assert found.p_flat == 2.0**-4
    assert shape_of(np.tile(agreed, (2, 1))).label == "u"
    flat = shape_of(np.full((20, 5), 0.1))
    assert (flat.label, flat.p_flat) == ("flat", 1.0)
    assert shape_of(np.tile([0.1, 0.2, 0.3, 0.4], (20, 1)) * 3).label == "rising"


@pytest.fixture(scope="module")
def curve() -> PositionCurve:
    generator = np.random.default_rng(8)
    scores = (generator.random((150, PLACES)) < [0.8, 0.6, 0.5, 0.5, 0.5, 0.6, 0.75]).astype(np.float64)
    scores[3, 4] = np.nan
    return position_curve(scores, positions=[0, 4, 9, 14, 19, 24, 29])


def test_where_all_means_are_alike_no_position_is_called_the_best() -> None:
    alike = position_curve(np.repeat([[1.0], [0.0], [1.0], [0.0]] * 3, 3, axis=1), positions=(0, 1, 2))
    assert alike.findings[-1].startswith("all positions have the same mean; differences: 0.000 [")


def test_curve_says_what_is_established(curve: PositionCurve) -> None:
    assert (curve.n_samples, curve.n_complete, curve.counts) == (150, 149, (150, 150, 150, 150, 149, 150, 150))
    assert curve.shape is not None
    assert curve.shape.label == "u"
    assert curve.middle_loss is not None
    assert curve.middle_loss.value.low > 0
    assert curve.comparison is not None
    assert len(curve.comparison.differences) == PLACES - 1
    assert curve.findings[0].startswith("a U: both ends are above the middle")
    assert "against the best, 0:" in curve.findings[2]


@pytest.mark.parametrize("n_samples", [0, 1, 2, 3, 5])
def test_few_samples_give_means_and_no_claims(n_samples: int) -> None:
    scores = np.tile([1.0, 0.0, 1.0], (n_samples, 1))
    for values in (scores, scores - 0.5):
        found = position_curve(values, positions=range(3))
        assert (found.comparison, found.shape, found.middle_loss) == (None,) * 3
        (told,) = found.findings
        assert told.startswith(f"{n_samples} samples scored at every one of 3 positions: too few for a claim")


def test_one_and_two_positions() -> None:
    one = position_curve(np.ones((10, 1)), positions=[3])
    assert (one.shape, one.comparison) == (None, None)
    two = position_curve(np.tile([0.0, 1.0], (10, 1)), positions=[0, 1])
    assert two.shape is not None
    assert (two.shape.label, two.middle_loss) == ("rising", None)


def test_wrong_requests_are_refused() -> None:
    scores = np.ones((10, 3))
    for positions in ([0, 1], [0, 2, 1], [0, 1, 1]):
        with pytest.raises(UsageError, match="positions must ascend, one for each of the 3 columns"):
            position_curve(scores, positions=positions)
    with pytest.raises(UsageError, match="infinite"):
        position_curve(scores * np.inf, positions=range(3))


def test_numbers_stay_within_what_scores_can_be() -> None:
    """Log-probabilities end at 0; of a flat curve it is said how many samples would decide."""
    generator = np.random.default_rng(4)
    nats = -generator.exponential(size=(6, 3)) * 3
    curve = position_curve(nats, positions=[0, 1, 2])
    assert max(mean.high for mean in curve.means) == 0.0
    assert max(mean.high for mean in position_curve(nats + 0.5, positions=[0, 1, 2]).means) > 0.5
    answers = np.array([[1, 0, 0], [0, 1, 1], [1, 1, 0], [0, 0, 1], [1, 0, 1], [0, 1, 0]], dtype=np.float64)
    curve = position_curve(answers, positions=[0, 1, 2])
    again = from_stored(PositionCurve, json.loads(json.dumps(plain(asdict(curve)), allow_nan=False)))
    assert again.findings == curve.findings
    difference, samples = curve.deciding
    losses = np.tile(answers, (int(np.ceil(samples / 6)), 1)) @ [0.5, -1, 0.5]
    assert detectable(float(losses.std(ddof=1)), len(losses)) == pytest.approx(difference, rel=0.1)
    assert position_curve(np.tile([1.0, 0, 0], (9, 1)), positions=[0, 1, 2]).deciding is None
