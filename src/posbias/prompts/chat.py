"""Conversations as prompts: rendered by the tokenizer's own chat template, tokenised, chosen by their exact length.

What the model reads is the rendered text, so its hash is kept beside the token ids. Prompts of one measurement are
equally long and nothing is padded or cut. A template is a program that came with a model, so what it may take is
bounded: time in the main thread only, where Python lets a signal interrupt it; memory wherever the system tells how
much this process has mapped (Linux). Both hold for the whole process while a template runs.
"""

import hashlib
import resource
import signal
import sys
import threading
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from posbias.chat_templates import check_template, template_options_of
from posbias.checks import checked
from posbias.errors import UsageError
from posbias.files import check_text, parsed_json, read_lines
from posbias.limits import READ_BYTES, TEMPLATE_BYTES, TEMPLATE_SECONDS
from posbias.prompts.control_tokens import Marks, Span, control_pattern, special_pattern
from posbias.prompts.prompts import Prompts, PromptSource, TokenModel, check_vocabulary, tokenise, why_no_tokenizer
from posbias.prompts.sources import file_size

Conversation = Sequence[Mapping[str, Any]]
"""Messages in order, each with a `role` (text) and a `content` (text, or a list of parts)."""
SHOWN_LENGTHS = 5
CHAT_SCHEME = "chat:"
_ONE_TEMPLATE = threading.Lock()


@dataclass(frozen=True, eq=False)
class ChatPrompts(Prompts):
    """Prompts that were rendered from conversations."""

    rendered_sha256: tuple[str, ...] = ()
    """Hash of each rendered prompt's text (UTF-8), before it was tokenised."""
    conversations: tuple[int, ...] = ()
    """Which of the given conversations each prompt is."""

    def describe(self) -> dict[str, Any]:
        """With what the prompts were rendered from."""
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
    encoded = tokenise([each.text for each in rendered], model.tokenizer, [each.spelled for each in rendered])
    sizes = Counter(sorted(map(len, encoded)))
    shown = ", ".join(f"{length} tokens ({count})" for length, count in sizes.most_common(SHOWN_LENGTHS))
    more = "" if len(sizes) <= SHOWN_LENGTHS else f" and {len(sizes) - SHOWN_LENGTHS} other lengths"
    if n_positions is None and len(sizes) > 1:
        raise UsageError(f"conversations have different lengths: {shown}{more}; choose one with n_positions")
    if n_positions is not None and n_positions not in sizes:
        raise UsageError(f"no conversation has {n_positions} tokens; there are {shown}{more}")
    length = next(iter(sizes)) if n_positions is None else n_positions
    chosen = tuple(index for index, token_ids in enumerate(encoded) if len(token_ids) == length)
    if model.max_positions is not None and length > model.max_positions:
        raise UsageError(f"conversation {chosen[0]} has {length} tokens; the model takes at most {model.max_positions}")
    for index in chosen:
        check_vocabulary(encoded[index], model, f"conversation {index}")
    return ChatPrompts(
        np.stack([encoded[index] for index in chosen]),
        source="chat",
        rendered_sha256=tuple(hashlib.sha256(rendered[index].text.encode()).hexdigest() for index in chosen),
        conversations=chosen,
        control_tokens=tuple(rendered[index].spellings for index in chosen),
    )


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
    if file_size(path) > READ_BYTES.most:  # all are rendered, since their lengths are not known before
        raise READ_BYTES.exceeded(f"conversations {str(path)!r} are too long")
    conversations = []
    for place, line in read_lines(path):
        value = parsed_json(line, place)
        messages = value.get("messages") if isinstance(value, dict) else value
        if not isinstance(messages, list) or not messages:
            raise UsageError(f"{place} needs a list of messages, or a field 'messages' that holds one")
        check_messages(messages, place)
        conversations.append(messages)
    found = chat_prompts(model, conversations, n_positions=n_positions)
    rows = np.sort(np.unique(found.rendered_sha256, return_index=True)[1]).tolist()  # where each text stands first
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
        control_tokens=tuple(found.control_tokens[row] for row in rows),
    )


