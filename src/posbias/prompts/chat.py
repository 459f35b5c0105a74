"""Conversations as prompts: rendered by the tokenizer's own chat template, tokenised, grouped by their exact length.

What the model reads is the rendered text, so its hash is kept beside the token ids. Prompts of one measurement are
equally long and nothing is padded or cut, so conversations are chosen by length.
"""

import hashlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from posbias.checks import checked
from posbias.errors import UsageError
from posbias.files import check_text
from posbias.limits import READ_BYTES
from posbias.prompts.prompts import Prompts
from posbias.prompts.template_bounds import bounded
from posbias.prompts.tokens import TokenModel, check_vocabulary, tokenise

Conversation = Sequence[Mapping[str, Any]]
"""Messages in order, each with a `role` (text) and a `content` (text, or a list of parts)."""
SHOWN_LENGTHS = 5


@dataclass(frozen=True, eq=False)
class ChatPrompts(Prompts):
    """Prompts that were rendered from conversations."""

    rendered_sha256: tuple[str, ...] = ()
    """Hash of each rendered prompt's text (UTF-8), before it was tokenised."""
    conversations: tuple[int, ...] = ()
    """Which of the given conversations each prompt is."""

    def describe(self) -> dict[str, Any]:
        """Plain values for a record."""
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
    """Conversations of one exact length as prompts, in the order given.

    Args:
        model: Its tokenizer must have a chat template.
        conversations: Each a list of messages such as `{"role": "user", "content": "..."}`.
        n_positions: Take those whose rendered text has exactly so many tokens; None: all must have the same number.
        generation_prompt: End with the opening of the assistant's answer, so that the last position predicts it.

    Raises:
        UsageError: no tokenizer or no template, a conversation that the template refuses, none of that length, or one
            of them beyond the model's positions or vocabulary; conversations of other lengths do not matter.
    """
    groups = _by_length(model, conversations, generation_prompt=generation_prompt)
    sizes = Counter({length: group.count for length, group in groups.items()})
    told = ", ".join(f"{length} tokens ({count})" for length, count in sizes.most_common(SHOWN_LENGTHS))
    more = "" if len(sizes) <= SHOWN_LENGTHS else f" and {len(sizes) - SHOWN_LENGTHS} other lengths"
    if n_positions is None and len(groups) > 1:
        raise UsageError(f"conversations have different lengths: {told}{more}; choose one with n_positions")
    if n_positions is not None and n_positions not in groups:
        raise UsageError(f"no conversation has {n_positions} tokens; there are {told}{more}")
    return _checked(groups[next(iter(groups)) if n_positions is None else n_positions], model)


def chat_groups(
    model: TokenModel, conversations: Sequence[Conversation], *, generation_prompt: bool = True
) -> dict[int, ChatPrompts]:
    """All conversations, grouped by the tokens of their rendered text, shortest first.

    Raises:
        UsageError: as `chat_prompts`, for any length.
    """
    groups = _by_length(model, conversations, generation_prompt=generation_prompt)
    return {length: _checked(group, model) for length, group in groups.items()}


def _checked(group: ChatPrompts, model: TokenModel) -> ChatPrompts:
    """Conversations of one length that the model can read."""
    if model.max_positions is not None and group.n_positions > model.max_positions:
        raise UsageError(
            f"conversation {group.conversations[0]} has {group.n_positions} tokens; "
            f"the model takes at most {model.max_positions}"
        )
    for index, token_ids in zip(group.conversations, group.token_ids, strict=True):
        check_vocabulary(token_ids, model, f"conversation {index}")
    return group


def _by_length(
    model: TokenModel, conversations: Sequence[Conversation], *, generation_prompt: bool
) -> dict[int, ChatPrompts]:
    """All conversations by the tokens of their rendered text, shortest first; those the model cannot read too."""
    if not conversations:
        raise UsageError("no conversation given; give at least 1")
    tokenizer = model.tokenizer
    check_template(tokenizer)
    rendered = [
        render_conversation(tokenizer, messages, index=index, generation_prompt=generation_prompt)
        for index, messages in enumerate(conversations)
    ]
    encoded = tokenise(rendered, tokenizer)
    members: dict[int, list[int]] = {}
    for index, token_ids in enumerate(encoded):
        members.setdefault(len(token_ids), []).append(index)
    return {
        length: ChatPrompts(
            np.stack([encoded[index] for index in indices]),
            source="chat",
            rendered_sha256=tuple(hashlib.sha256(rendered[index].encode()).hexdigest() for index in indices),
            conversations=tuple(indices),
        )
        for length, indices in sorted(members.items())
    }


def check_template(tokenizer: Any) -> None:
    """Refuse a tokenizer that cannot render conversations.

    Raises:
        UsageError: there is no tokenizer, or it has no chat template.
    """
    if tokenizer is None:
        raise UsageError("the model has no tokenizer, so it cannot render a conversation; give token ids")
    if not getattr(tokenizer, "chat_template", None):
        raise UsageError(
            "the model's tokenizer has no chat template (a base model?); write the prompts as text, or set "
            "tokenizer.chat_template"
        )


def check_messages(messages: Sequence[object], place: str) -> None:
    """Refuse what a template would write out as words that nobody said, such as None.

    Args:
        messages: Of one conversation.
        place: Where it stands, for the message of the error.

    Raises:
        UsageError: a message without role and content, a role that is no text, a content that is neither text nor a
            list of parts.
    """
    for message in messages:
        if not isinstance(message, Mapping) or not {"role", "content"} <= set(message):
            raise UsageError(f"{place}: a message needs role and content, got {message!r}")
        role, content = message["role"], message["content"]
        if not isinstance(role, str):
            raise UsageError(f"{place}: the role of a message must be text such as 'user', got {role!r}")
        parts = content if isinstance(content, list | tuple) else ()
        if not isinstance(content, str) and not (parts and all(isinstance(part, Mapping) for part in parts)):
            raise UsageError(f"{place}: the content of a message must be text or a list of parts, got {content!r}")


def render_conversation(
    tokenizer: Any, messages: Conversation, *, index: int = 0, generation_prompt: bool = True
) -> str:
    """One conversation as the text that the model reads, special tokens included.

    Args:
        tokenizer: A Hugging Face tokenizer with a chat template.
        messages: Each with a `role` and a `content`, as `check_messages` wants them.
        index: Number of the conversation, for messages of errors.
        generation_prompt: End with the opening of the assistant's answer.

    Raises:
        UsageError: no messages, one without a proper role and content, or the template refuses them.
    """
    if isinstance(messages, str | Mapping) or not messages:
        raise UsageError(f"conversation {index} must be a list of messages with role and content, got {messages!r}")
    check_messages(messages, f"conversation {index}")
    try:
        with bounded(f"conversation {index}"):
            text = tokenizer.apply_chat_template(
                [dict(message) for message in messages], tokenize=False, add_generation_prompt=generation_prompt
            )
    except UsageError:
        raise
    except Exception as error:  # whatever a model's own template may raise, such as roles it does not know
        raise UsageError(
            f"conversation {index}: the chat template refuses it ({' '.join(str(error).split())})"
        ) from None
    if not text:
        raise UsageError(f"conversation {index} renders to an empty text")
    READ_BYTES.check(f"conversation {index}, rendered by the chat template,", len(text))
    check_text(str(text), f"conversation {index}")
    return str(text)
