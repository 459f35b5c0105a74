"""The parts of a run's report, and how it becomes one offline HTML page, or text.

Every verb has a function from its record to a `Report`, registered here; nothing but the record is read. A page answers
first: the verdict, one picture, the tables that matter most; everything else is folded below. All text is escaped where
it is rendered, here and in `tables.py`, so that none of it steers a page or a terminal. Figures are SVG; a content
security policy forbids any script and external load, so that a report can be mailed around and opened years later.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from posbias.checks import checked
from posbias.display.figures import Figure, HeatMap
from posbias.display.showing import Showing
from posbias.display.static import fragment_of
from posbias.errors import UsageError, printable
from posbias.files import write_file
from posbias.registry import Registry
from posbias.report.tables import Table, condensed, print_notes, print_tables
from posbias.runs.parts import clear_parts
from posbias.runs.records import REPORT_FILE, Record
from posbias.runs.results import Result, result_of
from posbias.tasks.language.base import NOTICES
from posbias.version import __version__

if TYPE_CHECKING:
    from jinja2 import Template
    from rich.console import Console

TEMPLATE = "page.html.jinja"
DEMO_NAME = "SmolLM2-135M-Instruct"
NOTICED = {
    "gold_without_answer": "a model that reads only that passage cannot be right there",
    "gold_repeated": "at every position the answer can be had elsewhere, too, so less depends on the position",
    "answer_elsewhere": "a right answer need not come from the passage that moves, so less depends on the position",
    "control_tokens": "they were read as ordinary text, never as the tokens",
    "thoughts_left_out": "it answers without having read them",
}
"""What follows from a notice (`NOTICES` says what it is)."""
LONGEST_LIST = 8
"""Values of a list that the conditions of a run write out; a longer one is cut, with its length given."""


@dataclass(frozen=True, eq=False)
class Section:
    """A part of a page, in the order in which it is shown; folded, unless it is the whole report."""

    title: str
    anchor: str = "figure"
    """Beginning of the ids of its charts."""
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
    figures: Sequence[Figure | HeatMap] = ()
    note: str = ""
    """How to read figures and tables."""
    tables: Sequence[Table] = ()
    left_out: Sequence[str] = ()
    """Things that were not possible or not done, and why."""
    record: Record | None = None
    """The run that is repeated by its command, under its conditions."""

    def __post_init__(self) -> None:
        of_record = [] if self.record is None else caveats_of(self.record)
        object.__setattr__(self, "caveats", list(dict.fromkeys([*of_record, *self.caveats])))


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
    """Figures that are seen first: one, or two side by side. Further ones are `figures`."""
    summary: Sequence[Table] = ()
    """The few tables that matter most. Further ones are `tables`."""
    folded: Mapping[str, Sequence[Table]] = field(default_factory=dict)
    """Further tables by the line that unfolds them."""
    sections: Sequence[Section] = ()
    glossary: Mapping[str, str] = field(default_factory=dict)


_PAGES = "attention compare_evaluations correlate decompose design evaluate mitigate place train"
_PROFILES = "audit compare measure predict"
REPORTS: Registry[Callable[..., Report]] = Registry(
    "report",
    homes={verb: f"posbias.report.{verb}" for verb in _PAGES.split()}
    | {"evaluate_lengths": "posbias.report.evaluate"}
    | dict.fromkeys(_PROFILES.split(), "posbias.report.profiles"),
)
"""Functions by verb; that of profiles takes several runs. A verb's module is imported for its page."""


def records_of(runs: Showing | Record | Sequence[Showing | Record]) -> list[Record]:
    """The records of one result or several, at least one; refused is one that has no record, such as a profile."""
    results = [runs] if isinstance(runs, Showing | Record) else list(runs)
    if not results:
        raise UsageError("a report needs at least one run")
    records = [result.as_run() for result in results]
    if None in records:
        other = results[records.index(None)]
        raise UsageError(f"a report is drawn from runs, and {other!r} is none; allowed: what a verb returns, a Record")
    return records


def report_of(*runs: Showing | Record) -> Report:
    """The report of a finished run, or of several that hold profiles, side by side and then one by one."""
    records = records_of(runs)
    first = records[0]
    make: Callable[..., Report] = REPORTS[first.verb]
    alone = [record.verb for record in records if record.verb not in _PROFILES.split()]
    if alone and len(records) > 1:
        raise UsageError(f"runs of {alone[0]} are drawn one at a time; `posbias compare` pairs two of evaluate")
    for record in records:
        if record.status != "done" and (not record.scalars or record.verb not in alone):
            raise UsageError(
                f"the run {record.run_id} did not finish ({record.error}); only finished runs can be drawn"
            )
    try:
        return make(*map(result_of, records))
    except (AttributeError, IndexError, KeyError, TypeError) as error:
        raise UsageError(f"the record of run {first.run_id} is damaged: {type(error).__name__} {error}") from None


def verdict(run: Result | Record) -> tuple[str, ...]:
    """The answer of a finished run, a line for each part; no claim without its interval.

    For an audit: does the model lose the middle, which end does it favour and by how much, what can be done, and which
    theory explains it?

    Raises:
        UsageError: the run failed, or its record is damaged.
    """
    return tuple(map(printable, report_of(run).verdict))


