"""The shipped study of adapters: its tables are those of its answers."""

import json
from importlib import util
from pathlib import Path

import numpy as np
import pytest

from posbias.statistics import mean_ends

STUDY = Path(__file__).parents[2] / "studies" / "adapters"


def exact_after(scores):
    """The share of exact answers of one fit."""
    return float(np.array(scores["after"])[..., 1].mean())


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
    assert len(shown) == 18
    assert all(any(line.startswith(row.removesuffix(" |")) for line in printed) for row in shown)
    for told in (
        *(".79 (.50 .90 .97)", ".87 (.63 1.00 .97)", ".73 (.40 .93 .87)"),
        *(".23 (.35 .23 .10)", ".45 (.56 .35 .44)", ".96 [.86, 1.00]"),
    ):
        assert told in page.replace("\n", " ")
        assert any(told in line for line in printed), told
    correlations = [line.split(" | ")[2:] for line in printed if line.count("(p ") == 3]
    influence, _, nearness = ([float(cells[column].split()[0]) for cells in correlations] for column in range(3))
    assert (min(influence), max(influence)) == (0.17, 0.52)
    assert sorted(nearness)[-5:] == [0.66, 0.70, 0.72, 0.75, 0.78]


def test_exchanged_distractors_are_not_shown_to_gain_over_the_three_fits(study):
    cells = json.loads((STUDY / "distractors.json").read_text())
    exact = {
        how: np.array([exact_after(cells[f"{how}, seed {seed}"]["scores"]) for seed in study.SEEDS])
        for how in ("kept", "shuffled", "exchanged")
    }
    pages = [(folder / "README.md").read_text() for folder in (STUDY, STUDY.parent)]
    for how, told, places in (("exchanged", "+.15 [-.24, .54]", 2), ("shuffled", "-.11 [-.42, .20]", 1)):
        gain = exact[how] - exact["kept"]
        low, high = mean_ends(gain, least=-1.0, most=1.0)
        assert f"{gain.mean():+.2f} [{low:.2f}, {high:.2f}]".replace("0.", ".") == told
        assert sum(told in page for page in pages) == places
