"""How every run ends and its report is written: one page and the pictures beside it, whatever the report is about."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from posbias.directories import write_atomically
from posbias.errors import RunError
from posbias.parts import clear_parts
from posbias.records import REPORT_FILE, Record, remove_report

if TYPE_CHECKING:
    from jinja2 import Template


def page_template(name: str) -> "Template":
    """A template of this package: everything is escaped, and a name that is not given is an error."""
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=PackageLoader("posbias.report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template(name)


def links_of(record: Record, out: Path | None) -> list[tuple[str, str]]:
    """Name and address of the pages that belong to a run's own, as far as they are there.

    Args:
        record: Its `resolved["related"]` names them, relative to its page.
        out: Where that page will lie; None: nowhere.
    """
    related: dict[str, str] = record.resolved.get("related", {})
    return [(name, page) for name, page in related.items() if out is not None and (out / page).is_file()]


def write_page(page: str, out: Path, *, pictures: Mapping[str, bytes] | None = None) -> Path:
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
        for name, content in (pictures or {}).items():
            write_atomically(out / name, content)
        write_atomically(out / REPORT_FILE, page.encode())
    except OSError as error:
        raise RunError(f"cannot write the report to {str(out)!r}: {error.strerror or error}") from None
    return out / REPORT_FILE


def conclude(record: Record, directory: Path, write: Callable[[Record, Path], Path], *, found: bool = False) -> Path:
    """The end of every run: its record is saved, its report drawn, and the pieces they are made of are removed.

    Args:
        record: What came out.
        directory: Of the run.
        write: Draws the report of such a record.
        found: The record was finished before and lies there: it stays as it is, whatever of the rest was done.

    Returns:
        The path of the page.

    Raises:
        RunError: something cannot be written.
    """
    if found:
        remove_report(directory)
    else:
        record.save(directory)
    page = write(record, directory)
    clear_parts(directory)
    return page
