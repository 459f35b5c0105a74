"""The numbers of a report as rows: for the terminal (rich, or plain columns where nobody is watching), HTML and JSON.

`comparison_rows` has one row per (subject, kind, theory), `share_rows` one per profile, `mixing_rows` one per layer.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from posbias.comparison import STATISTICS, Mixing, Sample, Subject, TheoryProfile, finite
from posbias.comparison.sampling import summarise
from posbias.comparison.subject import KindComparison
from posbias.profiles import Profile
from posbias.report.checks import depth_cells, detail_cells, found_cells, precision_cells
from posbias.report.layout import RunView
from posbias.report.wording import KINDS, SUBJECTS, THEORIES, label
from posbias.statistics import Interval
from posbias.statistics.intervals import MISSING

if TYPE_CHECKING:
    from rich.console import Console

Row = dict[str, Any]

VERDICTS = {-1: "closer", 0: "undecided", 1: "farther"}
BOOTSTRAP_SEED = 0
"""Of the intervals of a prediction's shares, which are drawn here from the record's prompts."""


def comparison_rows(view: RunView) -> list[Row]:
    """One row per subject, measured kind and theory: all metrics, the flat line's, noise and intervals; plain JSON."""
    return [_comparison_row(view, subject, block) for subject in view.subjects for block in subject.comparisons]


def share_rows(view: RunView) -> list[Row]:
    """One row per profile, measured or predicted: every statistic, with its interval where it was estimated."""
    rows: list[Row] = []
    for subject in view.subjects:
        origin = {"run": view.title, "subject": subject.name}
        for kind, measured in subject.measured.items():
            summary = subject.summaries.get(kind)
            shares = _point_statistics(measured.profile) if summary is None else summary
            rows.append({**origin, "profile": kind, "measured": True, **_records(shares)})
        for name, theory in subject.theories.items():
            # Beside a measurement intervals are told of distances, not of a theory's own shares.
            shares = _point_statistics(theory.profile) if subject.measured else _theory_statistics(theory)
            rows.append({**origin, "profile": name, "measured": False, **_records(shares)})
    return rows


def mixing_rows(view: RunView) -> list[Row]:
    """One row per subject and definition: smallest, mean and largest mixing over layers, and every layer's value."""
    return [
        _mixing_row(view, subject, definition, mixing)
        for subject in view.subjects
        for definition, mixing in subject.mixing.items()
    ]


def summary_cells(views: Sequence[RunView]) -> tuple[list[str], list[list[str]]]:
    """Header and cells of the comparison table; measured kinds without any theory get a row of their own."""
    header = ["model", "measured", "theory", "W1 [95 %]", "flat", "noise", "one prompt", "rank", "min", "than flat"]
    cells = [_summary_row(row) for view in views for row in comparison_rows(view)]
    return header, cells


def share_cells(views: Sequence[RunView]) -> tuple[list[str], list[list[str]]]:
    """Header and cells of the table of shares; a prediction's own row follows the measurements."""
    header = ["model", "profile", "first tenth", "middle tenth", "last tenth", "last position", "minimum at"]
    cells: list[list[str]] = []
    for view in views:
        for row in share_rows(view):
            name = label(KINDS if row["measured"] else THEORIES, row["profile"])
            shares = [share_text(row[key]) for key in ("first_tenth", "middle_tenth", "last_tenth", "last_token")]
            cells.append([subject_label(row), name, *shares, position_text(row["minimum_position"])])
    return header, cells


def show_summary(views: Sequence[RunView], console: "Console") -> None:
    """Print the summary tables to `console`: ruled on a terminal, aligned plain columns into a pipe or a file."""
    tables = [
        ("How near is each theory?", *summary_cells(views)),
        ("Where does the influence lie?", *share_cells(views)),
        ("How does the profile form?", *depth_cells(views)),
        ("What does half precision cost?", *precision_cells(views)),
        ("What else was found?", *detail_cells(views)),
        ("What does the theory find beside the profile?", *found_cells(views)),
    ]
    print_tables((table for table in tables if table[2]), console)
    print_notes(dict.fromkeys(text for view in views for text in view.caveats), console)
    print_notes(dict.fromkeys(text for view in views for text in view.left_out), console, mark="Left out: ")


def print_tables(tables: Iterable[tuple[str, Sequence[str], Sequence[Sequence[str]]]], console: "Console") -> None:
    """Title, header and cells of each: ruled on a terminal, aligned plain columns into a pipe or a file."""
    for title, header, cells in tables:
        if console.is_terminal:
            console.print(ruled(title, header, cells))
        else:
            console.file.write(f"{title}\n{plain_columns(header, cells)}\n\n")


