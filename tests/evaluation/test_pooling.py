"""The tie over several runs: ranks within each, permutations within each, contents of other seeds join their group."""

import numpy as np
import pytest

import posbias as pb
from posbias.errors import UsageError
from posbias.evaluation.pooling import group_runs, pool_ties, read_run
from posbias.evaluation.ties import Pair, tie
from posbias.report.ties import render_ties, statements_of_ties, tables_of_ties, write_ties_report
from tied_runs import GOLD, PLACES, saved


def test_pooling_is_the_tie_of_the_runs_tables_ranked_each_by_itself():
    records = [saved(), saved(model="other", level=7.0)]
    record = pb.tie_runs(records, seed=3)
    (entry,) = record.scalars["pooled"]
    names = tuple(f"example_order(shots=5) 0 {index}" for index in range(8))
    pairs = [Pair(run.arrays[GOLD], run.arrays["scores/logprob"], PLACES, len(PLACES), names) for run in records]
    expected = tie(pairs, seed=3).as_record()
    for ours, theirs in zip(entry["ties"]["logprob"]["correlations"], expected["correlations"], strict=True):
        assert {name: ours[name] for name in ("value", "low", "high", "p")} == {
            name: theirs[name] for name in ("value", "low", "high", "p")
        }
    assert entry["ties"]["logprob"]["correlations"][0]["value"] == pytest.approx(1)
    assert [alone["group"] for alone in record.scalars["alone"]] == [
        group["title"] for group in record.scalars["groups"]
    ]


def test_runs_of_one_model_and_task_with_other_seeds_are_more_contents_of_one_group():
    (group,) = group_runs([read_run(saved(seed=seed)) for seed in (0, 1, 2)])
    assert len(group.contents) == 24
    np.testing.assert_array_equal(group.tables["correct"][8:16], saved(seed=1).arrays["scores/correct"])
    (found,) = pool_ties([group])
    assert found.pooled["logprob"].n_contents == 24
    assert not found.alone
    apart = group_runs([read_run(saved()), read_run(saved(task="key_value(pairs=5)")), read_run(saved(model="other"))])
    assert len(apart) == 3


def test_the_same_contents_do_not_count_twice():
    with pytest.raises(UsageError, match="different seeds"):
        pb.tie_runs([saved(), saved()])
    # Lines of a file are the same whatever the seed.
    lines = "key_value(pairs=5, file='pairs.jsonl')"
    with pytest.raises(UsageError, match="different seeds"):
        pb.tie_runs([saved(task=lines), saved(task=lines, seed=1)])


def test_what_is_not_a_tied_run_is_refused(tmp_path):
    plain = saved()
    del plain.scalars["tie"]
    with pytest.raises(UsageError, match="without influence"):
        pb.tie_runs([plain])
    with pytest.raises(UsageError, match="got a run of 'measure'"):
        pb.tie_runs([pb.Record(verb="measure", arguments={})])
    failed = saved()
    failed.status = "failed"
    with pytest.raises(UsageError, match="a run that failed"):
        pb.tie_runs([failed])
    with pytest.raises(UsageError, match="at least 1"):
        pb.tie_runs([])
    with pytest.raises(UsageError, match="holds no posbias run"):
        pb.tie_runs([tmp_path])


def test_a_single_content_beside_others_gives_no_interval_and_no_claim():
    (entry,) = pb.tie_runs([saved(count=1), saved(model="other")]).scalars["pooled"]
    for found in entry["ties"].values():
        assert found["n_contents"] == 1
        assert all(correlation["low"] is None for correlation in found["correlations"])
        assert not any(correlation["established"] for correlation in found["correlations"])


def test_the_page_shows_every_group_and_the_pooled_correlations(tmp_path):
    record = pb.tie_runs([saved(), saved(model="other")])
    assert any("of 2 measurements" in text for text in statements_of_ties(record))
    titles = [title for title, _, _ in tables_of_ties(record)]
    assert titles[0] == "What is tied"
    assert any(title.startswith("other: example_order(shots=5) alone") for title in titles)
    page = render_ties(record)
    assert "both held fixed" in page
    assert "tie-correlations" in page
    write_ties_report(record, tmp_path)
    pictures = {path.name for path in tmp_path.glob("*.png")}
    assert pictures == {"tie-correlations.png", "tie-ranks-0.png", "tie-0.png", "tie-1.png"}
