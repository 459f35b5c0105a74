"""Chat templates: conversations rendered as the text that a model reads, with options such as `enable_thinking=False`.

The options are kept by the tokenizer, so that every conversation it renders is rendered alike: to be measured,
answered, scored or fitted to. A template is a program that came with a model, so its resources are bounded: time in the
main thread only, where Python lets a signal interrupt it; memory if the system tells how much this process has mapped
(Linux). Both bounds hold for the whole process while a template runs.
"""

import copy
import json
import re
import resource
import signal
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from posbias.errors import UsageError, check_most
from posbias.files import READ_BYTES, check_text
from posbias.prompts.control_tokens import Marks, Span, control_pattern, special_pattern

Conversation = Sequence[Mapping[str, Any]]
"""Messages in order, each with a `role` (text) and a `content` (text, or a list of parts)."""
DESCRIPTIONS = "tools"
"""Role of a first message that describes tools, each by a line of JSON: templates and servers take these beside the
conversation."""
TEMPLATE_OPTIONS = "posbias_template_options"
"""Attribute of a tokenizer that holds the options of its chat template."""
SET_BY_RENDERING = frozenset(
    (
        *("conversation", "messages", "tools", "documents", "chat_template", "add_generation_prompt", "tokenize"),
        *("continue_final_message", "padding", "truncation", "max_length", "return_tensors", "return_dict"),
        *("return_assistant_tokens_mask", "tokenizer_kwargs", "processor_kwargs", "self"),
    )
)
"""Arguments of rendering that are no options of a template."""
TEMPLATE_SECONDS = 2
"""Processor time that a chat template may take for one conversation."""
TEMPLATE_BYTES = 1 << 28
"""Memory that it may take."""
_ONE_TEMPLATE = threading.Lock()


def check_template(tokenizer: Any) -> None:
    """Refuse a model without a tokenizer, and a tokenizer that cannot render conversations."""
    if tokenizer is None:
        raise UsageError("the model has no tokenizer, so it cannot render a conversation; give token ids")
    if not getattr(tokenizer, "chat_template", None):
        raise UsageError(
            "the model's tokenizer has no chat template (a base model?); write the prompts as text, or set "
            "tokenizer.chat_template"
        )


def with_template_options(tokenizer: Any, options: Mapping[str, Any] | None) -> Any:
    """Copy a tokenizer with options for its chat template, such as `{"enable_thinking": False}`.

    Raises:
        UsageError: no chat template, or one that does not hold the name of an option, which would do nothing.
    """
    if not options:
        return tokenizer
    check_template_options(options)
    check_template(tokenizer)
    template = tokenizer.chat_template
    text = "\n".join(map(str, template.values())) if isinstance(template, Mapping) else str(template)
    for name in options:
        if not re.search(rf"\b{name}\b", text):
            raise UsageError(f"template option {name!r} does nothing: the model's chat template does not name it")
    copied = copy.copy(tokenizer)
    setattr(copied, TEMPLATE_OPTIONS, dict(options))
    return copied


