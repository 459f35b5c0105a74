"""`posbias reproduce`, its record and its page, end to end."""

import json
from html import unescape
from io import StringIO

import numpy as np
import pytest
from rich.console import Console

from posbias import load_record, write_report
from posbias.results.page import html_of, show_report
from posbias.results.result import report_of


def test_the_rollouts_record_and_offline_page(rollout, tmp_path):
    record = load_record(rollout.save(tmp_path)).record
    assert (record.verb, record.status) == ("reproduce", "done")
    assert len(record.scalars["rows"]) == 5 * 2 * 4
    assert record.arrays["bloom-176b/published/residual"].shape == (256,)
    page = write_report([record], tmp_path).read_text()
    assert page.count("<figure ") == 5
    assert 'src="http' not in page
    assert "default-src 'none'" in page
    assert all(statement in unescape(page) for statement in rollout.statements)


def test_tables_and_sentences_on_a_pipe(rollout):
    console = Console(file=StringIO(), width=100)
    show_report(report_of(rollout), console)
    text = console.file.getvalue()
    assert "0.0159" in text
    assert "0.0682" in text
    assert "contradict the table" in " ".join(text.split())


def test_birth_end_to_end_as_one_json_document_with_record_and_page(posbias, tmp_path):
    options = "--size tiny --length 24 --initialisations 2 --probes 1 --seed 1 --json"
    finished = posbias("reproduce", "birth-2603.10123", *options.split(), "--out", tmp_path / "run")
    assert finished.returncode == 0, finished.stderr
    document = json.loads(finished.stdout)
    assert document["resolved"]["initialisations"] == 2
    assert {row["sort"] for row in document["scalars"]["rows"]} == {"theory", "shape", "rope", "probe"}
    assert document["resolved"]["command"].startswith("posbias reproduce birth-2603.10123 --size tiny")
    profile = np.array(document["arrays"]["gpt2/random/theories/mean_field"])
    assert profile.sum() == pytest.approx(1)
    record = load_record(tmp_path / "run").record
    assert record.scalars == document["scalars"]
    page = (tmp_path / "run" / "report.html").read_text()
    assert page == html_of(report_of(record))


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (("nobody-2020",), "unknown paper"),
        (("rollout-2602.16837", "--initialisations", 3), "--initialisations belongs to birth-2603.10123"),
        (("birth-2603.10123", "--size", "huge"), "size must be one of"),
    ],
)
def test_bad_requests_are_usage_errors(posbias, arguments, complaint):
    assert complaint in posbias("reproduce", *arguments).stderr.replace("\n", " ")
