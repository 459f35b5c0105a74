"""The command line as a user meets it: arguments in; output and exit code out."""

import subprocess
import sys
from collections.abc import Callable

import pytest

from posbias.cli import main

Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def posbias(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    """Run `posbias ARGUMENTS` in this process and return what it printed."""

    def run(*arguments: object) -> subprocess.CompletedProcess[str]:
        command = ["posbias", *map(str, arguments)]
        monkeypatch.setattr(sys, "argv", command)
        capsys.readouterr()
        try:
            main()
            code = 0
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else 0
        output = capsys.readouterr()
        return subprocess.CompletedProcess(command, code, output.out, output.err)

    return run
