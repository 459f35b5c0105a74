"""What a paper takes from runs: figures, tables, settings and references, made from records alone."""

import csv
import re
from collections.abc import Callable
from inspect import getdoc
from pathlib import Path

import pytest

import posbias as pb
from conftest import Run
from posbias import Record, UsageError
from posbias.paper import ARXIV, FUNCTIONS, VARIANTS, csv_table, references, sources_of, write_paper
from posbias.results.drawing import image_of
from posbias.results.page import figures_of, tables_of
from posbias.results.result import report_of
from posbias.results.tables import Table
from posbias.statistics import MISSING

Build = Callable[..., Record]


def prediction(theory: str = "rollout", encoding: str = "alibi") -> pb.Record:
    stack = pb.Architecture(depth=4, heads=2, encoding=encoding, mixing=0.1)
    return pb.predict(stack, n_positions=32, theory=theory).as_run()


def test_every_source_that_a_variant_names_has_an_entry_with_authors_and_no_entry_is_unused():
    documented = [registry[name] for registry in VARIANTS for name in registry] + [*FUNCTIONS.values()]
    named = {number for variant in documented for number in ARXIV.findall(getdoc(variant) or "")}
    assert named == set(references())
    for entry in references().values():
        assert re.search(r"^  author = \{[A-Z].*,.*\},$", entry, re.M)
        assert entry.count("{") == entry.count("}")


@pytest.mark.parametrize(
    ("record", "numbers"),
    [
        (prediction(), {"2602.16837", "2108.12409"}),
        (prediction("attention_only", "none"), {"2502.01951"}),
        (Record("evaluate", {"task": "key_value(pairs=5)"}), {"2307.03172"}),
        (Record("mitigate", {"methods": "pine,adapter(rank=2)"}), {"2407.01100", "2106.09685"}),
        (Record("measure", {"model": "rollout"}, {"model": {"source": "pine"}}), set()),
    ],
)
def test_a_run_cites_the_work_that_it_rests_on(record, numbers):
    assert numbers - set(sources_of(record)) == set()
    assert set(sources_of(record)) - numbers <= {"2602.16837"}  # a model of that name


def test_what_is_no_run_names_posbias_alone():
    result = pb.predict(pb.Architecture(depth=4, mixing=0.1), n_positions=32, theory="rollout")
    told = {re.sub("% run: .*", "", text) for text in (pb.cite(result), result.cite(), pb.cite(result.as_run()))}
    assert len(told) == 1, "all but the name of the run, which each record draws"
    assert "% environment: packages: numpy: " in result.cite()
    assert "Herasimchyk, Hanna" in result.cite()
    cited = pb.cite(result.profile)
    assert cited.startswith("@software{posbias-")
    assert "@article" not in cited


def test_a_saved_picture_names_its_command_and_is_the_same_every_time(tmp_path: Path):
    result = pb.predict(pb.Architecture(depth=4, mixing=0.1), n_positions=32, theory="rollout")
    for sort in ("pdf", "svg"):
        first, again = (result.save(tmp_path / f"{name}.{sort}").read_bytes() for name in ("a", "b"))
        assert first == again
        assert b"posbias.predict" in first
    assert "<dc:title>" in (tmp_path / "a.svg").read_text()
    result.profile.save(tmp_path / "profile.svg")


def test_figures_tables_and_references_are_written(posbias: Run, tmp_path: Path):
    """By the command, which draws no page."""
    record, out = prediction(), tmp_path / "paper"
    record.resolved["title"] = "50%_&$#~"
    record.save(tmp_path / "run")
    assert posbias("report", tmp_path / "run", "--paper", out).returncode == 0
    assert not (tmp_path / "run/report.html").exists()
    document = (out / "paper.tex").read_text()
    figures = sorted((out / "figures").iterdir())
    assert [path.suffix for path in figures] == [".pdf", ".svg"]
    (figure,) = figures_of(report_of(record)).values()
    assert figures[0].read_bytes() == image_of(figure, "pdf", about=record.command)
    assert "posbias.predict(theory=" in figures[1].read_text()
    assert document.count(f"{{figures/{figures[0].stem}}}") == 1
    assert document.count("Made by \\texttt{posbias.predict(theory=") == 1
    assert r"50\%\_\&\$\#\textasciitilde{}" in document
    tables = sorted((out / "tables").glob("*.csv"))
    for path in tables:
        assert rf"\input{{tables/{path.stem}}}" in document
        assert path.with_suffix(".tex").read_text().count(r"\toprule") == 1
    settings = csv.DictReader(tables[-1].read_text().splitlines())
    assert {"made by", "architecture: encoding", "environment: posbias"} <= {row["setting"] for row in settings}
    assert "@software{posbias-" in (out / "references.bib").read_text()
    refused = posbias("report", tmp_path / "run", "--paper", tmp_path / "other", "--out", tmp_path / "page")
    assert (refused.returncode, "leave out --out" in refused.stderr) == (2, True)


def test_any_number_of_runs_are_summed_up_by_theory_w1_interval_and_flat_line(audit_record: Build):
    names = ["some/model_a", "model_b", "model_c"]
    tables = tables_of(report_of(*(audit_record(model=name) for name in names)))
    assert tables[0].title.startswith("How near is each theory?")
    near = list(csv.DictReader(csv_table(tables[0]).splitlines()))
    assert {row["model"].partition(" ")[0] for row in near} == {*names}
    assert {row["theory"] for row in near} >= {"power rollout", "published residual rollout"}
    for row in near:
        assert float(row["a flat line's distance"]) > 0
        value, low, high = (float(row[f"distance W1 [95 %]{end}"]) for end in ("", " low", " high"))
        assert low <= value <= high


def test_intervals_become_three_columns_and_what_is_not_known_is_empty():
    table = Table("t", ["a", "b"], [["x", "0.5 % [-1.0, inf]"], ["y", MISSING], ["z", "2.0 % [1.0, 3.0]"]])
    assert csv_table(table) == "a,b %,b % low,b % high\nx,0.5,-1.0,inf\ny,,,\nz,2.0,1.0,3.0\n"


def test_a_place_that_holds_something_is_refused(tmp_path: Path):
    (tmp_path / "mine").write_text("in the way")
    for place in (tmp_path, tmp_path / "mine"):
        with pytest.raises(UsageError, match="is not empty"):
            write_paper([prediction()], place)
