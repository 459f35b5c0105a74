"""Finished pieces of an unfinished audit, one file each, so that a killed run continues where it stopped.

A piece (one prompt of one subject) is computed once, written atomically under `parts/`, and found again by
`--resume` only if it was made under the same settings: every file carries the fingerprint of model, prompts, kinds
and seeds. The parts are removed once the record is saved.
"""

import hashlib
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from posbias.errors import RunError
from posbias.records import plain, write_atomically

PARTS = "parts"


class PartStore:
    """Named groups of arrays on disk; without a directory they are only computed, never kept."""

    def __init__(self, directory: Path | None, settings: Mapping[str, Any], *, resume: bool) -> None:
        """`settings`: everything the pieces depend on. Without `resume`, older pieces are removed."""
        self.fingerprint = fingerprint(settings)
        self._directory = None if directory is None else directory / PARTS
        self.reused = 0
        """How many pieces were found finished."""
        if self._directory is not None and not resume:
            self.clear()

    def get(self, name: str, compute: Callable[[], dict[str, np.ndarray]]) -> dict[str, np.ndarray]:
        """The finished piece of that name, or the result of `compute`, kept from now on.

        Raises:
            RunError: the piece cannot be written (a full disk).
        """
        if self._directory is None:
            return compute()
        path = self._directory / f"{name}.safetensors"
        finished = self._read(path)
        if finished is not None:
            self.reused += 1
            return finished
        arrays = {key: np.ascontiguousarray(array) for key, array in compute().items()}
        self._write(path, arrays)
        return arrays

    def clear(self) -> None:
        """Remove all pieces."""
        if self._directory is None or not self._directory.is_dir():
            return
        for path in [*self._directory.glob("*.safetensors"), *self._directory.glob(".*.tmp")]:
            path.unlink()
        self._directory.rmdir()

    def _read(self, path: Path) -> dict[str, np.ndarray] | None:
        from safetensors import SafetensorError, safe_open

        if not path.is_file():
            return None
        try:
            with safe_open(path, framework="numpy") as file:
                metadata = file.metadata() or {}
                if metadata.get("fingerprint") != self.fingerprint:
                    return None
                return {key: file.get_tensor(key) for key in json.loads(metadata["order"])}
        except (SafetensorError, KeyError, json.JSONDecodeError):
            return None  # Not ours or damaged: computed again, and replaced.

    def _write(self, path: Path, arrays: dict[str, np.ndarray]) -> None:
        from safetensors.numpy import save

        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            # The file sorts its arrays; theories are compared in their own order, resumed or not.
            metadata = {"fingerprint": self.fingerprint, "order": json.dumps(list(arrays))}
            write_atomically(path, save(arrays, metadata=metadata))
        except OSError as error:
            raise RunError(f"cannot write to {str(path.parent)!r}: {error.strerror or error}") from None


def fingerprint(settings: Mapping[str, Any]) -> str:
    """A hash that changes whenever anything a result depends on changes."""
    text = json.dumps(plain(settings), sort_keys=True, allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()
