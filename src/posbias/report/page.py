"""What a run's report consists of, and how it becomes one offline HTML page with a PNG per figure, or text.

Every verb has a function from its record to a `Report`, registered here under the verb; nothing but the record is
read. The templates escape all text; plotly is inlined once; a content security policy in the page forbids any external
load, so that a report can be mailed around and opened years later.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from posbias.directories import write_atomically
from posbias.errors import RunError, UsageError
from posbias.records import REPORT_FILE, Record
from posbias.registry import Registry
from posbias.report.conditions import command_of, conditions_of
from posbias.report.figures import Figure
from posbias.report.heatmaps import HeatMap, interactive_map, png_map
from posbias.report.interactive import interactive, plotly_source
from posbias.report.static import png
from posbias.report.tables import Table, print_notes, print_tables
from posbias.version import __version__

if TYPE_CHECKING:
    from rich.console import Console

TEMPLATE = "page.html.jinja"


@dataclass(frozen=True, eq=False)
class Section:
    """A part of a page with a verdict and a picture of its own."""

    title: str
    verdict: str
    mark: str
    """Colour of the verdict: `holds`, `correction` or `fails`."""
    source: str
    texts: Sequence[str]
    """Paragraphs, the statement first."""
    finding: str
    """Set apart; empty where there is none."""
    figure: Figure
    note: str


@dataclass(frozen=True, eq=False)
class Report:
    """What is said and drawn of one run."""

    kicker: str
    """What sort of page this is, above its title."""
    title: str
    statements: Sequence[str] = ()
    """What the intervals allow to say."""
    summary: Sequence[Table] = ()
    """Tables above the figures."""
    figures: Sequence[Figure | HeatMap] = ()
    note: str = ""
    """How to read the figures."""
    sections: Sequence[Section] = ()
    tables: Sequence[Table] = ()
    left_out: Sequence[str] = ()
    """What was not possible or not done, and why."""
    caveats: Sequence[str] = ()
    """What to know before anything is believed."""
    glossary: Mapping[str, str] = field(default_factory=dict)


REPORTS: Registry[Callable[[Record], Report]] = Registry("report")
"""By verb; runs of other verbs hold profiles, whose page can show several side by side (report/profiles.py)."""


def report_of(record: Record) -> Report:
    """The report of a finished run.

    Raises:
        UsageError: the run failed, its verb has no report of this form, or the record is damaged.
    """
    if record.status != "done" and not record.scalars:
        raise UsageError(f"the run {record.run_id} did not finish ({record.error}); only finished runs can be drawn")
    make: Callable[[Record], Report] = REPORTS[record.verb]
    try:
        return make(record)
    except (AttributeError, IndexError, KeyError, TypeError) as error:
        raise UsageError(f"the record of run {record.run_id} is damaged: {type(error).__name__} {error}") from None


def write_run_report(record: Record, out: Path) -> Path:
    """Write `report.html` and a PNG per figure into `out`, each atomically, and return the page's path.

    Raises:
        UsageError: as `report_of`.
        RunError: the files cannot be written.
    """
    report = report_of(record)
    pictures = {f"{figure.slug}.png": _picture(figure) for figure in report.figures}
    return write_page(_page(report, record, out), out, pictures=pictures)


def page_of(record: Record) -> str:
    """The page as text, without links to pages beside it."""
    return _page(report_of(record), record, None)


def _page(report: Report, record: Record, out: Path | None) -> str:
    sections = [
        {**vars(section), "chart": interactive(section.figure, anchor=section.figure.slug)}
        for section in report.sections
    ]
    return rendered(
        TEMPLATE,
        report=report,
        sections=sections,
        charts=[_chart(figure) for figure in report.figures],
        links=links_of(record, out),
        command=command_of(record),
        conditions=conditions_of(record),
    )


def show_report(report: Report, console: "Console") -> None:
    """Print tables and statements: ruled on a terminal, aligned plain columns into a pipe or a file."""
    print_tables([*report.summary, *report.tables], console)
    print_notes([*report.statements, *report.left_out, *report.caveats], console)


def rendered(template: str, **values: Any) -> str:
    """A template of this package: everything is escaped, and a name that is not given is an error."""
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=PackageLoader("posbias.report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template(template).render(plotly=plotly_source(), version=__version__, **values)


def links_of(record: Record, out: Path | None) -> list[tuple[str, str]]:
    """Name and address of the pages that belong to a run's own, as far as they are there.

    Args:
        record: Its `resolved["related"]` names them, relative to its page.
        out: Where that page will lie; None: nowhere.
    """
    related: dict[str, str] = record.resolved.get("related", {})
    return [(name, page) for name, page in related.items() if out is not None and (out / page).is_file()]


def write_page(page: str, out: Path, *, pictures: Mapping[str, bytes]) -> Path:
    """Write `report.html` and its pictures into `out`, each atomically, the page last.

    Args:
        page: The page's HTML.
        out: Directory, made where missing.
        pictures: PNG files by name.

    Returns:
        The path of the page.

    Raises:
        RunError: the files cannot be written.
    """
    try:
        out.mkdir(parents=True, exist_ok=True)
        for name, content in pictures.items():
            write_atomically(out / name, content)
        write_atomically(out / REPORT_FILE, page.encode())
    except OSError as error:
        raise RunError(f"cannot write the report to {str(out)!r}: {error.strerror or error}") from None
    return out / REPORT_FILE


def _chart(figure: Figure | HeatMap) -> str:
    anchor = f"figure-{figure.slug}"
    if isinstance(figure, HeatMap):
        return interactive_map(figure, anchor=anchor)
    return interactive(figure, anchor=anchor)


def _picture(figure: Figure | HeatMap) -> bytes:
    return png_map(figure) if isinstance(figure, HeatMap) else png(figure)
