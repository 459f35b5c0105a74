"""YAML read strictly into plain values: no tags, no repeated keys, every complaint with its line.

PyYAML does the parsing; values are made here, because its own reading keeps the last of two equal keys in silence and
takes 1e-3 for a text (YAML 1.1).
"""

import re
from pathlib import Path
from typing import Any

from posbias.errors import UsageError

FLOAT = re.compile(r"[-+]?(\d[\d_]*(\.\d*)?|\.\d+)([eE][-+]?\d+)?")
PLAIN_TAGS = ("null", "bool", "int", "float", "str")
DEEPEST = 20
"""Most levels of nesting; also what ends an alias that contains itself."""
LONGEST_NUMBER = 100
"""Most digits of a whole number."""
LONGEST = 1_000_000
"""Most bytes of a file."""


def read_yaml(path: str | Path) -> Any:
    """The one document of a file, as dictionaries, lists, numbers, texts, booleans and None.

    Raises:
        UsageError: no such file, not YAML, or anything but plain values in it.
    """
    import yaml

    try:
        with open(path, "rb") as file:
            text = file.read(LONGEST + 1)
    except OSError as error:
        raise UsageError(f"cannot read study {str(path)!r}: {error.strerror or error}") from None
    if len(text) > LONGEST:
        raise UsageError(f"study {str(path)!r} is longer than {LONGEST} bytes")
    try:
        node = yaml.compose(text, Loader=yaml.SafeLoader)
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError) as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise UsageError(f"study {str(path)!r} is not YAML: {reason}") from None
    if node is None:
        raise UsageError(f"study {str(path)!r} is empty")
    return _value(node, str(path), DEEPEST)


def _value(node: Any, path: str, depth: int) -> Any:
    if depth == 0:
        raise _complaint(node, path, f"more than {DEEPEST} levels of nesting")
    if node.id == "mapping":
        found: dict[str, Any] = {}
        for key_node, value_node in node.value:
            key = _scalar(key_node, path) if key_node.id == "scalar" else None
            if not isinstance(key, str | int | float):
                raise _complaint(key_node, path, "a key must be a text or a number")
            if str(key) in found:
                raise _complaint(key_node, path, f"{str(key)!r} is given twice")
            found[str(key)] = _value(value_node, path, depth - 1)
        return found
    if node.id == "sequence":
        return [_value(item, path, depth - 1) for item in node.value]
    return _scalar(node, path)


def _scalar(node: Any, path: str) -> Any:
    tag = node.tag.removeprefix("tag:yaml.org,2002:")
    if tag not in PLAIN_TAGS:
        raise _complaint(node, path, f"{node.value!r} is no plain number or text (write it in quotes)")
    if tag == "null":
        return None
    if tag == "bool":
        return node.value.lower() in ("yes", "true", "on")
    plain = node.value.replace("_", "")
    if tag == "int" and re.fullmatch(r"[-+]?(0|[1-9]\d*)", plain):
        if len(plain) > LONGEST_NUMBER:
            raise _complaint(node, path, f"a number of {len(plain)} digits; allowed: at most {LONGEST_NUMBER}")
        return int(plain)
    if tag != "str" or (node.style is None and FLOAT.fullmatch(node.value)):
        try:
            return float(plain.replace(".inf", "inf").replace(".nan", "nan").replace(".Inf", "inf"))
        except ValueError:
            raise _complaint(node, path, f"cannot read the number {node.value!r}") from None
    return node.value


def _complaint(node: Any, path: str, reason: str) -> UsageError:
    return UsageError(f"study {path!r}, line {node.start_mark.line + 1}: {reason}")
