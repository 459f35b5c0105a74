"""Conversations with calls of tools, in the format of OpenAI's chat API: which messages may change their places.

A message is an object with a `role` and a `content` (text, or a list of parts of text); one of the assistant may have
`tool_calls` [{`id`, `type`, `function` {`name`, `arguments`}}], each answered by a message of the role `tool` with its
`tool_call_id` before anyone else speaks. A call and its results stay together, wherever they are put.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from posbias.errors import UsageError
from posbias.files import json_object
from posbias.progress import report
from posbias.prompts.templates import DESCRIPTIONS
from posbias.registry import Registry
from posbias.tasks.language.calls import arguments_text, call_text
from posbias.tasks.language.locating import THOUGHTS, Message, Span

ROLES = ("system", "developer", "user", "assistant", "tool")
FIELDS = ("role", "content", "name", "tool_calls", "tool_call_id", "moved", THOUGHTS, "reasoning", "reasoning_details")
RESULT = "<tool_response>\n{}\n</tool_response>"
"""Form in which results are written as text."""
TOOLS = (
    "# Tools\n\nYou may call these functions, each described by a line of JSON:\n<tools>\n{}\n</tools>\n\nCall one by "
    'a JSON object in tags: <tool_call>\n{{"name": ..., "arguments": ...}}\n</tool_call>'
)
Blocks = tuple[list[range], list[int]]
"""Messages that stay together, by their indices, in order; and which of these blocks can change places."""
AMONG: Registry[Callable[[Sequence[Message], int, int | None], Blocks]] = Registry("group of messages")
"""Blocks of a conversation, given the index of the moved message and that of the question (None: none of them)."""


def read_messages(messages: Sequence[Any], where: str) -> list[Message]:
    """Messages with their content as text, checked; `moved` and fields that hold nothing are taken out.

    Raises:
        UsageError: a field or role that is not known, content that is no text, or a call without its result.
    """
    read = [_message(message, f"{where}, message {index}") for index, message in enumerate(messages)]
    waiting: list[str] = []
    for index, message in enumerate(read):
        of_message = f"{where}, message {index}"
        if message["role"] == "tool":
            call = message.get("tool_call_id")
            if call not in waiting:
                raise UsageError(f"{of_message}: no call before it has the 'tool_call_id' {call!r:.80}")
            waiting.remove(call)
        elif waiting:
            raise UsageError(f"{of_message}: the call {waiting[0]!r:.80} has no result before it")
        waiting += [call["id"] for call in message.get("tool_calls", ())]
    if waiting:
        raise UsageError(f"{where}: the call {waiting[0]!r:.80} has no result")
    return read


def _message(message: Any, where: str) -> Message:
    if not isinstance(message, Mapping) or message.get("role") not in ROLES:
        raise UsageError(f"{where}: need an object with a 'role' of {', '.join(ROLES)}, got {message!r:.80}")
    plain = {name: value for name, value in message.items() if value not in (None, [], {}) and name != "moved"}
    if odd := sorted(set(plain) - set(FIELDS)):
        raise UsageError(f"{where}: unknown field {odd[0]!r}; allowed: {', '.join(FIELDS)}")
    content = plain.get("content", "")
    if isinstance(content, list):
        parts = [part.get("text") if isinstance(part, Mapping) else None for part in content]
        content = None if any(not isinstance(part, str) for part in parts) else "".join(map(str, parts))
    if not isinstance(content, str):
        raise UsageError(f"{where}: field 'content' must be text or parts of text, got {plain['content']!r:.80}")
    calls = plain.get("tool_calls", [])
    if not content and not calls and plain["role"] != "tool":
        raise UsageError(f"{where}: field 'content' is empty, and there are no 'tool_calls'")
    if not isinstance(calls, list) or (calls and plain["role"] != "assistant"):
        raise UsageError(f"{where}: field 'tool_calls' must be a list, of the assistant, got {calls!r:.80}")
    read = {name: plain[name] for name in FIELDS[:5] if name in plain}
    if calls:
        read["tool_calls"] = [_call(call, where) for call in calls]
    if thoughts := _thoughts(plain, where):
        read[THOUGHTS] = thoughts
    return {**read, "content": content if content or not calls else None}


def _call(call: Any, where: str) -> dict[str, Any]:
    """A call with its arguments as JSON; other fields of its function, such as what a library made of them, go."""
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not all(
        isinstance(text, str) for text in (call.get("id"), function.get("name"))
    ):
        raise UsageError(f"{where}: a call needs 'id', and 'function' with 'name', got {call!r:.80}")
    arguments = arguments_text(function.get("arguments"))
    json_object(arguments.encode(), f"{where}: the 'arguments' of {function['name']!r:.80}")
    return {**call, "function": {"name": function["name"], "arguments": arguments}}


def _thoughts(message: Message, where: str) -> str:
    """The thoughts of an assistant's message, under whatever name servers give them; encrypted ones are left out."""
    given = [message[name] for name in (THOUGHTS, "reasoning", "reasoning_details") if name in message]
    if given and message["role"] != "assistant":
        raise UsageError(f"{where}: thoughts are of the assistant, got {given[0]!r:.80}")
    thoughts = given[0] if given else ""
    if isinstance(thoughts, list):
        told = [part.get("text") or part.get("summary") for part in thoughts if isinstance(part, Mapping)]
        thoughts = "".join(text for text in told if isinstance(text, str))
        if not thoughts:
            report(f"{where}: its thoughts are encrypted, and left out")
    if not isinstance(thoughts, str):
        raise UsageError(f"{where}: thoughts must be text or parts of text, got {thoughts!r:.80}")
    return thoughts


