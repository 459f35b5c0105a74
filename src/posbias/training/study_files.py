"""YAML read strictly into plain values: no tags, no repeated keys, every complaint with its line.

PyYAML does the parsing; values are made here, because its own reading keeps the last of two equal keys in silence and
takes 1e-3 for a text (YAML 1.1).
"""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from posbias.errors import UsageError
from posbias.files import read_whole
from posbias.limits import NODES, YAML_BYTES

FLOAT = re.compile(r"[-+]?(\d[\d_]*(\.\d*)?|\.\d+)([eE][-+]?\d+)?")
PLAIN_TAGS = ("null", "bool", "int", "float", "str")
DEEPEST = 20
"""Most levels of nesting; also what ends an alias that contains itself."""
LONGEST_NUMBER = 100
"""Most digits of a whole number."""


def read_yaml(path: str | Path) -> Any:
    """The one document of a file, as dictionaries, lists, numbers, texts, booleans and None.

    Raises:
        UsageError: no such file, not YAML, or anything but plain values in it.
    """
    import yaml

    content = read_whole(path, "study", YAML_BYTES)
    count = _Count(str(path))

    class Loader(yaml.SafeLoader):  # type: ignore[misc]
        def compose_node(self, parent: Any, index: Any) -> Any:
            count.add()
            return super().compose_node(parent, index)

    try:
        node = yaml.compose(content, Loader=Loader)
    except UsageError:
        raise
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise UsageError(f"study {str(path)!r} is not YAML: {reason}") from None
    if node is None:
        raise UsageError(f"study {str(path)!r} is empty")
    return _value(node, str(path), DEEPEST, _Count(str(path)))


@dataclass
class _Count:
    """Nodes seen so far, each time an alias stands for them."""

    path: str
    nodes: int = 0

    def add(self) -> None:
        self.nodes += 1
        if self.nodes > NODES.most:
            raise NODES.exceeded(f"study {self.path!r} is too large once its aliases are written out")


def _value(node: Any, path: str, depth: int, count: _Count) -> Any:
    count.add()
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
            found[str(key)] = _value(value_node, path, depth - 1, count)
        return found
    if node.id == "sequence":
        return [_value(item, path, depth - 1, count) for item in node.value]
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
