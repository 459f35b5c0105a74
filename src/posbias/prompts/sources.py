"""Sources of prompts: the default corpus, text files, JSON lines and Parquet, as groups of documents.

They are read a segment at a time: a part of a file small enough to hold in memory; only the segments that windows are
drawn from are read. In a text file a line that holds only a form feed (U+000C) ends one document and begins the next.
A record is one document, in the field or column named after `#` in the path, otherwise `text`, otherwise `token_ids`.
"""

import codecs
import itertools
import mmap
import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Int64

from posbias.errors import UsageError
from posbias.files import check_text, file_exists, json_object, open_file, read_line
from posbias.limits import BLANK_LINES, PARQUET_BYTES
from posbias.prompts.prompts import as_token_ids

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

DEFAULT_FIELDS = ("text", "token_ids")
MAX_BATCH_ROWS = 1024
"""Most Parquet rows in one batch."""
Batch = tuple[int, int, int]
"""Row group, batch within it, rows per batch."""


@dataclass(frozen=True)
class Group:
    """Documents of one origin; windows are spread evenly over groups."""

    name: str
    """Name in messages: the file's."""
    segments: tuple[Callable[[], list[Document]], ...]
    """Each call reads one segment and returns its documents, without empty ones."""
    is_text: bool = True
    """Set if documents are texts; otherwise they are token ids."""
    ended: Callable[[], bool] = bool
    """Tells whether all further segments are known to be empty, as at the end of a stream."""


def default_corpus(names: str = "") -> list[Group]:
    """The corpus inside the package, one group per file; see corpus/SOURCES.md.

    Args:
        names: Names of files, separated by commas; none: all.

    Raises:
        UsageError: no file has such a name.
    """
    folder = resources.files("posbias.prompts") / "corpus"
    files = sorted((entry for entry in folder.iterdir() if entry.name.endswith(".txt")), key=lambda entry: entry.name)

    def read(entry: Traversable) -> list[Document]:
        return documents_of(entry.read_text(encoding="utf-8"))

    titles = [entry.name.removesuffix(".txt") for entry in files]
    chosen = names.split(",") if names else titles
    unknown = [name for name in chosen if name not in titles]
    if unknown:
        raise UsageError(f"the default corpus has no {unknown[0]!r}; allowed: {', '.join(titles)}")
    return [Group(entry.name, (partial(read, entry),)) for entry in files if entry.name.removesuffix(".txt") in chosen]


