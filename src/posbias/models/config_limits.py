"""What a configuration may ask for, checked on its numbers alone before transformers builds anything from it.

Transformers makes lists and modules as long as these numbers say, so that one of them can take all memory or never end.
What is left is counted in bytes, with none taken, by `network_size`.
"""

import re
from collections.abc import Iterator, Mapping
from typing import Any

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


def check_numbers(plain: Mapping[str, Any], name: str) -> None:
    """Refuse a configuration whose numbers are beyond every model, or that points to files elsewhere.

    Args:
        plain: As read from `config.json`, or the metadata of a GGUF file.
        name: Of the model, for the message.

    Raises:
        UsageError: the entry, its value and the largest allowed.
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
