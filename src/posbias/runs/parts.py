"""Finished pieces of an unfinished run, one file each, so that a killed run continues where it stopped.

A piece (one prompt of one model) is computed once, written atomically under `parts/`, and found again by `--resume`
only if it was made under the same settings: every file carries the fingerprint of model, prompts, kinds and seeds.
The parts are removed once the record is saved.
"""

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import is_dataclass
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np

from posbias.files import TEMPORARY
from posbias.progress import announce
from posbias.results.records import Record, describe_environment, plain, read_arrays, record_in, write_arrays

PARTS = "parts"
PARTS_FORMAT = 2
"""Goes up when what a piece holds changes its meaning."""


class PartStore:
    """Named groups of arrays on disk; without a directory they are only computed, never kept."""

    def __init__(self, directory: Path | None, settings: Mapping[str, Any]) -> None:
        """`settings`: everything the pieces depend on. Older pieces are there only in a run that is resumed."""
        self.fingerprint = fingerprint(settings)
        self._directory = None if directory is None else Path(directory) / PARTS
        self.reused = 0
        """How many pieces were found finished."""
        self.others = 0
        """How many pieces of the names asked for were made under other settings, and are made again."""

    def get(self, name: str, compute: Callable[[], dict[str, np.ndarray]]) -> dict[str, np.ndarray]:
        """The finished piece of that name, or the result of `compute`, kept from now on."""
        finished = self.find(name)
        return self.keep(name, compute()) if finished is None else finished

    def find(self, name: str) -> dict[str, np.ndarray] | None:
        """The finished piece of that name under the same settings; None if there is none, or only a damaged one."""
        path = None if self._directory is None else self._directory / f"{name}.safetensors"
        if path is None or not path.is_file():
            return None
        with suppress(KeyError, ValueError):  # not ours or damaged: computed again, and replaced
            metadata, arrays = read_arrays(path)
            if metadata["fingerprint"] == self.fingerprint:
                found = {key: arrays[key] for key in json.loads(metadata["order"])}
                self.reused += 1
                return found
            self.others += 1
        return None

    def keep(self, name: str, arrays: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Write a piece, whole or not at all, and hand its arrays back."""
        whole = {key: np.ascontiguousarray(array) for key, array in arrays.items()}
        if self._directory is not None:
            # The file sorts its arrays; theories are compared in their own order, resumed or not.
            metadata = {"fingerprint": self.fingerprint, "order": json.dumps(list(arrays))}
            write_arrays(self._directory / f"{name}.safetensors", whole, metadata)
        return whole

    def report(self, count: int) -> None:
        """Say how many of `count` pieces were found, and how many there are that belong to something else."""
        if self.reused:
            announce(f"{self.reused} of {count} pieces were finished before and are taken over")
        if self.others:
            announce(
                f"{self.others} of {count} pieces were made with other settings, weights or another version of posbias"
                " and are made again"
            )


def clear_parts(directory: str | Path) -> None:
    """Remove the pieces kept in a run directory, and what a kill left half-written; a user's own files stay."""
    parts = Path(directory) / PARTS
    for path in (*filter(is_piece, parts.glob("*.safetensors")), *parts.glob(f".*.{TEMPORARY}")):
        path.unlink(missing_ok=True)
    with suppress(OSError):  # other files are there, or no pieces ever were
        parts.rmdir()


def is_piece(path: Path) -> bool:
    """True if a file carries a fingerprint: other files are the user's, or damaged."""
    with suppress(ValueError):
        return "fingerprint" in read_arrays(path)[0]
    return False


def finished_run(
    directory: str | Path | None, settings: Callable[[], Mapping[str, Any]], *, resume: bool
) -> Record | None:
    """The record of a finished run that a directory holds, if `resume` asks for it and the settings are the same.

    The settings are everything the record depends on, asked for only if there is a finished record, which keeps
    their fingerprint as `resolved["fingerprint"]`.
    """
    record = record_in(directory, done=True) if resume and directory is not None else None
    stored = None if record is None else record.resolved.get("fingerprint")
    if stored is not None and stored == fingerprint(settings()):
        return record
    if record is not None:
        announce(
            f"the finished run in {str(directory)!r} has other settings or was made by other code, and is replaced"
        )
    return None


def made_by(packages: Sequence[str] = ("posbias",)) -> dict[str, Any]:
    """The code that computes a piece, as far as its numbers may depend on it, for the settings of every store.

    The code is told by a hash of the source files of these packages, by dotted name, not by a commit: one that touches
    none of them does not throw hours of work away, and a change that is not committed is not overlooked.
    """
    environment = describe_environment()
    versions = {name: environment[name] for name in ("posbias", "packages")}
    return {"parts_format": PARTS_FORMAT, **versions, "sources": _digest(tuple(packages))}


@cache
def _digest(packages: tuple[str, ...]) -> str:
    """SHA-256 over names and contents of all Python files; read once in a process, which runs what it has read."""
    digest = hashlib.sha256()
    for package in packages:
        root = Path(str(resources.files(package)))
        for path in sorted(root.rglob("*.py")):
            content = path.read_bytes()
            digest.update(f"{package}/{path.relative_to(root).as_posix()}:{len(content)}\n".encode() + content)
    return digest.hexdigest()


DOCUMENT, PLACE = "document", "array"
"""In a packed piece the name of its JSON text, and there the key of an array's name."""


def packed(tree: Any) -> dict[str, np.ndarray]:
    """Dataclasses, mappings, lists, arrays and plain values as a piece: arrays by their place, all else as JSON."""
    arrays: dict[str, np.ndarray] = {}

    def told(value: Any, place: str) -> Any:
        if isinstance(value, np.ndarray):
            arrays[place] = value
            return {PLACE: place}
        if is_dataclass(value):
            value = vars(value)
        if isinstance(value, Mapping):
            return {name: told(entry, f"{place}/{name}") for name, entry in value.items()}
        if isinstance(value, list | tuple):
            return [told(entry, f"{place}/{index}") for index, entry in enumerate(value)]
        return value.item() if isinstance(value, np.generic) else value

    text = json.dumps(told(tree, ""))
    return {**arrays, DOCUMENT: np.frombuffer(text.encode(), dtype=np.uint8)}


def unpacked(arrays: Mapping[str, np.ndarray]) -> Any:
    """What was packed, dataclasses as dictionaries and tuples as lists."""

    def put(found: dict[str, Any]) -> Any:
        return arrays[found[PLACE]] if found.keys() == {PLACE} else found

    return json.loads(arrays[DOCUMENT].tobytes(), object_hook=put)


def flat(parts: Any, stem: str = "") -> dict[str, np.ndarray]:
    """The arrays within dataclasses and mappings, by slash-separated name."""
    if isinstance(parts, np.ndarray):
        return {stem: parts}
    entries = vars(parts) if is_dataclass(parts) else parts if isinstance(parts, Mapping) else {}
    found = [flat(part, f"{stem}/{name}" if stem else str(name)) for name, part in entries.items()]
    return {name: array for arrays in found for name, array in arrays.items()}


def nested(arrays: Mapping[str, np.ndarray]) -> dict[str, Any]:
    """Arrays as mappings within mappings, by the parts of their names."""
    tree: dict[str, Any] = {}
    for name, array in arrays.items():
        *stems, last = name.split("/")
        level = tree
        for stem in stems:
            level = level.setdefault(stem, {})
        level[last] = array
    return tree


def below(arrays: Mapping[str, np.ndarray], stem: str) -> dict[str, np.ndarray]:
    """The arrays whose names begin with the stem, by the rest of their names."""
    return {name.removeprefix(stem): values for name, values in arrays.items() if name.startswith(stem)}


def fingerprint(settings: Mapping[str, Any]) -> str:
    """A hash that changes whenever anything a result depends on changes."""
    text = json.dumps(plain(settings), sort_keys=True, allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()
