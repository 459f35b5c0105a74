"""Records that the repository holds: all can be read, and none names a machine."""

import re
from pathlib import Path

import pytest

import posbias as pb
from conftest import check_record
from posbias.results.records import portable, read_record

STUDIES = Path(__file__).resolve().parents[1] / "studies"
RUNS = sorted(path.parent for path in STUDIES.rglob("record.json"))
LONGEST_LINE = 25
"""Words of a line of the verdict."""
MACHINE_PATH = re.compile(r"(?<![\w.~/:])/(?:work|tmp|home|root|Users|mnt|opt|var|usr)/")


@pytest.mark.parametrize("run", RUNS, ids=lambda run: run.relative_to(STUDIES).as_posix())
def test_every_record_can_be_read_and_names_no_machine(run):
    record = read_record(run)
    assert record.status == "done"
    check_record(run / "record.json")
    if run.name == "recall":  # its networks and tasks left
        with pytest.raises(pb.UsageError, match="synthetic task free_recall left posbias"):
            pb.load_record(run)
    elif record.verb != "study":  # which a script made of several commands' results
        lines = pb.load_record(run).verdict
        assert lines
        assert [line for line in lines if len(line.split()) > LONGEST_LINE] == []
    assert record.arguments == portable(record.arguments)
    assert not MACHINE_PATH.search((run / "record.json").read_text())
