"""The shipped study of trained models: its page shows its record, kept single prompts give the record."""

import importlib
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from posbias.results.records import read_record

ROOT = Path(__file__).parents[2]
STUDY = ROOT / "studies" / "trained_models"
PAGE = STUDY / "README.md"


@pytest.fixture
def script(monkeypatch):
    """A script of the study, by its name."""
    monkeypatch.syspath_prepend(str(STUDY))
    return importlib.import_module


def test_the_page_shows_the_record(script):
    summary, page, record = script("summary"), PAGE.read_text(), read_record(STUDY / "record")
    assert summary.with_tables(page, summary.tables_of(record)) == page
    for name, lines in summary.sheets_of(record).items():
        assert (STUDY / name).read_text() == lines, name


def test_the_page_shows_what_rivals_have(script):
    rivals, page = script("rivals"), PAGE.read_text()
    of_models, of_prompts = rivals.model_rows(), rivals.prompt_rows()
    assert rivals.with_tables(page, rivals.tables_of(of_models, of_prompts)) == page
    assert rivals.sheet(of_models) == (STUDY / "rivals.csv").read_text()
    assert rivals.sheet(of_prompts) == (STUDY / "rivals_prompts.csv").read_text()
    power, elsewhere, _, baseline = rivals.OF_MODELS
    assert len(of_models) == 48
    assert sum(row[power] < row[elsewhere] for row in of_models) == 26
    assert sum(row[elsewhere] < row[baseline] / 2 for row in of_models) == 46
    own, flat = (f"less {name}" for name in ("other prompts", "uniform baseline"))
    kept = [row for row in of_prompts if row["n_positions"] == 2048 and row["text"] in rivals.LANGUAGE]
    assert len(kept) == 8
    assert sum(row[f"{own}, high"] < 0 for row in kept) == 6
    spread = [f"{end(row[name] for row in kept):.3f}"[1:] for name in rivals.OF_PROMPTS[:2] for end in (min, max)]
    assert spread == [".026", ".060", ".045", ".078"]
    demo = {row["text"]: row for row in of_prompts if (row["model"], row["n_positions"]) == rivals.DEMO}
    assert [text for text, row in demo.items() if row[f"{own}, high"] < 0] == ["Markdown"]
    assert demo[rivals.REPEATED][f"{own}, low"] > 0
    assert demo[rivals.REPEATED][f"{flat}, high"] > 0
    for told in (page, (STUDY.parent / "README.md").read_text(), (ROOT / "README.md").read_text()):
        assert "in 26 of 48" in " ".join(told.split())


def test_kept_prompts_give_the_record(script):
    summary, cells = script("summary"), script("cells")
    rows = {summary.key_of(row): row for row in read_record(STUDY / "record").scalars["rows"]}
    judged = 0
    for cell in cells.cells(Path("nowhere"), STUDY / "kept", least=2):
        again = summary.row(cell, "jacobian", "diagonal_key")
        recorded = rows[summary.key_of(again)]
        if again["prompts"] < recorded["prompts"]:  # the record stays with the larger sample
            continue
        judged += 1
        assert again["prompts"] == recorded["prompts"], cell.name
        assert again["theory"]["value"] == pytest.approx(recorded["theory"]["value"], abs=1e-4), cell.name
        # The ends that the record keeps are those of a percentile bootstrap, which is no longer drawn.
        assert again["theory"]["low"] <= again["theory"]["value"] <= again["theory"]["high"], cell.name
    assert judged


def parts_of(folder, *, count, n_positions, seed=0):
    """Finished prompts, as `run.py` writes them."""
    folder.mkdir(parents=True)
    generator = np.random.default_rng(seed)
    names = ("norms/jacobian", "norms/probability", "theory/diagonal_key", "theory/published")
    for index in range(count):
        save_file(
            {name: generator.exponential(size=n_positions) for name in names}, folder / f"{index:03d}-ab.safetensors"
        )


def test_keeping_loses_nothing_that_is_judged(script, tmp_path):
    summary, cells = script("summary"), script("cells")
    parts_of(tmp_path / "parts" / "some-model" / "96" / "novels", count=6, n_positions=96)
    [cell] = cells.cells(tmp_path / "parts", tmp_path / "kept", least=2)
    cells.keep(cell, tmp_path / "kept")
    [again] = cells.cells(tmp_path / "none", tmp_path / "kept", least=2)
    assert (again.model, again.n_positions, again.text) == ("some-model", 96, "novels")
    assert list(again.finished) == list(cell.finished)
    assert set(cells.kept_prompts(tmp_path / "kept", "some-model", 96, "novels")) == set(cell.finished)
    for name in ("theory", "flat", "published"):
        first, second = (summary.row(each, "probability", "diagonal_key")[name] for each in (cell, again))
        assert second == pytest.approx(first, rel=2e-3)
