"""The command line is tested as a user meets it: a process, its output and its exit code."""

import os
import subprocess
import sys
from collections.abc import Callable

import pytest

Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="session")
def posbias() -> Run:
    """Run `posbias ARGUMENTS` and return what it printed."""

    def run(*arguments: object, timeout: float = 300) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "posbias", *map(str, arguments)],
            capture_output=True,
            text=True,
            timeout=timeout,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )

    return run
