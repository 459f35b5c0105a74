"""Answers of servers on disk, so that nothing is asked and paid twice and a killed run continues where it stopped.

One JSON file per answer, named by the hash of the request's body (the model's name is part of it) and the address that
is asked, written atomically. It holds the answer and its token counts: no prompt, no address, no key.
"""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from posbias.directories import write_atomically
from posbias.errors import RunError

ANSWER_FORMAT = 2
"""Goes up when what a file holds changes its meaning."""


class AnswerCache:
    """Answers by key; without a directory they are kept in memory, for as long as the responder lives.

    Args:
        directory: Where they are kept; None: in memory.
        reuse: Whether those that lie there already count; otherwise only what this cache has kept.
    """

    def __init__(self, directory: Path | None, *, reuse: bool = True) -> None:
        self._directory = directory
        self._memory: dict[str, dict[str, Any]] = {}
        self._own: set[str] | None = None if reuse else set()

    def find(self, key: str) -> dict[str, Any] | None:
        """The answer under a key; None where there is none, or a damaged one."""
        if self._directory is None:
            return self._memory.get(key)
        if self._own is not None and key not in self._own:
            return None
        try:
            document = json.loads(self._path(self._directory, key).read_bytes())
        except (OSError, ValueError):
            return None
        if not isinstance(document, dict) or (document.get("format"), document.get("key")) != (ANSWER_FORMAT, key):
            return None
        answer = document.get("answer")
        return answer if isinstance(answer, dict) else None

    def keep(self, key: str, answer: Mapping[str, Any]) -> None:
        """Store an answer, whole or not at all.

        Raises:
            RunError: it cannot be written (a full disk).
        """
        if self._directory is None:
            self._memory[key] = dict(answer)
            return
        document = {"format": ANSWER_FORMAT, "key": key, "answer": dict(answer)}
        path = self._path(self._directory, key)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(path, json.dumps(document, sort_keys=True).encode())
        except OSError as error:
            raise RunError(f"cannot write to {str(self._directory)!r}: {error.strerror or error}") from None
        if self._own is not None:
            self._own.add(key)

    @staticmethod
    def _path(directory: Path, key: str) -> Path:
        return directory / key[:2] / f"{key}.json"


def answer_key(address: str, body: Mapping[str, Any]) -> str:
    """SHA-256 of the address that is asked and the body of a request, which names the model."""
    return hashlib.sha256(json.dumps({"address": address, "body": body}, sort_keys=True).encode()).hexdigest()
