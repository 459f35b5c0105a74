"""Conversations with calls of tools, in the format of OpenAI's chat API: which messages may change their places.

A message is an object with a `role` and a `content` (text, or a list of parts of text); one of the assistant may have
`tool_calls` [{`id`, `type`, `function` {`name`, `arguments`}}], each answered by a message of the role `tool` with its
`tool_call_id` before anyone else speaks. A call and its results stay together, wherever they are put.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from posbias.errors import UsageError
from posbias.files import json_object
from posbias.progress import report
from posbias.prompts.templates import DESCRIPTIONS
from posbias.tasks.language.calls import arguments_text, call_text
from posbias.tasks.language.locating import THOUGHTS, Message, Span

ROLES = ("system", "developer", "user", "assistant", "tool")
FIELDS = ("role", "content", "name", "tool_calls", "tool_call_id", "moved", THOUGHTS, "reasoning", "reasoning_details")
AMONG = ("alike", "results", "turns")
"""Groups of messages among which one may change its place (`movable_blocks`)."""
RESULT = "<tool_response>\n{}\n</tool_response>"
"""Form in which results are written as text."""
TOOLS = (
    "# Tools\n\nYou may call these functions, each described by a line of JSON:\n<tools>\n{}\n</tools>\n\nCall one by "
    'a JSON object in tags: <tool_call>\n{{"name": ..., "arguments": ...}}\n</tool_call>'
)


def read_messages(messages: Sequence[Any], where: str) -> list[Message]:
    """Messages with their content as text, checked; `moved` and fields that hold nothing are taken out.

    Raises:
        UsageError: a field or role that is not known, content that is no text, or a call without its result.
    """
    read, waiting = [], list[str]()
    for index, given in enumerate(messages):
        of_message = f"{where}, message {index}"
        message = _message(given, of_message)
        if message["role"] == "tool":
            if (call := message.get("tool_call_id")) not in waiting:
                raise UsageError(f"{of_message}: no call before it has the 'tool_call_id' {call!r:.80}")
            waiting.remove(call)
        elif waiting:
            raise UsageError(f"{of_message}: the call {waiting[0]!r:.80} has no result before it")
        waiting += [call["id"] for call in message.get("tool_calls", ())]
        read.append(message)
    if waiting:
        raise UsageError(f"{where}: the call {waiting[0]!r:.80} has no result")
    return read


def _message(message: Any, where: str) -> Message:
    if not isinstance(message, Mapping) or message.get("role") not in ROLES:
        raise UsageError(f"{where}: need an object with a 'role' of {', '.join(ROLES)}, got {message!r:.80}")
    plain = {name: value for name, value in message.items() if value not in (None, [], {}) and name != "moved"}
    if odd := sorted(set(plain) - set(FIELDS)):
        raise UsageError(f"{where}: unknown field {odd[0]!r}; allowed: {', '.join(FIELDS)}")
    content, calls = plain.get("content", ""), plain.get("tool_calls", [])
    if isinstance(content, list):
        parts = [part.get("text") if isinstance(part, Mapping) else None for part in content]
        content = None if any(not isinstance(part, str) for part in parts) else "".join(map(str, parts))
    if not isinstance(content, str):
        raise UsageError(f"{where}: field 'content' must be text or parts of text, got {plain['content']!r:.80}")
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
    if not isinstance(function, Mapping) or not isinstance(call.get("id"), str):
        raise UsageError(f"{where}: a call needs 'id', and 'function' with 'name', got {call!r:.80}")
    name, arguments = function.get("name"), arguments_text(function.get("arguments"))
    if not isinstance(name, str):
        raise UsageError(f"{where}: a call needs 'id', and 'function' with 'name', got {call!r:.80}")
    json_object(arguments.encode(), f"{where}: the 'arguments' of {name!r:.80}")
    return {**call, "function": {"name": name, "arguments": arguments}}


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


def movable_blocks(
    messages: Sequence[Message], among: str, moved: int, question: int | None
) -> tuple[list[range], list[int]]:
    """Messages that stay together, by their indices, and which of these blocks can change places with the moved one.

    `alike`: calls with their results among such, other messages among those of their role; `turns`: messages of the
    user, each with all that follows it up to the next; `results`: those of calls that were made together.
    """
    roles = [str(message["role"]) for message in messages]
    callers = [index for index, role in enumerate(roles) if role != "tool"]
    users = [index for index, role in enumerate(roles) if role == "user"]
    turns = [*range(min(users, default=len(roles))), *users]
    begins = {"alike": callers, "turns": turns, "results": list(range(len(roles)))}[among]
    blocks = [range(begin, end) for begin, end in zip(begins, [*begins[1:], len(roles)], strict=True)]
    if among == "results":
        together = next(group for group in movable_blocks(messages, "alike", moved, None)[0] if moved in group)
        return blocks, list(together[1:])
    kinds = ["call" if among == "alike" and len(block) > 1 else roles[block[0]] for block in blocks]
    wanted = "user" if among == "turns" else next(k for k, block in zip(kinds, blocks, strict=True) if moved in block)
    return blocks, [n for n, kind in enumerate(kinds) if kind == wanted and question not in blocks[n]]


def movable_in_words(messages: Sequence[Message]) -> str:
    """The messages that can be moved, calls with their results, for an error."""
    words = []
    for block in movable_blocks(messages, "alike", 0, None)[0]:
        first, role = block[0], messages[block[0]]["role"]
        if len(block) > 1:
            words.append(f"{first}-{block[-1]} (a call with results)")
        elif role not in ("system", "developer"):
            words.append(f"{first} ({role})")
    return ", ".join(words) or "none"


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
    forms = {"tool": ("user", RESULT), DESCRIPTIONS: ("system", TOOLS)}
    for number, message in enumerate(placed.messages):
        role, form = forms.get(message["role"], (str(message["role"]), "{}"))
        calls = [call_text(**call["function"]) for call in message.get("tool_calls", ())]
        told = form.format("\n".join([*([message["content"]] if message["content"] else []), *calls]))
        alike = joined.pop() if joined and joined[-1]["role"] == role else {}
        lead = f"{alike['content']}\n\n" if alike else ""
        thoughts = alike.get(THOUGHTS, "") + message.get(THOUGHTS, "")
        joined.append({"role": role, "content": lead + told, **({THOUGHTS: thoughts} if thoughts else {})})
        if number == placed.index:
            shift = len(lead) + form.index("{}")
            index, span = len(joined) - 1, (placed.span[0] + shift, placed.span[1] + shift)
    return Placed(tuple(joined), index, span)
