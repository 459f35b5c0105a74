"""What a configuration may ask for, checked on its numbers alone before transformers builds anything from it.

Transformers makes lists and modules as long as these numbers say, so that one of them can take all memory or never end.
What is left is counted in bytes, with none taken, by `network_size`. The configuration of a GGUF file is its metadata,
walked here with stated limits before a library that trusts its counts and lengths reads it: "GGUF", version, how many
tensors, how many entries, the entries (key, type, value), the table of tensors.
"""

import base64
import math
import re
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

from posbias.errors import UsageError, one_line

LAYERS, COUNT, SIZE = 1_000, 100_000, 10**12
"""The most layers; heads, experts and other things of which there are many in a layer; anything else."""
LIMITS = (
    (re.compile(r"(size|dim|width|length|position|ctx|embd|inner|param)"), SIZE),
    (re.compile(r"(layers?|depth|blocks?|block_count|stacks?|cycles|types|pattern|replace)$"), LAYERS),
    (re.compile(r"^(num|n|number)_|(heads?|head_count(_kv)?|experts?|expert_count|groups)$"), COUNT),
)
"""By what the last part of an entry's name holds, the first that fits: the largest number it may have."""
FOREIGN_FILES = {
    "transformers_weights": "a file of weights of its own choice",
    "configuration_files": "other configuration files",
}
"""Entries that send transformers to files that no one has checked."""

MOST_GROWTH = 256
"""Characters that a tokenizer's normalizer, or its decoder, may make of one; those of T5 make 72, NFKC alone 18."""

MOST_ENTRIES, MOST_VALUES, MOST_STRING_BYTES = 100_000, 5_000_000, 1 << 24
"""Entries, and tensors; values in all lists together (10^6 tokens with scores and types fit); one text."""
TENSORS = "GGUF.tensor_count"
"""What the number of tensors is called among the entries, as the `gguf` package calls it."""
VERSIONS = (2, 3)
STRING, ARRAY = 8, 9
NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
"""By type: how `struct` spells a number."""


def check_numbers(plain: Mapping[str, Any], name: str) -> None:
    """Refuse a configuration whose numbers are beyond every model, or that points to files elsewhere.

    It is a `config.json` or the metadata of a GGUF file; the message names the entry, its value and the largest
    allowed.
    """
    for key, value in _entries(plain):
        if key in FOREIGN_FILES and value is not None:
            raise UsageError(f"model {name!r}: configuration names {FOREIGN_FILES[key]} ({key}), which is not allowed")
        if isinstance(value, str) and key.endswith("pattern"):
            value = len(value)  # a letter for each layer
        if isinstance(value, bool) or not isinstance(value, int):
            continue
        most = next((limit for pattern, limit in LIMITS if pattern.search(key)), SIZE)
        if abs(value) > most:
            said = one_line(f"configuration has {key} {value:,}")
            raise UsageError(f"model {name!r}: {said}; at most {most:,} are allowed")


def _entries(value: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    """Every entry at every depth (which `read_json` bounds), with the last part of its name."""
    if isinstance(value, Mapping):
        for name, item in value.items():
            yield from _entries(item, str(name).rpartition(".")[2])
    elif isinstance(value, list):
        for item in value:
            yield from _entries(item, key)
    else:
        yield key, value


def check_text_growth(tokenizer: Any) -> None:
    """Refuse a `tokenizer.json` that lengthens text without bound: 26 times "aa" for "a" is 64 MB of a letter.

    A ValueError says which part does. Other JSON files of a tokenizer have no such parts.
    """
    if not isinstance(tokenizer, Mapping):
        return
    for part in ("normalizer", "decoder"):
        growth = _growth(tokenizer.get(part))
        if growth > MOST_GROWTH:
            raise ValueError(
                f"has a {part} that can make {growth:,} characters of one; at most {MOST_GROWTH} are allowed"
            )


def _growth(step: Any) -> int:
    """The most characters that a step of a normalizer or decoder, nested steps included, makes of one."""
    if not isinstance(step, Mapping):
        return 1
    growth = math.prod(_growth(nested) for name in ("normalizers", "decoders") for nested in step.get(name) or ())
    pattern, content = step.get("pattern"), str(step.get("content", ""))
    if isinstance(pattern, Mapping) and pattern.get("String"):
        growth *= max(-(-len(content) // len(str(pattern["String"]))), 1)
    elif pattern is not None:
        growth *= len(content) + 1  # a regular expression may match between any two characters
    if isinstance(step.get("prepend"), str):
        growth *= len(step["prepend"]) + 1
    if isinstance(step.get("precompiled_charsmap"), str):
        table = base64.b64decode(step["precompiled_charsmap"])
        strings = table[4 + int.from_bytes(table[:4], "little") :].decode(errors="replace").split("\0")
        growth *= max(*map(len, strings), 1)  # they follow the trie, whose size stands first
    return growth


def gguf_metadata(path: Path) -> dict[str, Any]:
    """The entries of a file: numbers and text as they are, of a list its length.

    A ValueError says that it is no GGUF file, ends too early, or goes beyond a limit.
    """
    with open(path, "rb") as file:
        return _Header(file).entries()


class _Header:
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
            key = self.value(STRING)
            if key in found:
                raise ValueError(f"holds the key {key[:80]!r} twice")
            found[key] = self.value(self.number("I"))
        return found

    def value(self, kind: int) -> Any:
        if kind == STRING:
            try:
                return self.text().decode()
            except UnicodeDecodeError:
                raise ValueError("holds a text that is not UTF-8") from None
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
                self.text()
        elif kind in NUMBERS:
            self.bytes(length * struct.calcsize(NUMBERS[kind]))
        else:
            raise ValueError(f"holds a list of type {kind}; allowed: numbers and text")
        return int(length)

    def text(self) -> bytes:
        length = self.number("Q")
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
