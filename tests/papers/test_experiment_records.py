"""The page of the study says what the records say: every verdict, and the claims in its bullets."""

import csv
import importlib.util
from pathlib import Path

import numpy as np
import pytest

from posbias import UsageError
from posbias.runs.records import read_record
from posbias.training import load_study
from posbias_papers import PAPERS
from posbias_papers.liu2026.partial_information import partial_information_losses
from posbias_papers.pages.reproduce import ReproductionRun
from posbias_papers.study_runs import StudySettings

ROOT = Path(__file__).resolve().parents[2]
RUNS = {"position-copy": "position-copy-liu2026", "icl": "icl-2502.01951"}
STUDY = ROOT / "studies" / "experiments"
PAGE = "".join((STUDY / f"{name}.md").read_text() for name in ("README", "appendix"))


def script(name):
    """A program of studies/experiments, as a module."""
    spec = importlib.util.spec_from_file_location(name, STUDY / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def records():
    return {run: read_record(STUDY / run) for run in RUNS}


def rows(record, sort):
    return [row for row in record.scalars["rows"] if row["sort"] == sort]


def pooled(record, theory, moment, outcome):
    for row in rows(record, "loop"):
        named = (row["architecture"], row["theory"], row["moment"], row["outcome"])
        if named == ("all architectures", theory, moment, outcome):
            return row["correlation"]
    raise AssertionError((theory, moment, outcome))


def test_the_findings_are_those_of_the_records(records):
    assert script("tables").findings(records) == (STUDY / "findings.csv").read_text()


@pytest.mark.parametrize("run", RUNS)
def test_the_records_were_made_with_the_shipped_studies(records, run):
    record = records[run]
    for study in PAPERS[RUNS[run]]().studies(StudySettings("small")).values():
        assert study.schedule.steps == record.resolved["steps"]
    run = ReproductionRun.from_record(record)
    assert run.figures
    assert run.statements
    assert run.tables


def test_the_plateau_is_near_what_counts_alone_give(records):
    levels = partial_information_losses(10, 10)
    plateau = records["position-copy"].arrays["2 layers, d 10/loss"][:, 3:9].mean()
    assert levels["counts_linear"] < plateau < levels["nothing"]
    assert plateau == pytest.approx(levels["counts_linear"], abs=0.08)


@pytest.mark.parametrize("theory", ["uniform_rollout", "rollout", "jacobian"])
def test_retrieval_is_predicted_before_the_first_step_where_the_control_is_wrong(records, theory):
    outcome = "high final accuracy"
    found = [row for row in rows(records["icl"], "loop") if (row["moment"], row["outcome"]) == ("initial", outcome)]
    own = {r["architecture"]: r["correlation"] for r in found if r["theory"] == theory}
    control = {r["architecture"]: r["correlation"] for r in found if r["theory"] == "control"}
    del own["all architectures"], control["all architectures"]
    mixture = [value for name, value in own.items() if "fixed" not in name]
    fixed = [value for name, value in own.items() if "fixed" in name]
    assert [len(mixture), sum(value["low"] > 0 for value in mixture)] == [24, 24]
    assert [len(fixed), sum(value["low"] > 0 for value in fixed)] == [18, 14]
    wrong = [name for name, value in control.items() if value["high"] < 0 and "fixed" not in name]
    assert wrong
    assert all(own[name]["low"] > 0 for name in wrong)


def test_after_training_the_jacobian_agrees_best_with_position_copy(records):
    outcome = "a low final loss"
    trained = pooled(records["position-copy"], "jacobian", "trained", outcome)["value"]
    for theory in ("mean_field", "uniform_rollout", "rollout", "jacobian"):
        assert trained > pooled(records["position-copy"], theory, "initial", outcome)["value"] + 0.1


def test_accuracy_is_not_yet_that_of_retrieval(records):
    accuracy = [rows for name, rows in records["icl"].arrays.items() if name.endswith("/accuracy")]
    assert np.mean([values.mean() for values in accuracy]) < 0.5
    assert "Training is far shorter than theirs" in " ".join(PAGE.split())


def test_where_position_copy_falls_short_of_the_post(records):
    arrays = records["position-copy"].arrays
    assert arrays["3 layers, d 10/loss"][:, 9].min() > 1.5
    for network in ("2 layers, d 2", "2 layers, d 10"):
        published = {"2 layers, d 2": (1.13, 2.06, 2.15, 2.18), "2 layers, d 10": (0.0, 1.65, 1.88, 1.97)}[network]
        ours = arrays[f"{network}/loss"].mean(axis=0)[:4]
        np.testing.assert_allclose(ours, published, atol=0.11)  # read off a figure, +-0.03
        assert arrays[f"{network}/loss"][:, 9].min() < 0.1


def test_the_losses_shown_are_those_of_the_record(records):
    with (STUDY / "losses.csv").open(newline="") as file:
        shown = {(network, kind): losses for network, kind, *losses in csv.reader(file)}
    arrays = {name: losses for name, losses in records["position-copy"].arrays.items() if name.endswith("/loss")}
    assert len(arrays) == sum(kind == "mean" for _, kind in shown)
    for name, losses in arrays.items():
        network = name.removesuffix("/loss")
        for kind, values in {"mean": losses.mean(axis=0), "best seed": losses.min(axis=0)}.items():
            np.testing.assert_allclose(np.array(shown[network, kind], dtype=float), values, atol=0.0051)


def test_depth_changes_sign_with_the_evaluation_sets(records):
    def change(where, case):
        found = [row for row in rows(records["icl"], "finding") if row["where"] == where]
        depth = "without residual connections more layers mean more bias to the first place"
        return next(row for row in found if row["reported"].startswith(depth))["tests"][case]

    assert change("Figures 2 and 4", "none")["high"] < 0
    assert change("Figures 2 and 4", "decay")["low"] > 0
    for case in ("none", "decay", "RoPE"):
        assert change("Figures 2 and 4, unconfounded sets", case)["low"] > 0


def test_squares_rank_retrieval_worse_than_the_bare_architecture(records):
    for outcome in ("high final accuracy", "high accuracy over training"):
        for moment in ("initial", "trained"):
            bare = pooled(records["icl"], "uniform_rollout", moment, outcome)["value"]
            assert pooled(records["icl"], "power_rollout", moment, outcome)["value"] < bare


def test_position_copy_is_judged_again_from_its_record_alone(records):
    again = script("judge_again").judged_again(records["position-copy"])
    for found, stored in zip(rows(again, "finding"), rows(records["position-copy"], "finding"), strict=True):
        assert {name: found[name] for name in found if name != "tests"} == {
            name: stored[name] for name in found if name != "tests"
        }
        for case, test in found["tests"].items():
            assert [test[end] for end in ("value", "low", "high")] == pytest.approx(
                [stored["tests"][case][end] for end in ("value", "low", "high")]
            )
    assert len(rows(again, "loop")) == len(rows(records["position-copy"], "loop"))
    made = {"commit": records["position-copy"].environment["commit"]}
    told = records["position-copy"].resolved.get("trained_with", made)
    assert again.resolved["trained_with"]["commit"] == told["commit"]
    for name, values in records["position-copy"].arrays.items():
        if not name.startswith("figures/"):
            np.testing.assert_array_equal(again.arrays[name], values)
    with pytest.raises(UsageError, match="no losses of position copy"):
        script("judge_again").judged_again(records["icl"])


def test_the_numbers_of_the_recall_study_are_shown():
    positions, record = script("serial_positions"), read_record(STUDY / "recall")
    assert positions.table(record) == (STUDY / "recall.csv").read_text()
    for width in (8, 32):
        assert all(str(gap) in " ".join(PAGE.split()) for gap in positions.both_ways(record, width).values())


def test_recall_has_recency_by_demand_and_no_primacy():
    positions, record = script("serial_positions"), read_record(STUDY / "recall")
    for demand, quantity in (("running span", "span_recalled"), ("both", "recalled")):
        for name, values in positions.curves(record, demand, quantity).items():
            assert "two-way" in name or positions.ends(values)[1].interval.low > 0
    for name, values in positions.curves(record, "free recall", "free_recalled").items():
        for end in positions.ends(values):
            assert abs(end.interval.value) < 0.03, name
            assert end.supports() != "reproduced"


def test_the_longer_study_is_the_shipped_one_and_its_table_is_on_the_page():
    training, record = script("by_training"), read_record(STUDY / "longer")
    study = load_study(STUDY / "longer.yaml")
    assert record.scalars["counts"] == {"done": study.n_members}
    assert study.schedule.describe() == record.resolved["options"]
    assert all(line in PAGE for line in training.lines(record))


def test_retrieval_arises_with_residual_connections_and_decay_only_and_the_sets_disagree_about_it():
    training, record = script("by_training"), read_record(STUDY / "longer")
    novel = {cell: rows[:, 2:].mean(axis=0) for cell, rows in training.values(record, "accuracy_novel_classes").items()}
    for cell, course in novel.items():
        assert course[-1] > 0.9 if cell == ("added", "decay") else course[-1] < 0.6
        assert cell[0] == "added" or (np.abs(course - 0.51) < 0.03).all()
    places = training.values(record, "accuracy_by_place")["added", "decay"]
    assert places[:, -1, 0].min() > places[:, -1, 1:].max()
    assert places[:, 1, -2:].mean() > places[:, 1, :2].mean()
    assert training.gap(training.values(record, "gaps")["added", "decay"]).interval.high < 0
    assert training.gap(training.values(record, "unconfounded_gaps")["added", "decay"]).interval.low > 0
