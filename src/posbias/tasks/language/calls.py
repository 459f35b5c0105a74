"""Calls of tools: in what a model writes, and in conversations, in which they and other messages change their places.

Read are JSON and Python's calls, in tags, behind marks or alone in a line (Hermes, Qwen, Llama, Granite, Phi, older
Mistral), and the forms of Qwen 3.5 and Qwen3-Coder, GLM, Mistral, DeepSeek, Kimi and gpt-oss.

Conversations are in the format of OpenAI's chat API. A message is an object with a `role` and a `content` (text, or a
list of parts of text); one of the assistant may have `tool_calls` [{`id`, `type`, `function` {`name`, `arguments`}}],
each answered by a message of the role `tool` with its `tool_call_id` before anyone else speaks. A call and its results
stay together, wherever they are put.
"""

import ast
import json
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

from posbias.errors import UsageError
from posbias.files import json_object
from posbias.progress import report
from posbias.prompts.tokens import DESCRIPTIONS, THOUGHTS, Message, Span

CALL = "<tool_call>\n{}\n</tool_call>"
"""Form in which a call is written as text."""
BEGUN = re.compile(
    r"(<tool_call>|<\|tool_call(?:_start)?\|>|\[TOOL_CALLS\]|<\|python_(?:tag|start)\|>)\s*"
    r"|(?:^[ \t]*|```(?:json|python|tool_code)?\s*)(?=[\[{])",
    re.MULTILINE,
)
"""What stands before JSON or Python's calls; the group is a mark behind which nothing but calls stands."""
NAMED = re.compile(
    r"(?:\[TOOL_CALLS\]\s*([\w.-]+)(?:\[CALL_ID\]\w+)?\[ARGS\]"
    r"|<｜tool▁call▁begin｜>(?:function<｜tool▁sep｜>)?([\w.-]+)(?:<｜tool▁sep｜>)?"
    r"|<\|tool_call_begin\|>\s*(?:functions\.)?([\w.-]+?)(?::\d+)?\s*<\|tool_call_argument_begin\|>"
    r"|\bto=functions\.([\w.-]+)(?:\s|<\|\w+\|>|commentary|json|code)*)"
    r"\s*(?:```json)?\s*(?=\{)"
)
"""A tool's name, behind which its arguments stand as JSON: Mistral, DeepSeek, Kimi, gpt-oss (marked or not)."""
TAGGED = re.compile(
    r"<function=([^<>\s]+)>.*?</function>|<tool_call>\s*([\w.-]+)\s*(?:<arg_key>.*?)?</tool_call>", re.DOTALL
)
"""A tool's name and its arguments in tags: Qwen 3.5 and Qwen3-Coder, GLM."""
ARGUMENT = re.compile(
    r"<parameter=([^<>\s]+)>\n?(.*?)\n?</parameter>|<arg_key>(.*?)</arg_key>\s*<arg_value>(.*?)</arg_value>", re.DOTALL
)
MARKS = re.compile(
    r"\[TOOL_CALLS\]|<[^<>\s]{0,20}(?:tool|function)[_▁]?calls?[^<>\s]{0,20}>|<function=|<[^<>\s]{0,20}invoke name="
    r"|\bto=functions\.|<\|python_(?:tag|start)\|>"
)
"""What tells that a model meant to call a tool, in whatever form."""
DECODER = json.JSONDecoder()
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


class Called(NamedTuple):
    """A call in a text."""

    name: str
    arguments: Mapping[str, Any]
    typed: bool = True
    """False where all arguments are written as texts, whatever their types."""

    def meets(self, name: str, needed: Mapping[str, Any]) -> bool:
        """True if the tool is called with arguments that have the needed values."""
        return name == self.name and all(
            key in self.arguments and self._equal(self.arguments[key], value) for key, value in needed.items()
        )

    def _equal(self, given: Any, value: Any) -> bool:
        for read in () if self.typed or isinstance(value, str) else (json.loads, ast.literal_eval):
            with suppress(ValueError, SyntaxError, MemoryError, RecursionError):
                return bool(read(given) == value)
        return bool(given == value)


def arguments_text(arguments: object) -> str:
    """Arguments as JSON, whether they are given so, as an object, or not at all: blank or None."""
    told = arguments if isinstance(arguments, str) else json.dumps(arguments or {}, ensure_ascii=False)
    return told.strip() or "{}"


def call_text(name: str, arguments: object = None) -> str:
    """A call as text; the arguments are as `arguments_text` takes them."""
    return CALL.format(f'{{"name": {json.dumps(name)}, "arguments": {arguments_text(arguments)}}}')


