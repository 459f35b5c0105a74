"""The page of the study says what the records say: every verdict, and the claims in its bullets."""

import csv
import importlib.util
from pathlib import Path

import numpy as np
import pytest

from posbias import UsageError
from posbias.results.records import read_record
from posbias.training.study import load_study
from posbias_papers import PAPERS, Reproduction
from posbias_papers.reproduction import StudySettings

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


def test_the_findings_are_those_of_the_records(records):
    assert script("tables").findings(records) == (STUDY / "findings.csv").read_text()


@pytest.mark.parametrize("run", RUNS)
def test_the_records_were_made_with_the_shipped_studies(records, run):
    record = records[run]
    for study in PAPERS[RUNS[run]]().studies(StudySettings("small")).values():
        assert study.schedule.steps == record.resolved["steps"]
    run = Reproduction.from_record(record)
    assert [figure.rows for figure in run.figures] == [tuple(stored["rows"]) for stored in record.scalars["figures"]]
    assert run.statements
    assert run.tables


def test_the_losses_shown_are_those_of_the_record(records):
    with (STUDY / "losses.csv").open(newline="") as file:
        shown = {(network, kind): losses for network, kind, *losses in csv.reader(file)}
    arrays = {name: losses for name, losses in records["position-copy"].arrays.items() if name.endswith("/loss")}
    assert len(arrays) == sum(kind == "mean" for _, kind in shown)
    for name, losses in arrays.items():
        network = name.removesuffix("/loss")
        for kind, values in {"mean": losses.mean(axis=0), "best seed": losses.min(axis=0)}.items():
            np.testing.assert_allclose(np.array(shown[network, kind], dtype=float), values, atol=0.0051)


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


def test_the_longer_study_is_the_shipped_one_and_its_table_that_of_the_record():
    training, record = script("by_training"), read_record(STUDY / "longer")
    study = load_study(STUDY / "longer.yaml")
    assert record.scalars["counts"] == {"done": len(study.members())}
    assert study.schedule.describe() == record.resolved["options"]
    assert (STUDY / "longer.csv").read_text().splitlines() == training.lines(record)
