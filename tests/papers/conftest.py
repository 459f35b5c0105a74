"""All claims, and the rollouts, take seconds: once for all tests."""

import pytest

from posbias.papers import Verdict, reproduce, verify
from posbias.papers.reproduction import Reproduction


@pytest.fixture(scope="session")
def rollout() -> Reproduction:
    return reproduce("rollout-2602.16837")


@pytest.fixture(scope="session")
def verdicts() -> dict[str, Verdict]:
    return {verdict.claim.name: verdict for verdict in verify()}
