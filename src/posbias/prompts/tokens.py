"""The text of a prompt as a model reads it, in tokens, and the places of its parts.

A text is opened by the special tokens the tokenizer puts before one (BOS); a conversation is rendered by the chat
template, which writes its own. Its options, such as `enable_thinking=False`, are kept by the tokenizer, so that every
conversation it renders is rendered alike: to be measured, answered, scored or fitted to. The place of an item is read
off the tokenizer's character offsets, never guessed.

A tokenizer takes the spelling of a control token, such as "<|im_end|>" in a passage, for the token, wherever it stands,
so that a passage could end a turn or a text. Here only what the tokenizer or a chat template writes itself is one. What
a text spells is tokenised by itself, by the tokenizer's normaliser, pre-tokeniser and model alone; all other text is
tokenised as ever.
"""

import copy
import inspect
import json
import re
import signal
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from posbias.errors import UsageError, check_most
from posbias.files import READ_BYTES, check_text

Message = Mapping[str, Any]
"""One turn of a conversation: its `role` and its `content`; calls of tools beside it, or in its place. The first one
may describe tools (`DESCRIPTIONS`)."""
Span = tuple[int, int]
"""Begin and end of a part of a text or a prompt: of its first character or token, and one past its last."""
THOUGHTS = "reasoning_content"
"""Field of an assistant's message that servers and templates take its thoughts from."""
DESCRIPTIONS = "tools"
"""Role of a first message that describes tools, each by a line of JSON: templates and servers take these beside the
conversation."""
TEMPLATE_OPTIONS = "posbias_template_options"
"""Attribute of a tokenizer that holds the options of its chat template."""
PATTERN = "posbias_control_pattern"
"""Attribute that holds its `control_pattern`, and what that was made from: it takes milliseconds, every prompt asks."""
USUAL = re.compile(
    r"<\|[\w./ -]{1,40}\|>|</?s>|<(?:bos|eos|pad|unk|mask)>|<(?:start|end)_of_(?:turn|image|audio)>|\[/?INST\]"
    r"|<</?SYS>>|<｜[\w▁ ]{1,40}｜>|\[(?:CLS|SEP|PAD|MASK|UNK)\]"
)
"""The usual spellings of control tokens, for a model on a server, whose tokenizer is not known."""
LEAD = "\n"
"""Put before a piece of a text while it is tokenised: some tokenizers put a space before the first word."""
TEMPLATE_SECONDS = 10.0
"""Longest rendering of one conversation: a template is a program of the model's makers, which may go on for ever."""
PRIVATE = range(0xE000, 0xF900)
"""Characters that mean nothing to anyone: two of them mark in a message what it spells, until it is rendered."""


class Encoded(NamedTuple):
    """A text as a model reads it."""

    text: str
    """What was tokenised: a prompt itself, or a rendered conversation."""
    token_ids: list[int]
    offsets: list[Span]
    """Begin and end of each token in `text`, (0, 0) for opening special tokens; empty: a slow tokenizer."""


def control_pattern(tokenizer: Any) -> re.Pattern[str]:
    """A pattern that finds the control tokens a text spells; without a tokenizer those in usual spellings.

    They are the tokenizer's special tokens, and the added ones that its chat template spells; blanks and words are not.
    """
    if tokenizer is None:
        return USUAL
    template = str(getattr(tokenizer, "chat_template", None) or "")
    made_from = len(tokenizer) if hasattr(tokenizer, "__len__") else 0, template
    known: tuple[Any, re.Pattern[str]] | None = getattr(tokenizer, PATTERN, None)
    if known is None or known[0] != made_from:
        known = made_from, _pattern(tokenizer, template)
        setattr(tokenizer, PATTERN, known)
    return known[1]


