"""What is shipped: the source distribution has what a contributor needs and leaves the studies' records out."""

import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SDIST = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]["targets"]["sdist"]


def test_the_source_distribution_holds_what_a_contributor_needs():
    kept = {"src", "tests", "docs", "README.md", "CONTRIBUTING.md", "LICENSE", "constraints.txt", "Makefile"}
    assert kept <= set(SDIST["include"])
    assert "studies" not in SDIST["include"]
    assert all((ROOT / name).exists() for name in SDIST["include"])


@pytest.mark.skipif(not (ROOT / "studies").exists(), reason="a source distribution: the studies are not in it")
def test_tests_that_read_the_studies_stay_out_of_the_source_distribution():
    reads = {
        path.relative_to(ROOT).as_posix()
        for path in (ROOT / "tests").rglob("test_*.py")
        if any(mark in path.read_text() for mark in ('ROOT / "studies"', 'parents[1] / "studies"'))
        and path != Path(__file__)
    }
    left_out = {path for path in reads if any(path.startswith(start) for start in SDIST["exclude"])}
    assert reads - left_out == {"tests/docs/test_documentation.py", "tests/papers/test_rollout.py"}  # they pass over it
