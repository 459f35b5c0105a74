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
    QUESTION_FIRST,
    Asked,
    Draft,
    LanguageTask,
    Line,
    Order,
    Text,
    check_form,
    check_order,
    line_of,
    published_lines,
)
from posbias.tasks.language.calls import AMONG, as_text, movable_blocks, read_messages
from posbias.tasks.language.rules import LETTERS, Rule

LONGER = "prompts are made longer by a file of further units, fillers='FILE.jsonl'"
TOOLS = "tools"
"""Descriptions of tools, where these are what is moved among."""


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
class Transcript(Asked):
    """A conversation in which messages that stay together, or descriptions of tools, change places."""

    units: tuple[Any, ...] = ()
    """All of the conversation, or all descriptions, in their given order: blocks of messages, or lines of JSON."""
    slots: tuple[int, ...] = ()
    """Indices of those that can change places, the moved one's among them."""
    messages: tuple[Message, ...] = ()
    """The conversation, if descriptions are what is moved."""
    tools: tuple[str, ...] = ()
    """Descriptions of tools, if they stay in place."""

    def arranged(self, slot: int) -> tuple[list[Any], int]:
        """All units with the moved one in a slot, and its index; more others than slots follow the last of these."""
        movable = iter([*self.others[:slot], self.moved, *self.others[slot:]])
        units: list[Any] = []
        for index, unit in enumerate(self.units):
            units.append(next(movable) if index in self.slots else unit)
            if index == self.slots[-1]:
                units += movable
        return units, next(index for index, unit in enumerate(units) if unit is self.moved)


def _read_record(given: dict[str, Any], where: str, rule: Rule, among: str) -> Asked:
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
        if record.question is None:
            raise UsageError(f"{where}: need the field 'question'")
        allowed = f"unit, by its index (0 ... {len(record.units) - 1}) or 'id', or a unit be marked \"moved\": true"
        fields = [unit.model_dump() for unit in record.units]
        moved = _moved(record, fields, "id", where, allowed)
        texts = [unit.text for unit in record.units]
        read = Asked("", (), texts.pop(moved), tuple(texts), rank=moved)
    else:
        read = _transcript(record, where, among)
    return replace(
        read,
        question=record.question or "",
        answers=_answers(record, where, rule),
        target=None if rule.text else record.target or "",
        cluster="" if record.group is None else f"group {record.group}",
    )


def _answers(record: OwnRecord, where: str, rule: Rule) -> tuple[str, ...]:
    given = [name for name in ("answer", "answers") if getattr(record, name) is not None]
    if rule.name == "choice":
        if given:
            raise UsageError(f"{where}: field {given[0]!r} goes without choice, which takes the moved one's letter")
        return ()
    if len(given) != 1:
        raise UsageError(f"{where}: need one of the fields 'answer' (a text or number) and 'answers' (a list)")
    answers = []
    for answer in record.answers or [record.answer]:
        text = json.dumps(answer) if rule.name == "call" and isinstance(answer, Mapping) else answer
        if isinstance(text, bool) or not isinstance(text, str | int | float) or not str(text).strip():
            raise UsageError(f"{where}: field {given[0]!r} must hold texts or numbers, none empty, got {answer!r:.80}")
        rule.check(str(text), f"{where}: field {given[0]!r}")
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


def _transcript(record: OwnRecord, where: str, among: str) -> Transcript:
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
        moved, slots = _moved(record, functions, "name", where, allowed), [*range(len(lines))]
        units: tuple[Any, ...] = lines
    else:
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
            raise UsageError(
                f"{where}, message {blocks[moved][-1]}: its 'content' is empty, so its place cannot be told"
            )
        units = tuple(tuple(messages[number] for number in block) for block in blocks)
    others = tuple(units[slot] for slot in slots if slot != moved)
    told, kept = (tuple(messages), ()) if among == TOOLS else ((), lines)
    return Transcript("", (), units[moved], others, units=units, slots=tuple(slots), messages=told, tools=kept)


