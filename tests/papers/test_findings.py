"""Verdicts follow the intervals over seeds, and the paired test is the exact one."""

import numpy as np
import pytest
from scipy import stats

from posbias import RunError, UsageError
from posbias_papers.findings import Outcome, Outcomes, combined, difference


def of(values):
    return difference(np.asarray(values, dtype=np.float64))


def cases(tests):
    return {f"case {number}": test for number, test in enumerate(tests)}


REVERSED = of([-0.2, -0.25, -0.3, -0.22, -0.28, -0.24])
CLEAR, NOISY = of([0.2, 0.25, 0.3, 0.22, 0.28, 0.24]), of([0.2, -0.3, 0.1, -0.2, 0.3, -0.1])


@pytest.mark.parametrize(
    ("tests", "verdict"),
    [
        ([CLEAR, CLEAR], "reproduced"),
        ([CLEAR, NOISY], "reproduced in part"),
        ([NOISY], "undecided"),
        ([REVERSED, NOISY], "not reproduced"),
    ],
)
def test_verdicts_of_several_tests(tests, verdict):
    assert combined(cases(tests)) == verdict
    assert tests[0].supports() == {"reproduced in part": "reproduced"}.get(verdict, verdict)
    assert of([0.2, 0.25, 0.3]).supports() == "undecided", "fewer than six seeds support no claim"


def test_interval_and_p_are_students():
    values = np.array([0.2, 0.25, 0.3, 0.22, 0.28, 0.24])
    found, wanted = of(values), stats.ttest_1samp(values, 0)
    low, high = wanted.confidence_interval(0.95)
    assert (found.interval.low, found.interval.high) == pytest.approx((low, high))
    assert found.p_value == pytest.approx(wanted.pvalue)
    together = wanted.confidence_interval(1 - 0.05 / 7)
    assert (found.among(7).low, found.among(7).high) == pytest.approx(tuple(together))
    assert of([1.0]).among(3).as_record() == {"value": 1.0, "low": None, "high": None}
    assert of([1.0]).p_value == of([0.0] * 6).p_value == 1, "nothing is known"
    assert str(of([0.0] * 6)) == "+0.000"
    assert of([0.1] * 6).supports() == "reproduced"


def test_that_some_cases_hold_takes_intervals_that_hold_together():
    """One of eight cases just clear of zero is what chance gives; eight of eight just clear are not."""
    just = of([0.09, -0.01, 0.05, 0.08, 0.01, 0.06])
    assert just.supports() == "reproduced"
    assert just.supports(quantities=8) == "undecided"
    assert combined(cases([just] * 8)) == "reproduced"
    assert combined(cases([just] + [NOISY] * 7)) == "undecided"
    assert combined(cases([just, CLEAR] + [NOISY] * 6)) == "reproduced in part"


@pytest.mark.parametrize("count", [1, 8])
def test_without_any_effect_a_statement_is_decided_as_often_as_claimed(count):
    draw = np.random.default_rng(3)
    decided = 0
    for _ in range(400):
        tests = cases([of(draw.normal(size=6)) for _ in range(count)])
        decided += combined(tests) != "undecided"
    assert decided / 400 < 0.08


def test_no_seed_or_a_value_that_is_not_finite_is_refused():
    for values in ([], [np.nan, 1.0]):
        with pytest.raises(UsageError, match="at least one seed and finite values"):
            of(values)


def member(seed, status="done", **factors):
    return Outcome(factors, seed, status, {"loss": np.array(float(seed))})


def test_members_that_failed_are_counted_and_left_out():
    table = Outcomes([member(0, depth=1), member(1, depth=1), member(2, "diverged", depth=1), member(1, depth=2)])
    assert table.seeds(depth=1) == [0, 1]
    assert table.common_seeds({"depth": 1}, {"depth": 2}) == [1]
    assert table.values("loss", {"depth": 1}, [0, 1]).tolist() == [0, 1]
    assert table.levels("depth") == [1, 2]
    assert table.facts()["lost"] == ["depth 1, seed 2: diverged"]
    with pytest.raises(RunError, match="0 finished members"):
        table.values("loss", {"depth": 3}, [0])
