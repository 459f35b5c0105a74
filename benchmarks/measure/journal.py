"""What a run prints and keeps: tables of numbers by method and column, and the record that holds them all.

The record is written anew with each table, so that a run that is stopped keeps what it had.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from posbias.results.records import Record
from posbias.runs.running import failed_record

VERB = "benchmark"
UNFINISHED = "the run was stopped before its end; the tables are those it had printed"
NAME, COLUMN = "{:<34}", "{:>10} {:>14} {:>10}"


@dataclass(frozen=True)
class Table:
    """Numbers by method and column."""

    title: str
    rows: Mapping[str, Mapping[str, float]]
    """By method, then by column; all methods have the same columns, three at most."""
    digits: int = 3
    """Decimals printed; the record holds the numbers as they are."""
    line: str | None = None
    """Each row is printed by this format of its name and numbers alone, below the table before; None: as a table."""

    def text(self) -> str:
        """The table as it is printed."""
        if self.line is not None:
            return "\n".join("  " + self.line.format(name, *row.values()) for name, row in self.rows.items())
        columns = list(next(iter(self.rows.values())))
        lines = [printed(self.title, *columns)]
        for name, row in self.rows.items():
            lines.append(printed(f"  {name}", *(f"{value:.{self.digits}f}" for value in row.values())))
        return "\n" + "\n".join(lines)


def against(title: str, unit: str, values: Mapping[str, float], floor: str) -> Table:
    """One row per method: the number, and how many times that of `floor`."""
    return Table(title, {name: {unit: value, "times": value / values[floor]} for name, value in values.items()})


def printed(name: str, *columns: str) -> str:
    """A line of a table."""
    padded = [*columns, *[""] * (3 - len(columns))]
    return f"{NAME.format(name)} {COLUMN.format(*padded)}".rstrip()


class Journal:
    """Prints each table when it is there, and keeps it in the record."""

    def __init__(self, record: Record, directory: Path | None) -> None:
        self.record = record
        self.directory = directory
        self.record.scalars["tables"] = []

    def add(self, part: str, table: Table) -> None:
        """One table more."""
        print(table.text(), flush=True)
        rows = {name: dict(row) for name, row in table.rows.items()}
        self.record.scalars["tables"].append({"part": part, "title": table.title, "rows": rows})
        self.save()

    def save(self) -> None:
        """Write the record, if there is a directory for it."""
        if self.directory is not None:
            self.record.save(self.directory, overwrite=True)


@contextmanager
def journal(record: Record, directory: Path | None) -> Iterator[Journal]:
    """The journal of a run: its record is "failed" until the end is reached, and says why if it is not."""
    kept = Journal(record, directory)
    record.status, record.error = "failed", UNFINISHED
    kept.save()
    try:
        yield kept
    except Exception as error:
        record.error = failed_record(VERB, record.arguments, error).error
        kept.save()
        raise
    record.status, record.error = "done", None
    kept.save()