def call_mark(text: str) -> str:
    """The mark of a call in a text, in whatever form; empty if there is none."""
    found = MARKS.search(text)
    return "" if found is None else found[0]


def calls_in(text: str) -> list[Called]:
    """The calls that a text makes, in the first of the forms above in which there are any."""
    return _behind_names(text) or _in_tags(text) or _listed(text)


def _behind_names(text: str) -> list[Called]:
    calls = []
    for found in NAMED.finditer(text):
        with suppress(ValueError, RecursionError):
            arguments, _ = DECODER.raw_decode(text, found.end())
            calls.append(Called(str(found[found.lastindex or 0]), arguments))
    return calls


def _in_tags(text: str) -> list[Called]:
    calls = []
    for found in TAGGED.finditer(text):
        pairs = ARGUMENT.findall(found[0])
        arguments = {key or other: value if key else of_other for key, value, other, of_other in pairs}
        calls.append(Called(found[1] or found[2], arguments, typed=False))
    return calls


def _listed(text: str) -> list[Called]:
    """Calls in JSON or as Python writes them, behind marks if there are any; what stands within other JSON is none."""
    calls: dict[bool, list[Called]] = {True: [], False: []}
    read_to = 0
    for begun in BEGUN.finditer(text):
        if begun.end() < read_to:
            continue
        marked = begun[1] is not None
        try:
            value, read_to = DECODER.raw_decode(text, begun.end())
        except (ValueError, RecursionError):
            calls[marked] += _python_calls(re.split(r"<\||```", text[begun.end() :].partition("\n")[0])[0].strip())
            continue
        for entry in value if isinstance(value, list) else [value]:
            calls[marked] += _of_json(entry, marked=marked)
    return calls[True] or calls[False]


def _of_json(entry: Any, *, marked: bool) -> list[Called]:
    """The call that an object is; where nothing marks it as one, it must have arguments."""
    entry = entry.get("function", entry) if isinstance(entry, dict) else None
    if not isinstance(entry, dict) or not isinstance(entry.get("name"), str):
        return []
    given = [entry[name] for name in ("arguments", "parameters") if name in entry]
    if not given and not marked:
        return []
    arguments = given[0] if given else None
    if isinstance(arguments, str) and arguments.strip():  # as servers give them
        with suppress(ValueError, RecursionError):
            arguments = json.loads(arguments)
    return [Called(entry["name"], arguments)] if isinstance(arguments := arguments or {}, dict) else []


def _python_calls(text: str) -> list[Called]:
    """The calls of `[name(key=value), ...]`, values being literals."""
    with suppress(ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        node = ast.parse(text, mode="eval").body
        if isinstance(node, ast.List) and all(isinstance(call, ast.Call) and not call.args for call in node.elts):
            return [
                Called(ast.unparse(call.func), {str(pair.arg): ast.literal_eval(pair.value) for pair in call.keywords})
                for call in node.elts
                if isinstance(call, ast.Call)
            ]
    return []


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
    named = isinstance(function, Mapping) and isinstance(function.get("name"), str)
    if not isinstance(function, Mapping) or not named or not isinstance(call.get("id"), str):
        raise UsageError(f"{where}: a call needs 'id', and 'function' with 'name', got {call!r:.80}")
    name, arguments = function["name"], arguments_text(function.get("arguments"))
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


Placed = tuple[tuple[Message, ...], int, Span]
"""A conversation, the message that holds the moved item, and its characters in that message's content."""


def as_text(messages: Sequence[Message], moved: int, span: Span) -> Placed:
    """A conversation with calls, results and descriptions of tools written as text; messages of one role are joined.

    `span` is the moved item's in message `moved`; where it stands then comes with the conversation.
    """
    joined: list[dict[str, str]] = []
    forms = {"tool": ("user", RESULT), DESCRIPTIONS: ("system", TOOLS)}
    for number, message in enumerate(messages):
        role, form = forms.get(message["role"], (str(message["role"]), "{}"))
        calls = [call_text(**call["function"]) for call in message.get("tool_calls", ())]
        told = form.format("\n".join([*([message["content"]] if message["content"] else []), *calls]))
        alike = joined.pop() if joined and joined[-1]["role"] == role else {}
        lead = f"{alike['content']}\n\n" if alike else ""
        thoughts = alike.get(THOUGHTS, "") + message.get(THOUGHTS, "")
        joined.append({"role": role, "content": lead + told, **({THOUGHTS: thoughts} if thoughts else {})})
        if number == moved:
            shift = len(lead) + form.index("{}")
            index, place = len(joined) - 1, (span[0] + shift, span[1] + shift)
    return tuple(joined), index, place
