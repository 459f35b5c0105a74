"""Where prompts come from: the default corpus and text files, as groups of documents read a segment at a time.

A segment is a part of a file small enough to hold in memory; only the segments that windows are drawn from are read.
In a text file a line that holds only a form feed (U+000C) ends one document and begins the next.
"""

import codecs
import itertools
import mmap
import os
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path

import numpy as np
from jaxtyping import Int64

from posbias.errors import UsageError
from posbias.files import file_exists, open_file

Document = str | Int64[np.ndarray, "_"]
"""A text, or token ids that are ready."""

WHOLE_BYTES = 1 << 20
"""Files up to this size are one segment."""
SEGMENT_BYTES = 1 << 18
"""Least size of a segment of a larger file."""
BYTES_PER_POSITION = 64
"""A segment has this many bytes for each token of a window, so that several windows fit (English: 4-5 per token)."""
BORDER_BYTES = 256
"""How far from a cut in a large file a word border is looked for; scripts without spaces are cut anywhere."""

DOCUMENT_BORDER = re.compile(r"^[ \t]*\f[ \t]*$", re.MULTILINE)
BORDER_LINE = re.compile(rb"^[ \t]*\f[ \t]*\r?$", re.MULTILINE)
"""The same in a file's bytes, where a line may end in CR LF."""


@dataclass(frozen=True)
class Group:
    """Documents of one origin; windows are spread evenly over groups."""

    name: str
    """For messages: the file name."""
    segments: tuple[Callable[[], list[Document]], ...]
    """Each call reads one segment and returns its documents, without empty ones."""
    is_text: bool = True
    """Whether documents are texts; otherwise token ids."""
    ended: Callable[[], bool] = bool
    """Whether all further segments are known to be empty, as where a stream has ended."""


def default_corpus() -> list[Group]:
    """The corpus inside the package, one group per file; see corpus/SOURCES.md."""
    folder = resources.files("posbias.prompts") / "corpus"
    files = sorted((entry for entry in folder.iterdir() if entry.name.endswith(".txt")), key=lambda entry: entry.name)
    return [Group(entry.name, (partial(_read_entry, entry),)) for entry in files]


def text_file(path: Path, n_positions: int, *, starts: bool = False) -> Group:
    """A UTF-8 text file, by byte ranges; with `starts` only by such as begin where a document does."""
    cuts = document_ranges(path, n_positions) if starts else byte_ranges(path, n_positions)
    return Group(path.name, tuple(partial(_read_text, path, *cut, cut_anywhere=not starts) for cut in cuts))


def documents_of(text: str) -> list[Document]:
    """Split at lines that hold only a form feed; drop surrounding blank lines and empty documents."""
    parts: Iterable[str] = DOCUMENT_BORDER.split(text.replace("\r\n", "\n"))
    return [part.strip("\n") for part in parts if part.strip()]


def segment_bytes(n_positions: int) -> int:
    """Least size of a segment of a large file that windows of so many tokens are drawn from."""
    return max(SEGMENT_BYTES, BYTES_PER_POSITION * n_positions)


def byte_ranges(path: Path, n_positions: int) -> list[tuple[int, int]]:
    """Cut a file into [start, stop) ranges: one for a small file, equal ones that hold several windows otherwise.

    Raises:
        UsageError: the file is missing, empty or not readable.
    """
    size = file_size(path)
    if size <= WHOLE_BYTES:
        return [(0, size)]
    pieces = max(1, size // segment_bytes(n_positions))
    borders = [size * piece // pieces for piece in range(pieces + 1)]
    return list(itertools.pairwise(borders))


def document_ranges(path: Path, n_positions: int) -> list[tuple[int, int]]:
    """[start, stop) ranges of a text file that each hold whole documents, or the first bytes of one long document.

    Raises:
        UsageError: the file is missing, empty or not readable.
    """
    size = file_size(path)
    if size <= WHOLE_BYTES:
        return [(0, size)]
    enough = segment_bytes(n_positions)
    with open_file(path) as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        borders = [match.span() for match in BORDER_LINE.finditer(content)]
    begins, ends = [0, *(end for _, end in borders)], [*(start for start, _ in borders), size]
    ranges: list[tuple[int, int]] = []
    first = 0
    for begin, end, following in zip(begins, ends, [*begins[1:], size], strict=True):
        if end - begin > enough:
            # What lies before it in this range comes first; of itself the beginning is all that is wanted.
            ranges += [(first, begin), (begin, begin + enough)]
            first = following
        elif end - first >= SEGMENT_BYTES or following == size:
            ranges.append((first, end))
            first = following
    return [(start, stop) for start, stop in ranges if start < stop]


def file_size(path: Path) -> int:
    """Bytes of a file that is there, readable and not empty.

    Raises:
        UsageError: it is not.
    """
    if not file_exists(path):
        raise UsageError(
            f"no such file: {str(path)!r}; prompts are 'default', a .txt, .jsonl or .parquet file or token ids"
        )
    with open_file(path) as file:
        size = file.seek(0, os.SEEK_END)
    if size == 0:
        raise UsageError(f"{str(path)!r} is empty; prompts need text")
    return size


def _read_entry(entry: Traversable) -> list[Document]:
    """The documents of one file of the package."""
    return documents_of(entry.read_text(encoding="utf-8"))


def _read_text(path: Path, start: int, stop: int, *, cut_anywhere: bool = True) -> list[Document]:
    """The documents within a byte range; what begins or ends inside one is cut at a word border.

    Args:
        path: The file.
        start: First byte.
        stop: First byte after the range.
        cut_anywhere: Whether the range may begin inside a document.
    """
    with open_file(path) as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(start)
        data = file.read(stop - start)
    if start > 0 and cut_anywhere:
        head = re.search(rb"\s", data[:BORDER_BYTES])
        data = data[head.start() :] if head else data.lstrip(bytes(range(0x80, 0xC0)))
    if stop < size:
        tail = re.search(rb"\S*\Z", data[-BORDER_BYTES:])
        if tail and len(tail.group()) < min(BORDER_BYTES, len(data)):
            data = data[: len(data) - len(tail.group())]
    try:
        text = codecs.getincrementaldecoder("utf-8-sig" if start == 0 else "utf-8")().decode(data, final=stop == size)
    except UnicodeDecodeError as error:
        raise UsageError(f"{str(path)!r} is not UTF-8 text: {error.reason} near byte {start + error.start}") from None
    return documents_of(text)
