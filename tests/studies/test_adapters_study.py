"""The shipped study of adapters: its tables are those of its answers."""

from importlib import util
from pathlib import Path

import pytest

STUDY = Path(__file__).parents[2] / "studies" / "adapters"


@pytest.fixture(scope="module")
def study():
    spec = util.spec_from_file_location("adapters_run", STUDY / "run.py")
    module = util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_tables_shown_are_those_of_the_answers(study, capsys):
    study.table(STUDY)
    study.order_of_learning(STUDY)
    printed = [line for line in capsys.readouterr().out.splitlines() if line.startswith("|")]
    page = (STUDY / "README.md").read_text()
    shown = [line for line in page.splitlines() if line.startswith("| ") and not line.startswith("| families |")]
    assert len(shown) == 20
    assert all(any(line.startswith(row.removesuffix(" |")) for line in printed) for row in shown)
    for told in (".79 (.50 .90 .97)", ".87 (.63 1.00 .97)", ".73 (.40 .93 .87)"):
        assert told in page.replace("\n", " ")
        assert any(told in line for line in printed), told
    correlations = [line.split(" | ")[2:] for line in printed if line.count("(p ") == 3]
    for column, (least, most) in enumerate(((0.17, 0.29), (0.30, 0.42), (0.66, 0.78))):
        values = [float(cells[column].split()[0]) for cells in correlations]
        assert (min(values), max(values)) == (least, most)
