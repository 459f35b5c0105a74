"""Items of one's own: a file says which units can be moved, which one is, what is asked, and what is right.

Units are texts in a prompt (passages, candidates, options, instructions) or messages of a conversation, such as a
transcript of an agent, in which calls of tools and their results stay together (`calls.py`). A file holds one record a
line, which has either

    {"units": ["...", {"text": "...", "id": "b"}, ...], "moved": 1 or "b", "question": "...", "answer": "..."}

where a unit may be marked `"moved": true` instead, or `messages` in the place of units, with `tools` if descriptions of
tools are in play. What may stand beside: `answers` (a list) for `answer`, `target` (a text to score if the answer is a
pattern), `group` (records of one group count as one sample in intervals) and `id`.
"""

import json
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Annotated, Any, ClassVar

from annotated_types import Ge, MinLen
from pydantic import ConfigDict, model_validator

from posbias.checks import Count, CountOrZero, FileName, OneOf
from posbias.errors import UsageError, check_most
from posbias.files import parsed_json, read_lines
from posbias.prompts.tokens import DESCRIPTIONS, Message
from posbias.tasks.language.base import (
    LANGUAGE_TASKS,
    MOST_EXAMPLES,
    Draft,
    LanguageTask,
    Line,
    Text,
    check_form,
    line_of,
    listed,
    published_lines,
)
from posbias.tasks.language.calls import AMONG, Placed, as_text, movable_blocks, read_messages
from posbias.tasks.language.rules import LETTERS, RULES, Call, Choice, Rule

CLOSING = "\nAnswer with one letter."
CALLS = ("native", "text")
LONGER = "prompts are made longer by a file of further units, fillers='FILE.jsonl'"
TOOLS = "tools"
"""Descriptions of tools, where these are what is moved among."""

Unit = str | tuple[Message, ...]
"""A text, or messages that stay together."""


class OwnUnit(Line):
    """A unit that is a text, alone or with a name."""

    model_config = ConfigDict(extra="forbid")

    text: Text
    id: str | int | None = None
    moved: bool | None = None

    @model_validator(mode="before")
    @classmethod
    def _of_text(cls, unit: object) -> object:
        return {"text": unit} if isinstance(unit, str) else unit


class OwnRecord(Line):
    """A record of a file."""

    model_config = ConfigDict(extra="forbid")

    units: Annotated[list[OwnUnit], MinLen(1)] | None = None
    messages: Annotated[list[Any], MinLen(1)] | None = None
    tools: Annotated[list[Any], MinLen(1)] | None = None
    moved: Any = None
    question: Text | None = None
    answer: Any = None
    answers: Annotated[list[Any], MinLen(1)] | None = None
    target: Text | None = None
    group: str | int | None = None
    id: Any = None


@dataclass(frozen=True)
class ItemRecord:
    """A record of a file: units in their given order, some of which can change places, and one is moved over these."""

    where: str
    units: tuple[Unit, ...]
    slots: tuple[int, ...]
    """Indices of the units that can change places."""
    moved: int
    """Index of the moved one."""
    question: str | None = None
    answers: tuple[str, ...] = ()
    """Accepted answers; empty if the answer is the letter of the moved unit's place."""
    target: str | None = None
    group: str = ""
    messages: tuple[Message, ...] = ()
    """The conversation, if what is moved is not part of it."""
    tools: tuple[str, ...] = ()
    """Descriptions of tools that stay in place, as JSON."""

    @property
    def texts(self) -> bool:
        """True if units are texts in a prompt."""
        return isinstance(self.units[0], str) and not self.messages

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


def _read_record(given: dict[str, Any], where: str, rule: Rule, among: str) -> ItemRecord:
    """A record, checked.

    Raises:
        UsageError: a field that is not known, is missing or holds something else.
    """
    record = line_of(OwnRecord, given, where)
    if (record.units is None) == (record.messages is None):
        raise UsageError(f"{where}: need one of the fields 'units' and 'messages'")
    if record.target is not None and rule.text:
        raise UsageError(f"{where}: field 'target' goes with a rule whose answer is no text; {rule.name} scores it")
    if record.units is not None:
        if record.tools is not None:
            raise UsageError(f"{where}: field 'tools' goes with 'messages'")
        allowed = f"unit, by its index (0 ... {len(record.units) - 1}) or 'id', or a unit be marked \"moved\": true"
        fields = [unit.model_dump() for unit in record.units]
        texts = tuple(unit.text for unit in record.units)
        read = ItemRecord(where, texts, tuple(range(len(texts))), _moved(record, fields, "id", where, allowed))
    else:
        read = _of_messages(record, where, among)
    return replace(
        read,
        question=record.question,
        answers=_answers(record, where, rule),
        target=None if rule.text else record.target or "",
        group="" if record.group is None else str(record.group),
    )


