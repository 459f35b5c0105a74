"""The numbers of a report as tables: for the terminal (rich, or plain columns where nobody is watching) and for HTML.

`comparison_rows` has one row per (subject, kind, theory), `share_rows` one per profile, `mixing_rows` one per layer, as
plain values; functions of views give ready tables.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from posbias.comparison import (
    METRICS,
    STATISTICS,
    UNITS_FOR_CLAIM,
    KindComparison,
    Sample,
    Subject,
    TheoryProfile,
    finite,
    summarise,
)
from posbias.profiles import Profile, uniform_profile
from posbias.report import wording
from posbias.report.layout import RunView
from posbias.report.wording import FOUND, KINDS, MIXINGS, SUBJECTS, THEORIES, label
from posbias.statistics import Interval
from posbias.statistics.intervals import MISSING

if TYPE_CHECKING:
    from rich.console import Console

Row = dict[str, Any]

VERDICTS = {-1: "closer", 0: "undecided", 1: "farther"}
BOOTSTRAP_SEED = 0
"""Of the intervals of a prediction's shares, which are drawn here from the record's prompts."""
SHOWN_LAYERS = 7
"""Layers of a table or figure of depth: first, last, and evenly between."""
TENTHS = {"first_tenth": "first tenth", "middle_tenth": "middle tenth", "last_tenth": "last tenth"}
ENDS = {"first_token": "first position", "last_token": "last position"}
_LOSSES = {"wasserstein": ".4f", "median_relative": ".2%", "largest_relative": ".2%"}


@dataclass(frozen=True)
class Table:
    """Ready-made text cells."""

    title: str
    header: Sequence[str]
    cells: Sequence[Sequence[str]]
    prose: bool = False
    """Whether cells are sentences, which may be broken into lines."""


def print_tables(tables: Iterable[Table], console: "Console") -> None:
    """Title, header and cells of each: ruled on a terminal, aligned plain columns into a pipe or a file."""
    for table in tables:
        if console.is_terminal:
            console.print(_ruled(table))
        else:
            console.file.write(f"{table.title}\n{plain_columns(table.header, table.cells)}\n\n")


def print_notes(notes: Iterable[str], console: "Console", *, mark: str = "- ") -> None:
    """Each after its mark: on a terminal broken at words, else one line; nothing in it is taken for markup."""
    for note in dict.fromkeys(notes):
        console.print(f"{mark}{note}", highlight=False, markup=False, soft_wrap=not console.is_terminal)


def plain_columns(header: Sequence[str], cells: Iterable[Sequence[str]]) -> str:
    """Aligned columns, two spaces apart, nothing wrapped."""
    lines = [list(header), *(list(row) for row in cells)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(header))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines
    )


def _ruled(table: Table) -> Any:
    """A table for a terminal (rich); its texts are taken literally."""
    from rich.markup import escape
    from rich.table import Table as RichTable

    drawn = RichTable(title=table.title, title_justify="left", title_style="bold", header_style="bold")
    for name in table.header:
        drawn.add_column(name, overflow="fold")
    for row in table.cells:
        drawn.add_row(*(escape(cell) for cell in row))
    return drawn


def number_text(value: float | None, digits: int = 3) -> str:
    """A number with fixed decimals, a dash where there is none."""
    if value is None or not math.isfinite(value):
        return MISSING
    return f"{round(value, digits) + 0.0:.{digits}f}"


def interval_text(stored: Mapping[str, Any] | None, digits: int = 3, *, sign: str = "") -> str:
    """A stored number with its interval; `sign` "+": with its sign where it is positive too."""
    return MISSING if stored is None else Interval.of_record(stored).text(f"{sign}.{digits}f")


def share_text(stored: Mapping[str, Any]) -> str:
    """A share in percent with its interval."""
    return Interval.of_record(stored).text(".1f", scale=100, unit=" %")


def state_of(view: RunView, subject: Subject) -> str:
    """The run and the state its model is in."""
    return f"{view.title} {label(SUBJECTS, subject.name)}" if subject.name in SUBJECTS else view.title


def shown_rows(count: int) -> list[int]:
    """Which of `count` layers are shown: first, last, and evenly between."""
    return sorted({int(row) for row in np.linspace(0, count - 1, min(count, SHOWN_LAYERS)).round()})


def comparison_rows(view: RunView) -> list[Row]:
    """One row per subject, measured kind and theory: all metrics, the flat line's, noise and intervals; plain JSON."""
    return [_comparison_row(view, subject, block) for subject in view.subjects for block in subject.comparisons]


