"""Verdicts on claims, each computed once, when the first test asks for it."""

import pytest

from posbias_papers import Verdict, verify


class Verdicts(dict[str, Verdict]):
    """Verdicts by claim."""

    def __missing__(self, name: str) -> Verdict:
        (self[name],) = verify(name)
        return self[name]


@pytest.fixture(scope="session")
def verdicts() -> Verdicts:
    return Verdicts()
