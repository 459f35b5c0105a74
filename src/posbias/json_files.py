"""JSON documents that were written elsewhere, read with stated limits: bytes, depth, digits, characters, repeated keys.

What Python's parser lets through and later code stumbles over (a number of 400 digits, half a surrogate pair, a
thousand brackets) is refused here, in one line.
"""

import json
import re
from pathlib import Path
from typing import Any

MOST_LEVELS = 64
"""Lists and objects inside each other."""
MOST_DIGITS = 40
"""Digits of a whole number; files of tokenizers write "no limit" as 10^30."""
SURROGATE = re.compile(r"\\ud[89a-f]", re.IGNORECASE)
"""The escape of half a character beyond 16 bits."""


def read_json(path: Path, *, most_bytes: int) -> Any:
    """The value that a file of JSON holds.

    Args:
        path: A regular file; a pipe or device, which may never end, is not read.
        most_bytes: Of the file (>= 1).

    Returns:
        Dictionaries, lists, text that can be encoded, numbers that a float can hold, True, False, None.

    Raises:
        OSError: there is no such file, or it cannot be read.
        ValueError: it holds anything else; one line that does not name the file.
    """
    if not path.is_file():
        raise FileNotFoundError(f"{path.name} is no file")
    with open(path, "rb") as file:
        content = file.read(most_bytes + 1)
    if len(content) > most_bytes:
        raise ValueError(f"is larger than {most_bytes:,} bytes")
    try:
        text = content.decode("utf-8")
        value = json.loads(text, parse_int=_whole, parse_float=_real, object_pairs_hook=_unrepeated)
    except UnicodeDecodeError:
        raise ValueError("is not UTF-8 text") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"is not JSON (line {error.lineno}: {error.msg})") from None
    except RecursionError:
        raise ValueError(f"is nested deeper than {MOST_LEVELS} levels") from None
    _check_levels(value)
    if SURROGATE.search(text):
        _check_text(value)
    return value


def _whole(text: str) -> int:
    if len(text.lstrip("-")) > MOST_DIGITS:
        raise ValueError(f"holds a whole number of {len(text)} digits; at most {MOST_DIGITS} are allowed")
    return int(text)


def _real(text: str) -> float:
    value = float(text)
    if value in (float("inf"), float("-inf")):
        raise ValueError(f"holds {text[:20]}, which is beyond floating point")
    return value


def _unrepeated(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"holds the key {next(name for name in names if names.count(name) > 1)[:80]!r} twice")
    return found


def _check_levels(value: Any) -> None:
    """Level by level, as a recursion would end in the same trouble."""
    level = [value]
    for _ in range(MOST_LEVELS + 1):
        below = [item.values() if isinstance(item, dict) else item for item in level if isinstance(item, dict | list)]
        level = [each for items in below for each in items if isinstance(each, dict | list)]
        if not level:
            return
    raise ValueError(f"is nested deeper than {MOST_LEVELS} levels")


def _check_text(value: Any) -> None:
    """Pairs of escapes were joined by the parser; what is left of them is half a character."""
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        half = error.object[error.start]
        raise ValueError(f"holds text with half a character ({half!r})") from None
