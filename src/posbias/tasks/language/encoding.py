"""From a prompt to the token ids a model reads, and from characters of the prompt to tokens.

A text is opened by the special tokens the tokenizer puts before one (BOS); a conversation is rendered by the chat
template, which writes its own. The place of an item is read off the tokenizer's character offsets, never guessed.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from posbias.errors import UsageError
from posbias.prompts.chat import check_template, render_conversation
from posbias.prompts.tokens import opening


@dataclass(frozen=True)
class Encoded:
    """A prompt as a model reads it."""

    text: str
    """The text that was tokenised: the prompt itself, or the rendered conversation."""
    token_ids: tuple[int, ...]
    offsets: tuple[tuple[int, int], ...] | None
    """Begin and end of each token in `text`, (0, 0) for the opening special tokens; None: a slow tokenizer."""


def rendered(
    prompt: str | Sequence[Mapping[str, str]], tokenizer: Any, *, index: int = 0
) -> tuple[str, tuple[int, ...]]:
    """The text that a model reads, and the special tokens that open it (a template writes its own out).

    A conversation is rendered up to the opening of the assistant's answer; `index` is its number, for messages.

    Raises:
        UsageError: a conversation for a tokenizer without chat template.
    """
    if isinstance(prompt, str):
        return prompt, tuple(opening(tokenizer))
    check_template(tokenizer)
    return render_conversation(tokenizer, prompt, index=index), ()


def encode(prompt: str | tuple[Mapping[str, str], ...], tokenizer: Any) -> Encoded:
    """The token ids of a prompt, with their places in its text. Errors as `rendered`."""
    text, before = rendered(prompt, tokenizer)
    fast = bool(getattr(tokenizer, "is_fast", False))
    found = tokenizer(
        text, add_special_tokens=False, return_attention_mask=False, return_offsets_mapping=fast, verbose=False
    )
    offsets = ((0, 0),) * len(before) + tuple(found["offset_mapping"]) if fast else None
    return Encoded(text, (*before, *found["input_ids"]), offsets)


def locate(
    prompt: str | tuple[Mapping[str, str], ...], gold: tuple[int, int] | None, tokenizer: Any
) -> tuple[int | None, int | None, int | None]:
    """The tokens of the characters `gold` of a prompt's (last message's) text.

    Args:
        prompt: Text, or messages.
        gold: Begin and end in characters of the text (of the last message); None: only the length is wanted.
        tokenizer: A Hugging Face tokenizer, or None.

    Returns:
        The first token that reaches beyond the begin, one past the last that begins before the end (a token that
        straddles a border counts as part of the item), and the tokens of the prompt; None where that is not known.

    Raises:
        UsageError: no chat template, or one that changes the message so that the item cannot be found in it.
    """
    if tokenizer is None:
        return None, None, None
    encoded = encode(prompt, tokenizer)
    if gold is None or encoded.offsets is None:
        return None, None, len(encoded.token_ids)
    begin, end = gold
    if not isinstance(prompt, str):
        shift = encoded.text.rfind(prompt[-1]["content"])
        if shift < 0:
            raise UsageError("the chat template changes the text of the message, so the item cannot be located in it")
        begin, end = begin + shift, end + shift
    low, high = np.array(encoded.offsets).T
    touching = np.flatnonzero((high > begin) & (low < end))
    return int(touching[0]), int(touching[-1]) + 1, len(encoded.token_ids)
