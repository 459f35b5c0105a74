"""Correlations over several runs: ranks and permutations within each; runs that asked the same are drawn together.

Rank correlations are the textbook's; holding position fixed removes what position alone explains.
"""

import hashlib
from dataclasses import replace

import numpy as np
import pytest
from scipy.stats import rankdata, spearmanr

import posbias as pb
from behaviour_runs import GOLD, PLACES, saved
from conftest import json_lines, refused
from posbias import CorrelateOptions, correlate, write_report
from posbias.evaluation.correlate import CONTROLS, Pair, check_different, correlate_pairs, source_of
from posbias.evaluation.evaluation import Evaluation
from posbias.results.result import report_of


def test_pooling_is_the_correlation_of_the_runs_tables_ranked_each_by_itself(tmp_path):
    runs = [saved(), saved(model="other", level=7.0)]
    result = correlate(runs, options=CorrelateOptions(seed=3))
    (entry,) = result.pooled
    pairs = [Pair(run.record.arrays[GOLD], run.tables["logprob"], PLACES, len(PLACES), "samples") for run in runs]
    expected = correlate_pairs(pairs, seed=3)
    for ours, theirs in zip(entry.correlations["logprob"].correlations, expected.correlations, strict=True):
        assert ours.value.as_record() == theirs.value.as_record()
        np.testing.assert_equal(ours.p, theirs.p)
    assert entry.correlations["logprob"].of("nothing").value.value == pytest.approx(1)
    again = pb.load_record(result.save(tmp_path))
    assert (again.groups, again.pooled) == (result.groups, result.pooled)


@pytest.mark.parametrize("again", [{}, {"seed": 1}, {"seed": 1, "count": 12}])
def test_one_model_and_task_is_read_once(again):
    with refused("of one model and task ", "; give one, with as many samples as both"):
        correlate([saved(), saved(**again)])
    check_different([saved(), saved(task="key_value(pairs=6)"), saved(model="other")])


def test_runs_share_samples_by_task_file_and_seed():
    def source(data=None, task="documents(documents=5, file='pairs.jsonl')", **given):
        return source_of(replace(saved(task=task, **given), file_sha256=data))

    assert source("a") == source("a", seed=1, model="other") != source("b"), "lines are the same whatever the seed"
    needles = "needle(depths=5, corpus='text.txt')"
    assert source("a", needles) != source("a", needles, seed=1), "seeds choose from a text"
    assert source(task="key_value(pairs=5)") == source(task="key_value(pairs=5)", model="other", count=5)


def test_a_file_is_known_by_what_it_holds(long_model, tmp_path):
    documents = [{"text": "1", "is_gold": True}, {"text": "2"}]
    path = json_lines(tmp_path / "pairs.jsonl", {"question": "q", "answers": ["1"], "documents": documents})
    options = pb.EvaluateOptions(count=1, generate=False)
    found = pb.evaluate(long_model, f"documents(documents=2, file={path!r})", options=options)
    assert found.task == "documents(documents=2, file='pairs.jsonl')"
    assert found.file_sha256 == hashlib.sha256((tmp_path / "pairs.jsonl").read_bytes()).hexdigest()
    assert pb.evaluate(long_model, "key_value(pairs=2)", options=options).file_sha256 is None


def test_what_is_not_such_a_run_is_refused(tmp_path):
    pb.Record(verb="measure", arguments={}).save(tmp_path / "measured")
    failed = pb.Record(verb="evaluate", arguments={}, status="failed")
    failed.save(tmp_path / "failed")
    for runs, complaint in (
        ([replace(saved(), series=())], "without influence"),
        ([Evaluation(failed)], "without influence"),
        ([tmp_path / "measured"], "finished run of posbias audit --behaviour, got 'measure' (done)"),
        ([tmp_path / "failed"], "got 'evaluate' (failed)"),
        ([], "at least 1"),
        ([tmp_path], "holds no posbias run"),
    ):
        with refused(complaint):
            correlate(runs)