def _answers(record: OwnRecord, where: str, rule: Rule) -> tuple[str, ...]:
    given = [name for name in ("answer", "answers") if getattr(record, name) is not None]
    if isinstance(rule, Choice):
        if given:
            raise UsageError(f"{where}: field {given[0]!r} goes without choice, which takes the moved one's letter")
        return ()
    if len(given) != 1:
        raise UsageError(f"{where}: need one of the fields 'answer' (a text or number) and 'answers' (a list)")
    answers = []
    for answer in record.answers or [record.answer]:
        text = json.dumps(answer) if isinstance(rule, Call) and isinstance(answer, Mapping) else answer
        if isinstance(text, bool) or not isinstance(text, str | int | float) or not str(text).strip():
            raise UsageError(f"{where}: field {given[0]!r} must hold texts or numbers, none empty, got {answer!r:.80}")
        try:
            rule.check(str(text))
        except UsageError as error:
            raise UsageError(f"{where}: field {given[0]!r}: {error}") from None
        answers.append(str(text))
    return tuple(answers)


def _moved(record: OwnRecord, entries: Sequence[Mapping[str, Any]], key: str, where: str, allowed: str) -> int:
    """Index of the one entry that is marked, or that `moved` names by its key or index."""
    moved, found = record.moved, [index for index, entry in enumerate(entries) if entry.get("moved") is True]
    if moved is not None and not isinstance(moved, bool):
        by_index = [moved] if isinstance(moved, int) and 0 <= moved < len(entries) else []
        found += [index for index, entry in enumerate(entries) if entry.get(key) == moved] or by_index
    if len(found) != 1:
        raise UsageError(f"{where}: field 'moved' must name one {allowed}, got {moved!r:.80}")
    return found[0]


def _of_messages(record: OwnRecord, where: str, among: str) -> ItemRecord:
    """Units that are messages, or descriptions of tools beside a conversation."""
    messages = read_messages(record.messages or (), where)
    tools = [_described(tool, f"{where}, tool {index}") for index, tool in enumerate(record.tools or ())]
    users = [index for index, message in enumerate(messages) if message["role"] == "user"]
    if record.question is None and (not users or messages[-1]["role"] not in ("user", "tool")):
        raise UsageError(
            f"{where}: field 'messages' must end with a message of the user or a result, for the model to answer; or "
            "give a 'question'"
        )
    lines = tuple(json.dumps(tool, ensure_ascii=False) for tool in tools)
    if among == TOOLS:
        functions = [tool["function"] for tool in tools]
        allowed = f"of the tools {', '.join(function['name'] for function in functions)}"
        moved = _moved(record, functions, "name", where, allowed)
        return ItemRecord(where, lines, tuple(range(len(lines))), moved, messages=tuple(messages))
    question = users[-1] if record.question is None else None  # the message that is answered
    allowed = (
        f"message, by its index (0 ... {len(messages) - 1}) or the 'tool_call_id' of its result, or a message be "
        'marked "moved": true'
    )
    index = _moved(record, record.messages or (), "tool_call_id", where, allowed)
    if index == question:
        raise UsageError(f"{where}: message {index} is the question; move another, or give a 'question'")
    blocks, slots = movable_blocks(messages, among, index, question)
    moved = next((number for number, block in enumerate(blocks) if index in block), -1)
    if moved not in slots:
        raise UsageError(f"{where}: message {index} cannot be moved among {among!r}")
    if not messages[blocks[moved][-1]]["content"]:
        raise UsageError(f"{where}, message {blocks[moved][-1]}: its 'content' is empty, so its place cannot be told")
    units = tuple(tuple(messages[number] for number in block) for block in blocks)
    return ItemRecord(where, units, tuple(slots), moved, tools=lines)


def _described(tool: Any, where: str) -> dict[str, Any]:
    """A tool's description in the format of OpenAI's API."""
    wrapped = tool if isinstance(tool, Mapping) and "function" in tool else {"function": tool}
    function = wrapped["function"]
    if not isinstance(function, Mapping) or not (function.get("name") and isinstance(function["name"], str)):
        raise UsageError(f"{where}: a description of a tool must be an object with a 'name', got {tool!r:.80}")
    if not isinstance(function.get("description") or "", str):
        raise UsageError(f"{where}: field 'description' must be text, got {function['description']!r:.80}")
    return {"type": "function", **wrapped}