def _comparison_row(view: RunView, subject: Subject, block: KindComparison) -> Row:
    row: Row = {"run": view.title, "subject": subject.name, "state": state_of(view, subject)}
    row |= {"kind": block.kind, "theory": block.theory}
    row["metrics"] = block.comparison.as_record()
    row["flat"] = block.comparison.flat.as_record()
    influence = subject.theories[block.theory].profile.influence
    row["minimum_position"] = finite(float(STATISTICS["minimum_position"](influence)))
    prompts = block.prompts
    if prompts is not None:
        for name in ("distance", "difference", "per_prompt", "per_prompt_flat"):
            row[name] = getattr(prompts, name).as_record()
        row["flat_distance"] = prompts.flat.as_record()
        row["noise"] = {name: finite(value) for name, value in vars(prompts.noise).items()}
        row["n_units"] = prompts.n_units
        row["than_flat"] = VERDICTS[prompts.decides]
    return row


def share_rows(view: RunView) -> list[Row]:
    """One row per profile, measured or predicted: every statistic, with its interval where it was estimated."""
    rows: list[Row] = []
    for subject in view.subjects:
        origin = {"run": view.title, "subject": subject.name, "state": state_of(view, subject)}
        for kind, measured in subject.measured.items():
            shares = subject.summaries.get(kind) or _point_statistics(measured.profile)
            rows.append({**origin, "profile": kind, "measured": True, **_records(shares)})
        for name, theory in subject.theories.items():
            # Beside a measurement intervals are given of distances, not of a theory's own shares.
            shares = _point_statistics(theory.profile) if subject.measured else _theory_statistics(theory)
            rows.append({**origin, "profile": name, "measured": False, **_records(shares)})
    return rows


def _point_statistics(profile: Profile) -> dict[str, Interval]:
    return {name: Interval(float(STATISTICS[name](profile.influence)), -math.inf, math.inf) for name in STATISTICS}


def _theory_statistics(theory: TheoryProfile) -> Mapping[str, Interval]:
    """With intervals over prompts where the theory has a profile for each."""
    if theory.per_prompt is None or len(theory.per_prompt) < 2:
        return _point_statistics(theory.profile)
    return summarise(Sample.of(theory.per_prompt), generator=np.random.default_rng(BOOTSTRAP_SEED))


def _records(intervals: Mapping[str, Interval]) -> dict[str, dict[str, float | None]]:
    return {name: interval.as_record() for name, interval in intervals.items()}


def mixing_rows(view: RunView) -> list[Row]:
    """One row per subject and definition: smallest, mean and largest mixing over layers, and every layer's value."""
    return [
        {
            "run": view.title,
            "subject": subject.name,
            "state": state_of(view, subject),
            "definition": definition,
            "layers": int(mixing.value.size),
            "smallest": float(mixing.value.min()),
            "mean": float(mixing.value.mean()),
            "largest": float(mixing.value.max()),
            "largest_layer": int(mixing.value.argmax()),
            "value": [float(entry) for entry in mixing.value],
        }
        for subject in view.subjects
        for definition, mixing in subject.mixing.items()
    ]


def overview_tables(views: Sequence[RunView]) -> list[Table]:
    """What a run is read for first: theories, shares, depth, precision, and what else was found."""
    tables = [
        _theory_table(views),
        _share_table(views),
        _depth_table(views),
        _precision_table(views),
        _detail_table(views),
        _found_table(views),
    ]
    return [table for table in tables if table.cells]


