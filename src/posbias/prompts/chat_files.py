"""Conversations from a JSON Lines file as prompts: `chat:FILE.jsonl`.

A line is an object whose field `messages` holds the conversation, or the conversation itself; empty lines are skipped.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from posbias.errors import UsageError
from posbias.files import parsed_json, read_lines
from posbias.limits import READ_BYTES
from posbias.prompts.chat import ChatPrompts, chat_prompts, check_messages
from posbias.prompts.request import PromptSource
from posbias.prompts.sources import file_size
from posbias.prompts.tokens import TokenModel

CHAT_SCHEME = "chat:"


def chat_file_prompts(asked: PromptSource, model: TokenModel, *, n_positions: int, count: int) -> ChatPrompts:
    """The first `count` conversations of a file whose rendered text has exactly `n_positions` tokens, each text once.

    Raises:
        UsageError: an unreadable file or line, windows or shuffling, no or too few conversations of that length.
    """
    if asked.windows != "random" or asked.shuffle:
        raise UsageError("chat prompts are whole conversations in order; windows='starts' and shuffle need text")
    path = Path(asked.source.removeprefix(CHAT_SCHEME))
    found = chat_prompts(model, read_conversations(path), n_positions=n_positions)
    rows = _distinct(found.rendered_sha256)
    if len(rows) < count:
        raise UsageError(
            f"{path.name}: only {len(rows)} distinct conversations have {n_positions} tokens, {count} asked"
        )
    rows = rows[:count]
    return replace(
        found,
        token_ids=found.token_ids[rows],
        source=f"{CHAT_SCHEME}{path.name}",
        duplicates=rows[-1] + 1 - count,
        rendered_sha256=tuple(found.rendered_sha256[row] for row in rows),
        conversations=tuple(found.conversations[row] for row in rows),
    )


def _distinct(texts: Sequence[str]) -> list[int]:
    """Where each text stands first."""
    first: dict[str, int] = {}
    for row, text in enumerate(texts):
        first.setdefault(text, row)
    return list(first.values())


def read_conversations(path: Path) -> list[Any]:
    """The conversations of a file, in order.

    Raises:
        UsageError: an unreadable file, or a line without a conversation (its number is named).
    """
    if file_size(path) > READ_BYTES.most:  # all are rendered, since their lengths are not known before
        raise READ_BYTES.exceeded(f"conversations {str(path)!r} are too long")
    return [_conversation(line, place) for place, line in read_lines(path)]


def _conversation(line: bytes, place: str) -> Any:
    value = parsed_json(line, place)
    messages = value.get("messages") if isinstance(value, dict) else value
    if not isinstance(messages, list) or not messages:
        raise UsageError(f"{place} needs a list of messages, or a field 'messages' that holds one")
    check_messages(messages, place)
    return messages