def _pattern(tokenizer: Any, template: str = "") -> re.Pattern[str]:
    """A pattern of special tokens and of the added ones that a template spells, longer ones first."""
    special = {str(token) for token in getattr(tokenizer, "all_special_tokens", ())}
    for token in getattr(tokenizer, "added_tokens_decoder", {}).values():
        written = token.content in template and not token.content.isspace() and not token.content.isalnum()
        if token.special or written:
            special.add(token.content)
    spellings = [re.escape(spelling) for spelling in sorted(special - {""}, key=len, reverse=True)]
    return re.compile("|".join(spellings) or r"(?!)")


def spelled_in(text: str, tokenizer: Any) -> tuple[Span, ...]:
    """Spans in which a text spells control tokens."""
    return tuple(match.span() for match in control_pattern(tokenizer).finditer(text))


def tokenised(text: str, tokenizer: Any, ordinary: Sequence[Span] | None = None) -> Encoded:
    """Tokenise a text, without special tokens around it and without a limit.

    Control tokens spelled in `ordinary` spans are ordinary text; None: all of them are.
    """
    options = {"return_offsets_mapping": True} if getattr(tokenizer, "is_fast", False) else {}

    def read(text: str) -> Encoded:
        """A text as the tokenizer reads it."""
        encoded = tokenizer(text, add_special_tokens=False, return_attention_mask=False, verbose=False, **options)
        return Encoded(text, list(encoded["input_ids"]), list(map(tuple, encoded.get("offset_mapping", ()))))

    token_ids: list[int] = []
    places: list[Span] = []
    spans = spelled_in(text, tokenizer) if ordinary is None else ordinary
    borders = [0, *(border for span in spans for border in span), len(text)]
    for number, (begin, end) in enumerate(pairwise(borders)):
        if begin == end and len(borders) > 2:
            continue
        piece = text[begin:end]
        if number % 2:
            found = _ordinary(piece, tokenizer, behind=begin > 0)
            placed = [(begin, end)] * len(found) if options else []
        else:
            _, found, own = _behind(read, piece) if begin else read(piece)
            placed = [(first + begin, last + begin) for first, last in own]
        token_ids += found
        places += placed
    return Encoded(text, token_ids, places)


def _behind(read: Callable[[str], Encoded], piece: str) -> Encoded:
    """A piece of a text as it is read behind other text."""
    lead, whole = read(LEAD), read(LEAD + piece)
    count = len(lead.token_ids)
    if whole.token_ids[:count] != lead.token_ids:
        return read(piece)  # the lead joins what follows, as a line break does another
    offsets = [(max(0, first - len(LEAD)), last - len(LEAD)) for first, last in whole.offsets[count:]]
    return Encoded(piece, whole.token_ids[count:], offsets)


def _ordinary(piece: str, tokenizer: Any, *, behind: bool) -> list[int]:
    """The spelling of a control token in the tokens of ordinary text."""

    def read(text: str) -> Encoded:
        if not getattr(tokenizer, "is_fast", False):
            return Encoded(text, tokenizer.encode(text, add_special_tokens=False, split_special_tokens=True), [])
        backend = tokenizer.backend_tokenizer
        normal = text if backend.normalizer is None else backend.normalizer.normalize_str(text)
        parts = [(normal, None)] if backend.pre_tokenizer is None else backend.pre_tokenizer.pre_tokenize_str(normal)
        return Encoded(text, [token.id for part, _ in parts for token in backend.model.tokenize(part)], [])

    token_ids = (_behind(read, piece) if behind else read(piece)).token_ids
    if tokenizer.convert_tokens_to_ids(piece) in token_ids:  # its model has the token as a word, as unigram ones do
        token_ids = [token for letter in piece for token in _behind(read, letter).token_ids]
    return token_ids


def opening(tokenizer: Any) -> tuple[int, ...]:
    """The special tokens the tokenizer puts before a text by default: usually BOS, or nothing."""
    full, plain = (list(map(int, tokenizer("a", **how)["input_ids"])) for how in ({}, {"add_special_tokens": False}))
    begins = [begin for begin in range(len(full) - len(plain) + 1) if full[begin : begin + len(plain)] == plain]
    return tuple(full[: begins[0]]) if begins else ()


