"""GGUF files: metadata and table of tensors, walked with stated limits before a library that trusts them reads either.

"GGUF", version, how many tensors, how many entries, the entries (key, type, value), the table of tensors (name, shape,
type, offset), the tensors. Tensors are aligned, lie within the file and share no byte, as those of safetensors do.
"""

import math
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from posbias.models.config_limits import LAYERS

MOST_ENTRIES, MOST_VALUES, MOST_STRING_BYTES = 100_000, 5_000_000, 1 << 24
"""Entries, and tensors; values in all lists together (10^6 tokens with scores and types fit); one text."""
MOST_DIMENSIONS = 4
"""Of a tensor, which is the format's own limit."""
VERSIONS = (2, 3)
ALIGNMENT = 32
"""Bytes, where `general.alignment` does not say otherwise."""
STRING, ARRAY = 8, 9
NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
"""By type: how `struct` spells a number."""
FLOAT32 = 0
"""Type of a tensor of plain numbers."""


class GgufTensor(NamedTuple):
    """The place of one tensor in a file, and how it is stored."""

    shape: tuple[int, ...]
    """Dimensions in torch's order: the slowest first."""
    kind: int
    """Type of the format's numbering."""
    start: int
    """Byte of the file."""
    n_bytes: int


@dataclass(frozen=True)
class GgufFile:
    """A file's metadata and table of tensors, checked."""

    path: Path
    entries: dict[str, Any]
    """Numbers and text as they are; lists of up to 1,000 numbers; of other lists a range of their length."""
    tensors: dict[str, GgufTensor]

    def numbers(self, name: str) -> list[float]:
        """The values of a tensor in one dimension. A ValueError says that it is stored otherwise."""
        tensor = self.tensors[name]
        if tensor.kind != FLOAT32 or len(tensor.shape) != 1:
            raise ValueError(f"stores {name} in shape {list(tensor.shape)} and type {tensor.kind}; F32 in one is read")
        return [float(number) for number in np.fromfile(self.path, "<f4", *tensor.shape, offset=tensor.start)]


def read_gguf(path: Path) -> GgufFile:
    """A file's metadata and table of tensors; no weight is read.

    A ValueError says that it is no GGUF file, ends too early, goes beyond a limit, or has tensors that lie wrongly.
    """
    with open(path, "rb") as file:
        header = _Header(file)
        entries, n_tensors = header.entries()
        tensors = header.tensors(n_tensors, alignment=entries.get("general.alignment", ALIGNMENT))
    _check_places(tensors, path.stat().st_size)
    return GgufFile(path, entries, tensors)


