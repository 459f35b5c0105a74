"""docs/claims.md says what a run says."""

import re
from pathlib import Path

from posbias.papers import CLAIMS
from posbias.papers.claims import claim_generator

PAGE = Path(__file__).resolve().parents[2] / "docs" / "claims.md"
QUICK = ("birth-2603.10123/claim-1-closed-form", "birth-2603.10123/claim-2-dead-zone", "wu2025/theorem-4.5")


def test_the_table_lists_every_claim_once_with_its_command():
    rows = re.findall(
        r"^\| (\S+/\S+) \|.*\| \*\*(.+?)\*\* \| (.+?) \| `posbias verify (\S+)` \|$", PAGE.read_text(), re.M
    )
    assert [row[0] for row in rows] == list(CLAIMS)
    assert all(row[0] == row[3] for row in rows)


def test_its_numbers_are_those_of_a_run():
    rows = dict(re.findall(r"^\| (\S+/\S+) \|.*\*\* \| (\S+) \| `posbias", PAGE.read_text(), re.M))
    for name in QUICK:
        assert rows[name] == f"{CLAIMS[name]().check(claim_generator(name, 0)).finding.value:.4g}"
