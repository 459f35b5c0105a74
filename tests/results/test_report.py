"""The record layout, the tables, the page itself, and what a paper takes from runs: figures and tables."""

import io
import re
from collections.abc import Callable
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from conftest import Run
from posbias import Architecture, Profile, Record, UsageError, compare, predict, write_report
from posbias.cli.predict import MOST_CURVES
from posbias.comparison.stored import ProfileRun
from posbias.comparison.tables import detailed_tables, overview_tables
from posbias.results.drawing import image_of
from posbias.results.figures import Figure
from posbias.results.page import Report, html_of, show_report, tables_of
from posbias.results.result import report_of, write_paper
from posbias.results.tables import Table, condensed, latex_table

Build = Callable[..., Any]


class Page(HTMLParser):
    """Collects what a page would load and the text it shows."""

    def __init__(self) -> None:
        super().__init__()
        self.loads: list[str] = []
        self.scripts = 0
        self.text: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.loads += [str(value) for name, value in attrs if name in ("src", "href", "action", "srcset", "data")]
        if tag == "script":
            self.scripts += 1

    def handle_data(self, data: str) -> None:
        self.text.append(data)


def prediction(n_positions: int = 300, theory: str = "rollout") -> Record:
    values = Profile.normalised(1 / (1 + np.arange(n_positions, dtype=np.float64))).influence
    arguments = {"depth": 12, "theory": theory, "n_positions": n_positions}
    return Record("predict", arguments, {"theory": theory}, arrays={"profile/influence": values})


def test_tables_carry_every_number(audit_record: Build) -> None:
    view = ProfileRun.from_record(audit_record())
    tables = {
        table.title: [dict(zip(table.header, row, strict=True)) for row in table.cells]
        for table in (*overview_tables([view]), *detailed_tables(view))
    }
    (rows,) = (rows for title, rows in tables.items() if title.startswith("How near is each theory?"))
    assert len(rows) == 2 * 3 + 2
    of_rollout = [row for row in rows if row["theory"] == "power rollout" and row["measured"] == "Jacobian"]
    best = of_rollout[0]
    (block,) = (
        block for block in view.subjects[0].comparisons if (block.theory, block.kind) == ("power_rollout", "jacobian")
    )
    assert block.prompts is not None
    assert best["distance W1 [95 %]"] == str(block.prompts.distance)
    assert best["a flat line's distance"] == f"{block.flat['wasserstein']:.3f}" == f"{block.prompts.flat.value:.3f}"
    (change,) = tables["What differs between the two?"]
    contrast = view.contrasts["jacobian"]
    assert change["last tenth"] == contrast.statistics["last_tenth"].text("+.1f", scale=100, unit=" points")
    assert (change["distance W1 [95 %]"], change["texts or seeds"]) == (str(contrast.distance), "8")
    shares = view.subjects[0].summaries["jacobian"]["first_tenth"]
    assert shares.low < shares.value < shares.high
    row = next(row for row in tables["Shares of the influence"] if row["profile"] == "Jacobian")
    assert row["first tenth"] == shares.text(".1f", scale=100, unit=" %")


def test_the_summary_is_plain_in_a_pipe_and_ruled_on_a_terminal(audit_record: Build) -> None:
    from rich.console import Console

    plain, ruled = io.StringIO(), io.StringIO()
    report = report_of(audit_record(model="[bold]odd[/bold]"))
    show_report(report, Console(file=plain, width=40))
    show_report(report, Console(file=ruled, width=200, force_terminal=True))
    lines = plain.getvalue().splitlines()
    assert "\x1b" not in plain.getvalue()
    row = next(line for line in lines[3:] if "power rollout" in line and "as trained" in line)
    assert "[bold]odd[/bold] as trained" in row
    assert row.endswith("closer"), "nothing is wrapped, however narrow the pipe"
    assert lines[: len(report.verdict)] == list(report.verdict), "the answer comes first"
    assert "━" in ruled.getvalue()
    assert "[bold]odd[/bold]" in ruled.getvalue()
    for text in (plain.getvalue(), ruled.getvalue()):
        assert text.count("Left out: Content logits were not measured.\n") == 1