@checked
def write_report(runs: Showing | Record | Sequence[Showing | Record], out: Path) -> Path:
    """Write `report.html` into the directory `out`, atomically.

    Args:
        runs: A result, as a verb returned it or `load_record` read it, or several that hold profiles: these are shown
            side by side and then one by one.
        out: Made if missing.

    Returns:
        The path of the page.

    Raises:
        UsageError: no records, one that failed or holds nothing to draw, or, among several, a run that has to be drawn
            alone.
        RunError: the page cannot be written.
    """
    records = records_of(runs)
    report = report_of(*records)
    related: dict[str, str] = records[0].resolved.get("related", {}) if len(records) == 1 else {}
    page = html_of(report, links={name: place for name, place in related.items() if (out / place).is_file()})
    return write_file(out / REPORT_FILE, page.encode())


def figures_of(report: Report) -> dict[str, Figure | HeatMap]:
    """All figures that are drawn as pictures, too, by the name of their file without its ending."""
    figures = {figure.slug: figure for figure in (*report.picture, *report.figures)}
    for section in report.sections:
        figures.update({f"{section.anchor}-{figure.slug}": figure for figure in section.figures})
    return figures


def tables_of(report: Report) -> list[Table]:
    """All tables that hold anything, those that matter most first."""
    folded = [table for tables in report.folded.values() for table in tables]
    of_sections = [table for section in report.sections for table in section.tables]
    return [table for table in (*report.summary, *report.tables, *folded, *of_sections) if table.cells]


def html_of(report: Report, *, links: Mapping[str, str] | None = None) -> str:
    """The page as text, with `links` to pages beside it; all is escaped, a name that the template lacks is an error."""
    return _page_template().render(
        chart=fragment_of,
        report=report,
        title=real_name(report.title),
        called=real_name(report.title) != report.title,
        demo=DEMO_NAME,
        links=links or {},
        version=__version__,
    )


@cache
def _page_template() -> "Template":
    """The template of pages, compiled once: that takes longer than drawing most pages."""
    from jinja2 import Environment, PackageLoader, StrictUndefined
    from markupsafe import Markup

    environment = Environment(
        loader=PackageLoader("posbias.report"),
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
    return environment.get_template(TEMPLATE)


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


@checked
def conclude(run: Result | Record, directory: Path, *, found: bool = False) -> Path:
    """The end of every run: its record is saved, its report drawn, and the pieces they are made of are removed.

    A record that was `found` finished in the directory stays as it is. Returns the path of the page.
    """
    if found:
        (directory / REPORT_FILE).unlink(missing_ok=True)
    else:
        run.as_run().write_run(directory)
    page = write_report([run], directory)
    clear_parts(directory)
    return page


def real_name(title: str) -> str:
    """A title in which the demo model goes by the name that its makers gave it."""
    return re.sub(r"(?<![\w/-])demo(?![\w/-])", DEMO_NAME, title)


def caveats_of(record: Record) -> list[str]:
    """Warnings about the model (an encoding that is not the published one), the theories and the prompts."""
    resolved = record.resolved
    model = resolved.get("model") or (resolved.get("responder") or {}).get("model")
    caveats = [*(model.get("caveats", ()) if isinstance(model, Mapping) else ()), *record.scalars.get("caveats", ())]
    if tokens := (record.prompts or {}).get("control_tokens"):
        caveats.append(f"The prompts spell control tokens ({_quoted(tokens)}): {NOTICED['control_tokens']}.")
    return list(map(str, caveats))


def notice_sentences(notices: Mapping[str, Any], *, count: int | None, here: bool, of: str = "") -> list[str]:
    """Oddities of samples of a file, one sentence each; the layout is that of `evaluation.samples.notices_of`.

    Args:
        notices: By name, the numbers of samples.
        count: Number of all samples; None: not known.
        here: True if the model ran in this process, which reads control tokens in texts as ordinary text.
        of: The run, if a record is made of several.
    """
    sentences = []
    for name, entry in notices.items():
        samples = entry["samples"]
        tokens = f" ({_quoted(entry['tokens'])})" if "tokens" in entry else ""
        after = NOTICED[name]
        if name == "control_tokens" and not here:
            after = "it is not known whether whatever runs the model reads them as ordinary text"
        total = "" if count is None else f" of {count}"
        numbers = f"number {_first(list(map(str, samples)))}"
        sentences.append(f"{of}In {len(samples)}{total} samples ({numbers}) {NOTICES[name]}{tokens}: {after}.")
    return sentences


def _quoted(tokens: Mapping[str, int]) -> str:
    return _first([f"{token!r} {times} times" if times > 1 else repr(token) for token, times in tokens.items()])


def _first(texts: Sequence[str]) -> str:
    return ", ".join(texts[:LONGEST_LIST]) + (" ..." if len(texts) > LONGEST_LIST else "")


def conditions_of(record: Record) -> dict[str, str]:
    """Model, prompts, seeds and versions as label and text, nested tables written out."""
    found: dict[str, str] = {}

    def add(name: str, value: Any) -> None:
        if isinstance(value, Mapping):
            for key, entry in value.items():
                add(f"{name}: {key}" if name else str(key), entry)
        elif isinstance(value, list | tuple) and value:
            texts = [f"{entry:.4g}" if isinstance(entry, float) else str(entry) for entry in value[:LONGEST_LIST]]
            more = f", ... ({len(value)} values)" if len(value) > LONGEST_LIST else ""
            found[name.replace("_", " ")] = ", ".join(texts) + more
        elif value is not None and value not in ("", [], ()):
            found[name.replace("_", " ")] = f"{value:.6g}" if isinstance(value, float) else str(value)

    untold = ("command", "title", "related", "curves")
    add("", {name: value for name, value in record.resolved.items() if name not in untold})
    add("", {"seed": record.seeds, "environment": record.environment})
    return {**found, "finished": record.created, "run": record.run_id}
