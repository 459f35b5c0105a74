"""Sources of prompts: the default corpus, text files, JSON lines and data sets, as groups of documents.

A file is read whole, within `files.READ_BYTES`; what is larger is streamed as a data set. Documents are tokenised a
segment at a time, only those that windows are drawn from. In a text file a line that holds only a form feed (U+000C)
ends one document and begins the next. A record is one document, in the field or column named after `#` in the path,
otherwise `text`, otherwise `token_ids`.

A data set of Hugging Face is spelled `hf:owner/name[config]:split#field`; all but the id may be left out, and a local
directory of data files stands in for an id. It is streamed, so that only as many documents are fetched as the windows
need, in the order of the library's seeded shuffle.
"""

import itertools
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Int64

from posbias.errors import UsageError, check_most, one_line
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
SCHEME = "hf:"
LITERAL = re.compile(r"hf:(?P<id>[^\[\]#:]+)(\[(?P<config>[^\[\]]+)\])?(:(?P<split>[\w.-]+))?(#(?P<field>.+))?")
BATCH_DOCUMENTS = 16
"""Documents of a data set read at a time."""
MOST_BATCHES = 65536
"""Batches read at most, a million documents: enough for any number of prompts that can be measured."""
SHUFFLE_BUFFER = 256
"""Documents held while shuffling."""


@dataclass(frozen=True)
class Group:
    """Documents of one origin; windows are spread evenly over groups."""

    name: str
    """Name in messages: the file's."""
    segments: Iterable[list[Document]]
    """Documents that are tokenised together, without empty ones; those of a stream are read as they are asked for."""
    is_text: bool = True
    """Set if documents are texts; otherwise they are token ids."""


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
    documents = documents_of(decoded(read_whole(path, "text file (hf:DIRECTORY streams longer ones)"), repr(str(path))))
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


def choose_field(chosen: str | None, fields: Sequence[str], source: str) -> str:
    """The field to read; if it is not there, the message lists the known ones."""
    for field in (chosen,) if chosen else DEFAULT_FIELDS:
        if field in fields:
            return field
    missing = repr(chosen) if chosen else "'text' or 'token_ids'"
    raise UsageError(f"{source}: no field {missing}; known: {', '.join(fields) or 'none'} (choose one by FILE#FIELD)")


Records = Iterator[tuple[str, dict[str, Any]]]
"""Records in order, each with its place for messages."""


def begun(records: Records, field: str | None, source: str) -> tuple[str, bool, Records]:
    """The field to read, whether it holds texts, and all records; the first one decides, none at all is refused."""
    first = next(records, None)
    if first is None:
        raise UsageError(f"{source} holds no records")
    where, record = first
    chosen = choose_field(field, list(record), where)
    return chosen, isinstance(record[chosen], str), itertools.chain([first], records)


def documents_in(records: Iterable[tuple[str, dict[str, Any]]], field: str, is_text: bool) -> list[Document]:
    """The documents of records, checked, without empty ones."""
    documents: list[Document] = []
    for where, record in records:
        value = record[choose_field(field, list(record), where)]
        if value == [] or (isinstance(value, str) and not value.strip()):
            continue
        documents.append(_checked(value, is_text, where))
    return documents


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
    """A file of JSON lines, plain or gzip; every record must have the field."""
    chosen, is_text, records = begun(_json_lines(path), field, repr(str(path)))
    return Group(path.name, segmented(documents_in(records, chosen, is_text), n_positions), is_text)


def _json_lines(path: Path) -> Records:
    size = 0
    for where, line in read_lines(path):
        size += len(line)
        check_most(f"{str(path)!r}, which hf:DIRECTORY would stream", size, READ_BYTES, "bytes")
        yield where, json_object(line, where)


def dataset_group(text: str, *, seed: int) -> Group:
    """The documents of a data set, `hf:owner/name[config]:split#field`, in batches in the order they come.

    The split is "train" if none is named.

    Raises:
        UsageError: another spelling, the library is not installed, or there is no such dataset, config, split or field.
    """
    match = LITERAL.fullmatch(text)
    if match is None:
        raise UsageError(f"prompts {text!r}: need hf:owner/name[config]:split#field (all but the id may be left out)")
    split = match["split"] or "train"
    # Only the base name of a directory goes into records.
    owner = Path(match["id"]).resolve().name if Path(match["id"]).is_dir() else match["id"]
    config, field = f"[{match['config']}]" if match["config"] else "", f"#{match['field']}" if match["field"] else ""
    name = f"{SCHEME}{owner}{config}:{split}{field}"
    streamed = _streamed(name, match["id"], match["config"], split, seed)
    chosen, is_text, records = begun(streamed, match["field"], name)
    batches = iter(lambda: list(itertools.islice(records, BATCH_DOCUMENTS)), [])
    segments = (documents_in(batch, chosen, is_text) for batch in itertools.islice(batches, MOST_BATCHES))
    return Group(name, segments, is_text)


def _streamed(name: str, dataset: str, config: str | None, split: str, seed: int) -> Records:
    """The records of a data set in the order of the library's seeded shuffle, with their places."""
    try:
        import datasets
    except ImportError:
        raise UsageError(f"prompts {name!r} need the datasets package: pip install 'posbias[datasets]'") from None
    watched = datasets.are_progress_bars_disabled()
    datasets.disable_progress_bars()
    try:
        stream = datasets.load_dataset(dataset, config, split=split, streaming=True)
        for number, record in enumerate(stream.shuffle(seed=seed, buffer_size=SHUFFLE_BUFFER)):
            yield f"{name}, record {number}", record
    except Exception as error:  # the library raises its own, Hugging Face's and the file formats' errors
        raise UsageError(f"prompts {name!r} cannot be loaded: {one_line(error)}") from None
    finally:
        if not watched:
            datasets.enable_progress_bars()