def _described(tool: Any, where: str) -> dict[str, Any]:
    """A tool's description in the format of OpenAI's API."""
    wrapped = tool if isinstance(tool, Mapping) and "function" in tool else {"function": tool}
    function = wrapped["function"]
    if not isinstance(function, Mapping) or not (function.get("name") and isinstance(function["name"], str)):
        raise UsageError(f"{where}: a description of a tool must be an object with a 'name', got {tool!r:.80}")
    if not isinstance(function.get("description") or "", str):
        raise UsageError(f"{where}: field 'description' must be text, got {function['description']!r:.80}")
    return {"type": "function", **wrapped}


@LANGUAGE_TASKS.register("items")
@dataclass(frozen=True)
class Items(LanguageTask):
    """Answer the questions of a file of one's own, in which one unit moves and the others keep their order."""

    file: FileName
    """A .jsonl or .jsonl.gz file of records: `units` or `messages`, which one is `moved`, `question`, `answer`
    (docs/evaluate.md)."""
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
    calls: Annotated[str, OneOf("native", "text")] = "native"
    """How calls, results and descriptions of tools are put to a model: `native`, as its template or server has them, or
    as `text`."""
    depths: Annotated[Count, Ge(2)] | None = None
    """Evenly spread places at which the moved unit is put, for records with different numbers of units (>= 2); None:
    every place."""
    fillers: FileName | None = None
    """A .jsonl file of further units, which `filled` and lengths draw from."""
    filled: CountOrZero = 0
    """Fillers among the other units of every record, drawn by the seed."""
    order: Order | None = None
    """None: one unit moves. Else all stand in one order, as in `documents`; `given` is that of the file."""

    max_tokens: ClassVar[int] = 64
    counted: ClassVar[str] = "filled"
    slot: ClassVar[str] = "units"
    wording: ClassVar[tuple[str, ...]] = ("order",)

    def __post_init__(self) -> None:
        if self.filled and self.fillers is None:
            raise UsageError(f"{self.name}: {LONGER}")
        if self.among == TOOLS and self.fillers is not None:
            raise UsageError(f"{self.name}: among='tools' takes no fillers")
        check_form(self.name, self.entry, "text", "number text", "letter text")
        check_order(self, "fillers and depths move one unit" if self.fillers or self.depths else "")
        self.answer_rule  # noqa: B018  a rule that is none is refused at once

    @property
    def _letters(self) -> bool:
        """True if the answer is the letter of the moved unit's place, which the file does not say."""
        return self.answer_rule.name == "choice"

    @cached_property
    def _raw(self) -> list[tuple[str, dict[str, Any]]]:
        records = list(published_lines(self.file))
        if not records:
            raise UsageError(f"{self.file!r} holds no record")
        return records

    @cached_property
    def _fillers(self) -> list[Any]:
        """Units, one a line: a text in quotes or an object with `text`; a message, or a list of them."""
        fillers: list[Any] = []
        for where, line in read_lines(self.fillers) if self.fillers is not None else ():
            value = parsed_json(line, where)
            if isinstance(value, Mapping) and "role" in value:
                value = [value]
            is_text = not isinstance(value, list)
            fillers.append(line_of(OwnUnit, value, where).text if is_text else tuple(read_messages(value, where)))
            check_most(f"{self.fillers!r}: what one file holds", len(fillers), MOST_EXAMPLES, "examples")
        return fillers

    @property
    def stands_alone(self) -> bool:
        """False where the answer is the letter of a place, and for conversations, which are no lists."""
        return not self._letters and not any("messages" in record for _, record in self._raw)

    @property
    def plain(self) -> tuple[str, str]:
        """The units, then the question, which comes first if letters are asked for."""
        if self._letters:
            return "{question}\n", "\nAnswer with one letter." if self.chat else "\nAnswer:"
        return "Question: {question}\n\n" * (self.order == QUESTION_FIRST), "\n\nQuestion: {question}\nAnswer:"

    @property
    def form(self) -> str:
        """How a unit is listed."""
        return self.entry or ("{letter}. {text}" if self._letters else "[{number}] {text}")

    @cached_property
    def n_items(self) -> int:
        """Places of the moved unit: as many as in the first record, which all others must have, or `depths`; or one."""
        if self.order is not None:
            return 1
        return self.depths or len(self._record(0).others) + 1 + self.filled

    def _record(self, index: int) -> Asked:
        where, record = self._raw[index]
        return _read_record(record, where, self.answer_rule, self.among)

    def noted(self, text: str | None) -> dict[str, float | None]:
        """`chosen`, if letters are asked for: the place of the one that is named; None if none is."""
        if not self._letters:
            return {}
        named = None if text is None else self.answer_rule.read(text)
        return {"chosen": None if named is None else float(LETTERS.index(named))}

    def at_length(self, tokens: int, tokenizer: Any, *, seed: int = 0) -> LanguageTask:
        """This task with as many fillers as fit; see `LanguageTask.at_length`."""
        if self.fillers is None:
            raise UsageError(f"{self.name}: {LONGER}")
        return super().at_length(tokens, tokenizer, seed=seed)

    def draw(self, tokenizer: Any, *, count: int, seed: int) -> Iterator[Asked]:
        """Records with the units around the moved one in order, fillers evenly among them."""
        if len(self._raw) < count:
            raise UsageError(f"{self.file!r} holds {len(self._raw)} records; {count} samples are asked")
        records = [self._checked(index) for index in range(count)]
        clustered = any(record.get("group") is not None for _, record in self._raw)
        if len(self._fillers) < self.filled:
            raise UsageError(f"{self.fillers!r} holds {len(self._fillers)} fillers; {self.filled} are asked")
        samples = []
        for index, record in enumerate(records):
            source, others = random.Random(f"items {seed} {index}"), [*record.others]
            total = len(others) + self.filled
            for number, filler in enumerate(source.sample(self._fillers, self.filled)):
                others.insert(int((number + 0.5) * total / self.filled), filler)
            cluster = record.cluster or (self._raw[index][0] if clustered else "")
            asked = replace(record, others=tuple(others), cluster=cluster)
            if self.order is not None:
                asked = asked.ordered(self.order, random.Random(f"order {seed} {index}"))
            samples.append(asked)
        return iter(samples)

    def _checked(self, index: int) -> Asked:
        record, where = self._record(index), self._raw[index][0]
        places, texts = len(record.others) + 1 + self.filled, not isinstance(record, Transcript)
        if self.order is not None and not texts:
            raise UsageError(f"{where}: order {self.order!r} is for units that are texts; messages stay where they are")
        if self.depths is None and self.order is None and places != self.n_items:
            raise UsageError(
                f"{where}: the moved one has {places} places, in the first record {self.n_items}; "
                "items(depths=...) spreads so many over any number"
            )
        if places < (least := max(2, self.n_items)):
            raise UsageError(f"{where}: the moved one has {places} of at least {least} places")
        if self._letters and (not texts or places > len(LETTERS)):
            raise UsageError(f"{where}: rule 'choice' takes units that are texts, at most {len(LETTERS)}")
        if not texts and (self.template or self.entry):
            raise UsageError(f"{where}: template and entry are for units that are texts, not for messages")
        if any(isinstance(filler, str) != texts for filler in self._fillers):
            raise UsageError(f"{self.fillers!r}: fillers must be {'texts' if texts else 'messages'}, as the units are")
        return record

    def draft(self, sample: Asked, position: int) -> Draft:
        """Units as texts in a prompt, or as messages of a conversation."""
        slot = position if self.depths is None else round(position * len(sample.others) / (self.depths - 1))
        if isinstance(sample, Transcript):
            return self._conversation(sample, slot)
        told = super().draft(sample, slot)
        # With letters the order of passages decides which one is right.
        return replace(told, passages=()) if self._letters else told

    def _conversation(self, sample: Transcript, slot: int) -> Draft:
        units, moved = sample.arranged(slot)
        told = sample.messages or tuple(message for block in units for message in block)
        tools = units if sample.messages else sample.tools
        described = ({"role": DESCRIPTIONS, "content": "\n".join(tools)},) if tools else ()
        asked = ({"role": "user", "content": sample.question},) if sample.question else ()
        messages = (*described, *told, *asked)
        if sample.messages:
            index, begin = 0, sum(len(tool) + 1 for tool in tools[:moved])
            span = (begin, begin + len(tools[moved]))
        else:
            index = len(described) + sum(map(len, units[: moved + 1])) - 1
            span = (0, len(str(messages[index]["content"])))
        if self.calls == "text":
            messages, index, span = as_text(messages, index, span)
        return Draft(
            str(messages[index]["content"]),
            sample.answers,
            span,
            messages=messages,
            moved_message=index,
            target=sample.target,
            cluster=sample.cluster,
        )