def check_messages(messages: Sequence[object], place: str) -> None:
    """Refuse what a template would write out as words that nobody said, such as None; `place` says where it stands.

    A message has a role (text) and a content (text, or a list of parts).
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


class Rendered(NamedTuple):
    """A conversation as the text that a model reads, special tokens included."""

    text: str
    spelled: tuple[Span, ...]
    """Where messages spelled control tokens, which stay ordinary text; all others are the template's."""

    @property
    def spellings(self) -> tuple[str, ...]:
        """What stands there."""
        return tuple(self.text[begin:end] for begin, end in self.spelled)


def render_conversation(
    tokenizer: Any, messages: Conversation, *, index: int = 0, generation_prompt: bool = True
) -> Rendered:
    """One conversation (its number is for messages), rendered by the tokenizer's chat template.

    Raises:
        UsageError: no messages, one without a proper role and content, or the template refuses them.
    """
    name = f"conversation {index}"
    if isinstance(messages, str | Mapping) or not messages:
        raise UsageError(f"{name} must be a list of messages with role and content, got {messages!r}")
    check_messages(messages, name)
    plain = [dict(message) for message in messages]
    text = _rendered(tokenizer, plain, name, generation_prompt=generation_prompt)
    for pattern_of in (control_pattern, special_pattern):
        marks = Marks(plain, pattern_of(tokenizer))
        if not marks.needed:
            return Rendered(text, ())
        marked = _rendered(tokenizer, marks.marked(plain), name, generation_prompt=generation_prompt)
        unmarked, spelled = marks.unmarked(marked)
        if unmarked == text:
            return Rendered(text, spelled)
        # The template itself looks for what was marked, such as the thoughts of an earlier answer, and renders it so.
    raise UsageError(
        f"{name} spells special tokens that the chat template reads in messages; allowed: messages without them"
    )


def _rendered(tokenizer: Any, messages: list[dict[str, Any]], name: str, *, generation_prompt: bool) -> str:
    """The text that a tokenizer's chat template makes of checked messages, within bounds of time and memory."""
    try:
        with (
            _bounded_time(TEMPLATE_SECONDS.exceeded(f"{name}: the chat template does not end")),
            _bounded_memory(TEMPLATE_BYTES.most),
        ):
            text = tokenizer.apply_chat_template(
                messages,
                tokenize=False,
                add_generation_prompt=generation_prompt,
                **template_options_of(tokenizer),
            )
    except UsageError:
        raise
    except MemoryError:
        raise TEMPLATE_BYTES.exceeded(f"{name}: the chat template takes too much memory") from None
    except Exception as error:  # whatever a model's own template may raise, such as roles it does not know
        raise UsageError(f"{name}: the chat template refuses it ({' '.join(str(error).split())})") from None
    if not text:
        raise UsageError(f"{name} renders to an empty text")
    READ_BYTES.check(f"{name}, rendered by the chat template,", len(text))
    check_text(str(text), name)
    return str(text)


@contextmanager
def _bounded_time(refusal: UsageError) -> Iterator[None]:
    """Processor time, so that a busy machine ends nothing; raised from the signal's handler."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def end(*_: Any) -> None:
        raise refusal

    before = signal.signal(signal.SIGVTALRM, end)
    signal.setitimer(signal.ITIMER_VIRTUAL, TEMPLATE_SECONDS.most)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)


@contextmanager
def _bounded_memory(most: int) -> Iterator[None]:
    """Bounds the address space beyond what is mapped already; threads take turns, since the bound is the process's."""
    if not sys.platform.startswith("linux"):
        yield
        return
    with _ONE_TEMPLATE:
        soft, hard = resource.getrlimit(resource.RLIMIT_AS)
        bound = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize() + most
        resource.setrlimit(resource.RLIMIT_AS, (bound if soft == resource.RLIM_INFINITY else min(soft, bound), hard))
        try:
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
