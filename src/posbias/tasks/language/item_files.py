"""Records of one's own: units in an order, of which one is moved, with a question and its accepted answers.

A .json file holds a list of records, any other one record per line (.jsonl, .jsonl.gz). A record has either

    {"units": ["...", {"text": "...", "id": "b"}, ...], "moved": 1 or "b", "question": "...", "answer": "..."}

where a unit may be marked `"moved": true` instead, or `messages` (`transcripts.py`) in the place of units, with `tools`
if descriptions of tools are in play. What may stand beside: `answers` (a list) for `answer`, `target` (a text to score
if the answer is a pattern), `group` (records of one group count as one sample in intervals) and `id`.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from posbias.errors import UsageError, check_most
from posbias.files import parsed_json, read_lines, read_whole
from posbias.tasks.language.base import MOST_EXAMPLES, group_field, list_field, published_lines, text_field
from posbias.tasks.language.locating import Message
from posbias.tasks.language.rules import Call, Choice, Rule
from posbias.tasks.language.transcripts import movable_blocks, movable_in_words, read_messages

FIELDS = ("units", "messages", "tools", "moved", "question", "answer", "answers", "target", "group", "id")
UNIT_FIELDS = ("text", "id", "moved")
TOOLS = "tools"
"""Descriptions of tools, where these are what is moved among."""

Unit = str | tuple[Message, ...]
"""A text, or messages that stay together."""


@dataclass(frozen=True)
class Arrangement:
    """Units in their given order, of which some can change places and one is moved over all these places."""

    units: tuple[Unit, ...]
    slots: tuple[int, ...]
    """Indices of the units that can change places."""
    moved: int
    """Index of the moved one."""
    messages: tuple[Message, ...] = ()
    """The conversation, if what is moved is not part of it."""
    tools: tuple[str, ...] = ()
    """Descriptions of tools that stay in place, as JSON."""

    @property
    def texts(self) -> bool:
        """True if units are texts in a prompt."""
        return isinstance(self.units[0], str) and not self.messages

    def others(self) -> list[Unit]:
        """Units that can change places, without the moved one."""
        return [self.units[slot] for slot in self.slots if slot != self.moved]

    def at(self, slot: int, others: Sequence[Unit]) -> tuple[list[Unit], int]:
        """All units with the moved one in a slot and the others, as many as there are or more, in the other slots.

        Also its index among them. More slots than the record has follow its last.
        """
        movable, units, last = [*others[:slot], self.units[self.moved], *others[slot:]], [*self.units], self.slots[-1]
        more = len(movable) - len(self.slots)
        units[last + 1 : last + 1] = [""] * more
        places = [*self.slots, *range(last + 1, last + 1 + more)]
        for place, unit in zip(places, movable, strict=True):
            units[place] = unit
        return units, places[slot]


@dataclass(frozen=True)
class ItemRecord:
    """A record of a file."""

    where: str
    arrangement: Arrangement
    question: str | None
    answers: tuple[str, ...]
    """Accepted answers; empty if the answer is the letter of the moved unit's place."""
    target: str | None
    group: str


def raw_records(path: str) -> list[tuple[str, dict[str, Any]]]:
    """The records of a file, each with its place for messages."""
    if Path(path).suffix != ".json":
        return list(published_lines(path))
    name, entries = Path(path).name, parsed_json(read_whole(path, "file of items"), Path(path).name)
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        raise UsageError(f"{name}: need a list of objects; a file with one object per line is a .jsonl")
    check_most(f"{path!r}: what one file holds", len(entries), MOST_EXAMPLES, "examples")
    return [(f"{name}, record {number}", entry) for number, entry in enumerate(entries, 1)]


def read_record(record: dict[str, Any], where: str, *, rule: Rule, among: str) -> ItemRecord:
    """A record, checked.

    Raises:
        UsageError: a field that is not known, is missing or holds something else.
    """
    if unknown := sorted(set(record) - set(FIELDS)):
        raise UsageError(f"{where}: unknown field {unknown[0]!r}; allowed: {', '.join(FIELDS)}")
    if ("units" in record) == ("messages" in record):
        raise UsageError(f"{where}: need one of the fields 'units' and 'messages'")
    question = text_field(record, "question", where) if record.get("question") is not None else None
    group, target = group_field(record, where), record.get("target")
    if target is not None and rule.text:
        raise UsageError(f"{where}: field 'target' goes with a rule whose answer is no text; {rule.name} scores it")
    if not rule.text:
        target = "" if target is None else text_field(record, "target", where)
    if "units" in record:
        arrangement = _of_texts(record, where)
    else:
        arrangement = _of_messages(record, where, asked=question is not None, among=among)
    return ItemRecord(where, arrangement, question, _answers(record, where, rule), target, group)


def _answers(record: dict[str, Any], where: str, rule: Rule) -> tuple[str, ...]:
    given = [name for name in ("answer", "answers") if record.get(name) is not None]
    if isinstance(rule, Choice):
        if given:
            raise UsageError(
                f"{where}: field {given[0]!r} goes without {rule.name}, which takes the moved one's letter"
            )
        return ()
    if len(given) != 1:
        raise UsageError(f"{where}: need one of the fields 'answer' (a text or number) and 'answers' (a list)")
    answers = list_field(record, "answers", where) if given == ["answers"] else [record["answer"]]
    if isinstance(rule, Call):
        answers = [json.dumps(answer) if isinstance(answer, Mapping) else answer for answer in answers]
    for answer in answers:
        if isinstance(answer, bool) or not isinstance(answer, str | int | float) or not str(answer).strip():
            raise UsageError(f"{where}: field {given[0]!r} must hold texts or numbers, none empty, got {answer!r:.80}")
        try:
            rule.check(str(answer))
        except UsageError as error:
            raise UsageError(f"{where}: field {given[0]!r}: {error}") from None
    return tuple(map(str, answers))


