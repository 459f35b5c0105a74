"""Sources of prompts: the default corpus, text files and JSON lines, as groups of documents.

A file is read whole, within `files.READ_BYTES`. Documents are tokenised a segment at a time, only those that windows
are drawn from. In a text file a line that holds only a form feed (U+000C) ends one document and begins the next. A
record is one document, in the field named after `#` in the path, otherwise `text`, otherwise `token_ids`.
"""

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Int64

from posbias.errors import UsageError, check_most
from posbias.files import READ_BYTES, check_text, decoded, json_object, read_lines, read_whole
from posbias.prompts.prompts import as_token_ids

Document = str | Int64[np.ndarray, "_"]
"""A text, or token ids that are ready."""

WHOLE = 1 << 20
"""Documents of a file of up to so many characters are one segment."""
SEGMENT = 1 << 18
"""Least size of a segment of a larger one."""
PER_POSITION = 64
"""A segment has so many characters for each token of a window, so that several windows fit (English: 4-5 per token)."""
DOCUMENT_BORDER = re.compile(r"^[ \t]*\f[ \t]*$", re.MULTILINE)
DEFAULT_FIELDS = ("text", "token_ids")


@dataclass(frozen=True)
class Group:
    """Documents of one origin; windows are spread evenly over groups."""

    name: str
    """Name in messages: the file's."""
    segments: list[list[Document]]
    """Documents that are tokenised together, without empty ones; all of them are texts, or token ids."""


def default_corpus(names: str = "") -> list[Group]:
    """The corpus inside the package, one group per file; see corpus/SOURCES.md.

    Args:
        names: Names of files, separated by commas; none: all.

    Raises:
        UsageError: no file has such a name.
    """
    folder = resources.files("posbias.prompts") / "corpus"
    files = {entry.name.removesuffix(".txt"): entry for entry in folder.iterdir() if entry.name.endswith(".txt")}
    chosen = names.split(",") if names else list(files)
    unknown = [name for name in chosen if name not in files]
    if unknown:
        raise UsageError(f"the default corpus has no {unknown[0]!r}; allowed: {', '.join(sorted(files))}")
    return [
        Group(f"{name}.txt", [documents_of(files[name].read_text(encoding="utf-8"))])
        for name in sorted(files)
        if name in chosen
    ]


def text_file(path: Path, n_positions: int) -> Group:
    """A UTF-8 text file."""
    documents = documents_of(decoded(read_whole(path, "text file"), repr(str(path))))
    return Group(path.name, segmented(documents, n_positions))


def documents_of(text: str) -> list[Document]:
    """Split at lines that hold only a form feed; drop surrounding blank lines and empty documents."""
    parts: Iterable[str] = DOCUMENT_BORDER.split(text.replace("\r\n", "\n"))
    return [part.strip("\n") for part in parts if part.strip()]


def segmented(documents: list[Document], n_positions: int) -> list[list[Document]]:
    """Documents in segments, each enough for several windows of so many tokens.

    Long texts are cut between words.
    """
    if sum(map(len, documents)) <= WHOLE:
        return [documents]
    enough = max(SEGMENT, PER_POSITION * n_positions)
    segments: list[list[Document]] = [[]]
    held = 0
    for document in documents:
        for piece in _pieces(document, enough):
            if held >= enough:
                segments.append([])
                held = 0
            segments[-1].append(piece)
            held += len(piece)
    return segments


def _pieces(document: Document, size: int) -> Iterator[Document]:
    """Parts of a text of about a size, cut at blanks where there are any; token ids whole."""
    begin = 0
    while isinstance(document, str) and len(document) - begin > 2 * size:
        border = document.find(" ", begin + size, begin + 2 * size)
        end = begin + size if border < 0 else border
        yield document[begin:end]
        begin = end
    yield document[begin:]


def _checked(value: Any, is_text: bool, where: str) -> Document:
    """A document that is text or token ids as expected."""
    if is_text:
        if not isinstance(value, str):
            raise UsageError(f"{where}: need text, got {type(value).__name__}")
        if not value.isascii():
            check_text(value, where)
        return value
    token_ids = as_token_ids(value, where)
    if token_ids.ndim != 1:
        raise UsageError(f"{where}: need text or one flat list of token ids, got {token_ids.ndim} levels")
    return token_ids


def record_file(path: Path, n_positions: int, field: str | None) -> Group:
    """A file of JSON lines, plain or gzip; every record must have the field, of the sort that it has in the first.

    Without a `field`, it is the first of the usual ones that the first record has.
    """
    documents: list[Document] = []
    size, is_text = 0, None
    for where, line in read_lines(path):
        size += len(line)
        check_most(repr(str(path)), size, READ_BYTES, "bytes")
        record = json_object(line, where)
        missing = repr(field) if field else "'text' or 'token_ids'"
        field = next((name for name in ([field] if field else DEFAULT_FIELDS) if name in record), None)
        if field is None:
            known = ", ".join(record) or "none"
            raise UsageError(f"{where}: no field {missing}; known: {known} (choose one by FILE#FIELD)")
        value = record[field]
        if is_text is None:
            is_text = isinstance(value, str)
        if value != [] and not (isinstance(value, str) and not value.strip()):
            documents.append(_checked(value, is_text, where))
    if is_text is None:
        raise UsageError(f"{str(path)!r} holds no records")
    return Group(path.name, segmented(documents, n_positions))
