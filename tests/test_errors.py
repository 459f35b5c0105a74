"""What a person sees of an error in a notebook: its sentence, and the traceback on demand."""

import pytest
from IPython.core.interactiveshell import InteractiveShell
from IPython.utils.capture import capture_output

CELL = """
import posbias
def mine():
    posbias.Architecture(depth=0)
mine()
"""


def shown(shell: InteractiveShell, code: str) -> str:
    """All that one cell prints."""
    with capture_output(display=False) as captured:
        shell.run_cell(code)
    return captured.stdout + captured.stderr


@pytest.fixture(scope="module")
def shell(tmp_path_factory: pytest.TempPathFactory) -> InteractiveShell:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("IPYTHONDIR", str(tmp_path_factory.mktemp("ipython")))
        shell = InteractiveShell()
    shell.history_manager.enabled = False
    return shell


def test_a_notebook_shows_the_sentence_and_the_traceback_on_demand(shell, monkeypatch):
    told = shown(shell, CELL).splitlines()
    assert len(told) == 2
    assert told[0].startswith("UsageError: Architecture: depth must be ")
    assert told[1] == "(%tb shows the traceback)"
    traced = shown(shell, "%tb")
    assert "in mine" in traced
    assert told[0] in traced
    monkeypatch.setenv("POSBIAS_DEBUG", "1")
    assert "in mine" in shown(shell, CELL)


def test_a_run_that_failed_is_told_likewise_and_other_errors_as_ever(shell):
    told = shown(shell, "raise posbias.RunError('the disk is full')")
    assert told.splitlines()[0] == "RunError: the disk is full"
    assert "Traceback" in shown(shell, "1 / 0")
