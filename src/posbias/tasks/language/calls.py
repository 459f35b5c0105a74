"""Calls of tools in what a model writes: the form in which they are kept as text, and the forms that are read.

Read are JSON and Python's calls, in tags, behind marks or alone in a line (Hermes, Qwen, Llama, Granite, Phi, older
Mistral), and the forms of Qwen 3.5 and Qwen3-Coder, GLM, Mistral, DeepSeek, Kimi and gpt-oss.
"""

import ast
import json
import re
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, NamedTuple

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
ARGUMENTS = ("arguments", "parameters")
DECODER = json.JSONDecoder()


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
    given = [entry[name] for name in ARGUMENTS if name in entry]
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