def test_a_failed_or_empty_run_is_not_drawn(tmp_path: Path, audit_record: Build) -> None:
    with pytest.raises(UsageError, match="did not finish"):
        write_report([Record("audit", {}, status="failed", error="NaN gradients")], tmp_path)
    with pytest.raises(UsageError, match="holds no profile"):
        write_report([Record("measure", {})], tmp_path)
    with pytest.raises(UsageError, match="at least one run"):
        write_report([], tmp_path)
    damaged = audit_record()
    del damaged.arrays["trained/mixing/frobenius/value"]
    with pytest.raises(UsageError, match=r"is damaged: .*frobenius"):
        write_report([damaged], tmp_path)
    foreign = audit_record()
    del foreign.scalars["subjects"]["trained"]["summaries"]["jacobian"]["first_tenth"]["low"]
    with pytest.raises(UsageError, match="is damaged: KeyError 'low'"):
        write_report([foreign], tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_the_page_is_one_file_that_loads_nothing(tmp_path: Path, audit_record: Build) -> None:
    hostile = '</script><script>alert("x")</script><img src=http://example.org/x.png>$x$'
    record = audit_record(model=hostile)
    record.scalars["left_out"].append(hostile)
    page = write_report([record], tmp_path)
    text = page.read_text()
    parser = Page()
    parser.feed(text)
    assert all(target.startswith(("#", "data:")) for target in parser.loads)
    assert text.count('alert("x")') == 0
    assert "<img" not in text
    assert "default-src 'none'" in text
    assert len(text) < 150_000, "a page can be mailed around"
    charts = text.count('class="chart"')
    assert charts == 6
    assert parser.scripts == 0
    assert text.count("<svg ") == text.count('role="img"') == charts + text.count('type="checkbox"') == charts + 2
    ids = re.findall(r' id="([^"]+)"', text)
    assert len(ids) == len(set(ids))
    assert set(re.findall(r'url\(#([^)]+)\)|xlink:href="#([^"]+)"', text)) <= {
        *((each, "") for each in ids),
        *(("", each) for each in ids),
    }
    assert "<style" not in text.partition("</style>")[2], "no picture changes the page's style"
    assert write_report([record], tmp_path / "again").read_bytes() == page.read_bytes()
    shown = " ".join(parser.text)
    for needed in (
        "posbias audit",
        "ab" * 32,
        "Content logits were not measured.",
        "What differs between the two?",
        "Between halves of the texts",
    ):
        assert needed in shown
    report = report_of(record)
    assert sorted(figure.slug for figure in (*report.picture, *report.figures)) == [
        "initialised-jacobian",
        "initialised-jacobian-best",
        "mixing",
        "trained-jacobian",
        "trained-jacobian-best",
        "trained-probability",
    ]


@pytest.mark.parametrize("n_positions", [1, 2, 3, 19, 20_000])
def test_predictions_of_any_length_are_drawn(tmp_path: Path, n_positions: int) -> None:
    page = write_report([prediction(n_positions)], tmp_path)
    assert page.stat().st_size < 250_000
    assert "posbias.predict(depth=12, theory=&#39;rollout&#39;" in page.read_text()


def test_a_prediction_that_others_are_compared_to_is_not_called_measured(audit_record: Build) -> None:
    one, other = (predict(Architecture(2, encoding=encoding, mixing=0.2), 30).record for encoding in ("none", "alibi"))
    compared = compare(one, other).record
    report = report_of(compared)
    (figure,) = report.picture
    assert isinstance(figure, Figure)
    assert [curve.name for curve in figure.curves] == ["compared to: alibi", "none", "flat line"]
    said = [report.title, *report.verdict, *(figure.title for figure in report.picture)]
    said += [cell for table in [*report.summary, *report.sections[-1].tables] for cell in table.header]
    assert not any("measured" in text for text in said), said
    measured = report_of(compare(one, audit_record(n_positions=30)).record)
    names = [curve.name for figure in measured.picture for curve in figure.curves]  # type: ignore[union-attr]
    assert "measured (Jacobian)" in names
    beside = report_of(compared, one).picture[0]
    assert isinstance(beside, Figure)
    assert not any("measured" in text for text in (beside.title, *(curve.name for curve in beside.curves)))
    assert "measured" in measured.summary[0].header


def test_a_theory_beside_a_measurement_is_one_picture(audit_record: Build) -> None:
    """Each sentence of the verdict has one lead, which names its run."""
    theories = [predict(Architecture(2, encoding=name, mixing=0.2), 300).record for name in ("none", "alibi")]
    measurement = audit_record(n_positions=300)
    del measurement.scalars["subjects"]["initialised"]
    report = report_of(*theories, measurement)
    assert [figure.slug for figure in (*report.picture, *report.figures)] == ["runs-jacobian", "runs-probability"]
    (drawn,) = report.picture
    assert isinstance(drawn, Figure)
    names = ["measured: demo as trained", "none", "alibi", "flat line"]
    assert [curve.name for curve in drawn.curves] == names
    assert len({curve.stroke for curve in drawn.curves}) == 4
    assert [said.partition(": ")[0] for said in report.verdict] == [
        "Predicted, rollout of an architecture, none",
        "Predicted, rollout of an architecture, alibi",
        "demo loses the middle",
    ]
    both = report_of(theories[0], audit_record(n_positions=300)).picture[0]
    assert isinstance(both, Figure)
    assert [curve.name for curve in both.curves[:2]] == ["demo as trained", "demo at initialisation"]
    assert len({curve.stroke for curve in both.curves}) == len(both.curves) == 4


def test_what_all_rows_share_is_said_once() -> None:
    cells = [["demo", str(row), "Jacobian", ""] for row in range(3)]
    table = Table("Title", ["model", "row", "measured", ""], cells)
    short, shared = condensed(table)
    assert (short.header, short.cells, shared) == (
        ["row", ""],
        [["0", ""], ["1", ""], ["2", ""]],
        "model = demo; measured = Jacobian",
    )
    few = replace(table, cells=cells[:2])
    assert condensed(few) == (few, ""), "two rows may agree by chance"
    same = Table("Title", ["model"], [["demo"]] * 3)
    assert condensed(same) == (same, "")
    mixed = Table("Title", ["model", "row"], [["a", "1"], ["a", "2"], ["b", "2"]])
    page = html_of(Report("Title", summary=[table, mixed]))
    assert "In every row: model = demo; measured = Jacobian." in page
    assert page.count('class="again"') == 1, "a phone shows the name of a group once"


def test_pages_of_long_contexts_are_light(tmp_path: Path) -> None:
    """The most curves that a command draws, with values of all digits; and two pages of them side by side."""
    random, n_positions = np.random.default_rng(0), 65_536
    values = np.exp(random.normal(size=(MOST_CURVES, n_positions)) - 30 * random.random((MOST_CURVES, n_positions)))
    curves = {f"theories/{row}": {"theory": "rollout", "mixing": row / 100} for row in range(MOST_CURVES)}
    arrays = {f"{name}/influence": row / row.sum() for name, row in zip(curves, values, strict=True)}
    record = Record("predict", {}, {"title": "24 predictions", "curves": curves}, arrays=arrays)
    assert write_report([record], tmp_path / "one").stat().st_size < 150_000
    assert write_report([record, record], tmp_path / "two").stat().st_size < 200_000


def test_a_saved_picture_names_its_command_and_is_the_same_every_time(tmp_path: Path):
    result = predict(Architecture(4, mixing=0.1), 32)
    for sort in ("pdf", "svg"):
        first, again = (result.save(tmp_path / f"{name}.{sort}").read_bytes() for name in ("a", "b"))
        assert first == again
        assert b"posbias.predict" in first
    assert "<dc:title>" in (tmp_path / "a.svg").read_text()
    result.profile.save(tmp_path / "profile.svg")


def test_figures_and_tables_are_written_by_the_command_which_draws_no_page(posbias: Run, tmp_path: Path):
    record, out = predict(Architecture(4, heads=2, mixing=0.1), 32, theory="rollout").as_run(), tmp_path / "paper"
    record.save(tmp_path / "run")
    assert posbias("report", tmp_path / "run", "--paper", out).returncode == 0
    assert not (tmp_path / "run/report.html").exists()
    (figure,) = report_of(record).picture
    name = figure.slug
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