def text_file(path: Path, n_positions: int, *, starts: bool = False) -> Group:
    """A UTF-8 text file, by byte ranges; with `starts` only by ranges that begin where a document does."""
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
    """Cut a file into [start, stop) ranges: one for a small file, equal ones that hold several windows otherwise."""
    size = file_size(path)
    pieces = 1 if size <= WHOLE_BYTES else max(1, size // segment_bytes(n_positions))
    return list(itertools.pairwise(size * piece // pieces for piece in range(pieces + 1)))


def document_ranges(path: Path, n_positions: int) -> list[tuple[int, int]]:
    """[start, stop) ranges of a text file that each hold whole documents, or the first bytes of one long document."""
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
    """Bytes of a file that is there, readable and not empty; refused otherwise."""
    if not file_exists(path):
        raise UsageError(
            f"no such file: {str(path)!r}; prompts are 'default', a .txt, .jsonl or .parquet file or token ids"
        )
    with open_file(path) as file:
        size = file.seek(0, os.SEEK_END)
    if size == 0:
        raise UsageError(f"{str(path)!r} is empty; prompts need text")
    return size


def _read_text(path: Path, start: int, stop: int, *, cut_anywhere: bool = True) -> list[Document]:
    """The documents within [start, stop); what begins (with `cut_anywhere`) or ends inside one is cut between words."""
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


def choose_field(chosen: str | None, fields: Sequence[str], source: str) -> str:
    """The field to read; if it is not there, the message lists the known ones."""
    for field in (chosen,) if chosen else DEFAULT_FIELDS:
        if field in fields:
            return field
    missing = repr(chosen) if chosen else "'text' or 'token_ids'"
    raise UsageError(f"{source}: no field {missing}; known: {', '.join(fields) or 'none'} (choose one by FILE#FIELD)")


def as_documents(value: Any, is_text: bool, where: Callable[[], str]) -> list[Document]:
    """A document, checked to be text or token ids as expected; none if it is blank. `where()` names the record."""
    if value == [] or (isinstance(value, str) and not value.strip()):
        return []
    if is_text:
        if not isinstance(value, str):
            raise UsageError(f"{where()}: need text, got {type(value).__name__}")
        if not value.isascii():
            check_text(value, where())
        return [value]
    if not isinstance(value, list):
        raise UsageError(f"{where()}: need text or a list of token ids, got {type(value).__name__}")
    token_ids = as_token_ids(value, where())
    if token_ids.ndim != 1:
        raise UsageError(f"{where()}: need one flat list of token ids, got {token_ids.ndim} levels")
    return [token_ids]


def jsonl_file(path: Path, n_positions: int, field: str | None) -> Group:
    """A JSON lines file, by byte ranges; refused unless its first record is an object with the field."""
    ranges = byte_ranges(path, n_positions)
    first = next(_records(path, (0, file_size(path))), None)
    if first is None:
        raise UsageError(f"{str(path)!r} holds no records")
    offset, record = first
    chosen = choose_field(field, list(record), _line_name(path, offset))
    is_text = isinstance(record[chosen], str)
    return Group(path.name, tuple(partial(_read_lines, path, chosen, is_text, cut) for cut in ranges), is_text)


def _read_lines(path: Path, field: str, is_text: bool, cut: tuple[int, int]) -> list[Document]:
    """The documents whose line begins in the byte range `cut`."""
    documents: list[Document] = []
    for offset, record in _records(path, cut):
        if field not in record:
            choose_field(field, list(record), _line_name(path, offset))
        documents += as_documents(record[field], is_text, partial(_line_name, path, offset))
    return documents


def _records(path: Path, cut: tuple[int, int]) -> Iterator[tuple[int, dict[str, Any]]]:
    """The records whose line begins in [start, stop), each with its byte offset."""
    start, stop = cut
    blank = 0
    with open_file(path) as file:
        if start > 0:
            file.seek(start - 1)
            read_line(file, repr(str(path)))
        while (offset := file.tell()) < stop:
            line = read_line(file, f"{str(path)!r}, at byte {offset:,}")
            if line.strip():
                blank = 0
                try:
                    record = json_object(line, "")
                except UsageError:
                    record = json_object(line, _line_name(path, offset))  # the place costs a look at all lines before
                yield offset, record
            elif (blank := blank + 1) > BLANK_LINES.most:
                raise BLANK_LINES.exceeded(f"{_line_name(path, offset)}: nothing but blank lines")


def _line_name(path: Path, offset: int) -> str:
    """The file and 1-based number of the line at a byte offset; counts the lines before, so only for messages."""
    number = 1
    with open_file(path) as file:
        while offset > 0 and (block := file.read(min(offset, 1 << 20))):
            number += block.count(b"\n")
            offset -= len(block)
    return f"{str(path)!r}, line {number}"


def parquet_file(path: Path, n_positions: int, column: str | None) -> Group:
    """A Parquet file, by batches of rows within its row groups; refused without records or the column."""
    import pyarrow as pa

    file_size(path)
    try:
        with _open_parquet(path) as file:
            schema, metadata = file.schema_arrow, file.metadata
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{str(path)!r} is not a readable Parquet file: {str(error).splitlines()[0]}") from None
    chosen = choose_field(column, schema.names, repr(str(path)))
    is_text = _holds_text(schema.field(chosen).type, f"{str(path)!r}, column {chosen!r}")
    if metadata.num_rows == 0:
        raise UsageError(f"{str(path)!r} holds no records")
    segments = _batches(metadata, chosen, n_positions)
    return Group(path.name, tuple(partial(_read_batches, path, chosen, is_text, part) for part in segments), is_text)


def _open_parquet(path: Path, dictionaries: list[str] | None = None) -> Any:
    """The open file; columns are read as needed, not a whole row group ahead, those of `dictionaries` undecoded."""
    from pyarrow import parquet

    return parquet.ParquetFile(path, pre_buffer=False, buffer_size=1 << 20, read_dictionary=dictionaries)


def _holds_text(kind: Any, source: str) -> bool:
    """Tell whether an Arrow type is text, not lists of whole numbers; others are refused."""
    from pyarrow import types

    if types.is_dictionary(kind):
        kind = kind.value_type
    if types.is_string(kind) or types.is_large_string(kind) or types.is_string_view(kind):
        return True
    is_list = types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind)
    if is_list and types.is_integer(kind.value_type):
        return False
    raise UsageError(f"{source} must hold text or lists of token ids, got {kind}")


def _batches(metadata: Any, column: str, n_positions: int) -> list[list[Batch]]:
    """The batches of each segment: one segment for a small file, otherwise segments of about the same size."""
    batches: list[Batch] = []
    whole = 0
    for row_group in range(metadata.num_row_groups):
        part = metadata.row_group(row_group)
        chunks = [part.column(number) for number in range(part.num_columns)]
        size = sum(chunk.total_uncompressed_size for chunk in chunks if chunk.path_in_schema.split(".")[0] == column)
        pieces = max(1, size // segment_bytes(n_positions), -(-part.num_rows // MAX_BATCH_ROWS))
        rows = max(1, -(-part.num_rows // pieces))
        batches += [(row_group, batch, rows) for batch in range(-(-part.num_rows // rows))]
        whole += size
    return [batches] if whole <= WHOLE_BYTES else [[batch] for batch in batches]


def _read_batches(path: Path, column: str, is_text: bool, batches: list[Batch]) -> list[Document]:
    import pyarrow as pa

    documents: list[Document] = []
    try:
        with _open_parquet(path, [column] if is_text else None) as file:
            for batch in batches:
                for row, value in _rows(path, file, column, batch):
                    where = partial("{!r}, row group {}, row {}".format, str(path), batch[0], row)
                    documents += as_documents(value, is_text, where)
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:  # texts are decoded without being checked
        raise UsageError(f"cannot read {str(path)!r}: {str(error).splitlines()[0]}") from None
    return documents


def _decoded_bytes(values: Any) -> int:
    """Bytes of records as text or numbers; a text that is stored once and repeated counts each time."""
    from pyarrow import compute, types

    if not types.is_dictionary(values.type):
        return int(values.nbytes)
    lengths = compute.binary_length(values.dictionary)
    return int(compute.sum(lengths.take(values.indices)).as_py() or 0)


def _rows(path: Path, file: Any, column: str, batch: Batch) -> Iterator[tuple[int, Any]]:
    """The numbered rows of one batch; Arrow may hand them over in smaller portions than asked."""
    row_group, index, rows = batch
    first, stop = index * rows, (index + 1) * rows
    row = 0
    for portion in file.iter_batches(batch_size=rows, row_groups=[row_group], columns=[column]):
        if row >= stop:
            return
        if row + len(portion) > first:
            portion_name = f"{str(path)!r}, row group {row_group}: a batch of {len(portion)} records"
            PARQUET_BYTES.check(portion_name, _decoded_bytes(portion.column(0)))
            values = enumerate(portion.column(0).to_pylist(), start=row)
            yield from ((number, value) for number, value in values if first <= number < stop)
        row += len(portion)