def detailed_tables(view: RunView) -> list[Table]:
    """Every metric with its intervals and noise, every share, mixing."""
    tables = [_metric_table(view), _interval_table(view), _all_shares_table(view), _mixing_table(view)]
    return [table for table in tables if table.cells]


def _names(row: Row) -> list[str]:
    return [row["state"], label(KINDS, row["kind"]), label(THEORIES, row["theory"])]


def _profile_names(row: Row) -> list[str]:
    return [row["state"], label(KINDS if row["measured"] else THEORIES, row["profile"])]


def _theory_table(views: Sequence[RunView]) -> Table:
    header = ["model", "measured", "theory", "W1 [95 %]", "flat", "noise", "one prompt", "rank", "min", "than flat"]
    cells = [
        [
            *_names(row),
            interval_text(row["distance"]) if "distance" in row else number_text(row["metrics"]["wasserstein"]),
            number_text(row["flat"]["wasserstein"]),
            number_text(row.get("noise", {}).get("mean")),
            number_text(row.get("per_prompt", {}).get("value")),
            number_text(row["metrics"]["spearman"], 2),
            number_text(row["minimum_position"], 0),
            row.get("than_flat", MISSING),
        ]
        for view in views
        for row in comparison_rows(view)
    ]
    return Table("How near is each theory?", header, cells)


def _share_table(views: Sequence[RunView]) -> Table:
    header = ["model", "profile", *TENTHS.values(), "last position", "minimum at"]
    cells = [
        [
            *_profile_names(row),
            *(share_text(row[name]) for name in (*TENTHS, "last_token")),
            interval_text(row["minimum_position"], 0),
        ]
        for view in views
        for row in share_rows(view)
    ]
    return Table("Where does the influence lie?", header, cells)


def _depth_table(views: Sequence[RunView]) -> Table:
    """Shares of the influence on the stream after some layers, and how far that profile is from the final one's."""
    header = ["model", "after layer", *TENTHS.values(), *ENDS.values(), "W1 to flat", "W1 to last layer"]
    cells = []
    states = [(state_of(view, subject), subject) for view in views for subject in view.subjects]
    for state, subject in states:
        if subject.depth is None:
            continue
        flat, last = uniform_profile(subject.depth.influence.shape[1]).influence, subject.depth.influence[-1]
        for row in shown_rows(len(subject.depth.layers)):
            profile = subject.depth.influence[row]
            shares = [f"{100 * float(STATISTICS[share](profile)):.1f} %" for share in (*TENTHS, *ENDS)]
            distances = [f"{float(METRICS['wasserstein'](profile, other)):.3f}" for other in (flat, last)]
            cells.append([state, str(int(subject.depth.layers[row])), *shares, *distances])
    return Table("How does the profile form?", header, cells)


def _precision_table(views: Sequence[RunView]) -> Table:
    """Per kind, the profile in the model's precision against that of a float32 copy with the same random draws."""
    header = ["model", "measured", "W1 to float32", "median change", "largest change", "prompts checked"]
    cells = [
        [
            view.title,
            label(KINDS, kind),
            *(_range_text(loss[name], style) for name, style in _LOSSES.items()),
            str(len(loss["wasserstein"])),
        ]
        for view in views
        for kind, loss in view.precision.items()
    ]
    return Table("What does half precision cost?", header, cells)


def _range_text(values: Sequence[float | None], style: str) -> str:
    """One number, or the smallest and largest of several; a dash where none is finite."""
    known = sorted(value for value in values if value is not None)
    return " to ".join(dict.fromkeys(format(value, style) for value in (*known[:1], *known[-1:]))) or MISSING


def _detail_table(views: Sequence[RunView]) -> Table:
    """What kinds with passes of their own found on the prompts, the mean and the range over prompts."""
    cells = []
    for view in views:
        for kind, found in view.details.items():
            for name, values in found.items():
                numbers = np.asarray(values, dtype=np.float64)
                texts = [f"{value:.4g}" for value in (numbers.mean(), numbers.min(), numbers.max())]
                cells.append([view.title, label(KINDS, kind), name.replace("_", " "), *texts])
    return Table("What else was found?", ["model", "measured", "found", "mean", "smallest", "largest"], cells)


