"""The rollouts take seconds: once for all tests."""

import pytest

from posbias.papers import reproduce
from posbias.papers.reproduction import Reproduction


@pytest.fixture(scope="session")
def rollout() -> Reproduction:
    return reproduce("rollout-2602.16837")