def question_of(messages: Sequence[Message], where: str) -> int:
    """Index of the message that is answered: the last one of the user."""
    users = [index for index, message in enumerate(messages) if message["role"] == "user"]
    if not users or messages[-1]["role"] not in ("user", "tool"):
        raise UsageError(
            f"{where}: field 'messages' must end with a message of the user or a result, for the model to answer; or "
            "give a 'question'"
        )
    return users[-1]


def moved_message(messages: Sequence[Any], moved: Any, where: str) -> int:
    """Index of the message that is moved: marked by `moved`, or named by its index or the id of its call."""
    marked = [index for index, message in enumerate(messages) if message.get("moved") is True]
    if moved is not None:
        of_call = [index for index, message in enumerate(messages) if message.get("tool_call_id") == moved]
        marked += of_call or ([moved] if type(moved) is int and 0 <= moved < len(messages) else [])
    if len(marked) != 1:
        raise UsageError(
            f"{where}: field 'moved' must name one message, by its index (0 ... {len(messages) - 1}) or the "
            f"'tool_call_id' of its result, or a message be marked \"moved\": true, got {moved!r:.80}; "
            f"these can be moved: {_movable(messages)}"
        )
    return int(marked[0])


def _movable(messages: Sequence[Message]) -> str:
    """The messages that can be moved, in words, calls with their results."""
    words = []
    for block in _with_results(messages):
        first, role = block[0], messages[block[0]]["role"]
        if role not in ("system", "developer") or len(block) > 1:
            words.append(f"{first} ({role})" if len(block) == 1 else f"{first}-{block[-1]} (a call with results)")
    return ", ".join(words) or "none"


def _with_results(messages: Sequence[Message]) -> list[range]:
    """Every message alone, but calls with their results."""
    begins = [index for index, message in enumerate(messages) if message["role"] != "tool"]
    return [range(begin, end) for begin, end in zip(begins, [*begins[1:], len(messages)], strict=True)]


@AMONG.register("alike")
def among_alike(messages: Sequence[Message], moved: int, question: int | None) -> Blocks:
    """Calls with their results among such, other messages among those of their role."""

    def kind(block: range) -> str:
        return "call" if len(block) > 1 else str(messages[block[0]]["role"])

    blocks = _with_results(messages)
    wanted = next(kind(block) for block in blocks if moved in block)
    return blocks, [n for n, block in enumerate(blocks) if kind(block) == wanted and question not in block]


@AMONG.register("turns")
def among_turns(messages: Sequence[Message], moved: int, question: int | None) -> Blocks:
    """A message of the user with all that follows it up to the next, among such."""
    begins = [index for index, message in enumerate(messages) if message["role"] == "user"]
    before = [range(index, index + 1) for index in range(begins[0] if begins else len(messages))]
    turns = [range(begin, end) for begin, end in zip(begins, [*begins[1:], len(messages)], strict=True)]
    blocks = [*before, *turns]
    return blocks, [n for n in range(len(before), len(blocks)) if question not in blocks[n]]


@AMONG.register("results")
def among_results(messages: Sequence[Message], moved: int, question: int | None) -> Blocks:
    """A result among those of the calls that were made together with its own."""
    together = next(block for block in _with_results(messages) if moved in block)
    return [range(index, index + 1) for index in range(len(messages))], list(together[1:])


@dataclass(frozen=True)
class Placed:
    """A conversation, and the place of the moved item in it."""

    messages: tuple[Message, ...]
    index: int
    """The message that holds it."""
    span: Span
    """Its characters in that message's content."""


def as_text(placed: Placed) -> Placed:
    """The same with calls, results and descriptions of tools written as text; messages of one role are joined."""
    joined: list[dict[str, str]] = []
    before_content = {"tool": RESULT.index("{}"), DESCRIPTIONS: TOOLS.index("{}")}
    for number, message in enumerate(placed.messages):
        role, content = _told(message)
        alike = joined.pop() if joined and joined[-1]["role"] == role else {}
        lead = f"{alike['content']}\n\n" if alike else ""
        thoughts = alike.get(THOUGHTS, "") + message.get(THOUGHTS, "")
        joined.append({"role": role, "content": lead + content, **({THOUGHTS: thoughts} if thoughts else {})})
        if number == placed.index:
            shift = len(lead) + before_content.get(message["role"], 0)
            index, span = len(joined) - 1, (placed.span[0] + shift, placed.span[1] + shift)
    return Placed(tuple(joined), index, span)


def _told(message: Message) -> tuple[str, str]:
    """The role and the words of a message."""
    content = message["content"] or ""
    if message["role"] == DESCRIPTIONS:
        return "system", TOOLS.format(content)
    if message["role"] == "tool":
        return "user", RESULT.format(content)
    calls = [call_text(**call["function"]) for call in message.get("tool_calls", ())]
    return str(message["role"]), "\n".join([*([content] if content else []), *calls])
