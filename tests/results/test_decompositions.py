"""The page and the tables of a decomposition, drawn from a made-up record with known shifts."""

from dataclasses import replace

import numpy as np
import pytest

from posbias import Record
from posbias.decomposition.decomposition import Counterfactual, Decomposition, store_decomposition
from posbias.decomposition.page import decomposition_report, tables_of
from posbias.results.result import verdict
from posbias.statistics import Interval

N_POSITIONS = 40


def moved(profiles: np.ndarray, share: float) -> np.ndarray:
    """A share of every prompt's influence goes to the first position."""
    first = np.zeros(profiles.shape[1])
    first[0] = 1
    return (1 - share) * profiles + share * first


def build(count: int) -> Decomposition:
    flat = np.random.default_rng(0).dirichlet(np.full(N_POSITIONS, 50.0), count)
    resolved = {"title": "made <up>", "command": "posbias decompose made-up"}
    items = (
        Counterfactual("no_rope", "encoding", {"jacobian": moved(flat, 0.3)}, None, np.full(count, 0.25)),
        Counterfactual("sink_masked(positions=2)", "sinks", reason="sink_masked(positions=2): <nothing> to mask"),
    )
    record = Record("decompose", {"model": "made up"}, resolved)
    return store_decomposition(Decomposition(record, {"jacobian": flat}, items))


@pytest.fixture
def decomposition() -> Decomposition:
    return build(8)


def test_tables_show_shifts_in_points(decomposition):
    tables = {table.title: (table.header, table.cells) for table in tables_of(decomposition)}
    header, ((*named, first, _, _),) = tables["Shift of the mass in percentage points (Jacobian)"]
    assert header == ["ingredient", "replaced by", "first tenth", "middle tenth", "last tenth"]
    assert named == ["encoding", "no_rope"]
    # 30 % of everything goes to the first position, which had about a fortieth: the first tenth wins about .3 * .9.
    assert first.startswith("+27.")
    assert tables["How far does the change drive the model?"][1] == [["encoding", "no_rope", "0.250 [0.176, 0.324]"]]
    assert [row[0] for row in tables["Masses with nothing replaced (a flat line: 10 % each)"][1]] == ["Jacobian"]


def test_the_verdict_says_no_more_than_the_intervals(decomposition):
    most, moving = verdict(decomposition)
    assert most.startswith("no_rope moves the profile most: the first tenth changes by +27.")
    assert moving == "These replacements are shown to move it: no_rope."
    assert verdict(build(5)) == ("5 prompts: with fewer than 6 nothing is decided.",)
    wide = [replace(shift, shift=Interval(0.1, -0.1, 0.2)) for shift in decomposition.shifts]
    vars(decomposition)["shifts"] = tuple(wide)
    assert list(decomposition_report(decomposition).verdict) == ["No replacement is shown to move the profile."]


def test_what_was_not_possible_is_told_with_its_reason(decomposition):
    told = ["sink_masked(positions=2): not possible, <nothing> to mask"]
    assert decomposition_report(decomposition).left_out == told
