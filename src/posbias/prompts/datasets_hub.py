"""Prompts from Hugging Face datasets, streamed: only as many documents are fetched as the windows need.

Spelled `hf:owner/name[config]:split#field`; all but the id may be left out. A local directory of data files stands in
for an id. Documents come in the order of the library's seeded shuffle.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from posbias.errors import UsageError, one_line
from posbias.prompts.sources import Group, Records, begun, documents_in

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
    chosen, is_text, records = begun(_records(dataset.name, _open(dataset, seed)), dataset.field, dataset.name)
    batches = iter(lambda: list(islice(records, BATCH_DOCUMENTS)), [])
    segments = (documents_in(batch, chosen, is_text) for batch in islice(batches, MOST_BATCHES))
    return Group(dataset.name, segments, is_text)


def _records(name: str, stream: Iterator[dict[str, Any]]) -> Records:
    """The records of a stream with their places."""
    try:
        for number, record in enumerate(stream):
            yield f"{name}, record {number}", record
    except Exception as error:  # whatever a broken connection or a damaged file may raise
        raise UsageError(f"cannot read {name}: {one_line(error)}") from None


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
