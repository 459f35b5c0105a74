"""The shipped study of hybrids: its page and sheet show its record, which has every arm and seed."""

import importlib.util
from pathlib import Path

import pytest

from posbias.results.records import read_record

STUDY = Path(__file__).parents[2] / "studies" / "hybrids"


@pytest.fixture
def study():
    spec = importlib.util.spec_from_file_location("hybrids", STUDY / "run.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_page_and_the_sheet_show_the_record(study):
    results = study.Results(read_record(STUDY / "record"))
    page = (STUDY / "README.md").read_text()
    assert study.with_table(page, results) == page
    assert study.sheet(results) == (STUDY / "results.csv").read_text()


def test_the_record_has_every_arm_and_seed_of_the_study_files(study):
    record = read_record(STUDY / "record")
    for name in study.STUDIES:
        assert record.scalars[name]["counts"] == {"done": 10 * len(study.ARMS)}
        for arm in study.ARMS:
            assert record.arrays[f"{name}/{arm}/accuracy"].shape[0] == 10
