"""The parts of a run's report, and how it becomes one offline HTML page, or text.

A page answers first: the verdict, one picture, the tables that matter most; everything else is folded below. All text
is escaped where it is rendered, here and in `tables.py`, so that none of it steers a page or a terminal. Figures are
SVG; a content security policy forbids any script and external load, so that a report can be mailed around and opened
years later.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING, Any

from posbias.errors import printable
from posbias.results.drawing import fragment_of
from posbias.results.figures import Figure, HeatMap
from posbias.results.records import Record
from posbias.results.tables import Table, condensed, latex_table, print_notes, print_tables
from posbias.version import __version__

if TYPE_CHECKING:
    from jinja2 import Template
    from rich.console import Console

DEMO_NAME = "SmolLM2-135M-Instruct"
MARKDOWN = str.maketrans({sign: f"\\{sign}" for sign in "|<"})
"""Signs that would end a cell, or begin a tag."""
LONGEST_LIST = 8
"""Values of a list that the conditions of a run write out; a longer one is cut, with its length given."""


@dataclass(frozen=True, eq=False)
class Section:
    """A part of a page, in the order in which it is shown; folded, unless it is the whole report."""

    title: str = ""
    """By default that of the record."""
    badge: str = ""
    mark: str = ""
    """Colour of the badge: `holds`, `correction` or `fails`."""
    source: str = ""
    texts: Sequence[str] = ()
    """Paragraphs, the statement first."""
    statements: Sequence[str] = ()
    """Sentences that the intervals support."""
    caveats: Sequence[str] = ()
    """Warnings to read before anything is believed; those of the record stand first."""
    note: str = ""
    """How to read tables and figures."""
    tables: Sequence[Table] = ()
    left_out: Sequence[str] = ()
    """Things that were not possible or not done, and why."""
    record: Record | None = None
    """The run that is repeated by its command, under its conditions; of a page of one run `report_of` knows it."""

    def __post_init__(self) -> None:
        of_record: list[str] = []
        if self.record is not None:  # on its model (an encoding that is not the published one), and on its theories
            resolved = self.record.resolved
            model = resolved.get("model") or (resolved.get("responder") or {}).get("model")
            of_record += model.get("caveats", ()) if isinstance(model, Mapping) else ()
            of_record += self.record.scalars.get("caveats", ())
            object.__setattr__(self, "title", self.title or self.record.title)
        object.__setattr__(self, "caveats", list(dict.fromkeys([*map(str, of_record), *self.caveats])))


@dataclass(frozen=True, eq=False)
class Report(Section):
    """All text, tables and figures about one run, or several."""

    kicker: str = ""
    """The sort of page, named above its title."""
    notices: Sequence[str] = ()
    """Notes to be read before any number: they stand first, on the page and on a terminal."""
    basis: str = ""
    """Data that the verdict rests on, and how much of it."""
    verdict: Sequence[str] = ()
    """Lines that answer what the run was made for, each of at most 25 words that need no glossary."""
    picture: Sequence[Figure | HeatMap] = ()
    """Figures that are seen first: one, or two side by side."""
    figures: Sequence[Figure | HeatMap] = ()
    """Further ones."""
    summary: Sequence[Table] = ()
    """The few tables that matter most. Further ones are `tables`."""
    folded: Mapping[str, Sequence[Table]] = field(default_factory=dict)
    """Further tables by the line that unfolds them."""
    sections: Sequence[Section] = ()
    glossary: Mapping[str, str] = field(default_factory=dict)


def tables_of(report: Report) -> list[Table]:
    """All tables that hold anything, those that matter most first."""
    folded = [table for tables in report.folded.values() for table in tables]
    of_sections = [table for section in report.sections for table in section.tables]
    return [table for table in (*report.summary, *report.tables, *folded, *of_sections) if table.cells]


def latex_of(report: Report) -> str:
    """Every table in LaTeX."""
    return "\n".join(map(latex_table, tables_of(report)))


def html_of(report: Report, *, links: Mapping[str, str] | None = None) -> str:
    """The page as text, with `links` to pages beside it; all is escaped, a name that the template lacks is an error."""
    # In its title the demo model goes by the name that its makers gave it.
    title = re.sub(r"(?<![\w/-])demo(?![\w/-])", DEMO_NAME, report.title)
    return _page_template().render(
        chart=fragment_of,
        report=report,
        title=title,
        called=title != report.title,
        demo=DEMO_NAME,
        links=links or {},
        version=__version__,
    )


Checks = Mapping[str, tuple[str, bool]]
"""Bounds that were asked for: by name a sentence on each, and whether it is met."""


def markdown_of(report: Report, checks: Checks) -> str:
    """Notices, verdict, sentences on bounds and the first tables, as GitHub shows them."""
    blocks = [f"## {report.title}", *report.notices, *report.verdict, *(f"**{told}**" for told, _ in checks.values())]
    blocks = [printable(block).translate(MARKDOWN) for block in blocks]
    for table in filter(lambda table: table.cells, report.summary):
        rows = [table.header, ["---"] * len(table.header), *table.cells]
        cells = [[printable(cell).translate(MARKDOWN) for cell in row] for row in rows]
        blocks.append("\n".join(f"| {' | '.join(row)} |" for row in cells))
    return "\n\n".join(blocks) + "\n"


def junit_of(report: Report, checks: Checks) -> str:
    """A suite of JUnit, in XML, with a test case for each bound, which fails where it is not met."""
    from xml.etree import ElementTree

    failures = str(sum(not met for _, met in checks.values()))
    suite = ElementTree.Element("testsuite", name=printable(report.title), tests=str(len(checks)), failures=failures)
    for name, (told, met) in checks.items():
        case = ElementTree.SubElement(suite, "testcase", classname="posbias", name=printable(name))
        if not met:
            ElementTree.SubElement(case, "failure", message=printable(told)).text = printable(told)
    return str(ElementTree.tostring(suite, "utf-8", xml_declaration=True), "utf-8")


@cache
def _page_template() -> "Template":
    """The template of pages, compiled once: that takes longer than drawing most pages."""
    from jinja2 import Environment, PackageLoader, StrictUndefined
    from markupsafe import Markup

    environment = Environment(
        loader=PackageLoader("posbias.results"),
        autoescape=True,
        undefined=StrictUndefined,
        finalize=lambda value: printable(value) if isinstance(value, str) and not isinstance(value, Markup) else value,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.globals.update(condensed=condensed, conditions_of=conditions_of)
    # Names of columns are told to style sheets once, as strings of CSS; phones show them before the cells.
    quoted = str.maketrans({"\\": r"\\", '"': r"\""})
    environment.filters.update(printable=printable, quoted=lambda name: f'"{printable(name).translate(quoted)}"')
    return environment.get_template("page.html.jinja")


def show_report(report: Report, console: "Console") -> None:
    """Print notices, the verdict, tables and statements: ruled on a terminal, else in plain columns."""
    print_notes(report.notices, console, mark="Notice: ")
    print_notes(report.verdict, console, mark="")
    if report.verdict:
        console.print()
    folded = [table for tables in report.folded.values() for table in tables if table.cells]
    print_tables([*report.summary, *report.tables, *folded], console)
    texts = [*report.statements, *report.caveats]
    print_notes([text for text in texts if text not in report.verdict], console)
    print_notes(report.left_out, console, mark="Left out: ")


def first_of(values: Sequence[object]) -> str:
    """The first of many, as text."""
    return ", ".join(map(str, values[:LONGEST_LIST])) + (" ..." if len(values) > LONGEST_LIST else "")


def conditions_of(record: Record) -> dict[str, str]:
    """Model, prompts, seeds and versions as label and text, nested tables written out."""
    found: dict[str, str] = {}

    def add(name: str, value: Any) -> None:
        if isinstance(value, Mapping):
            for key, entry in value.items():
                add(f"{name}: {key}" if name else str(key), entry)
        elif isinstance(value, list | tuple) and value:
            more = f" ({len(value)} values)" if len(value) > LONGEST_LIST else ""
            texts = [f"{entry:.4g}" if isinstance(entry, float) else str(entry) for entry in value]
            found[name.replace("_", " ")] = first_of(texts) + more
        elif value is not None and value not in ("", [], ()):
            found[name.replace("_", " ")] = f"{value:.6g}" if isinstance(value, float) else str(value)

    untold = ("command", "title", "related", "curves")
    add("", {name: value for name, value in record.resolved.items() if name not in untold})
    add("", {"seed": record.seeds, "environment": record.environment})
    return {**found, "finished": record.created, "run": record.run_id}
