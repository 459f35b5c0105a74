"""Files of published examples: one JSON object per line, plain or gzip, read as they are.

Every complaint names the file and the line. Only the lines that are asked for are read, but for the file's hash.
"""

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from posbias.errors import UsageError
from posbias.files import check_text, json_object, open_file, read_lines


def published_lines(path: str, count: int) -> Iterator[tuple[str, dict[str, Any]]]:
    """The first `count` records of a file, each with the name of its line for messages.

    Blank lines are passed over.

    Raises:
        UsageError: the file is missing, unreadable, shorter than asked, or a line is not a JSON object.
    """
    found = 0
    for where, line in read_lines(path):
        record = json_object(line, where)
        check_text(json.dumps(record, ensure_ascii=False), where)
        yield where, record
        found += 1
        if found == count:
            return
    raise UsageError(f"{path!r} holds {found} examples; {count} asked")


def check_path(owner: str, parameter: str, value: object) -> None:
    """Refuse a variant's file name that is neither a text nor None, or empty."""
    if value is not None and not (isinstance(value, str) and value):
        raise UsageError(f"{owner}: {parameter} must be a path, got {value!r}")


def file_sha256(task: object) -> str | None:
    """Hash of the file that a task's samples are read from; None where it makes its own, or that is no plain file."""
    path = getattr(task, "file", None) or getattr(task, "corpus", None)
    if path is None or not Path(path).is_file():
        return None
    with open_file(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def text_field(record: dict[str, Any], name: str, where: str, *, empty: bool = False) -> str:
    """A field that must be text, and not empty unless `empty` allows it."""
    value = record.get(name)
    if not isinstance(value, str) or not (value or empty):
        raise UsageError(f"{where}: field {name!r} must be text, got {value!r:.80}")
    return value


def list_field(record: dict[str, Any], name: str, where: str) -> list[Any]:
    """A field that must be a list with at least one entry."""
    value = record.get(name)
    if not isinstance(value, list) or not value:
        raise UsageError(f"{where}: field {name!r} must be a list with entries, got {value!r:.80}")
    return value
