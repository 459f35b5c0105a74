"""Modules of the benchmarks, on tiny shapes: their equalities hold and their tables are whole. No time is asserted."""

import importlib
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
FOLDERS = [BENCHMARKS / "gpu", BENCHMARKS / "measure"]


@pytest.fixture
def script(monkeypatch, request):
    """A module of the test's benchmark by its name, forgotten afterwards: other benchmarks have a `run` too."""
    folders = FOLDERS if "gpu" in request.node.path.name else FOLDERS[1:]
    names = [path.stem for folder in folders for path in folder.glob("*.py")]
    monkeypatch.setattr(sys, "path", [*map(str, folders), *sys.path])
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    kept = {name: sys.modules.pop(name) for name in names if name in sys.modules}
    yield importlib.import_module
    for name in names:
        sys.modules.pop(name, None)
    sys.modules.update(kept)
