"""arXiv 2602.16837 again: BLOOM's published distances, and what no measured curve could undercut."""

from html import unescape
from pathlib import Path

import numpy as np
import pytest

from posbias import UsageError, load_record, write_report
from posbias_papers import reproduce
from posbias_papers.rollout2602.table import TABLE_DIGIT, bloom_influence, published_models

ROOT = Path(__file__).resolve().parents[2]


def row(rollout, model, slopes, variant):
    (found,) = [
        entry
        for entry in rollout.rows
        if (entry["model"], entry["slopes"], entry["variant"]) == (model, slopes, variant)
    ]
    return found


@pytest.mark.parametrize(
    ("variant", "distance"),
    [("residual", 0.0790), ("content_published", 0.0159), ("content_scaled", 0.0682), ("attention_only", 0.6511)],
)
def test_blooms_distances_with_the_authors_settings(rollout, variant, distance):
    found = row(rollout, "bloom-176b", "published", variant)
    assert found["metrics"]["wasserstein"] == pytest.approx(distance, abs=5e-5)
    assert found["flat"]["wasserstein"] == pytest.approx(0.1516, abs=5e-5)


def test_with_blooms_own_slopes_and_scale_content_adds_nothing(rollout):
    plain = row(rollout, "bloom-176b", "real", "residual")["metrics"]["wasserstein"]
    scaled = row(rollout, "bloom-176b", "real", "content_scaled")["metrics"]["wasserstein"]
    assert plain == pytest.approx(0.0353, abs=5e-5)
    assert scaled > plain


def test_no_distance_undercuts_the_difference_of_means(rollout):
    """W1 >= |difference of means|, and the measured mean that the table implies holds for the measured curve."""
    mean = float(bloom_influence().influence @ np.linspace(0, 1, bloom_influence().n_positions))
    for entry in rollout.rows:
        if "metrics" in entry:
            assert entry["metrics"]["wasserstein"] >= abs(entry["mean_position"] - mean) - 1e-12
            assert entry["measured_mean_low"] <= mean <= entry["measured_mean_high"]
            assert entry["metrics"]["wasserstein"] >= entry["bound"]


def test_every_row_of_a_model_is_held_against_the_same_measured_mean(rollout):
    """There is one measured curve and one table, made with the published slopes, whatever slopes a row has."""
    for model in published_models():
        entries = [entry for entry in rollout.rows if entry["model"] == model.name]
        own = row(rollout, model.name, "published", "attention_only")
        assert {entry["measured_mean_low"] for entry in entries} == {own["measured_mean_low"]}
        width = entries[0]["measured_mean_high"] - entries[0]["measured_mean_low"]
        assert width == pytest.approx(2 * (TABLE_DIGIT + own["mean_position"]))


def test_where_the_shipped_numbers_contradict_the_table(rollout):
    against = {
        (entry["model"], entry["variant"])
        for entry in rollout.rows
        if entry["contradicts_table"] and entry["slopes"] == "published" and entry["variant"] != "content_scaled"
    }
    assert against == {("falcon-rw-7b", "content_published"), ("mpt-7b", "content_published")}
    assert "reproduced to 0.006 on bloom-176b" in rollout.statements[0]
    assert rollout.statements[0].endswith("contradict the table on falcon-rw-7b, mpt-7b.")
    assert "content is no better than the residual rollout alone" in rollout.statements[1]


def test_slopes_differ_only_where_the_models_do():
    same = {model.name for model in published_models() if np.allclose(model.slopes_published, model.slopes_real)}
    assert same == {"mpt-7b", "mpt-30b", "bloom-7b"}
    falcon = published_models()[0]
    assert np.allclose(np.array(falcon.slopes_published) / 8, falcon.slopes_real)


def test_it_takes_no_settings_and_papers_have_names():
    with pytest.raises(UsageError, match="no settings"):
        reproduce("rollout-2602.16837", settings=1)
    with pytest.raises(UsageError, match=r"birth-2603\.10123, icl-2502\.01951, .*, rollout-2602\.16837"):
        reproduce("nobody-2020")


@pytest.mark.skipif(not (ROOT / "studies").exists(), reason="a source distribution: the studies are not in it")
def test_the_page_of_the_study_says_what_a_run_says(rollout):
    page = (ROOT / "studies" / "reproductions" / "README.md").read_text()
    for entry in rollout.rows:
        if "metrics" in entry:
            assert f"{entry['metrics']['wasserstein']:.4f}"[1:] in page
        elif entry["contradicts_table"] and entry["slopes"] == "published":
            assert f"{entry['bound']:.3f}"[1:] in page


def test_the_rollouts_record_and_page(rollout, tmp_path):
    record = load_record(rollout.save(tmp_path)).record
    assert (record.verb, record.status) == ("reproduce", "done")
    assert len(record.scalars["rows"]) == 5 * 2 * 4
    assert record.arrays["bloom-176b/published/residual"].shape == (256,)
    page = write_report([record], tmp_path).read_text()
    assert page.count("<figure ") == 5
    assert all(statement in unescape(page) for statement in rollout.statements)
