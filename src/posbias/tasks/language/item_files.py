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

from posbias.errors import UsageError
from posbias.files import parsed_json, read_lines, read_whole
from posbias.limits import EXAMPLES
from posbias.tasks.language.base import group_field, list_field, published_lines, text_field
from posbias.tasks.language.locating import Message
from posbias.tasks.language.rules import Rule
from posbias.tasks.language.transcripts import AMONG, moved_message, question_of, read_messages

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

    def others(self) -> list[Unit]:
        """Units that can change places, without the moved one."""
        return [self.units[slot] for slot in self.slots if slot != self.moved]

    def at(self, slot: int, others: Sequence[Unit]) -> tuple[list[Unit], int]:
        """All units with the moved one in a slot and the others, as many as there are or more, in the other slots.

        Also its index among them. More slots than the record has follow its last.
        """
        movable = [*others[:slot], self.units[self.moved], *others[slot:]]
        last = self.slots[-1]
        places = [*self.slots, *range(last + 1, last + 1 + len(movable) - len(self.slots))]
        stay = [unit for index, unit in enumerate(self.units) if index not in self.slots]
        queue, fixed = iter(movable), iter(stay)
        total = len(movable) + len(stay)
        return [next(queue) if index in places else next(fixed) for index in range(total)], places[slot]


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
    messages: tuple[Message, ...] = ()
    """The conversation, if what is moved is not part of it."""
    tools: tuple[str, ...] = ()
    """Descriptions of tools that stay in place, as JSON."""


def raw_records(path: str) -> list[tuple[str, dict[str, Any]]]:
    """The records of a file, each with its place for messages."""
    if Path(path).suffix != ".json":
        return list(published_lines(path))
    name, entries = Path(path).name, parsed_json(read_whole(path, "file of items"), Path(path).name)
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        raise UsageError(f"{name}: need a list of objects; a file with one object per line is a .jsonl")
    EXAMPLES.check(f"{path!r}: what one file holds", len(entries))
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
    if target is not None and not rule.text:
        target = text_field(record, "target", where)
    elif target is not None:
        raise UsageError(f"{where}: field 'target' goes with a rule whose answer is no text; {rule.name} scores it")
    read = _read_units if "units" in record else _read_conversation
    arrangement, conversation = read(record, where, asked=question is not None, among=among)
    return ItemRecord(
        where=where,
        arrangement=arrangement,
        question=question,
        answers=_answers(record, where, rule),
        target=target if rule.text else target or "",
        group=group,
        **conversation,
    )


def _answers(record: dict[str, Any], where: str, rule: Rule) -> tuple[str, ...]:
    given = [name for name in ("answer", "answers") if record.get(name) is not None]
    if rule.of_place:
        if given:
            raise UsageError(
                f"{where}: field {given[0]!r} goes without {rule.name}, which takes the moved one's letter"
            )
        return ()
    if len(given) != 1:
        raise UsageError(f"{where}: need one of the fields 'answer' (a text or number) and 'answers' (a list)")
    answers = list_field(record, "answers", where) if given == ["answers"] else [record["answer"]]
    if rule.objects:
        answers = [json.dumps(answer) if isinstance(answer, Mapping) else answer for answer in answers]
    for answer in answers:
        if isinstance(answer, bool) or not isinstance(answer, str | int | float) or not str(answer).strip():
            raise UsageError(f"{where}: field {given[0]!r} must hold texts or numbers, none empty, got {answer!r:.80}")
        try:
            rule.check(str(answer))
        except UsageError as error:
            raise UsageError(f"{where}: field {given[0]!r}: {error}") from None
    return tuple(map(str, answers))


