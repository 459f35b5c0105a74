"""Files that commands read, valid, and what makes them invalid: for `cli/test_fuzz.py`."""

import gzip
import json
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import safe_open
from safetensors.numpy import save

HUGE = 10**12
VALUES: tuple[Any, ...] = (
    *(None, True, 0, -1, 1.5, float("nan"), float("inf"), HUGE, 10**9, 2**63, 10**400, "", "x", "\ud800", "nan"),
    *([], [[]], {}, {"a": 1}, [None], "x" * 3000),
)
"""What stands in place of a value in a file."""

STUDY: dict[str, Any] = {
    "task": {"name": "position_copy", "target": 0, "context": 6, "vocabulary": 5},
    "model": {"depth": 1, "width": 8, "residual": "none", "mask": "causal", "mixing": 1.0},
    "optimiser": {"name": "adam", "learning_rate": 0.01},
    "train": {"steps": 4, "batch": 8, "window": 2, "evaluate_every": 2, "examples": 4, "stopping": "below(loss=0.1)"},
    "grid": {"task.target": [0, 5]},
    "seeds": 1,
}
PAIRS = {"question": "who", "response_A": "Ada", "response_B": "Bob", "label": "A>B"}
DOCUMENTS = {
    "question": "who",
    "answers": ["Ada"],
    "ctxs": [{"title": "A", "text": "Ada did.", "isgold": True}, {"title": "B", "text": "Bob.", "isgold": False}],
}
TEMPLATE = "{% for m in messages %}{{ m['role'] }}:{{ m['content'] }}{% endfor %}"
PROSE = "It was a bright cold day in April, and the clocks were striking thirteen. Winston walked home; it rained. "


def json_lines(*values: Any) -> bytes:
    return b"".join(json.dumps(value).encode() + b"\n" for value in values)


FILES: dict[str, Callable[[], bytes]] = {
    "text": lambda: (PROSE * 40).encode(),
    "records": lambda: json_lines({"text": PROSE, "id": 1}, {"text": PROSE.upper(), "id": 2}),
    "token_ids": lambda: json_lines({"token_ids": list(range(40))}, {"token_ids": list(range(50, 90))}),
    "pairs": lambda: gzip.compress(json_lines(PAIRS, PAIRS)),
    "documents": lambda: json_lines(DOCUMENTS, DOCUMENTS),
    "scores": lambda: json_lines({"score": 0.5}, 0.25, {"score": 1}),
    "study": lambda: json.dumps(STUDY).encode(),
}
SUFFIXES = {
    **dict.fromkeys(("records", "token_ids", "documents", "scores"), ".jsonl"),
    "text": ".txt",
    "pairs": ".jsonl.gz",
    "study": ".yaml",
}


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


def value_changed(kind: str, path: Path, source: random.Random) -> bytes:
    """A valid file of its kind, with one value of another sort."""
    content = path.read_bytes()
    if kind == "text":
        return bytes_changed(path, source)
    packed = kind == "pairs"
    lines = (gzip.decompress(content) if packed else content).splitlines()
    place = source.randrange(len(lines))
    lines[place] = json.dumps(node_changed(json.loads(lines[place]), source)).encode()
    text = b"\n".join(lines) + b"\n"
    return gzip.compress(text) if packed else text


def node_changed(value: Any, source: random.Random, values: tuple[Any, ...] = VALUES) -> Any:
    """A nested value with one node replaced, by one of some values or a deep list, removed or wrapped."""
    if not isinstance(value, dict | list) or not value or source.random() < 0.15:
        return source.choice([source.choice(values), [value], {"a": value}, deep()])
    keys = list(value) if isinstance(value, dict) else list(range(len(value)))
    key = source.choice(keys)
    changed = dict(value) if isinstance(value, dict) else list(value)
    if source.random() < 0.15:
        del changed[key]
    else:
        changed[key] = node_changed(value[key], source, values)
    return changed


def deep() -> Any:
    """A list in a list, 200 times: JSON reads it, recursive programs may not."""
    value: Any = 1
    for _ in range(200):
        value = [value]
    return value


def record_changed(path: Path, source: random.Random) -> bytes:
    """A run's file with another value in its record, an array less, or one of another shape or sort."""
    with safe_open(path, framework="numpy") as opened:
        document = json.loads(opened.metadata()["record"])
        metadata = dict(opened.metadata())
        arrays = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
    if source.random() < 0.5:
        metadata.pop("sha256", None)  # which is refused as well
    if source.random() < 0.6 or not arrays:
        document = node_changed(document, source)
    else:
        name = source.choice(list(arrays))
        array = arrays.pop(name)
        flat, strange = array.reshape(-1), np.array([float("nan")])
        odd = (flat, flat[:1], strange, array.astype(complex).real[..., None], array > 0, -array.astype(float) - 1)
        if source.random() < 0.8:
            arrays[name] = np.ascontiguousarray(source.choice(odd))
    metadata["record"] = json.dumps(document)
    return save(arrays, metadata=metadata)


NO_FILES: tuple[Callable[[Path], object], ...] = (
    lambda path: os.mkfifo(path),
    lambda path: path.symlink_to("/dev/zero"),
    lambda path: path.symlink_to(path),
    lambda path: path.mkdir(),
    lambda path: path.write_bytes(b""),
    lambda path: path.write_bytes(gzip.compress(b"\n" * 10**8)),
    lambda path: path.write_bytes(gzip.compress(b" " * 10**8)),
    lambda path: path.write_bytes(b'{"text": "' + b"a" * 10**8),
    lambda path: os.truncate(os.open(path, os.O_CREAT | os.O_RDWR), 3 * 10**9),
    lambda path: path.write_text(
        "a0: &a0 1\n" + "".join(f"a{n}: &a{n} [*a{n - 1}, *a{n - 1}]\n" for n in range(1, 40))
    ),
)
"""What stands where a file is expected."""
