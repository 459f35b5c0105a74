"""The rollouts take seconds: once for all tests."""

import pytest

from posbias.report.reproductions import Reproduction
from posbias.reproduce import reproduce


@pytest.fixture(scope="session")
def rollout() -> Reproduction:
    return reproduce("rollout-2602.16837")
