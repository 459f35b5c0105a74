"""Every published claim: its verdict, its numbers, and that a broken assumption changes it."""

import pytest

from posbias import UsageError
from posbias_papers import CLAIMS, verify
from posbias_papers.claims import claim_generator, selected

HOLDS, CORRECTED, FAILS = "holds", "holds with a correction", "fails as stated"
WRONG_IN_PART = {
    "birth-2603.10123/claim-1-closed-form",
    "birth-2603.10123/claim-3-recency-anchor",
    "birth-2603.10123/claim-4-u-shape",
    "birth-2603.10123/claim-5-gradient",
    "birth-2603.10123/claim-6-linear-addition",
    "wu2025/lemma-4.4",
    "wu2025/lemma-4.6",
    "wu2025/lemma-I.1",
    "wu2025/theorem-4.5",
    "wu2025/theorem-4.7",
    "wu2025/theorem-I.2",
}
WRONG = {"birth-2603.10123/claim-2-dead-zone"}
FALSE_BECOMES_TRUE = {"birth-2603.10123/claim-2-dead-zone", "birth-2603.10123/claim-6-linear-addition"}
"""Breaking the assumption restores these statements; it refutes all others."""


def expected(name: str) -> str:
    return FAILS if name in WRONG else CORRECTED if name in WRONG_IN_PART else HOLDS


@pytest.mark.parametrize("name", list(CLAIMS))
def test_each_claim_has_the_expected_verdict(verdicts, name):
    assert verdicts[name].verdict == expected(name)


@pytest.mark.parametrize("name", list(CLAIMS))
def test_a_broken_assumption_flips_the_verdict(name):
    verdict = CLAIMS[name]().check(claim_generator(name, 0), broken=True)
    assert verdict.verdict == (HOLDS if name in FALSE_BECOMES_TRUE else FAILS)
    assert verdict.as_dict()["broken"] == CLAIMS[name].broken_by


def test_verdicts_do_not_hang_on_the_seed():
    # The slow ones (deep random networks) are covered by seed 0.
    for name in selected("rollout-2602.16837"):
        if "theorem" not in name and "5.4" not in name:
            assert CLAIMS[name]().check(claim_generator(name, 1)).verdict == HOLDS
            assert CLAIMS[name]().check(claim_generator(name, 1), broken=True).verdict == FAILS


def test_selection_by_paper_and_by_claim_does_not_change_a_verdict(verdicts):
    alone = verify("wu2025/theorem-4.5")
    assert [verdict.claim.name for verdict in alone] == ["wu2025/theorem-4.5"]
    assert alone[0].as_dict() == verdicts["wu2025/theorem-4.5"].as_dict()
    assert {name.split("/")[0] for name in selected("wu2025")} == {"wu2025"}
    assert selected(None) == list(CLAIMS)


@pytest.mark.parametrize(
    ("selection", "named"),
    [("wu2026", "wu2025"), ("wu2025/theorem-9", "wu2025/theorem-4.1"), ("", "rollout-2602.16837")],
)
def test_unknown_names_list_the_known_ones(selection, named):
    with pytest.raises(UsageError, match=named):
        verify(selection)
