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


def test_the_table_of_results_says_what_the_answers_say(study, capsys):
    study.table(STUDY)
    printed = capsys.readouterr().out
    results = (STUDY.parent / "README.md").read_text().splitlines()
    first = next(index for index, line in enumerate(results) if "(adapters/README.md)" in line)
    for row, seeds, told in (
        ("| 12 families |", ".39 (.83 .28 .06)", "exact answers .00 to .83, the others .28 and .06"),
        ("| 12 families |", ".26 (.50 .11 .17)", "at four times the entries .50, .11, .17"),
        ("| unchanged |", ".23 (.33 .27 .08)", "Twenty samples mend their own task (.23 to .98;"),
        ("| adapter, 20 samples |", ".98 (.98 .98 .98)", "Twenty samples mend their own task (.23 to .98;"),
        ("| gemma-3-270m, 20 samples |", "1.00 (1.00 1.00 1.00)", "Gemma .00 to 1.00)"),
        ("| q, k, gold always first |", "1.00 .00 .00 .00", "with the gold row always first only that row is found"),
    ):
        assert any(line.startswith(row) and seeds in line for line in printed.splitlines()), seeds
        assert told in " ".join(results[first : first + 2])


def test_the_tables_shown_are_those_of_the_answers(study, capsys):
    study.table(STUDY)
    study.order_of_learning(STUDY)
    printed = [line for line in capsys.readouterr().out.splitlines() if line.startswith("|")]
    page = (STUDY / "README.md").read_text()
    shown = [line for line in page.splitlines() if line.startswith("| ") and not line.startswith("| families |")]
    assert len(shown) == 20
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


def test_a_family_that_was_fitted_falls(study):
    cell = json.loads((STUDY / "families.json").read_text())["12 families, seed 0"]
    scores = cell["scores"]["counts x1"]
    assert cell["own"] == "counts"
    assert "counts" in cell["fitted_to"]
    assert round(exact_after({"after": scores["before"]}), 2) == 0.17
    assert exact_after(scores) == 0
    assert "`counts`, falls from .17 to .00" in (STUDY / "README.md").read_text()
