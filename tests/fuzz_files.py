"""What makes valid files invalid: for `cli/test_fuzz.py`, and for damaged models."""

import json
import random
from pathlib import Path
from typing import Any

HUGE = 10**12
VALUES: tuple[Any, ...] = (
    *(None, True, 0, -1, 1.5, float("nan"), float("inf"), HUGE, 10**9, 2**63, 10**400, "", "x", "\ud800", "nan"),
    *([], [[]], {}, {"a": 1}, [None], "x" * 3000),
)
"""What stands in place of a value in a file."""


def bytes_changed(path: Path, source: random.Random) -> bytes:
    """Cut, bits turned, a part repeated or replaced by what does not belong there."""
    content = path.read_bytes()
    place = source.randrange(len(content))
    odd = source.choice(
        [b"", b"\0" * 50, b"\xff\xfe", b"\xed\xa0\x80", b"\n" * 3, b"[" * 3000, b'"', b"\x1f\x8b", b"9" * 5000]
    )
    return source.choice(
        [
            content[:place],
            content[:place] + bytes([content[place] ^ 1 << source.randrange(8)]) + content[place + 1 :],
            content[:place] + odd + content[place:],
            odd + content,
            odd,
            content[place:] + content[:place],
        ]
    )


def node_changed(value: Any, source: random.Random, values: tuple[Any, ...] = VALUES) -> Any:
    """A nested value with one node replaced, by one of some values or a deep list, removed or wrapped."""
    if not isinstance(value, dict | list) or not value or source.random() < 0.15:
        deep = json.loads("[" * 200 + "1" + "]" * 200)  # JSON reads it, recursive programs may not
        return source.choice([source.choice(values), [value], {"a": value}, deep])
    keys = list(value) if isinstance(value, dict) else list(range(len(value)))
    key = source.choice(keys)
    changed = dict(value) if isinstance(value, dict) else list(value)
    if source.random() < 0.15:
        del changed[key]
    else:
        changed[key] = node_changed(value[key], source, values)
    return changed