def check_template(tokenizer: Any) -> None:
    """Refuse a tokenizer that cannot render conversations."""
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
    from transformers import PreTrainedTokenizerBase

    reserved = {"messages", *inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters}
    for name in reserved.intersection(options):
        raise UsageError(f"template option {name!r} is reserved for rendering; allowed: others")
    try:
        json.dumps(dict(options), allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise UsageError(f"template options must be values that JSON can express: {error}") from None


def described_tools(messages: Sequence[Message]) -> tuple[list[dict[str, Any]], Sequence[Message]]:
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
    """A prompt as the text that a model reads, special tokens of a template included."""

    text: str
    spelled: tuple[Span, ...]
    """Places where control tokens are spelled that stay ordinary text; all others are the template's, or meant."""
    opening: tuple[int, ...] = ()
    """The special tokens before it (a template writes its own out)."""


def rendered(prompt: str | Sequence[Message], tokenizer: Any, *, index: int = 0, own_control: bool = False) -> Rendered:
    """The text that a model reads: of a conversation up to the opening of the assistant's answer.

    Args:
        prompt: A text, or a conversation, which the tokenizer's chat template renders.
        tokenizer: The model's own.
        index: Number of the conversation, for messages.
        own_control: As `Example.own_control`.

    Raises:
        UsageError: no chat template, no messages, one without a proper role and content, or the template refuses them.
    """
    if isinstance(prompt, str):
        return Rendered(prompt, () if own_control else spelled_in(prompt, tokenizer), opening(tokenizer))
    check_template(tokenizer)
    name = f"conversation {index}"
    if not isinstance(prompt, list | tuple) or not prompt:
        raise UsageError(f"{name} must be a list of messages with role and content, got {prompt!r}")
    check_messages(prompt, name)
    plain = [_with_arguments(message, tokenizer, name) for message in prompt]
    text, told = _by_template(tokenizer, plain, name), str(plain)
    free = [mark for mark in map(chr, PRIVATE) if mark not in told and repr(mark)[1:-1] not in told][:2]
    if len(free) < 2:
        raise UsageError(f"{name} holds every private-use character, so that no part of it can be marked")
    for pattern in (control_pattern(tokenizer), _pattern(tokenizer)):  # then without what a template may look for
        marked = _marked(plain, pattern, *free)
        if marked == plain:
            return Rendered(text, ())
        found = _unmarked(_by_template(tokenizer, marked, name), pattern, *free)
        if found.text == text:
            return found
        # The template itself looks for what was marked, such as the thoughts of an earlier answer, and renders it so.
    raise UsageError(
        f"{name} spells special tokens that the chat template reads in messages; allowed: messages without them"
    )


def _marked(value: Any, pattern: re.Pattern[str], begin: str, end: str) -> Any:
    """Messages, or any part of one, with marks around the control tokens that they spell."""
    if isinstance(value, str):
        return pattern.sub(lambda match: f"{begin}{match[0]}{end}", value)
    if isinstance(value, dict):
        return {name: _marked(part, pattern, begin, end) for name, part in value.items()}
    return [_marked(part, pattern, begin, end) for part in value] if isinstance(value, list | tuple) else value


def _unmarked(text: str, pattern: re.Pattern[str], begin: str, end: str) -> Rendered:
    """A rendered text without the marks, with the spans between them."""
    strays = str.maketrans("", "", begin + end)  # a template may have taken a marked token apart
    plain, spans, read_to = "", [], 0
    for match in re.finditer(f"{begin}({pattern.pattern}){end}", text):
        plain += text[read_to : match.start()].translate(strays)
        spans.append((len(plain), len(plain) + len(match[1])))
        plain, read_to = plain + match[1], match.end()
    return Rendered(plain + text[read_to:].translate(strays), tuple(spans))


def _with_arguments(message: Mapping[str, Any], tokenizer: Any, name: str) -> dict[str, Any]:
    """A message with the arguments of its calls as templates take them: objects, where servers take JSON."""
    calls = message.get("tool_calls")
    if not calls:
        return dict(message)
    if "tool_calls" not in str(tokenizer.chat_template):
        raise UsageError(
            f"{name}: the model's chat template passes calls of tools over; items(calls='text') writes them out"
        )
    try:
        parsed = [{**call["function"], "arguments": json.loads(call["function"]["arguments"])} for call in calls]
    except (TypeError, KeyError, ValueError):
        return dict(message)  # objects already
    return {
        **message,
        "tool_calls": [{**call, "function": function} for call, function in zip(calls, parsed, strict=True)],
    }


def _by_template(tokenizer: Any, messages: list[dict[str, Any]], name: str) -> str:
    """The text that a tokenizer's chat template makes of checked messages."""
    tools, turns = described_tools(messages)
    if tools and not re.search(r"\btools\b", str(tokenizer.chat_template)):
        raise UsageError(
            f"{name}: the model's chat template passes descriptions of tools over; items(calls='text') writes them out"
        )
    options = {**({"tools": tools} if tools else {}), **getattr(tokenizer, TEMPLATE_OPTIONS, {})}
    try:
        with _ended_after(TEMPLATE_SECONDS):
            text = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True, **options)
    except Exception as error:  # whatever a model's own template may raise, such as roles it does not know
        said = " ".join(str(error).split())
        called = any(turn["role"] == "tool" or turn.get("tool_calls") for turn in turns)
        remedy = "; items(calls='text') writes calls and results as text" if called else ""
        raise UsageError(f"{name}: the chat template refuses it ({said}){remedy}") from None
    if not text:
        raise UsageError(f"{name} renders to an empty text")
    check_most(f"{name}, rendered by the chat template", len(text), READ_BYTES, "bytes")
    check_text(str(text), name)
    return str(text)