def test_a_single_sample_beside_others_gives_no_interval_and_no_claim():
    result = correlate([saved(count=1), saved(model="other")])
    (entry,) = result.pooled
    assert all("no interval, since a measurement has a single sample" in text for text in report_of(result).left_out)
    assert len(report_of(result).left_out) == len(entry.correlations)
    assert not report_of(correlate([saved(), saved(model="other")])).left_out
    for found in entry.correlations.values():
        assert found.n_samples == 1
        assert not any(correlation.value.known or correlation.established for correlation in found.correlations)


def test_the_page_shows_every_group_and_the_pooled_correlations(tmp_path):
    result = correlate([saved(), saved(model="other")])
    report = report_of(result.record)
    assert report.summary[0].title == "What is correlated"
    assert report.summary[1].title.endswith(", all measurements pooled")
    assert "both held fixed" in write_report([result], tmp_path).read_text()


def tables(first, second, count=30, noise=0.01, seed=0):
    """Contents scattered around two curves."""
    generator = np.random.default_rng(seed)
    shape = (count, len(first))
    return tuple(np.asarray(curve) + noise * generator.normal(size=shape) for curve in (first, second))


def pair(first, second, **scatter):
    n_positions = len(first)
    return Pair(*tables(first, second, **scatter), tuple(range(n_positions)), n_positions)


def test_the_plain_correlation_is_spearmans_of_the_mean_curves():
    generator = np.random.default_rng(1)
    curves = generator.random((2, 9))
    given = pair(*curves, noise=0.3)
    expected = spearmanr(given.first.mean(axis=0), given.second.mean(axis=0))
    found = correlate_pairs(given).of("nothing")
    assert found.value.value == pytest.approx(expected.statistic)
    assert found.p == pytest.approx(expected.pvalue, abs=0.03)


def test_partial_correlation_is_that_of_what_regression_on_ranks_leaves():
    generator = np.random.default_rng(2)
    given = pair(*generator.random((2, 10)), noise=0.2)
    ranks = [rankdata(table.mean(axis=0)) for table in (given.first, given.second)]
    places = np.arange(10)
    held = np.column_stack([np.ones(10), rankdata(places), rankdata(np.minimum(places, 9 - places))])
    left = [values - held @ np.linalg.lstsq(held, values, rcond=None)[0] for values in ranks]
    expected = left[0] @ left[1] / np.sqrt((left[0] @ left[0]) * (left[1] @ left[1]))
    assert correlate_pairs(given).of("position_and_ends").value.value == pytest.approx(expected)


def test_curves_that_only_fall_alike_are_correlated_plainly_but_not_beyond_position():
    generator = np.random.default_rng(3)
    places = np.arange(12)
    established = dict.fromkeys(CONTROLS, 0)
    for seed in range(30):
        wiggles = generator.normal(0, 0.3, (2, 12))
        found = correlate_pairs(pair(-places + wiggles[0], -places + wiggles[1], seed=seed))
        for name in CONTROLS:
            established[name] += found.of(name).established
    assert established["nothing"] == 30
    assert established["position"] <= 5
    assert established["position_and_ends"] <= 5


def test_a_correlation_beyond_position_is_found():
    generator = np.random.default_rng(4)
    curve = generator.random(12)
    found = correlate_pairs(pair(curve, curve**2, noise=0.005))
    for name in CONTROLS:
        assert found.of(name).value.value > 0.9
        assert found.of(name).established
    opposed = correlate_pairs(pair(curve, -curve, noise=0.005)).of("nothing")
    assert opposed.value.value == pytest.approx(-1)
    assert opposed.value.high < 0


