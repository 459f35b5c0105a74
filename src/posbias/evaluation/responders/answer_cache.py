"""Answers of servers on disk, so that nothing is asked and paid twice and a killed run continues where it stopped.

One JSON file per answer, named by the hash of the request's body (the model's name is part of it) and the address that
is asked, written atomically. It holds the answer and its token counts: no address, no key.
"""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Generic, Literal

from pydantic import BaseModel, ValidationError

from posbias.directories import write_atomically
from posbias.errors import RunError
from posbias.evaluation.responders.server_answers import Hide, Kind, ServerAnswer

ANSWER_FORMAT: Literal[2] = 2
"""Goes up when what a file holds changes its meaning."""


class _Kept(BaseModel, Generic[Kind]):
    """What a file says."""

    format: Literal[2]
    key: str
    answer: Kind


class AnswerCache:
    """Answers by key; without a directory they are kept in memory, for as long as the responder lives.

    Args:
        directory: Where they are kept; None: in memory.
        reuse: Whether those that lie there already count; otherwise only what this cache has kept.
        hide: Takes the key out of what lies there.
    """

    def __init__(self, directory: Path | None, *, reuse: bool, hide: Hide) -> None:
        self._directory = directory
        self._hide = hide
        self._memory: dict[str, ServerAnswer] = {}
        self._own: set[str] | None = None if reuse else set()

    def find(self, key: str, kind: type[Kind]) -> Kind | None:
        """The answer under a key; None where there is none, or a damaged one."""
        if self._directory is None:
            known = self._memory.get(key)
            return known if isinstance(known, kind) else None
        if self._own is not None and key not in self._own:
            return None
        try:
            stored = self._path(self._directory, key).read_bytes()
            kept = _Kept[kind].model_validate_json(stored, by_alias=False, by_name=True, context=self._hide)  # type: ignore[valid-type]
        except (OSError, ValidationError):
            return None
        return kept.answer if kept.key == key else None

    def keep(self, key: str, answer: ServerAnswer) -> None:
        """Store an answer, whole or not at all.

        Raises:
            RunError: it cannot be written (a full disk).
        """
        if self._directory is None:
            self._memory[key] = answer
            return
        document = _Kept(format=ANSWER_FORMAT, key=key, answer=answer).model_dump(serialize_as_any=True)
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
