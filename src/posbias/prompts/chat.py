"""Conversations as prompts: rendered by the tokenizer's own chat template, tokenised, chosen by their exact length.

The model reads the rendered text, so its hash is kept beside the token ids. Prompts of one measurement are equally long
and nothing is padded or cut.
"""

import hashlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from posbias.checks import checked
from posbias.errors import UsageError
from posbias.files import parsed_json, read_lines
from posbias.prompts.prompts import (
    Prompts,
    PromptSource,
    TokenModel,
    check_vocabulary,
    tokenise,
    why_no_tokenizer,
    with_first_words,
)
from posbias.prompts.sources import check_file
from posbias.prompts.templates import Conversation, check_messages, check_template, render_conversation

SHOWN_LENGTHS = 5
CHAT_SCHEME = "chat:"


@dataclass(frozen=True, eq=False, repr=False)
class ChatPrompts(Prompts):
    """Prompts that were rendered from conversations."""

    rendered_sha256: tuple[str, ...] = ()
    """Hash of each rendered prompt's text (UTF-8), before it was tokenised."""
    conversations: tuple[int, ...] = ()
    """Number of the conversation that each prompt is, among those given."""

    def describe(self) -> dict[str, Any]:
        """Plain values for a record, the conversations among them."""
        return {
            **super().describe(),
            "rendered_sha256": list(self.rendered_sha256[: self.count]),
            "conversations": list(self.conversations[: self.count]),
        }


@checked
def chat_prompts(
    model: TokenModel,
    conversations: Sequence[Conversation],
    *,
    n_positions: int | None = None,
    generation_prompt: bool = True,
) -> ChatPrompts:
    """Conversations of one exact length as prompts, in the order given, for a tokenizer with a chat template.

    Args:
        model: Gives `tokenizer`, `vocabulary_size` and `max_positions`.
        conversations: Each a list of messages such as `{"role": "user", "content": "..."}`.
        n_positions: Take those whose rendered text has exactly so many tokens; None: all must have the same number.
        generation_prompt: End with the opening of the assistant's answer, so that the last position predicts it.

    Raises:
        UsageError: no tokenizer or no template, a conversation that the template refuses, none of that length, or one
            of them beyond the model's positions or vocabulary; conversations of other lengths do not matter.
    """
    if not conversations:
        raise UsageError("no conversation given; give at least 1")
    if model.tokenizer is None:
        raise UsageError(f"{why_no_tokenizer(model)}, so it cannot render a conversation; give token ids")
    check_template(model.tokenizer)
    rendered = [
        render_conversation(model.tokenizer, messages, index=index, generation_prompt=generation_prompt)
        for index, messages in enumerate(conversations)
    ]
    encoded = tokenise([chat.text for chat in rendered], model.tokenizer, [chat.spelled for chat in rendered])
    sizes = Counter(sorted(map(len, encoded)))
    lengths = ", ".join(f"{length} tokens ({count})" for length, count in sizes.most_common(SHOWN_LENGTHS))
    more = "" if len(sizes) <= SHOWN_LENGTHS else f" and {len(sizes) - SHOWN_LENGTHS} other lengths"
    if n_positions is None and len(sizes) > 1:
        raise UsageError(f"conversations have different lengths: {lengths}{more}; choose one with n_positions")
    if n_positions is not None and n_positions not in sizes:
        raise UsageError(f"no conversation has {n_positions} tokens; there are {lengths}{more}")
    length = next(iter(sizes)) if n_positions is None else n_positions
    chosen = tuple(index for index, token_ids in enumerate(encoded) if len(token_ids) == length)
    if model.max_positions is not None and length > model.max_positions:
        raise UsageError(f"conversation {chosen[0]} has {length} tokens; the model takes at most {model.max_positions}")
    for index in chosen:
        check_vocabulary(encoded[index], model, f"conversation {index}")
    prompts = ChatPrompts(
        np.stack([encoded[index] for index in chosen]),
        source="chat",
        rendered_sha256=tuple(hashlib.sha256(rendered[index].text.encode()).hexdigest() for index in chosen),
        conversations=chosen,
        control_tokens=tuple(rendered[index].spellings for index in chosen),
    )
    return with_first_words(prompts, model.tokenizer)


def chat_file_prompts(request: PromptSource, model: TokenModel, *, n_positions: int, count: int) -> ChatPrompts:
    """The first `count` conversations of a file whose rendered text has exactly `n_positions` tokens, each text once.

    A line of `chat:FILE.jsonl` is an object whose field `messages` holds the conversation, or the conversation itself;
    empty lines are skipped.

    Raises:
        UsageError: an unreadable file or line, windows or shuffling, no or too few conversations of that length.
    """
    if request.windows != "random" or request.shuffle:
        raise UsageError("chat prompts are whole conversations in order; windows='starts' and shuffle need text")
    path = Path(request.source.removeprefix(CHAT_SCHEME))
    check_file(path)  # all are rendered, since their lengths are not known before
    conversations = []
    for place, line in read_lines(path):
        value = parsed_json(line, place)
        messages = value.get("messages") if isinstance(value, dict) else value
        if not isinstance(messages, list) or not messages:
            raise UsageError(f"{place} needs a list of messages, or a field 'messages' that holds one")
        check_messages(messages, place)
        conversations.append(messages)
    prompts = chat_prompts(model, conversations, n_positions=n_positions)
    rows = np.sort(np.unique(prompts.rendered_sha256, return_index=True)[1]).tolist()  # where each text stands first
    if len(rows) < count:
        raise UsageError(
            f"{path.name}: only {len(rows)} distinct conversations have {n_positions} tokens, {count} were asked for"
        )
    rows = rows[:count]
    return replace(
        prompts,
        token_ids=prompts.token_ids[rows],
        source=f"{CHAT_SCHEME}{path.name}",
        duplicates=rows[-1] + 1 - count,
        rendered_sha256=tuple(prompts.rendered_sha256[row] for row in rows),
        conversations=tuple(prompts.conversations[row] for row in rows),
        control_tokens=tuple(prompts.control_tokens[row] for row in rows),
    )
