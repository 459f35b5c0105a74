"""What a paper takes from runs: figures and tables, made from records alone."""

from collections.abc import Callable
from pathlib import Path

import pytest

import posbias as pb
from conftest import Run
from posbias import Record, UsageError
from posbias.results.drawing import image_of
from posbias.results.page import figures_of, tables_of
from posbias.results.result import report_of, write_paper
from posbias.results.tables import Table, latex_table


def prediction() -> pb.Record:
    stack = pb.Architecture(depth=4, heads=2, encoding="alibi", mixing=0.1)
    return pb.predict(stack, n_positions=32, theory="rollout").as_run()


def test_a_saved_picture_names_its_command_and_is_the_same_every_time(tmp_path: Path):
    result = pb.predict(pb.Architecture(depth=4, mixing=0.1), n_positions=32, theory="rollout")
    for sort in ("pdf", "svg"):
        first, again = (result.save(tmp_path / f"{name}.{sort}").read_bytes() for name in ("a", "b"))
        assert first == again
        assert b"posbias.predict" in first
    assert "<dc:title>" in (tmp_path / "a.svg").read_text()
    result.profile.save(tmp_path / "profile.svg")


def test_figures_and_tables_are_written_by_the_command_which_draws_no_page(posbias: Run, tmp_path: Path):
    record, out = prediction(), tmp_path / "paper"
    record.save(tmp_path / "run")
    assert posbias("report", tmp_path / "run", "--paper", out).returncode == 0
    assert not (tmp_path / "run/report.html").exists()
    ((name, figure),) = figures_of(report_of(record)).items()
    assert sorted(path.name for path in out.iterdir()) == [f"{name}.pdf", f"{name}.svg", "tables.tex"]
    assert (out / f"{name}.pdf").read_bytes() == image_of(figure, "pdf", about=record.command)
    assert "posbias.predict(theory=" in (out / f"{name}.svg").read_text()
    assert (out / "tables.tex").read_text().count(r"\toprule") == len(tables_of(report_of(record))) >= 1
    refused = posbias("report", tmp_path / "run", "--paper", tmp_path / "other", "--out", tmp_path / "page")
    assert (refused.returncode, "leave out --out" in refused.stderr) == (2, True)
    with pytest.raises(UsageError, match="is not empty"):
        write_paper([record], out)


def test_cells_are_text_in_latex():
    written = latex_table(Table("50%_&$#~", ["a", "b"], [["{x}", "1"]]))
    assert r"\caption{50\%\_\&\$\#\textasciitilde{}}" in written
    assert r"\{x\} & 1 \\" in written


def test_any_number_of_runs_are_summed_up_by_theory_with_the_flat_line(audit_record: Callable[..., Record]):
    names = ["some/model_a", "model_b", "model_c"]
    first, *_ = tables_of(report_of(*(audit_record(model=name) for name in names)))
    assert first.title.startswith("How near is each theory?")
    near = [dict(zip(first.header, row, strict=True)) for row in first.cells]
    assert {row["model"].partition(" ")[0] for row in near} == {*names}
    assert {row["theory"] for row in near} >= {"power rollout", "published residual rollout"}
    assert all(float(row["a flat line's distance"]) > 0 for row in near)