def _moved(record: dict[str, Any], entries: Sequence[Any], key: str, where: str, allowed: str) -> int:
    """Index of the one entry that is marked, or that `moved` names by its key or index."""
    moved, fields = record.get("moved"), [entry if isinstance(entry, Mapping) else {} for entry in entries]
    found = [index for index, entry in enumerate(fields) if entry.get("moved") is True]
    if moved is not None and not isinstance(moved, bool):
        by_index = [moved] if isinstance(moved, int) and 0 <= moved < len(entries) else []
        found += [index for index, entry in enumerate(fields) if entry.get(key) == moved] or by_index
    if len(found) != 1:
        raise UsageError(f"{where}: field 'moved' must name one {allowed}, got {moved!r:.80}")
    return found[0]


def _of_texts(record: dict[str, Any], where: str) -> Arrangement:
    if "tools" in record:
        raise UsageError(f"{where}: field 'tools' goes with 'messages'")
    units = list_field(record, "units", where)
    texts = [_text_of(unit, f"{where}, unit {index}") for index, unit in enumerate(units)]
    allowed = f"unit, by its index (0 ... {len(units) - 1}) or 'id', or a unit be marked \"moved\": true"
    return Arrangement(tuple(texts), tuple(range(len(texts))), _moved(record, units, "id", where, allowed))


def _text_of(unit: Any, where: str) -> str:
    if isinstance(unit, str):
        unit = {"text": unit}
    if not isinstance(unit, Mapping) or set(unit) - set(UNIT_FIELDS):
        raise UsageError(
            f"{where}: a unit must be text, or an object with {', '.join(UNIT_FIELDS)} (messages go into 'messages'), "
            f"got {unit!r:.80}"
        )
    return text_field(dict(unit), "text", where)


def _of_messages(record: dict[str, Any], where: str, *, asked: bool, among: str) -> Arrangement:
    """Units that are messages, or descriptions of tools beside a conversation."""
    given = list_field(record, "messages", where)
    messages = read_messages(given, where)
    tools = list_field(record, "tools", where) if record.get("tools") is not None else []
    described = [_described(tool, f"{where}, tool {index}") for index, tool in enumerate(tools)]
    users = [index for index, message in enumerate(messages) if message["role"] == "user"]
    if not asked and (not users or messages[-1]["role"] not in ("user", "tool")):
        raise UsageError(
            f"{where}: field 'messages' must end with a message of the user or a result, for the model to answer; or "
            "give a 'question'"
        )
    lines = tuple(json.dumps(tool, ensure_ascii=False) for tool in described)
    if among == TOOLS:
        functions = [tool["function"] for tool in described]
        allowed = f"of the tools {', '.join(function['name'] for function in functions)}"
        moved = _moved(record, functions, "name", where, allowed)
        return Arrangement(lines, tuple(range(len(lines))), moved, messages=tuple(messages))
    question = None if asked else users[-1]  # the message that is answered
    allowed = (
        f"message, by its index (0 ... {len(given) - 1}) or the 'tool_call_id' of its result, or a message be marked "
        f'"moved": true (these can be moved: {movable_in_words(messages)})'
    )
    index = _moved(record, given, "tool_call_id", where, allowed)
    if index == question:
        raise UsageError(f"{where}: message {index} is the question; move another, or give a 'question'")
    blocks, slots = movable_blocks(messages, among, index, question)
    moved = next((number for number, block in enumerate(blocks) if index in block), -1)
    if moved not in slots:
        raise UsageError(f"{where}: message {index} cannot be moved among {among!r}")
    if not messages[blocks[moved][-1]]["content"]:
        raise UsageError(f"{where}, message {blocks[moved][-1]}: its 'content' is empty, so its place cannot be told")
    units = tuple(tuple(messages[number] for number in block) for block in blocks)
    return Arrangement(units, tuple(slots), moved, tools=lines)


def _described(tool: Any, where: str) -> dict[str, Any]:
    """A tool's description in the format of OpenAI's API."""
    described = {
        "type": "function",
        **(tool if isinstance(tool, Mapping) and "function" in tool else {"function": tool}),
    }
    fields = dict(described["function"]) if isinstance(described["function"], Mapping) else {}
    text_field(fields, "name", where)
    if fields.get("description") is not None:
        text_field(fields, "description", where, empty=True)
    return described


def read_fillers(path: str) -> list[Unit]:
    """Units of a file, one per line: a text in quotes or an object with `text`; a message, or a list of them."""
    fillers: list[Unit] = []
    for where, line in read_lines(path):
        value = parsed_json(line, where)
        if isinstance(value, Mapping) and "role" in value:
            value = [value]
        fillers.append(tuple(read_messages(value, where)) if isinstance(value, list) else _text_of(value, where))
        check_most(f"{path!r}: what one file holds", len(fillers), MOST_EXAMPLES, "examples")
    return fillers
