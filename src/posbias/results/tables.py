"""Tables: for the terminal (rich, or plain columns if nobody is watching), pages and LaTeX; texts of their cells."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from posbias.errors import printable
from posbias.statistics import MISSING, Interval

if TYPE_CHECKING:
    from rich.console import Console

LINE = 40
"""Characters of a cell from which its column is broken into lines there."""
_SPECIAL = {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "·": r"$\cdot$"}
LATEX = str.maketrans(_SPECIAL | {sign: f"\\{sign}" for sign in "&%$#_{}"})


@dataclass(frozen=True)
class Table:
    """Ready-made text cells."""

    title: str
    header: Sequence[str]
    cells: Sequence[Sequence[str]]
    prose: bool = False
    """True if cells are sentences, which may be broken into lines."""

    @classmethod
    def of(cls, title: str, rows: Iterable[Mapping[str, str]], *, prose: bool = False) -> "Table":
        """A table of rows by column, in the order in which the rows name columns; what a row lacks is a dash."""
        rows = list(rows)
        header = list(dict.fromkeys(name for row in rows for name in row))
        return cls(title, header, [[row.get(name, MISSING) for name in header] for row in rows], prose)


def condensed(table: Table) -> tuple[Table, str]:
    """A table without the columns in which its rows, of which there are several, all agree; and these in words."""
    columns = list(zip(table.header, *table.cells, strict=True))
    shared = [len(table.cells) > 2 and bool(name) and len(set(cells)) == 1 for name, *cells in columns]
    if not any(shared) or all(shared):
        return table, ""
    varying = [place for place, agrees in enumerate(shared) if not agrees]
    cells = [[row[place] for place in varying] for row in table.cells]
    words = [f"{name} = {cells[0]}" for (name, *cells), agrees in zip(columns, shared, strict=True) if agrees]
    return replace(table, header=[table.header[place] for place in varying], cells=cells), "; ".join(words)


def print_tables(tables: Iterable[Table], console: "Console") -> None:
    """Title, header and cells of each: ruled on a terminal, aligned plain columns into a pipe or a file."""
    from rich.markup import escape
    from rich.table import Table as Ruled

    for table in (table for table in tables if table.cells):
        rows = [list(map(printable, row)) for row in (table.header, *table.cells)]
        if not console.is_terminal:
            widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
            padded = (map(str.ljust, row, widths) for row in rows)
            lines = ["  ".join(cells).rstrip() for cells in padded]
            console.file.write("\n".join([printable(table.title), *lines, "", ""]))
            continue
        ruled = Ruled(
            title=escape(printable(table.title)), title_justify="left", title_style="bold", header_style="bold"
        )
        for name in rows[0]:
            ruled.add_column(escape(name), overflow="fold")
        for row in rows[1:]:
            ruled.add_row(*map(escape, row))
        console.print(ruled)


def print_notes(notes: Iterable[str], console: "Console", *, mark: str = "- ") -> None:
    """Each after its mark: on a terminal broken at words, else one line; nothing in it is taken for markup."""
    for note in dict.fromkeys(notes):
        console.print(f"{mark}{printable(note)}", highlight=False, markup=False, soft_wrap=not console.is_terminal)


def latex_table(table: Table) -> str:
    """One table for the packages booktabs and graphicx, its title as its caption."""
    texts = [[printable(cell).translate(LATEX) for cell in row] for row in (table.header, *table.cells)]
    head, *rows = (" & ".join(row) + r" \\" for row in texts)
    long = [max(map(len, column)) > LINE for column in zip(table.header, *table.cells, strict=True)]
    wrapped = rf"p{{{0.7 / max(1, sum(long)):.2f}\linewidth}}"
    begin = rf"\begin{{tabular}}{{{''.join(wrapped if cell else 'l' for cell in long)}}}"
    body = "\n".join([begin, r"\toprule", head, r"\midrule", *rows, r"\bottomrule", r"\end{tabular}"])
    if len(table.header) > 5:  # it is scaled to the width of the text
        body = f"\\resizebox{{\\linewidth}}{{!}}{{%\n{body}}}"
    return f"\\begin{{table}}\n\\caption{{{printable(table.title).translate(LATEX)}}}\n{body}\n\\end{{table}}\n"


def number_text(value: float | None, digits: int = 3) -> str:
    """A number with fixed decimals, a dash if there is none."""
    if value is None or not math.isfinite(value):
        return MISSING
    return f"{round(value, digits) + 0.0:.{digits}f}"


def interval_text(stored: Mapping[str, Any] | None, spec: str = ".3f") -> str:
    """A recorded number with its interval, as `Interval.text`; a dash if there is none."""
    return MISSING if stored is None else Interval.of_record(stored).text(spec)


def capital(text: str) -> str:
    """A text that begins a sentence."""
    return text[:1].upper() + text[1:]
