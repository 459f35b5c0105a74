"""The page of runs that hold profiles (audit, measure, predict, compare): one run, or several side by side."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from posbias.records import Record
from posbias.report.checks import depth_cells, detail_cells, found_cells, precision_cells
from posbias.report.figures import Figure, figures_of, side_by_side
from posbias.report.findings import Finding, findings_of, grouped
from posbias.report.ingredients import TITLE, ingredient_cells
from posbias.report.interactive import interactive
from posbias.report.layout import RunView, view_of
from posbias.report.page import links_of, rendered, write_page
from posbias.report.static import png
from posbias.report.tables import (
    Table,
    comparison_rows,
    interval_text,
    mixing_rows,
    number_text,
    position_text,
    share_cells,
    share_rows,
    share_text,
    subject_label,
    summary_cells,
)
from posbias.report.wording import GLOSSARY, KINDS, METRICS, MIXINGS, THEORIES, label

TEMPLATE = "profiles.html.jinja"


@dataclass(frozen=True, eq=False)
class Section:
    """One run's part of the page."""

    anchor: str
    view: RunView
    findings: tuple[tuple[Finding, ...], ...]
    """Sentences, grouped by the measurement they speak of."""
    figures: tuple[Figure, ...]
    tables: tuple[Table, ...]


def write_profiles(records: Sequence[Record], out: Path) -> Path:
    """Write `report.html` and a PNG per figure into `out`: several runs side by side, and then one by one.

    Raises:
        UsageError: a run failed or holds no profile.
        RunError: the files cannot be written.
    """
    sections = _sections([view_of(record) for record in records])
    shared = side_by_side([section.view for section in sections]) if len(sections) > 1 else []
    pictures = {f"{figure.slug}.png": png(figure) for figure in shared}
    for section in sections:
        pictures.update({f"{_stem(section, sections)}{figure.slug}.png": png(figure) for figure in section.figures})
    links = links_of(records[0], out) if len(records) == 1 else []
    return write_page(render(sections, shared, links), out, pictures=pictures)


def render(sections: Sequence[Section], shared: Sequence[Figure], links: Sequence[tuple[str, str]] = ()) -> str:
    """The page as text; `links` are names and addresses of pages beside it."""
    return rendered(
        TEMPLATE,
        chart=interactive,
        sections=sections,
        shared=shared,
        links=links,
        overview=_overview([section.view for section in sections]),
        glossary=GLOSSARY,
    )


def _sections(views: Sequence[RunView]) -> list[Section]:
    sections = []
    for number, view in enumerate(_told_apart(views), start=1):
        sections.append(
            Section(
                anchor=f"run-{number}",
                view=view,
                findings=grouped(findings_of(view)),
                figures=tuple(figures_of(view)),
                tables=tuple(_tables(view)),
            )
        )
    return sections


def _told_apart(views: Sequence[RunView]) -> list[RunView]:
    """Runs of the same title are numbered, so that every line of a legend names one run."""
    titles = [view.title for view in views]
    return [
        replace(view, title=f"{view.title} ({titles[:number].count(view.title) + 1})")
        if titles.count(view.title) > 1
        else view
        for number, view in enumerate(views)
    ]


def _stem(section: Section, sections: Sequence[Section]) -> str:
    """PNG names of several runs start with the run's anchor."""
    return f"{section.anchor}-" if len(sections) > 1 else ""


def _overview(views: Sequence[RunView]) -> list[Table]:
    tables = [
        Table("How near is each theory?", *summary_cells(views)),
        Table("Where does the influence lie?", *share_cells(views)),
    ]
    return [table for table in tables if table.cells]


def _tables(view: RunView) -> list[Table]:
    """The detailed tables of one run: every metric, every share, mixing."""
    tables = [
        Table("Every distance, the flat line's in parentheses", *_metric_cells(view)),
        Table("Intervals and noise of W1", *_interval_cells(view)),
        Table("Shares of the influence", *_detailed_shares(view)),
        Table("Mixing over layers", *_mixing_cells(view)),
        Table("How the profile forms with depth", *depth_cells([view])),
        Table("What half precision costs", *precision_cells([view])),
        Table("What else was found on the prompts", *detail_cells([view])),
        Table("What the theory finds beside the profile", *found_cells([view])),
        Table(TITLE, *ingredient_cells(view.ingredients)),
    ]
    return [table for table in tables if table.cells]


def _metric_cells(view: RunView) -> tuple[list[str], list[list[str]]]:
    rows = comparison_rows(view)
    known = list(METRICS)
    names = list(rows[0]["metrics"]) if rows else []
    names.sort(key=lambda name: known.index(name) if name in known else len(known))
    header = ["model", "measured", "theory", *(label(METRICS, name) for name in names)]
    cells = []
    for row in rows:
        values = []
        for name in names:
            digits = 0 if name == "minimum_shift" else 3
            own, flat = row["metrics"][name], row["flat"][name]
            values.append(f"{number_text(own, digits)} ({number_text(flat, digits)})")
        cells.append([subject_label(row), label(KINDS, row["kind"]), label(THEORIES, row["theory"]), *values])
    return header, cells


def _interval_cells(view: RunView) -> tuple[list[str], list[list[str]]]:
    header = ["model", "measured", "theory", "W1", "flat line", "theory minus flat", "half against half", "one prompt"]
    header += ["one prompt, flat", "units"]
    cells = []
    for row in comparison_rows(view):
        if "distance" not in row:
            continue
        names = ("distance", "flat_distance", "difference")
        texts = [interval_text(row[name]) for name in names]
        noise = row["noise"]
        halves = interval_text({"value": noise["mean"], "low": noise["low"], "high": noise["high"]})
        prompts = [interval_text(row[name]) for name in ("per_prompt", "per_prompt_flat")]
        head = [subject_label(row), label(KINDS, row["kind"]), label(THEORIES, row["theory"])]
        cells.append([*head, *texts, halves, *prompts, str(row["n_units"])])
    return header, cells


def _detailed_shares(view: RunView) -> tuple[list[str], list[list[str]]]:
    shares = ("first_tenth", "middle_tenth", "last_tenth", "first_token", "last_token", "interior_recency")
    header = ["model", "profile", "first tenth", "middle tenth", "last tenth", "first position", "last position"]
    header += ["last tenth without last position", "mean position", "minimum at"]
    cells = []
    for row in share_rows(view):
        name = label(KINDS if row["measured"] else THEORIES, row["profile"])
        texts = [share_text(row[key]) for key in shares]
        mean = interval_text(row["mean_position"])
        cells.append([subject_label(row), name, *texts, mean, position_text(row["minimum_position"])])
    return header, cells


def _mixing_cells(view: RunView) -> tuple[list[str], list[list[str]]]:
    header = ["model", "definition", "layers", "smallest", "mean", "largest", "in layer"]
    cells = []
    for row in mixing_rows(view):
        values = [number_text(row[name]) for name in ("smallest", "mean", "largest")]
        definition = label(MIXINGS, row["definition"])
        cells.append([subject_label(row), definition, str(row["layers"]), *values, str(row["largest_layer"])])
    return header, cells
