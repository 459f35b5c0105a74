"""One typed result per verb, written, read and drawn by what stands beside the verb.

A verb's result holds its numbers in typed fields and keeps `record`, the form in which it is stored. Each class is
registered here under the verb's name and names the function that makes its page; `load_record` gives the result of a
run directory back, `write_report` draws it. A page is made from the record alone.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from pathlib import Path
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from pydantic import ValidationError

from posbias.checks import checked
from posbias.errors import UsageError, printable
from posbias.files import write_file
from posbias.registry import Registry
from posbias.results.drawing import image_of
from posbias.results.records import REPORT_FILE, Record, adapter, plain, read_record
from posbias.results.showing import Showing, Shown
from posbias.statistics import Interval

if TYPE_CHECKING:
    from posbias.results.page import Report

Kind = TypeVar("Kind")


class Result(Showing):
    """The answer of one verb in typed fields, with the record in which it is stored."""

    record: Record
    drawn_by: ClassVar[str]
    """The function that makes its page, as `module:name`; the module is imported for the page alone."""
    drawn_together: ClassVar[bool] = False
    """True if that function puts several results side by side."""

    @classmethod
    def from_record(cls: type[Kind], record: Record) -> Kind:
        """The result that a record holds: its fields by their names, among what was resolved and what came out.

        KeyError, TypeError or ValueError: the record is damaged.
        """
        return from_stored(cls, {**record.resolved, **record.scalars, "record": record})

    def with_record(self: Kind, record: Record) -> Kind:
        """The result itself, whose record is the one that it was read from, not one that is made anew."""
        vars(self)["record"] = record
        return self

    def in_directory(self, directory: Path) -> "Result":
        """The result with the paths of the directory from which it was read, if it has any."""
        return self

    @property
    def verdict(self) -> tuple[str, ...]:
        """The answer in a few lines, each only as strong as its interval.

        Raises:
            UsageError: the run failed, or its record is damaged.
        """
        return verdict(self)

    def to_latex(self) -> str:
        """Every table of the report in LaTeX, for the packages booktabs and graphicx.

        Raises:
            UsageError: the run failed, or its record is damaged.
        """
        from posbias.results.page import latex_of

        return latex_of(report_of(self))

    def facts(self) -> Mapping[str, str]:
        """The verdict, what was left out, and caveats; or why the run failed."""
        if self.record.status == "failed":
            return {"failed": str(self.record.error)}
        report = report_of(self)
        told = {"verdict": report.verdict, "left out": report.left_out, "caveats": report.caveats}
        return {name: "\n".join(lines) for name, lines in told.items() if lines}


@dataclass(frozen=True, eq=False, repr=False)
class FailedRun(Result):
    """A run that failed before there was anything to read; its record says why."""

    record: Record
    drawn_together = True

    def shown(self) -> Shown:
        """The run in one line, and why it failed."""
        return Shown(self.record.line)


def from_stored(kind: type[Kind], stored: Any) -> Kind:
    """A dataclass, with those within it, from the plain values as which a record holds it.

    Fields that the record lacks have their defaults; what else it holds is left alone.

    Raises:
        ValueError: a field is missing or of another sort; it is named.
    """
    try:
        read: Kind = adapter(kind).validate_python(stored)  # type: ignore[arg-type]
    except ValidationError as error:
        first = error.errors()[0]
        raise ValueError(f"{'.'.join(map(str, first['loc']))}: {first['msg']}") from None
    return read


def as_stored(value: Any) -> Any:
    """Plain values of a dataclass and of all within it, which `from_stored` reads; what it decides stands with them."""
    if isinstance(value, Interval):
        return value.as_record()
    if is_dataclass(value):
        values = {field.name: as_stored(getattr(value, field.name)) for field in fields(value)}
        return {**values, "decides": value.decides} if hasattr(value, "decides") else values
    if isinstance(value, Mapping):
        return {name: as_stored(entry) for name, entry in value.items()}
    if isinstance(value, list | tuple):
        return [as_stored(entry) for entry in value]
    return plain(value)


RESULTS: Registry[type[Result]] = Registry(
    "result",
    made_by_users=False,
    homes={
        "attention": "posbias.measurement.attention_statistics",
        "audit": "posbias.comparison.stored",
        "compare": "posbias.comparison.compare",
        "compare_evaluations": "posbias.evaluation.comparison",
        "correlate": "posbias.evaluation.correlate",
        "decompose": "posbias.decomposition.decomposition",
        "design": "posbias.designing.result",
        "evaluate": "posbias.evaluation.evaluation",
        "evaluate_lengths": "posbias.evaluation.lengths",
        "evaluate_orders": "posbias.evaluation.forms",
        "evaluate_turns": "posbias.evaluation.forms",
        "measure": "posbias.measurement.measurement",
        "mitigate": "posbias.mitigation.result",
        "place": "posbias.evaluation.place",
        "predict": "posbias.theory.predict",
        "train": "posbias.training.running",
    },
)
"""The class of each verb's result, by verb; its module is imported when a record of the verb is read."""