Asked = tuple[ItemRecord, list[Unit], str]
"""A record, the units around the moved one in order, fillers among them, and the name of its cluster."""


@LANGUAGE_TASKS.register("items")
@dataclass(frozen=True)
class Items(LanguageTask):
    """Answer the questions of a file of one's own, in which one unit moves and the others keep their order."""

    file: FileName
    """A .jsonl or .jsonl.gz file of records: `units` or `messages`, which one is `moved`, `question`, `answer`
    (above)."""
    rule: str = "contains"
    """Rule of scoring (`rules.py`): contains, equals, whole_words, regex, choice (a letter), number(tolerance=0.5),
    call (of a tool) ..., or python(function='file.py:function'), which --allow-code must permit."""
    template: FileName | None = None
    """A text file with one's own prompt, `{units}` once and `{question}` at least once; None: the units, then the
    question, which comes first if letters are asked for. For units that are texts."""
    entry: str | None = None
    """How each unit is listed: `{text}` once, and before it, if wanted, `{number}` or `{letter}`; None: "[{number}]
    {text}", for letters "{letter}. {text}"."""
    among: Annotated[str, OneOf(*AMONG, TOOLS)] = "alike"
    """Places over which a message moves: `alike`, those of calls or of messages of its role; `turns`, with all up to
    the next message of the user; `results`, of calls made together; `tools`: a description moves among these."""
    calls: Annotated[str, OneOf(*CALLS)] = "native"
    """How calls, results and descriptions of tools are put to a model: `native`, as its template or server has them, or
    as `text`."""
    depths: Annotated[Count, Ge(2)] | None = None
    """Evenly spread places at which the moved unit is put, for records with different numbers of units (>= 2); None:
    every place."""
    fillers: FileName | None = None
    """A .jsonl file of further units, which `filled` and lengths draw from."""
    filled: CountOrZero = 0
    """Fillers among the other units of every record, drawn by the seed."""

    max_tokens: ClassVar[int] = 64
    counted: ClassVar[str] = "filled"
    slot: ClassVar[str] = "units"

    def __post_init__(self) -> None:
        if self.filled and self.fillers is None:
            raise UsageError(f"{self.name}: {LONGER}")
        if self.among == TOOLS and self.fillers is not None:
            raise UsageError(f"{self.name}: among='tools' takes no fillers")
        check_form(self.name, self.entry, "text", "number text", "letter text")
        self.answer_rule  # noqa: B018  a rule that is none is refused at once

    @cached_property
    def answer_rule(self) -> Rule:
        """The rule that is named."""
        return RULES.parse(self.rule)

    @property
    def _letters(self) -> bool:
        """True if the answer is the letter of the moved unit's place, which the file does not say."""
        return isinstance(self.answer_rule, Choice)

    @cached_property
    def _raw(self) -> list[tuple[str, dict[str, Any]]]:
        records = list(published_lines(self.file))
        if not records:
            raise UsageError(f"{self.file!r} holds no record")
        return records

    @cached_property
    def _fillers(self) -> list[Unit]:
        """Units, one a line: a text in quotes or an object with `text`; a message, or a list of them."""
        fillers: list[Unit] = []
        for where, line in read_lines(self.fillers) if self.fillers is not None else ():
            value = parsed_json(line, where)
            if isinstance(value, Mapping) and "role" in value:
                value = [value]
            is_text = not isinstance(value, list)
            fillers.append(line_of(OwnUnit, value, where).text if is_text else tuple(read_messages(value, where)))
            check_most(f"{self.fillers!r}: what one file holds", len(fillers), MOST_EXAMPLES, "examples")
        return fillers

    @property
    def plain(self) -> tuple[str, str]:
        """The units, then the question, which comes first if letters are asked for."""
        if self._letters:
            return "{question}\n", CLOSING if self.chat else "\nAnswer:"
        return "", "\n\nQuestion: {question}\nAnswer:"

    @cached_property
    def n_items(self) -> int:
        """Places of the moved unit: as many as in the first record, which all others must have, or `depths`."""
        return self.depths or self._places(self._record(0))

    def _places(self, record: ItemRecord) -> int:
        return len(record.slots) + self.filled

    def _record(self, index: int) -> ItemRecord:
        where, record = self._raw[index]
        return _read_record(record, where, self.answer_rule, self.among)

    def noted(self, text: str | None) -> dict[str, float | None]:
        """`chosen`, if letters are asked for: the place of the one that is named; None if none is."""
        if not isinstance(self.answer_rule, Choice):
            return {}
        named = None if text is None else self.answer_rule.read(text)
        return {"chosen": None if named is None else float(LETTERS.index(named))}

    def at_length(self, tokens: int, tokenizer: Any, *, seed: int = 0) -> LanguageTask:
        """This task with as many fillers as fit; see `LanguageTask.at_length`."""
        if self.fillers is None:
            raise UsageError(f"{self.name}: {LONGER}")
        return super().at_length(tokens, tokenizer, seed=seed)

    def draw(self, tokenizer: Any, *, count: int, seed: int) -> Iterator[Asked]:
        """Records with the units around the moved one in order."""
        if len(self._raw) < count:
            raise UsageError(f"{self.file!r} holds {len(self._raw)} records; {count} samples are asked")
        records = [self._checked(index) for index in range(count)]
        clustered = any(record.get("group") is not None for _, record in self._raw)
        if len(self._fillers) < self.filled:
            raise UsageError(f"{self.fillers!r} holds {len(self._fillers)} fillers; {self.filled} are asked")
        return (self._asked(record, seed, index, clustered=clustered) for index, record in enumerate(records))

    def _checked(self, index: int) -> ItemRecord:
        record = self._record(index)
        places, texts = self._places(record), record.texts
        if self.depths is None and places != self.n_items:
            raise UsageError(
                f"{record.where}: the moved one has {places} places, in the first record {self.n_items}; "
                "items(depths=...) spreads so many over any number"
            )
        least = max(2, self.n_items)
        if places < least:
            raise UsageError(f"{record.where}: the moved one has {places} of at least {least} places")
        if self._letters and (not texts or places > len(LETTERS)):
            raise UsageError(f"{record.where}: rule 'choice' takes units that are texts, at most {len(LETTERS)}")
        if not texts and (self.template or self.entry):
            raise UsageError(f"{record.where}: template and entry are for units that are texts, not for messages")
        if texts and record.question is None:
            raise UsageError(f"{record.where}: need the field 'question'")
        if any(isinstance(filler, str) != texts for filler in self._fillers):
            raise UsageError(f"{self.fillers!r}: fillers must be {'texts' if texts else 'messages'}, as the units are")
        return record

    def _asked(self, record: ItemRecord, seed: int, index: int, *, clustered: bool) -> Asked:
        source = random.Random(f"items {seed} {index}")
        others = [record.units[slot] for slot in record.slots if slot != record.moved]
        total = len(others) + self.filled
        for number, filler in enumerate(source.sample(self._fillers, self.filled)):  # evenly spread
            others.insert(int((number + 0.5) * total / self.filled), filler)
        cluster = record.group and f"group {record.group}"
        return record, others, (cluster or record.where) if clustered else ""

    def draft(self, sample: Asked, position: int) -> Draft:
        """Units as texts in a prompt, or as messages of a conversation."""
        record, others, cluster = sample
        slot = position if self.depths is None else round(position * len(others) / (self.depths - 1))
        units, moved = record.at(slot, others)
        answers = (LETTERS[slot],) if self._letters else record.answers
        if record.texts:
            form = self.entry or ("{letter}. {text}" if self._letters else "[{number}] {text}")
            told = listed(list(map(str, units)), moved, answers, around=self.framed(str(record.question)), form=form)
            # With letters the order of passages decides which one is right.
            told = replace(told, passages=()) if self._letters else told
        else:
            messages, index, span = self._conversation(record, units, moved)
            told = Draft(str(messages[index]["content"]), answers, span, messages=messages, moved_message=index)
        return replace(told, target=record.target, cluster=cluster)

    def _conversation(self, record: ItemRecord, units: Sequence[Unit], moved: int) -> Placed:
        told = record.messages
        tools = [str(unit) for unit in units] if told else record.tools
        described = ({"role": DESCRIPTIONS, "content": "\n".join(tools)},) if tools else ()
        asked = () if record.question is None else ({"role": "user", "content": record.question},)
        if told:
            index, begin = 0, sum(len(tool) + 1 for tool in tools[:moved])
            span = (begin, begin + len(tools[moved]))
        else:
            blocks = [unit for unit in units if not isinstance(unit, str)]
            told = tuple(message for block in blocks for message in block)
            last = sum(map(len, blocks[: moved + 1])) - 1
            index, span = len(described) + last, (0, len(str(told[last]["content"])))
        messages = (*described, *told, *asked)
        return as_text(messages, index, span) if self.calls == "text" else (messages, index, span)