def check_template_options(options: object) -> None:
    """Refuse options of a chat template that are not values by name, or that JSON cannot express."""
    if not isinstance(options, Mapping) or not all(isinstance(name, str) and name.isidentifier() for name in options):
        raise UsageError(f"template options must be values by name, such as enable_thinking=False, got {options!r:.80}")
    for name in options:
        if name in SET_BY_RENDERING:
            raise UsageError(f"template option {name!r} is reserved for rendering; allowed: others")
    try:
        json.dumps(dict(options), allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise UsageError(f"template options must be values that JSON can express: {error}") from None


def template_options_of(tokenizer: Any) -> dict[str, Any]:
    """Options of a tokenizer's chat template."""
    return dict(getattr(tokenizer, TEMPLATE_OPTIONS, {}))


def described_tools(messages: Conversation) -> tuple[list[dict[str, Any]], Conversation]:
    """The tools that a conversation begins with (DESCRIPTIONS), and the conversation without them."""
    if not messages or messages[0].get("role") != DESCRIPTIONS:
        return [], messages
    try:
        return [json.loads(line) for line in messages[0]["content"].split("\n")], messages[1:]
    except (ValueError, AttributeError):
        raise UsageError(
            f"a first message of the role {DESCRIPTIONS!r} describes one tool a line, as JSON; "
            f"got {str(messages[0]['content'])[:60]!r}"
        ) from None


def check_messages(messages: Sequence[object], place: str) -> None:
    """Refuse messages without a role (text) and a content (text, or a list of parts); `place` says where they stand.

    A template would write out anything else, such as None, as words that nobody said; a message with `tool_calls` alone
    may have it.
    """
    for message in messages:
        if isinstance(message, Mapping) and message.get("tool_calls") and message.get("content", "") is None:
            message = {**message, "content": ""}
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
    """Places where messages spelled control tokens, which stay ordinary text; all others are the template's."""

    @property
    def spellings(self) -> tuple[str, ...]:
        """Control tokens that messages spelled."""
        return tuple(self.text[begin:end] for begin, end in self.spelled)


def render_conversation(
    tokenizer: Any, messages: Conversation, *, index: int = 0, generation_prompt: bool = True
) -> Rendered:
    """Render one conversation by the tokenizer's chat template; its `index` names it in errors.

    Raises:
        UsageError: no messages, one without a proper role and content, or the template refuses them.
    """
    name = f"conversation {index}"
    if isinstance(messages, str | Mapping) or not messages:
        raise UsageError(f"{name} must be a list of messages with role and content, got {messages!r}")
    check_messages(messages, name)
    plain = [_with_arguments(message, tokenizer, name) for message in messages]
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


def _with_arguments(message: Mapping[str, Any], tokenizer: Any, name: str) -> dict[str, Any]:
    """A message with the arguments of its calls as templates take them: objects, where servers take JSON."""
    calls = message.get("tool_calls")
    if not calls:
        return dict(message)
    if "tool_calls" not in str(tokenizer.chat_template):
        raise UsageError(f"{name}: the model's chat template passes calls of tools over; write them as text")
    try:
        parsed = [{**call["function"], "arguments": json.loads(call["function"]["arguments"])} for call in calls]
    except (TypeError, KeyError, ValueError):
        return dict(message)  # objects already
    return {
        **message,
        "tool_calls": [{**call, "function": function} for call, function in zip(calls, parsed, strict=True)],
    }


def _rendered(tokenizer: Any, messages: list[dict[str, Any]], name: str, *, generation_prompt: bool) -> str:
    """The text that a tokenizer's chat template makes of checked messages, within bounds of time and memory."""
    tools, turns = described_tools(messages)
    if tools and not re.search(r"\btools\b", str(tokenizer.chat_template)):
        raise UsageError(
            f"{name}: the model's chat template passes descriptions of tools over; items(calls='text') writes them out"
        )
    try:
        with (
            _bounded_time(UsageError(f"{name}: the chat template does not end within {TEMPLATE_SECONDS} seconds")),
            _bounded_memory(TEMPLATE_BYTES),
        ):
            text = tokenizer.apply_chat_template(
                turns,
                **({"tools": tools} if tools else {}),
                tokenize=False,
                add_generation_prompt=generation_prompt,
                **template_options_of(tokenizer),
            )
    except UsageError:
        raise
    except MemoryError:
        raise UsageError(f"{name}: the chat template takes more than {TEMPLATE_BYTES:,} bytes of memory") from None
    except Exception as error:  # whatever a model's own template may raise, such as roles it does not know
        raise UsageError(f"{name}: the chat template refuses it ({' '.join(str(error).split())})") from None
    if not text:
        raise UsageError(f"{name} renders to an empty text")
    check_most(f"{name}, rendered by the chat template", len(text), READ_BYTES, "bytes")
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
    signal.setitimer(signal.ITIMER_VIRTUAL, TEMPLATE_SECONDS)
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