@contextmanager
def _ended_after(seconds: float) -> Iterator[None]:
    """End what takes longer with TimeoutError; other threads than the main one have no alarm, and wait."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def end(*_: object) -> None:
        raise TimeoutError(f"takes longer than {seconds:g} s")

    before = signal.signal(signal.SIGALRM, end)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def text_of(prompt: str | Sequence[Message]) -> str:
    """A prompt's text; of a conversation, its last message's."""
    return prompt if isinstance(prompt, str) else str(prompt[-1]["content"])


def encode(prompt: str | Sequence[Message], tokenizer: Any, *, own_control: bool = False) -> Encoded:
    """The token ids of a prompt, with their places in its text. Arguments and errors as `rendered`."""
    text, ordinary, before = rendered(prompt, tokenizer, own_control=own_control)
    _, token_ids, offsets = tokenised(text, tokenizer, ordinary)
    return Encoded(text, [*before, *token_ids], [*[(0, 0)] * len(before), *offsets] if offsets else [])


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
    if not encoded.offsets:
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
    text = rendered(prompt, tokenizer).text
    return any(thought.strip() not in text for thought in thoughts)


def _of_message(prompt: Sequence[Message], index: int, spans: Sequence[Span], tokenizer: Any, text: str) -> list[Span]:
    """Spans of a message's content in the rendered text; other messages may say the same, so its words are marked."""
    content = str(prompt[index]["content"])
    bare = content.strip()  # many templates trim a message
    lead = content.find(bare)
    end = lead + len(bare)
    free = next(chr(code) for code in PRIVATE if chr(code) not in text)
    begin = _with_content(prompt, index, content[:lead] + free + content[lead:], tokenizer).find(free)
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
        told = _with_content(prompt, index, content[:first] + line + content[last:], tokenizer)
        begin, end = told.find(free), told.rfind(free)
        if end <= begin or told.replace(free, "") != text:
            raise UsageError("the chat template changes the descriptions of tools, so one cannot be located in it")
        placed.append((begin, end - told[:end].count(free)))
    return placed


def _with_content(prompt: Sequence[Message], index: int, content: str, tokenizer: Any) -> str:
    """The rendered text of a conversation in which one message says something else."""
    return rendered([*prompt[:index], {**prompt[index], "content": content}, *prompt[index:][1:]], tokenizer).text
