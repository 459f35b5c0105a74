"""The shipped study of designed biases in training: its page shows its record, its files are the registered ones."""

import importlib
from pathlib import Path

import numpy as np
import pytest

from posbias.results.records import read_record
from posbias.training.study import load_study

STUDY = Path(__file__).parents[2] / "studies" / "design_training"


@pytest.fixture
def analyse(monkeypatch):
    monkeypatch.syspath_prepend(str(STUDY))
    return importlib.import_module("analyse")


def test_the_page_shows_the_record(analyse):
    page, record = (STUDY / "README.md").read_text(), read_record(STUDY / "record")
    assert analyse.with_verdicts(page, record) == page
    assert analyse.sheet(analyse.results(record)) == (STUDY / "results.csv").read_text()


def test_the_record_has_every_arm_and_seed_of_the_study_files(analyse):
    record = read_record(STUDY / "record")
    for study in analyse.results(record):
        if study.name in ("free_recall", "language"):  # whose tasks have left
            continue
        members = load_study(STUDY / f"{study.name}.yaml").members()
        assert {each.coordinates["arm"] for each in members} == set(study.arms)
        assert record.scalars[study.name]["counts"] == {"done": len(members)}
        for arm in study.arms:
            assert study.array(arm, "whole").shape == (10, study.array(arm, "curve").shape[2])


def test_a_threshold_that_is_never_reached_counts_one_interval_after_the_end(analyse):
    record = read_record(STUDY / "record")
    study = analyse.StudyResult("cued_copy", record)
    record.arrays["cued_copy/none/curve"] = np.zeros_like(record.arrays["cued_copy/none/curve"])
    assert (study.steps("none") == 1700).all()
    record.arrays["cued_copy/none/curve"][:, 2:] = 0.5
    assert (study.steps("none") == 200).all()
