"""Correlations over several runs: ranks and permutations within each, samples of other seeds join their group."""

import hashlib
import json

import numpy as np
import pytest

import posbias as pb
from behaviour_runs import GOLD, PLACES, saved
from posbias.errors import UsageError
from posbias.evaluation import correlate_runs
from posbias.evaluation.correlation import Pair, correlate
from posbias.evaluation.evaluation import evaluation_record
from posbias.evaluation.pooling import group_runs, pool, read_run
from posbias.report.correlate import reasons, statements, tables
from posbias.report.page import write_report


def test_pooling_is_the_correlation_of_the_runs_tables_ranked_each_by_itself():
    records = [saved(), saved(model="other", level=7.0)]
    record = correlate_runs(records, seed=3)
    (entry,) = record.scalars["pooled"]
    names = tuple(f"example_order(shots=5) 0 {index}" for index in range(8))
    pairs = [Pair(run.arrays[GOLD], run.arrays["scores/logprob"], PLACES, len(PLACES), names) for run in records]
    expected = correlate(pairs, seed=3).as_record()
    for ours, theirs in zip(entry["correlations"]["logprob"]["correlations"], expected["correlations"], strict=True):
        assert {name: ours[name] for name in ("value", "low", "high", "p")} == {
            name: theirs[name] for name in ("value", "low", "high", "p")
        }
    assert entry["correlations"]["logprob"]["correlations"][0]["value"] == pytest.approx(1)
    assert [alone["group"] for alone in record.scalars["alone"]] == [
        group["title"] for group in record.scalars["groups"]
    ]


def test_runs_of_one_model_and_task_with_other_seeds_are_more_samples_of_one_group():
    (group,) = group_runs([read_run(saved(seed=seed)) for seed in (0, 1, 2)])
    assert len(group.samples) == 24
    np.testing.assert_array_equal(group.tables["correct"][8:16], saved(seed=1).arrays["scores/correct"])
    (found,), alone = pool([group])
    assert found["correlations"]["logprob"]["n_samples"] == 24
    assert not alone
    apart = group_runs([read_run(saved()), read_run(saved(task="key_value(pairs=5)")), read_run(saved(model="other"))])
    assert len(apart) == 3


def test_the_same_samples_do_not_count_twice():
    with pytest.raises(UsageError, match="different seeds"):
        correlate_runs([saved(), saved()])
    # Lines of a file are the same whatever the seed.
    lines = "key_value(pairs=5, file='pairs.jsonl')"
    with pytest.raises(UsageError, match="whatever the seed, so give one of these runs"):
        correlate_runs([saved(task=lines), saved(task=lines, seed=1)])


def read_from(data, **given):
    """A run on the lines of a file with this hash."""
    record = saved(task="key_value(pairs=5, file='pairs.jsonl')", **given)
    record.resolved["file_sha256"] = data
    return read_run(record)


def test_other_files_of_the_same_name_are_other_tasks_and_share_no_samples():
    assert len(group_runs([read_from("a"), read_from("b")])) == 2
    with pytest.raises(UsageError, match="whatever the seed"):
        group_runs([read_from("a"), read_from("a", seed=1)])
    # Another model that read the same file was asked the same samples, and the first lines of it are the first.
    first, fewer, other = read_from("a"), read_from("a", model="other", count=5), read_from("b", model="other")
    assert first.samples[:5] == fewer.samples
    assert not set(first.samples) & set(other.samples)
    # A text that needles lie in is a file too, though seeds choose from it.
    needles = [saved(task="needle(depths=5, corpus='text.txt')", seed=seed) for seed in (0, 1)]
    for record in needles:
        record.resolved["file_sha256"] = "a"
    (group,) = group_runs([read_run(record) for record in needles])
    assert len(set(group.samples)) == 16


def test_a_file_is_known_by_what_it_holds(long_model, tmp_path):
    found = []
    for folder, value in (("one", "1"), ("two", "1"), ("three", "3")):
        (tmp_path / folder).mkdir()
        path = tmp_path / folder / "pairs.jsonl"
        path.write_text(json.dumps({"ordered_kv_records": [["a", value], ["b", "2"]], "key": "a", "value": value}))
        options = pb.EvaluateOptions(count=1, generate=False)
        evaluation = pb.evaluate(long_model, f"key_value(pairs=2, file={str(path)!r})", options=options)
        evaluation_record(evaluation, {}).save(tmp_path / folder / "run")
        found.append(pb.load_record(tmp_path / folder / "run").resolved)
    assert len({resolved["task"] for resolved in found}) == 1
    assert found[0]["file_sha256"] == hashlib.sha256((tmp_path / "two" / "pairs.jsonl").read_bytes()).hexdigest()
    assert found[1]["file_sha256"] == found[0]["file_sha256"] != found[2]["file_sha256"]
    drawn = pb.evaluate(long_model, "key_value(pairs=2)", options=options)
    assert drawn.file_sha256 is None


def test_what_is_not_such_a_run_is_refused(tmp_path):
    plain = saved()
    del plain.scalars["influence"]
    with pytest.raises(UsageError, match="without influence"):
        correlate_runs([plain])
    with pytest.raises(UsageError, match="got a run of 'measure'"):
        correlate_runs([pb.Record(verb="measure", arguments={})])
    failed = saved()
    failed.status = "failed"
    with pytest.raises(UsageError, match="a run that failed"):
        correlate_runs([failed])
    with pytest.raises(UsageError, match="at least 1"):
        correlate_runs([])
    with pytest.raises(UsageError, match="holds no posbias run"):
        correlate_runs([tmp_path])


def test_a_single_sample_beside_others_gives_no_interval_and_no_claim():
    record = correlate_runs([saved(count=1), saved(model="other")])
    (entry,) = record.scalars["pooled"]
    assert all("no interval, for demo: example_order(shots=5) has a single" in text for text in reasons(record))
    assert len(reasons(record)) == len(entry["correlations"])
    assert not reasons(correlate_runs([saved(), saved(model="other")]))
    for found in entry["correlations"].values():
        assert found["n_samples"] == 1
        assert all(correlation["low"] is None for correlation in found["correlations"])
        assert not any(correlation["established"] for correlation in found["correlations"])


def test_the_page_shows_every_group_and_the_pooled_correlations(tmp_path):
    record = correlate_runs([saved(), saved(model="other")])
    assert any("of 2 measurements" in text for text in statements(record))
    titles = [table.title for table in tables(record)]
    assert titles[0] == "What is correlated"
    assert any(title.startswith("other: example_order(shots=5) alone") for title in titles)
    page = write_report([record], tmp_path, png=True).read_text()
    assert "both held fixed" in page
    assert "correlations" in page
    pictures = {path.name for path in tmp_path.glob("*.png")}
    assert pictures == {
        *("correlations.png", "correlation-ranks-0.png"),
        *("correlation-0.png", "correlation-1.png"),
    }
