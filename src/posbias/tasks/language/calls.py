"""Calls of tools in what a model writes: the form in which they are kept as text, and the forms that are read."""

import json
import re
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

CALL = "<tool_call>\n{}\n</tool_call>"
"""Form in which a call is written as text."""
TAGGED = re.compile(r"<tool_call>(.*?)(?:</tool_call>|\Z)", re.DOTALL)
MARKED = re.compile(r"(?:\[TOOL_CALLS\]|<\|python_tag\|>|```(?:json)?)?\s*(?=[\[{])")
"""What may stand before a text that is a call, or a list of calls, alone."""
ARGUMENTS = ("arguments", "parameters")


def call_text(name: str, arguments: str) -> str:
    """A call as text; the arguments are JSON."""
    return CALL.format(f'{{"name": {json.dumps(name)}, "arguments": {arguments}}}')


def calls_in(text: str) -> list[tuple[str, dict[str, Any]]]:
    """The calls that a text makes, each by name and arguments: in tags, or JSON that the text begins with."""
    tagged = TAGGED.findall(text)
    begun = MARKED.match(text.lstrip())
    parts = tagged or ([text.lstrip()[begun.end() :]] if begun else [])
    return [call for part in parts for call in _calls(part.strip())]


def _calls(part: str) -> Iterator[tuple[str, dict[str, Any]]]:
    with suppress(ValueError, RecursionError):
        value, _ = json.JSONDecoder().raw_decode(part)
        for entry in value if isinstance(value, list) else [value]:
            entry = entry.get("function", entry) if isinstance(entry, dict) else {}
            arguments = next((entry[name] for name in ARGUMENTS if isinstance(entry, dict) and name in entry), None)
            if isinstance(arguments, str):  # as servers give them
                arguments = json.loads(arguments)
            if isinstance(arguments, dict) and isinstance(entry.get("name"), str):
                yield entry["name"], arguments
