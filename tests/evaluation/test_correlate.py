"""Correlations over several runs: ranks and permutations within each; runs that asked the same are drawn together."""

import hashlib
import json
from dataclasses import replace

import numpy as np
import pytest

import posbias as pb
from behaviour_runs import GOLD, PLACES, saved
from posbias import CorrelateOptions, UsageError, correlate, write_report
from posbias.evaluation.correlate import Pair, check_different, correlate_pairs, source_of
from posbias.evaluation.evaluation import Evaluation
from posbias.evaluation.finished_page import reasons
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
    with pytest.raises(UsageError, match=r"of one model and task .*; give one, with as many samples as both"):
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
    found = []
    for folder, value in (("one", "1"), ("two", "1"), ("three", "3")):
        (tmp_path / folder).mkdir()
        path = tmp_path / folder / "pairs.jsonl"
        documents = [{"text": value, "is_gold": True}, {"text": "2"}]
        path.write_text(json.dumps({"question": "q", "answers": [value], "documents": documents}))
        options = pb.EvaluateOptions(count=1, generate=False)
        evaluation = pb.evaluate(long_model, f"documents(documents=2, file={str(path)!r})", options=options)
        found.append(pb.load_record(evaluation.save(tmp_path / folder / "run")))
    assert len({run.task for run in found}) == 1
    assert found[0].file_sha256 == hashlib.sha256((tmp_path / "two" / "pairs.jsonl").read_bytes()).hexdigest()
    assert found[1].file_sha256 == found[0].file_sha256 != found[2].file_sha256
    drawn = pb.evaluate(long_model, "key_value(pairs=2)", options=options)
    assert drawn.file_sha256 is None


def test_what_is_not_such_a_run_is_refused(tmp_path):
    with pytest.raises(UsageError, match="without influence"):
        correlate([replace(saved(), series=())])
    pb.Record(verb="measure", arguments={}).save(tmp_path / "measured")
    with pytest.raises(UsageError, match=r"finished run of posbias audit --behaviour, got 'measure' \(done\)"):
        correlate([tmp_path / "measured"])
    pb.Record(verb="evaluate", arguments={}, status="failed").save(tmp_path / "failed")
    with pytest.raises(UsageError, match=r"got 'evaluate' \(failed\)"):
        correlate([tmp_path / "failed"])
    with pytest.raises(UsageError, match="without influence"):
        correlate([Evaluation(pb.Record(verb="evaluate", arguments={}, status="failed"))])
    with pytest.raises(UsageError, match="at least 1"):
        correlate([])
    with pytest.raises(UsageError, match="holds no posbias run"):
        correlate([tmp_path])


def test_a_single_sample_beside_others_gives_no_interval_and_no_claim():
    result = correlate([saved(count=1), saved(model="other")])
    (entry,) = result.pooled
    assert all("no interval, since a measurement has a single sample" in text for text in reasons(result))
    assert len(reasons(result)) == len(entry.correlations)
    assert not reasons(correlate([saved(), saved(model="other")]))
    for found in entry.correlations.values():
        assert found.n_samples == 1
        assert not any(correlation.value.known or correlation.established for correlation in found.correlations)


def test_the_page_shows_every_group_and_the_pooled_correlations(tmp_path):
    result = correlate([saved(), saved(model="other")])
    report = report_of(result.record)
    assert report.summary[0].title == "What is correlated"
    assert report.summary[1].title.endswith(", all measurements pooled")
    assert "both held fixed" in write_report([result], tmp_path).read_text()