def print_notes(notes: Iterable[str], console: "Console", *, mark: str = "- ") -> None:
    """A line for each, however long, after its mark; nothing in it is taken for markup."""
    for note in notes:
        console.print(f"{mark}{note}", highlight=False, markup=False, soft_wrap=True)


def plain_columns(header: Sequence[str], cells: Iterable[Sequence[str]]) -> str:
    """Aligned columns, two spaces apart, nothing wrapped."""
    lines = [list(header), *(list(row) for row in cells)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(header))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines
    )


def subject_label(row: Mapping[str, Any]) -> str:
    """The run and the state its model is in."""
    state = row["subject"]
    return f"{row['run']} {label(SUBJECTS, state)}" if state in SUBJECTS else str(row["run"])


def number_text(value: float | None, digits: int = 3) -> str:
    """A number with fixed decimals, a dash where there is none."""
    if value is None or not math.isfinite(value):
        return MISSING
    return f"{round(value, digits) + 0.0:.{digits}f}"


def interval_text(stored: Mapping[str, Any] | None, digits: int = 3) -> str:
    """A stored number with its interval."""
    return MISSING if stored is None else Interval.of_record(stored).text(f".{digits}f")


def share_text(stored: Mapping[str, Any]) -> str:
    """A share in percent with its interval."""
    return Interval.of_record(stored).text(".1f", scale=100, unit=" %")


def position_text(stored: Mapping[str, Any]) -> str:
    """A position with its interval."""
    return Interval.of_record(stored).text(".0f")


def _comparison_row(view: RunView, subject: Subject, block: KindComparison) -> Row:
    row: Row = {"run": view.title, "subject": subject.name, "kind": block.kind, "theory": block.theory}
    row["metrics"] = block.comparison.as_record()
    row["flat"] = block.comparison.flat.as_record()
    row["minimum_position"] = finite(float(STATISTICS["minimum_position"](_theory_influence(subject, block))))
    prompts = block.prompts
    if prompts is not None:
        for name in ("distance", "difference", "per_prompt", "per_prompt_flat"):
            row[name] = getattr(prompts, name).as_record()
        row["flat_distance"] = prompts.flat.as_record()
        row["noise"] = {name: finite(value) for name, value in vars(prompts.noise).items()}
        row["n_units"] = prompts.n_units
        row["than_flat"] = VERDICTS[prompts.decides]
    return row


def _theory_influence(subject: Subject, block: KindComparison) -> Any:
    return subject.theories[block.theory].profile.influence


def _summary_row(row: Row) -> list[str]:
    distance = row.get("distance")
    minimum = row["minimum_position"]
    return [
        subject_label(row),
        label(KINDS, row["kind"]),
        label(THEORIES, row["theory"]),
        number_text(row["metrics"]["wasserstein"]) if distance is None else interval_text(distance),
        number_text(row["flat"]["wasserstein"]),
        number_text(row.get("noise", {}).get("mean")),
        number_text(row.get("per_prompt", {}).get("value")),
        number_text(row["metrics"]["spearman"], 2),
        MISSING if minimum is None else f"{minimum:.0f}",
        row.get("than_flat", MISSING),
    ]


def _mixing_row(view: RunView, subject: Subject, definition: str, mixing: Mixing) -> Row:
    value = mixing.value
    return {
        "run": view.title,
        "subject": subject.name,
        "definition": definition,
        "layers": int(value.size),
        "smallest": float(value.min()),
        "mean": float(value.mean()),
        "largest": float(value.max()),
        "largest_layer": int(value.argmax()),
        "value": [float(entry) for entry in value],
    }


def _point_statistics(profile: Profile) -> dict[str, Interval]:
    return {name: Interval(float(STATISTICS[name](profile.influence)), -math.inf, math.inf) for name in STATISTICS}


def _theory_statistics(theory: TheoryProfile) -> Mapping[str, Interval]:
    """With intervals over prompts where the theory has a profile for each."""
    if theory.per_prompt is None or len(theory.per_prompt) < 2:
        return _point_statistics(theory.profile)
    return summarise(Sample.of(theory.per_prompt), generator=np.random.default_rng(BOOTSTRAP_SEED))


def _records(intervals: Mapping[str, Interval]) -> dict[str, dict[str, float | None]]:
    return {name: interval.as_record() for name, interval in intervals.items()}


def ruled(title: str, header: Sequence[str], cells: Iterable[Sequence[str]]) -> Any:
    """A table for a terminal (rich); its texts are taken literally."""
    from rich.markup import escape
    from rich.table import Table

    table = Table(title=title, title_justify="left", title_style="bold", header_style="bold")
    for name in header:
        table.add_column(name, overflow="fold")
    for row in cells:
        table.add_row(*(escape(cell) for cell in row))
    return table
