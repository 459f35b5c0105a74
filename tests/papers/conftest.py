"""All claims take seconds: once for all tests."""

import pytest

from posbias.papers import Verdict, verify


@pytest.fixture(scope="session")
def verdicts() -> dict[str, Verdict]:
    return {verdict.claim.name: verdict for verdict in verify()}