def _read_units(record: dict[str, Any], where: str, *, asked: bool, among: str) -> tuple[Arrangement, dict[str, Any]]:
    """Units that are texts."""
    if "tools" in record:
        raise UsageError(f"{where}: field 'tools' goes with 'messages'")
    units = list_field(record, "units", where)
    texts = [_text_of(unit, f"{where}, unit {index}") for index, unit in enumerate(units)]
    ids = [unit.get("id") if isinstance(unit, Mapping) else None for unit in units]
    marked = [index for index, unit in enumerate(units) if isinstance(unit, Mapping) and unit.get("moved") is True]
    moved = record.get("moved")
    if moved is not None:
        by_index = type(moved) is int and 0 <= moved < len(units)
        marked += [index for index, name in enumerate(ids) if name == moved and name is not None] or [moved] * by_index
    if len(marked) != 1:
        raise UsageError(
            f"{where}: field 'moved' must name one unit, by its index (0 ... {len(units) - 1}) or 'id', or a unit be "
            f'marked "moved": true, got {moved!r:.80}'
        )
    return Arrangement(tuple(texts), tuple(range(len(texts))), marked[0]), {}


def _text_of(unit: Any, where: str) -> str:
    if isinstance(unit, str):
        unit = {"text": unit}
    if not isinstance(unit, Mapping) or set(unit) - set(UNIT_FIELDS):
        raise UsageError(
            f"{where}: a unit must be text, or an object with {', '.join(UNIT_FIELDS)} (messages go into 'messages'), "
            f"got {unit!r:.80}"
        )
    return text_field(dict(unit), "text", where)


def _read_conversation(
    record: dict[str, Any], where: str, *, asked: bool, among: str
) -> tuple[Arrangement, dict[str, Any]]:
    """Units that are messages, or descriptions of tools beside a conversation."""
    given = list_field(record, "messages", where)
    messages = read_messages(given, where)
    tools = list_field(record, "tools", where) if record.get("tools") is not None else []
    question = None if asked else question_of(messages, where)
    if among == TOOLS:
        return _among_tools(tools, record.get("moved"), where), {"messages": tuple(messages)}
    index = moved_message(given, record.get("moved"), where)
    if index == question:
        raise UsageError(f"{where}: message {index} is the question; move another, or give a 'question'")
    blocks, slots = AMONG[among](messages, index, question)
    moved = next((number for number, block in enumerate(blocks) if index in block), -1)
    if moved not in slots:
        raise UsageError(f"{where}: message {index} cannot be moved among {among!r}")
    if not messages[blocks[moved][-1]]["content"]:
        raise UsageError(f"{where}, message {blocks[moved][-1]}: its 'content' is empty, so its place cannot be told")
    units = tuple(tuple(messages[number] for number in block) for block in blocks)
    return Arrangement(units, tuple(slots), moved), {"tools": _described(tools, where)[1]}


def _among_tools(tools: Sequence[Any], moved: Any, where: str) -> Arrangement:
    """Descriptions of tools as JSON, of which one is named."""
    names, units = _described(tools, where)
    if names.count(moved) != 1:
        raise UsageError(f"{where}: field 'moved' must name one of the tools {', '.join(names)}, got {moved!r:.80}")
    return Arrangement(units, tuple(range(len(units))), names.index(moved))


def _described(tools: Sequence[Any], where: str) -> tuple[list[str], tuple[str, ...]]:
    """Names of tools, and their descriptions as JSON in the format of OpenAI's API."""
    described = [tool if isinstance(tool, Mapping) and "function" in tool else {"function": tool} for tool in tools]
    names = []
    for index, tool in enumerate(described):
        fields = dict(tool["function"]) if isinstance(tool["function"], Mapping) else {}
        names.append(text_field(fields, "name", f"{where}, tool {index}"))
        if fields.get("description") is not None:
            text_field(fields, "description", f"{where}, tool {index}", empty=True)
    return names, tuple(json.dumps({"type": "function", **tool}, ensure_ascii=False) for tool in described)


def read_fillers(path: str) -> list[Unit]:
    """Units of a file, one per line: a text in quotes or an object with `text`; a message, or a list of them."""
    fillers: list[Unit] = []
    for where, line in read_lines(path):
        value = parsed_json(line, where)
        if isinstance(value, Mapping) and "role" in value:
            value = [value]
        fillers.append(tuple(read_messages(value, where)) if isinstance(value, list) else _text_of(value, where))
        EXAMPLES.check(f"{path!r}: what one file holds", len(fillers))
    return fillers
