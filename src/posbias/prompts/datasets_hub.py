"""Prompts from Hugging Face datasets, streamed: only as many documents are fetched as the windows need.

Spelled `hf:owner/name[config]:split#field`; all but the id may be left out. A local directory of data files stands in
for an id. Documents come in the order of the library's seeded shuffle.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import Any

from posbias.errors import UsageError, one_line
from posbias.prompts.sources import Document, Group, as_documents, choose_field

SCHEME = "hf:"
LITERAL = re.compile(r"hf:(?P<id>[^\[\]#:]+)(\[(?P<config>[^\[\]]+)\])?(:(?P<split>[\w.-]+))?(#(?P<field>.+))?")
BATCH_DOCUMENTS = 16
"""Documents read at a time."""
MOST_BATCHES = 65536
"""Batches read at most, a million documents: enough for any number of prompts that can be measured."""
SHUFFLE_BUFFER = 256
"""Documents held while shuffling."""


@dataclass(frozen=True)
class DatasetName:
    """A parsed literal."""

    id: str
    config: str | None
    split: str
    field: str | None

    @property
    def name(self) -> str:
        """Name in records and messages; only the base name of a directory."""
        owner = Path(self.id).resolve().name if Path(self.id).is_dir() else self.id
        config = f"[{self.config}]" if self.config else ""
        return f"{SCHEME}{owner}{config}:{self.split}{f'#{self.field}' if self.field else ''}"


def parse_dataset(text: str) -> DatasetName:
    """The parts of a literal; the split is "train" if none is named."""
    match = LITERAL.fullmatch(text)
    if match is None:
        raise UsageError(f"prompts {text!r}: need hf:owner/name[config]:split#field (all but the id may be left out)")
    return DatasetName(match["id"], match["config"], match["split"] or "train", match["field"])


def dataset_group(dataset: DatasetName, *, seed: int) -> Group:
    """The dataset's documents, in batches in the order they come.

    Raises:
        UsageError: the library is not installed, or there is no such dataset, config, split or field.
    """
    stream = _open(dataset, seed)
    rows = _Rows(dataset.name, stream)
    first = next(iter(rows.portion(1)), None)
    if first is None:
        raise UsageError(f"{rows.name} holds no records")
    rows.stream = chain([first], stream)
    chosen = choose_field(dataset.field, list(first), dataset.name)
    rows.column, rows.is_text = chosen, isinstance(first[chosen], str)
    # Whichever batch is asked for, the next one of the stream is read: batches have no number of their own there.
    return Group(dataset.name, (rows.next_batch,) * MOST_BATCHES, rows.is_text, lambda: rows.ended)


@dataclass
class _Rows:
    name: str
    stream: Iterator[dict[str, Any]]
    column: str = ""
    is_text: bool = True
    ended: bool = False
    _read: int = 0

    def next_batch(self) -> list[Document]:
        """The next documents, without empty ones; none at the end."""
        documents: list[Document] = []
        rows = self.portion(BATCH_DOCUMENTS)
        self.ended = len(rows) < BATCH_DOCUMENTS
        for number, row in enumerate(rows, start=self._read):
            if self.column not in row:
                choose_field(self.column, list(row), f"{self.name}, record {number}")
            documents += as_documents(
                row[self.column], self.is_text, partial("{}, record {}".format, self.name, number)
            )
        self._read += len(rows)
        return documents

    def portion(self, count: int) -> list[dict[str, Any]]:
        """The next records of the stream."""
        try:
            return list(islice(self.stream, count))
        except Exception as error:  # whatever a broken connection or a damaged file may raise
            raise UsageError(f"cannot read {self.name}: {one_line(error)}") from None


def _open(dataset: DatasetName, seed: int) -> Iterator[dict[str, Any]]:
    try:
        import datasets
    except ImportError:
        raise UsageError(
            f"prompts {dataset.name!r} need the datasets package: pip install 'posbias[datasets]'"
        ) from None
    watched = datasets.are_progress_bars_disabled()
    datasets.disable_progress_bars()
    try:
        stream = datasets.load_dataset(dataset.id, dataset.config, split=dataset.split, streaming=True)
        return iter(stream.shuffle(seed=seed, buffer_size=SHUFFLE_BUFFER))
    except Exception as error:  # the library raises its own, Hugging Face's and the file formats' errors
        raise UsageError(f"prompts {dataset.name!r} cannot be loaded: {one_line(error)}") from None
    finally:
        if not watched:
            datasets.enable_progress_bars()