COMPARISONS: Registry[Callable[[Result, Result], Result]] = Registry(
    "comparison", homes=dict.fromkeys(("evaluate", "evaluate_lengths"), "posbias.evaluation.comparison")
)
"""How two finished runs that hold no profiles are compared, by their verb."""


def result_of(record: Record, kind: type[Result] | None = None) -> Result:
    """The typed result that a record holds, read as that of its verb, or as another class; `FailedRun` if it has none.

    Raises:
        UsageError: no room reads records of this verb, or the record is damaged.
    """
    try:
        of_verb = kind or RESULTS[record.verb]
        return FailedRun(record) if record.status != "done" and not record.scalars else of_verb.from_record(record)
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        if isinstance(error, UsageError):
            raise
        why = f"is damaged: {type(error).__name__} {error}; one that another posbias has written is run again"
        raise UsageError(f"the record of run {record.run_id} {why}") from None


@checked
def load_record(directory: str | Path) -> Result:
    """Read the result of a finished run from its directory.

    Raises:
        UsageError: no run there, an unknown format version, or a damaged file.
    """
    return result_of(read_record(directory)).in_directory(Path(directory))


def records_of(runs: Showing | Sequence[Showing]) -> list[Record]:
    """The records of one result or several, at least one; refused is one that has no record, such as a profile."""
    results = [runs] if isinstance(runs, Showing) else list(runs)
    if not results:
        raise UsageError("a report needs at least one run")
    records = [result.as_run() for result in results]
    if None in records:
        other = results[records.index(None)]
        raise UsageError(f"a report is drawn from runs, and {other!r} is none; allowed: what a verb returns, a Record")
    return records


def report_of(*runs: Showing) -> "Report":
    """The report of a finished run, or of several that hold profiles, side by side and then one by one."""
    results = list(map(result_of, records_of(runs)))
    first = results[0]
    for result in results:
        if len(results) > 1 and not result.drawn_together:
            raise UsageError(
                f"runs of {result.record.verb} are drawn one at a time; together those of predict, measure and audit"
            )
        if isinstance(result, FailedRun):
            why = f"did not finish ({result.record.error})"
            raise UsageError(f"the run {result.record.run_id} {why}; only finished runs can be drawn")
    try:
        report: Report = resolve_name(first.drawn_by)(*results)
        return report if len(results) > 1 else replace(report, record=first.record)
    except (AttributeError, IndexError, KeyError, TypeError) as error:
        raise UsageError(
            f"the record of run {first.record.run_id} is damaged: {type(error).__name__} {error}"
        ) from None


def verdict(run: Showing) -> tuple[str, ...]:
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
    from posbias.results.page import html_of

    records = records_of(runs)
    report = report_of(*records)
    related: dict[str, str] = records[0].resolved.get("related", {}) if len(records) == 1 else {}
    page = html_of(report, links={name: place for name, place in related.items() if (out / place).is_file()})
    return write_file(out / REPORT_FILE, page.encode())


@checked
def write_paper(runs: Showing | Record | Sequence[Showing | Record], out: Path) -> Path:
    """Write what a paper takes from finished runs: every figure of the report as PDF and SVG, and `tables.tex`.

    `out` is a new directory, or an empty one, and is returned; errors as those of `write_report`.
    """
    from posbias.results.page import latex_of

    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UsageError(f"{str(out)!r} is not empty; figures and tables for a paper go into a new directory")
    records = records_of(runs)
    report, made_by = report_of(*records), printable("; ".join(record.command for record in records))
    for figure in (*report.picture, *report.figures):
        for sort in ("pdf", "svg"):
            write_file(out / f"{figure.slug}.{sort}", image_of(figure, sort, about=made_by))
    write_file(out / "tables.tex", latex_of(report).encode())
    return out
