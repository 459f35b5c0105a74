"""Verdicts follow the intervals over seeds, and the paired test is the exact one."""

import itertools

import numpy as np
import pytest

from posbias.errors import RunError, UsageError
from posbias.reproduce.findings import Finding, combined, findings_table, tally, weighed
from posbias.reproduce.outcomes import Outcome, Outcomes
from posbias.reproduce.paired import MOST_SIGNS, difference, sign_test


def generator():
    return np.random.default_rng(0)


def of(values):
    return difference(np.asarray(values, dtype=np.float64), generator=generator())


CLEAR, NOISY = of([0.2, 0.25, 0.3, 0.22, 0.28, 0.24]), of([0.2, -0.3, 0.1, -0.2, 0.3, -0.1])


def test_the_paired_test_counts_every_pattern_of_signs():
    values = np.array([0.3, -0.1, 0.2, 0.5, 0.05])
    means = [abs(np.dot(signs, values)) for signs in itertools.product([-1, 1], repeat=5)]
    expected = np.mean(np.array(means) >= abs(values.sum()) - 1e-12)
    assert sign_test(values, generator=generator()) == pytest.approx(expected)
    assert sign_test(np.ones(6), generator=generator()) == 2 / 64
    assert sign_test(np.zeros(6), generator=generator()) == 1
    assert np.isnan(sign_test(np.ones(1), generator=generator()))


def test_many_seeds_draw_the_signs_and_agree_with_the_exact_test():
    values = np.random.default_rng(1).normal(0.25, 1, MOST_SIGNS)
    exact = sign_test(values, generator=generator())
    drawn = sign_test(np.append(values, 0.0), generator=generator())
    assert drawn == pytest.approx(exact, abs=0.02)


def test_verdicts_of_one_test():
    assert CLEAR.supports(1) == "reproduced"
    assert CLEAR.supports(-1) == "not reproduced"
    assert NOISY.supports(1) == "undecided"
    assert of([0.2, 0.25, 0.3]).supports(1) == "undecided", "fewer than six seeds support no claim"


@pytest.mark.parametrize(
    ("tests", "sign", "verdict"),
    [
        ([CLEAR, CLEAR], 1, "reproduced"),
        ([CLEAR, NOISY], 1, "reproduced in part"),
        ([NOISY], 1, "undecided"),
        ([CLEAR, NOISY], -1, "not reproduced"),
    ],
)
def test_verdicts_of_several_tests(tests, sign, verdict):
    assert combined(tests, sign) == verdict


def test_a_statement_nobody_trained_for_is_not_run():
    finding = weighed("Figure 9", "something.", {})
    assert finding.verdict == "not run"
    assert tally([finding, Finding("a", "b", "c", "reproduced")]) == "Of 2 published findings: 1 reproduced, 1 not run."
    assert findings_table([finding]).cells[0][-1] == "not run"


def test_a_finding_carries_its_numbers():
    finding = weighed("Figure 2", "it falls.", {"case": CLEAR}, sign=-1, found="Slope:")
    assert "+0.248" in finding.found
    assert finding.row()["tests"]["case"]["p_value"] == 2 / 64
    assert finding.sentence().endswith("Not reproduced.")


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
    assert table.lost() == ["depth 1, seed 2: diverged"]
    with pytest.raises(RunError, match="0 finished members"):
        table.values("loss", {"depth": 3}, [0])