class _Header:
    def __init__(self, file: BinaryIO) -> None:
        self.file, self.values = file, 0

    def entries(self) -> tuple[dict[str, Any], int]:
        """The metadata, and how many tensors follow."""
        if self.file.read(4) != b"GGUF":
            raise ValueError("does not begin with GGUF")
        version, tensors, count = self.number("I"), self.number("Q"), self.number("Q")
        if version not in VERSIONS:
            raise ValueError(f"is GGUF version {version}; allowed: {' and '.join(map(str, VERSIONS))}")
        if max(tensors, count) > MOST_ENTRIES:
            raise ValueError(f"says it has {tensors:,} tensors and {count:,} entries; at most {MOST_ENTRIES:,} each")
        entries: dict[str, Any] = {}
        for _ in range(count):
            key = self.value(STRING)
            if key in entries:
                raise ValueError(f"holds the key {key[:80]!r} twice")
            entries[key] = self.value(self.number("I"))
        return entries, tensors

    def tensors(self, count: int, *, alignment: Any) -> dict[str, GgufTensor]:
        """The table that follows the metadata, with offsets counted from the beginning of the file."""
        if type(alignment) is not int or alignment < 1 or alignment & (alignment - 1):
            raise ValueError(f"has general.alignment {alignment!r}; a power of two is allowed")
        listed: dict[str, tuple[tuple[int, ...], int, int]] = {}
        for _ in range(count):
            name, n_dimensions = self.value(STRING), self.number("I")
            if name in listed:
                raise ValueError(f"holds the tensor {name[:80]!r} twice")
            if not 1 <= n_dimensions <= MOST_DIMENSIONS:
                raise ValueError(f"has tensor {name[:80]!r} in {n_dimensions} dimensions; allowed: 1 to 4")
            shape = tuple(self.number("Q") for _ in range(n_dimensions))[::-1]
            kind, offset = self.number("I"), self.number("Q")
            if offset % alignment:
                raise ValueError(f"has tensor {name[:80]!r} at offset {offset:,}, no multiple of {alignment}")
            listed[name] = (shape, kind, offset)
        begin = -(-self.file.tell() // alignment) * alignment
        return {
            name: GgufTensor(shape, kind, begin + offset, _bytes_of(name, shape, kind))
            for name, (shape, kind, offset) in listed.items()
        }

    def value(self, kind: int) -> Any:
        if kind == STRING:
            try:
                return self.text().decode()
            except UnicodeDecodeError:
                raise ValueError("holds a text that is not UTF-8") from None
        if kind == ARRAY:
            return self.sequence()
        if kind not in NUMBERS:
            raise ValueError(f"holds a value of type {kind}; allowed: 0 to 12")
        return self.number(NUMBERS[kind])

    def sequence(self) -> Any:
        kind, length = self.number("I"), self.number("Q")
        self.values += length
        if self.values > MOST_VALUES:
            raise ValueError(f"has lists of {self.values:,} values; at most {MOST_VALUES:,} are allowed")
        if kind == STRING:
            for _ in range(length):
                self.text()
        elif kind not in NUMBERS:
            raise ValueError(f"holds a list of type {kind}; allowed: numbers and text")
        elif length <= LAYERS:  # what a layer has its own of
            return [self.number(NUMBERS[kind]) for _ in range(length)]
        else:
            self.bytes(length * struct.calcsize(NUMBERS[kind]))
        return range(length)

    def text(self) -> bytes:
        length = self.number("Q")
        if length > MOST_STRING_BYTES:
            raise ValueError(f"holds a text of {length:,} bytes; at most {MOST_STRING_BYTES:,} are allowed")
        return self.bytes(length)

    def number(self, spelling: str) -> Any:
        return struct.unpack(f"<{spelling}", self.bytes(struct.calcsize(spelling)))[0]

    def bytes(self, length: int) -> bytes:
        content = self.file.read(length)
        if len(content) < length:
            raise ValueError("ends in the middle of its metadata")
        return content


def _bytes_of(name: str, shape: tuple[int, ...], kind: int) -> int:
    """Bytes of a tensor, which is stored in blocks along its fastest dimension."""
    from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

    try:
        block, bytes_each = GGML_QUANT_SIZES[GGMLQuantizationType(kind)]
    except (KeyError, ValueError):
        raise ValueError(f"has tensor {name[:80]!r} of type {kind}, unknown to the gguf package") from None
    if 0 in shape or shape[-1] % block:
        raise ValueError(f"has tensor {name[:80]!r} of shape {list(shape)}, which blocks of {block} do not fill")
    return math.prod(shape) // int(block) * int(bytes_each)


def _check_places(tensors: dict[str, GgufTensor], file_bytes: int) -> None:
    """Refuse tensors that go beyond the file or share bytes."""
    end, before = 0, ""
    for name, tensor in sorted(tensors.items(), key=lambda item: item[1].start):
        if tensor.start + tensor.n_bytes > file_bytes:
            raise ValueError(
                f"has tensor {name[:80]!r} in bytes {tensor.start:,} to {tensor.start + tensor.n_bytes:,}; it ends at "
                f"{file_bytes:,}"
            )
        if tensor.start < end:
            raise ValueError(f"has tensors {before[:80]!r} and {name[:80]!r} in the same bytes")
        end, before = tensor.start + tensor.n_bytes, name
