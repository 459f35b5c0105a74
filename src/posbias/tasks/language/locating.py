"""The text of a prompt as a model reads it, and the place of an item in its tokens.

A text is opened by the special tokens the tokenizer puts before one (BOS); a conversation is rendered by the chat
template, which writes its own. The place of an item is read off the tokenizer's character offsets, never guessed.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from posbias.errors import UsageError
from posbias.prompts.control_tokens import PRIVATE, spelled_in, tokenised
from posbias.prompts.prompts import opening
from posbias.prompts.templates import DESCRIPTIONS, Rendered, check_template, render_conversation

Message = Mapping[str, Any]
"""One turn of a conversation: its `role` and its `content`; calls of tools beside it, or in its place. The first one
may describe tools (`prompts.templates.DESCRIPTIONS`)."""
Span = tuple[int, int]
"""Begin and end of a part of a text or a prompt: of its first character or token, and one past its last."""
THOUGHTS = "reasoning_content"
"""Field of an assistant's message that servers and templates take its thoughts from."""


def text_of(prompt: str | Sequence[Message]) -> str:
    """A prompt's text; of a conversation, its last message's."""
    return prompt if isinstance(prompt, str) else str(prompt[-1]["content"])


@dataclass(frozen=True)
class Encoded:
    """A prompt as a model reads it."""

    text: str
    """The text that was tokenised: the prompt itself, or the rendered conversation."""
    token_ids: tuple[int, ...]
    offsets: tuple[tuple[int, int], ...] | None
    """Begin and end of each token in `text`, (0, 0) for the opening special tokens; None: a slow tokenizer."""


def rendered(
    prompt: str | Sequence[Message], tokenizer: Any, *, index: int = 0, own_control: bool = False
) -> tuple[Rendered, tuple[int, ...]]:
    """The text that a model reads, and the special tokens that open it (a template writes its own out).

    A conversation is rendered up to the opening of the assistant's answer, which takes a chat template (UsageError
    without); `index` is its number, for messages. `own_control`: as `Example.own_control`.
    """
    if isinstance(prompt, str):
        return Rendered(prompt, () if own_control else spelled_in(prompt, tokenizer)), tuple(opening(tokenizer))
    check_template(tokenizer)
    return render_conversation(tokenizer, prompt, index=index), ()


def encode(prompt: str | Sequence[Message], tokenizer: Any, *, own_control: bool = False) -> Encoded:
    """The token ids of a prompt, with their places in its text. Arguments and errors as `rendered`."""
    (text, ordinary), before = rendered(prompt, tokenizer, own_control=own_control)
    fast = bool(getattr(tokenizer, "is_fast", False))
    tokens = tokenised(text, tokenizer, ordinary, offsets=fast)
    offsets = ((0, 0),) * len(before) + tuple(tokens.offsets) if fast else None
    return Encoded(text, (*before, *tokens.token_ids), offsets)


def locate(
    prompt: str | Sequence[Message],
    spans: Sequence[Span],
    tokenizer: Any,
    *,
    own_control: bool = False,
    message: int = -1,
) -> tuple[tuple[Span, ...] | None, int | None]:
    """Tokens that hold parts of a prompt's text (of a conversation: of one message's), such as its passages.

    Args:
        prompt: As the model is to read it.
        spans: Begin and end in characters, none empty.
        tokenizer: The model's own; None if it is not to be had.
        own_control: As `Example.own_control`.
        message: Index of the message in a conversation.

    Returns:
        For every span the first token that reaches beyond its begin, and one past the last that begins before its end
        (a token that straddles a border counts as part of it); None without a tokenizer that knows character offsets.
        And the tokens of the prompt; None without a tokenizer.

    Raises:
        UsageError: no chat template, or one that changes the message so that nothing can be found in it.
    """
    if tokenizer is None:
        return None, None
    encoded = encode(prompt, tokenizer, own_control=own_control)
    if encoded.offsets is None:
        return None, len(encoded.token_ids)
    if spans and not isinstance(prompt, str):
        in_text = _of_tool if prompt[message]["role"] == DESCRIPTIONS else _of_message
        spans = in_text(prompt, message, spans, tokenizer, encoded.text)
    low, high = np.array(encoded.offsets).T
    places = []
    for begin, end in spans:
        touching = np.flatnonzero((high > begin) & (low < end))
        places.append((int(touching[0]), int(touching[-1]) + 1))
    return tuple(places), len(encoded.token_ids)


def leaves_thoughts_out(prompt: str | Sequence[Message], tokenizer: Any) -> bool:
    """True if a conversation holds thoughts of earlier answers that the model's chat template does not render."""
    thoughts = [] if isinstance(prompt, str) else [message[THOUGHTS] for message in prompt if THOUGHTS in message]
    if not thoughts or tokenizer is None:
        return False
    text = rendered(prompt, tokenizer)[0].text
    return any(thought.strip() not in text for thought in thoughts)


def _of_message(prompt: Sequence[Message], index: int, spans: Sequence[Span], tokenizer: Any, text: str) -> list[Span]:
    """Spans of a message's content in the rendered text; other messages may say the same, so its words are marked."""
    content = str(prompt[index]["content"])
    bare = content.strip()  # many templates trim a message
    lead = content.find(bare)
    end = lead + len(bare)
    free = next(chr(code) for code in PRIVATE if chr(code) not in text)
    marked = [dict(message) for message in prompt]
    marked[index]["content"] = content[:lead] + free + content[lead:]
    begin = rendered(marked, tokenizer)[0].text.find(free)
    if begin < 0 or text[begin : begin + len(bare)] != bare:
        raise UsageError("the chat template changes the text of the message, so the item cannot be located in it")
    shift = begin - lead
    if shift < 0 or not text.startswith(content, shift):  # trimmed: what stands around it is the template's
        spans = [(max(first, lead), min(last, end)) for first, last in spans]
    return [(first + shift, last + shift) for first, last in spans]


def _of_tool(prompt: Sequence[Message], index: int, spans: Sequence[Span], tokenizer: Any, text: str) -> list[Span]:
    """Descriptions of tools in the rendered text: each from its name to the end of what it says of itself."""
    content = str(prompt[index]["content"])
    free = next(chr(code) for code in PRIVATE if chr(code) not in text + content)
    placed = []
    for first, last in spans:
        tool = json.loads(content[first:last])
        said = tool.get("function", tool)
        ends = "description" if said.get("description") else "name"
        said["name"] = free + said["name"]
        said[ends] += free
        line = json.dumps(tool, ensure_ascii=False)
        marked = [dict(message) for message in prompt]
        marked[index]["content"] = content[:first] + line + content[last:]
        told = rendered(marked, tokenizer)[0].text
        begin, end = told.find(free), told.rfind(free)
        if end <= begin or told.replace(free, "") != text:
            raise UsageError("the chat template changes the descriptions of tools, so one cannot be located in it")
        placed.append((begin, end - told[:end].count(free)))
    return placed