def _found_table(views: Sequence[RunView]) -> Table:
    """What theories found beside their profiles, with intervals where they have them."""
    cells = [
        [view.title, label(FOUND, name), interval_text(stored)] for view in views for name, stored in view.found.items()
    ]
    return Table("What does the theory find beside the profile?", ["prediction", "found", "value [95 %]"], cells)


def ingredient_table(found: Mapping[str, Any]) -> Table:
    """For each measured kind the whole theory, what leaving out each of its ingredients costs, and the flat line.

    Args:
        found: The scalar `ingredients` of the record; empty where there is none.
    """
    header = ["measured", "left out", "W1 [95 %]", "more than with nothing left out [95 %]", "verdict"]
    cells = []
    for kind, entry in found.items():
        for left_out, row in entry["left_out"].items():
            cost = row["cost"]
            what = "nothing" if cost is None else left_out.replace("_", " ")
            verdict = MISSING if cost is None else _cost_verdict(Interval.of_record(cost), entry["count"])
            cells.append(
                [label(KINDS, kind), what, interval_text(row["distance"]), interval_text(cost, sign="+"), verdict]
            )
        cells.append([label(KINDS, kind), "(flat line)", interval_text(entry["flat"]), MISSING, MISSING])
    return Table("What does leaving out each ingredient cost?", header, cells)


def _cost_verdict(cost: Interval, count: int) -> str:
    """Whether the theory is closer or farther without it, where the interval says."""
    return VERDICTS[0 if count < UNITS_FOR_CLAIM else (cost.low > 0) - (cost.high < 0)]


def _metric_table(view: RunView) -> Table:
    rows = comparison_rows(view)
    known = list(wording.METRICS)
    names = list(rows[0]["metrics"]) if rows else []
    names.sort(key=lambda name: known.index(name) if name in known else len(known))
    digits = {name: 0 if name == "minimum_shift" else 3 for name in names}
    header = ["model", "measured", "theory", *(label(wording.METRICS, name) for name in names)]
    cells = [
        [
            *_names(row),
            *(
                f"{number_text(row['metrics'][name], digits[name])} ({number_text(row['flat'][name], digits[name])})"
                for name in names
            ),
        ]
        for row in rows
    ]
    return Table("Every distance, the flat line's in parentheses", header, cells)


def _interval_table(view: RunView) -> Table:
    header = ["model", "measured", "theory", "W1", "flat line", "theory minus flat", "half against half", "one prompt"]
    header += ["one prompt, flat", "units"]
    cells = []
    for row in comparison_rows(view):
        if "distance" in row:
            halves = {"value": row["noise"]["mean"], **{end: row["noise"][end] for end in ("low", "high")}}
            numbers = [row[name] for name in ("distance", "flat_distance", "difference")]
            numbers += [halves, row["per_prompt"], row["per_prompt_flat"]]
            cells.append([*_names(row), *map(interval_text, numbers), str(row["n_units"])])
    return Table("Intervals and noise of W1", header, cells)


def _all_shares_table(view: RunView) -> Table:
    header = ["model", "profile", *TENTHS.values(), *ENDS.values(), "last tenth without last position"]
    header += ["mean position", "minimum at"]
    cells = [
        [
            *_profile_names(row),
            *(share_text(row[name]) for name in (*TENTHS, *ENDS, "interior_recency")),
            interval_text(row["mean_position"]),
            interval_text(row["minimum_position"], 0),
        ]
        for row in share_rows(view)
    ]
    return Table("Shares of the influence", header, cells)


def _mixing_table(view: RunView) -> Table:
    cells = [
        [
            row["state"],
            label(MIXINGS, row["definition"]),
            str(row["layers"]),
            *(number_text(row[name]) for name in ("smallest", "mean", "largest")),
            str(row["largest_layer"]),
        ]
        for row in mixing_rows(view)
    ]
    header = ["model", "definition", "layers", "smallest", "mean", "largest", "in layer"]
    return Table("Mixing over layers", header, cells)
