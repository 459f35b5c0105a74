"""The page of the study of claims says what a run says, and the guide counts its verdicts."""

import re
from pathlib import Path

from posbias.papers import CLAIMS

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "studies" / "claims" / "README.md"
GUIDE = ROOT / "docs" / "verify.md"
QUICK = ("birth-2603.10123/claim-1-closed-form", "birth-2603.10123/claim-2-dead-zone", "wu2025/theorem-4.5")


def test_the_table_lists_every_claim_once_with_its_command():
    rows = re.findall(
        r"^\| (\S+/\S+) \|.*\| \*\*(.+?)\*\* \| (.+?) \| `posbias verify (\S+)` \|$", PAGE.read_text(), re.M
    )
    assert [row[0] for row in rows] == list(CLAIMS)
    assert all(row[0] == row[3] for row in rows)


def test_its_numbers_are_those_of_a_run(verdicts):
    rows = dict(re.findall(r"^\| (\S+/\S+) \|.*\*\* \| (\S+) \| `posbias", PAGE.read_text(), re.M))
    for name in QUICK:
        assert rows[name] == f"{verdicts[name].finding.value:.4g}"


def test_the_guide_counts_the_verdicts():
    verdicts = re.findall(r"^\| \S+/\S+ \|.*\| \*\*(.+?)\*\* \|", PAGE.read_text(), re.M)
    held, corrected, failed = (verdicts.count(name) for name in ("holds", "holds with a correction", "fails as stated"))
    counted = f"{held} hold as printed, {corrected} hold with a correction, {failed} fails as stated"
    assert counted in " ".join(GUIDE.read_text().split())
