"""Prompts from files of records: JSON lines and Parquet, one document per record, read a segment at a time.

The field or column holds text or token ids: the one named after `#` in the path, otherwise `text`, otherwise
`token_ids`.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from posbias.errors import UsageError
from posbias.files import check_text, json_object, open_file, read_line
from posbias.limits import BLANK_LINES
from posbias.prompts.sources import (
    WHOLE_BYTES,
    Document,
    Group,
    byte_ranges,
    file_size,
    segment_bytes,
)
from posbias.prompts.tokens import as_token_ids

DEFAULT_FIELDS = ("text", "token_ids")
MAX_BATCH_ROWS = 1024
"""Most Parquet rows in one batch."""

Batch = tuple[int, int, int]
"""Row group, batch within it, rows per batch."""


def choose_field(asked: str | None, known: Sequence[str], source: str) -> str:
    """The field to read.

    Raises:
        UsageError: it is not there; the message lists the known ones.
    """
    for field in (asked,) if asked else DEFAULT_FIELDS:
        if field in known:
            return field
    wanted = repr(asked) if asked else "'text' or 'token_ids'"
    raise UsageError(f"{source}: no field {wanted}; known: {', '.join(known) or 'none'} (choose one by FILE#FIELD)")


def as_document(value: Any, is_text: bool, where: Callable[[], str]) -> Document:
    """A checked document.

    Raises:
        UsageError: not text where text is expected, not token ids where they are; `where()` names the record.
    """
    if is_text:
        if not isinstance(value, str):
            raise UsageError(f"{where()}: need text, got {type(value).__name__}")
        if not value.isascii():
            check_text(value, where())
        return value
    if not isinstance(value, list):
        raise UsageError(f"{where()}: need text or a list of token ids, got {type(value).__name__}")
    token_ids = as_token_ids(value, where())
    if token_ids.ndim != 1:
        raise UsageError(f"{where()}: need one flat list of token ids, got {token_ids.ndim} levels")
    return token_ids


def is_blank(value: Any) -> bool:
    """Whether a document holds nothing; such records are passed over."""
    return value == [] or (isinstance(value, str) and not value.strip())


# --- JSON lines ---


def jsonl_file(path: Path, n_positions: int, field: str | None) -> Group:
    """A JSON lines file, by byte ranges.

    Raises:
        UsageError: the file is missing, empty, or its first record is not an object with the field.
    """
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
        if not is_blank(record[field]):
            documents.append(as_document(record[field], is_text, partial(_line_name, path, offset)))
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
                yield offset, _record(path, offset, line)
            elif (blank := blank + 1) > BLANK_LINES.most:
                raise BLANK_LINES.exceeded(f"{_line_name(path, offset)}: nothing but blank lines")


def _record(path: Path, offset: int, line: bytes) -> dict[str, Any]:
    """One parsed line."""
    try:
        return json_object(line, "")
    except UsageError:
        return json_object(line, _line_name(path, offset))  # the place costs a look at all lines before


def _line_name(path: Path, offset: int) -> str:
    """The file and 1-based number of the line at a byte offset; counts the lines before, so only for messages."""
    number = 1
    with open_file(path) as file:
        while offset > 0 and (block := file.read(min(offset, 1 << 20))):
            number += block.count(b"\n")
            offset -= len(block)
    return f"{str(path)!r}, line {number}"


# --- Parquet ---


def parquet_file(path: Path, n_positions: int, column: str | None) -> Group:
    """A Parquet file, by batches of rows within its row groups.

    Raises:
        UsageError: the file is missing, empty, not Parquet, or lacks the column.
    """
    import pyarrow as pa

    file_size(path)
    try:
        with _open_parquet(path) as file:
            schema, metadata = file.schema_arrow, file.metadata
    except (pa.ArrowException, OSError) as error:
        raise UsageError(f"{str(path)!r} is not a readable Parquet file: {str(error).splitlines()[0]}") from None
    chosen = choose_field(column, schema.names, repr(str(path)))
    is_text = _holds_text(schema.field(chosen).type, f"{str(path)!r}, column {chosen!r}")
    if metadata.num_rows == 0:
        raise UsageError(f"{str(path)!r} holds no records")
    segments = _batches(metadata, chosen, n_positions)
    return Group(path.name, tuple(partial(_read_batches, path, chosen, is_text, part) for part in segments), is_text)


def _open_parquet(path: Path) -> Any:
    """The open file; columns are read as needed, not a whole row group ahead."""
    from pyarrow import parquet

    return parquet.ParquetFile(path, pre_buffer=False, buffer_size=1 << 20)


def _holds_text(kind: Any, source: str) -> bool:
    """Whether an Arrow type is text; False for lists of whole numbers."""
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
    """The documents of one segment."""
    import pyarrow as pa

    documents: list[Document] = []
    try:
        with _open_parquet(path) as file:
            for batch in batches:
                for row, value in _rows(file, column, batch):
                    where = partial("{!r}, row group {}, row {}".format, str(path), batch[0], row)
                    if not is_blank(value):
                        documents.append(as_document(value, is_text, where))
    except (pa.ArrowException, OSError) as error:
        raise UsageError(f"cannot read {str(path)!r}: {str(error).splitlines()[0]}") from None
    return documents


def _rows(file: Any, column: str, batch: Batch) -> Iterator[tuple[int, Any]]:
    """The numbered rows of one batch; Arrow may hand them over in smaller portions than asked."""
    row_group, wanted, rows = batch
    first, stop = wanted * rows, (wanted + 1) * rows
    row = 0
    for portion in file.iter_batches(batch_size=rows, row_groups=[row_group], columns=[column]):
        if row >= stop:
            return
        if row + len(portion) > first:
            values = enumerate(portion.column(0).to_pylist(), start=row)
            yield from ((number, value) for number, value in values if first <= number < stop)
        row += len(portion)
