"""The metadata of a GGUF file, walked with stated limits before a library that trusts its counts and lengths reads it.

A file is: "GGUF", version, how many tensors, how many entries, the entries (key, type, value), the table of tensors.
"""

import struct
from pathlib import Path
from typing import Any, BinaryIO

MOST_ENTRIES, MOST_VALUES, MOST_STRING_BYTES = 100_000, 5_000_000, 1 << 24
"""Entries, and tensors; values in all lists together (10^6 tokens with scores and types fit); one text."""
TENSORS = "GGUF.tensor_count"
"""What the number of tensors is called among the entries, as the `gguf` package calls it."""
VERSIONS = (2, 3)
STRING, ARRAY = 8, 9
NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
"""By type: how `struct` spells a number."""


def gguf_metadata(path: Path) -> dict[str, Any]:
    """The entries of a file: numbers and text as they are, of a list its length.

    Raises:
        OSError: the file cannot be read.
        ValueError: it is no GGUF file, ends too early, or goes beyond a limit.
    """
    with open(path, "rb") as file:
        return _Header(file).entries()


class _Header:
    """A file, read from its beginning."""

    def __init__(self, file: BinaryIO) -> None:
        self.file, self.values = file, 0

    def entries(self) -> dict[str, Any]:
        if self.file.read(4) != b"GGUF":
            raise ValueError("does not begin with GGUF")
        version, tensors, count = self.number("I"), self.number("Q"), self.number("Q")
        if version not in VERSIONS:
            raise ValueError(f"is GGUF version {version}; allowed: {' and '.join(map(str, VERSIONS))}")
        if max(tensors, count) > MOST_ENTRIES:
            raise ValueError(f"says it has {tensors:,} tensors and {count:,} entries; at most {MOST_ENTRIES:,} each")
        found: dict[str, Any] = {TENSORS: tensors}
        for _ in range(count):
            key = self.text()
            if key in found:
                raise ValueError(f"holds the key {key[:80]!r} twice")
            found[key] = self.value(self.number("I"))
        return found

    def value(self, kind: int) -> Any:
        if kind == STRING:
            return self.text()
        if kind == ARRAY:
            return self.length_of_list()
        if kind not in NUMBERS:
            raise ValueError(f"holds a value of type {kind}; allowed: 0 to 12")
        return self.number(NUMBERS[kind])

    def length_of_list(self) -> int:
        kind, length = self.number("I"), self.number("Q")
        self.values += length
        if self.values > MOST_VALUES:
            raise ValueError(f"has lists of {self.values:,} values; at most {MOST_VALUES:,} are allowed")
        if kind == STRING:
            for _ in range(length):
                self.skip(self.number("Q"))
        elif kind in NUMBERS:
            self.bytes(length * struct.calcsize(NUMBERS[kind]))
        else:
            raise ValueError(f"holds a list of type {kind}; allowed: numbers and text")
        return int(length)

    def text(self) -> str:
        length = self.number("Q")
        try:
            return self.skip(length).decode()
        except UnicodeDecodeError:
            raise ValueError("holds a text that is not UTF-8") from None

    def skip(self, length: int) -> bytes:
        if length > MOST_STRING_BYTES:
            raise ValueError(f"holds a text of {length:,} bytes; at most {MOST_STRING_BYTES:,} are allowed")
        return self.bytes(length)

    def number(self, spelling: str) -> Any:
        return struct.unpack(f"<{spelling}", self.bytes(struct.calcsize(spelling)))[0]

    def bytes(self, length: int) -> bytes:
        found = self.file.read(length)
        if len(found) < length:
            raise ValueError("ends in the middle of its metadata")
        return found