def test_groups_are_ranked_each_by_itself_and_pooled():
    places = np.arange(4)
    rising = pair(places / 3, places / 3)
    shifted = pair(100 + places, -50 + places)
    found = correlate_pairs([rising, shifted])
    assert found.of("nothing").value.value == pytest.approx(1)
    assert found.n_positions == 8
    falling = pair(places / 3, -places / 3)
    assert correlate_pairs([rising, falling]).of("nothing").value.value == pytest.approx(0, abs=1e-12)


def test_permutations_of_few_positions_are_counted_exactly():
    found = correlate_pairs(pair([1, 2, 3, 4], [1, 2, 3, 4], noise=0.0)).of("nothing")
    assert found.value.value == pytest.approx(1)
    assert found.p == pytest.approx(2 / 24)


@pytest.mark.parametrize("n_positions", [1, 2, 3, 4])
def test_too_few_positions_leave_the_correlation_undefined_instead_of_perfect(n_positions):
    curve = np.arange(n_positions, dtype=float)
    found = correlate_pairs(pair(curve, curve))
    enough = {"nothing": 3, "position": 4, "ends": 4, "position_and_ends": 5}
    for name, least in enough.items():
        value = found.of(name).value.value
        # Position held fixed leaves nothing of a straight line.
        assert np.isnan(value) == (n_positions < least or name == "position")
        assert not found.of(name).established or n_positions >= 4


def test_constant_curves_have_no_correlation():
    found = correlate_pairs(pair(np.ones(6), np.arange(6.0), noise=0.0))
    assert all(np.isnan(entry.value.value) and np.isnan(entry.p) for entry in found.correlations)


def test_samples_with_gaps_are_left_out_and_a_single_one_supports_no_claim():
    given = pair([3, 1, 2, 5, 4], [3, 1, 2, 5, 4])
    given.first[1:, 0] = np.nan
    found = correlate_pairs(given)
    assert found.n_samples == 1
    assert found.of("nothing").value.low == -np.inf
    assert not found.of("nothing").established
    both = correlate_pairs([given, pair([3, 1, 2, 5, 4], [3, 1, 2, 5, 4])])
    assert both.n_samples == 1


def test_what_cannot_be_correlated_is_refused():
    with refused("no pair of curves to correlate; give at least 1"):
        correlate_pairs([])
    with refused("no sample has both"):
        correlate_pairs(Pair(np.full((3, 4), np.nan), np.ones((3, 4)), (0, 1, 2, 3), 4))
    with refused("two equal tables"):
        Pair(np.ones((3, 4)), np.ones((3, 5)), (0, 1, 2, 3), 4)
    with refused("infinite"):
        Pair(np.full((3, 4), np.inf), np.ones((3, 4)), (0, 1, 2, 3), 4)


@pytest.mark.parametrize("n_positions", [5, 6])
def test_of_unrelated_curves_at_few_positions_few_are_called_correlated(n_positions):
    generator = np.random.default_rng(0)
    found = dict.fromkeys(CONTROLS, 0)
    for _ in range(60):
        curves = [np.tile(curve, (2, 1)) for curve in generator.random((2, n_positions))]
        drawn = correlate_pairs(Pair(*curves, tuple(range(n_positions)), n_positions))
        for name in CONTROLS:
            found[name] += drawn.of(name).p <= 0.05
    assert max(found.values()) <= 8  # 3 expected; permuting without clearing again gives 15 with both held fixed


def test_sharing_samples_widens_what_is_known_of_two_models():
    """Two copies of one run are no more evidence about samples than one; taken as independent they would seem so."""
    given = pair(*np.random.default_rng(7).random((2, 8)), noise=0.5, count=12)
    shared = Pair(given.first, given.second, given.positions, 8, "twelve samples")
    once, together, apart = (
        correlate_pairs(group).of("nothing").value for group in (shared, [shared, shared], [given, given])
    )
    assert together.high - together.low == pytest.approx(once.high - once.low, rel=0.05)
    assert apart.high - apart.low < 0.9 * (together.high - together.low)
