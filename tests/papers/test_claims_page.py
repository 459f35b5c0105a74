"""The study of claims says what a run says, and the guide counts its verdicts."""

import csv
from pathlib import Path

from posbias_papers import CLAIMS

ROOT = Path(__file__).resolve().parents[2]
STUDY = ROOT / "studies" / "claims"
QUICK = ("birth-2603.10123/claim-1-closed-form", "birth-2603.10123/claim-2-dead-zone", "wu2025/theorem-4.5")


def _lines() -> dict[str, dict[str, str]]:
    with (STUDY / "claims.csv").open(newline="") as file:
        return {line["claim"]: line for line in csv.DictReader(file)}


def test_the_file_has_every_claim_once_and_the_page_those_that_do_not_hold_as_printed():
    lines, page = _lines(), (STUDY / "README.md").read_text()
    assert list(lines) == sorted(lines)
    assert set(lines) >= set(CLAIMS)
    for name, line in lines.items():
        row = next((row for row in page.splitlines() if row.startswith((f"| {name} |", f"| **{name}**"))), "")
        assert (f"| {line['value']} |" in row) == (line["verdict"] != "holds"), name


def test_its_numbers_are_those_of_a_run(verdicts):
    lines = _lines()
    for name in QUICK:
        assert lines[name]["value"] == f"{verdicts[name].finding.value:.4g}"


def test_the_page_counts_the_verdicts():
    verdicts = [line["verdict"] for line in _lines().values()]
    held, corrected = (verdicts.count(name) for name in ("holds", "holds with a correction"))
    assert f"{held} hold, {corrected} hold with a correction" in (STUDY / "README.md").read_text()
