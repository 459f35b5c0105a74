"""Claims that train nothing take seconds: once for all tests. Those that train wait until a test asks for one."""

import pytest

from posbias.papers import CLAIMS, Verdict, verify


class Verdicts(dict[str, Verdict]):
    """Verdicts by claim, of trained networks as they are asked for."""

    def __missing__(self, name: str) -> Verdict:
        (self[name],) = verify(name)
        return self[name]


@pytest.fixture(scope="session")
def verdicts() -> dict[str, Verdict]:
    return Verdicts({name: verify(name)[0] for name in CLAIMS if not CLAIMS[name].trains})
