"""Items of one's own: a file says which units can be moved, which one is, what is asked, and what is right.

Units are texts in a prompt (passages, candidates, options, instructions) or messages of a conversation, such as a
transcript of an agent, in which calls of tools and their results stay together.
"""

import math
import random
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Annotated, Any, ClassVar

from annotated_types import Ge

from posbias.checks import Count, CountOrZero, FileName, OneOf
from posbias.errors import UsageError
from posbias.prompts.templates import DESCRIPTIONS
from posbias.tasks.language.base import (
    LANGUAGE_TASKS,
    MEASURED_SAMPLES,
    Draft,
    LanguageTask,
    around,
    listed,
)
from posbias.tasks.language.item_files import TOOLS, ItemRecord, Unit, raw_records, read_fillers, read_record
from posbias.tasks.language.rules import LETTERS, RULES, Choice, Rule
from posbias.tasks.language.transcripts import AMONG, Placed, as_text

PLAIN = r"(?:(?!\{(?:number|letter|text)\}).)*"
ENTRY = re.compile(rf"{PLAIN}(?:\{{(?:number|letter)\}}{PLAIN})?\{{text\}}{PLAIN}", re.DOTALL)
"""The form of an entry of one's own."""
CLOSING = "\nAnswer with one letter."
CALLS = ("native", "text")
LONGER = "prompts are made longer by a file of further units, fillers='FILE.jsonl'"


@dataclass(frozen=True)
class AskedRecord:
    """A record as it is asked."""

    record: ItemRecord
    others: tuple[Unit, ...]
    """Units around the moved one, in order, fillers among them."""
    cluster: str


@LANGUAGE_TASKS.register("items")
@dataclass(frozen=True)
class Items(LanguageTask):
    """Answer the questions of a file of one's own, in which one unit moves and the others keep their order."""

    file: FileName
    """A .jsonl, .jsonl.gz or .json file of records: `units` or `messages`, which one is `moved`, `question`, `answer`
    (`tasks/language/item_files.py`)."""
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
    repeats: Count = 1
    """Times that each record is asked, from the second on with the other units in another order (>= 1); what is said
    of positions counts records then."""

    max_tokens: ClassVar[int] = 64
    counted: ClassVar[str] = "filled"

    def __post_init__(self) -> None:
        if self.filled and self.fillers is None:
            raise UsageError(f"{self.name}: {LONGER}")
        if self.among == TOOLS and self.fillers is not None:
            raise UsageError(f"{self.name}: among='tools' takes no fillers")
        if self.entry is not None and not ENTRY.fullmatch(self.entry):
            raise UsageError(
                f"{self.name}: entry must hold {{text}} once, and at most one of {{number}} and {{letter}} before it, "
                f"got {self.entry!r}"
            )
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
        records = raw_records(self.file)
        if not records:
            raise UsageError(f"{self.file!r} holds no record")
        return records

    @cached_property
    def _fillers(self) -> list[Unit]:
        return [] if self.fillers is None else read_fillers(self.fillers)

    @cached_property
    def _around(self) -> tuple[str, str]:
        """Texts before and after the units."""
        if self.template is None and self._letters:
            return "{question}\n", CLOSING if self.chat else "\nAnswer:"
        if self.template is None:
            return "", "\n\nQuestion: {question}\nAnswer:"
        return around(self.name, self.template, "units")

    @property
    def measured_samples(self) -> int:
        """All that there are, at most the usual number."""
        return min(MEASURED_SAMPLES, self.samples_there)

    @property
    def samples_there(self) -> int:
        """Records of the file, each as often as it is asked."""
        return len(self._raw) * self.repeats

    @cached_property
    def n_items(self) -> int:
        """Places of the moved unit: as many as in the first record, which all others must have, or `depths`."""
        return self.depths or self._places(self._record(0))

    def _places(self, record: ItemRecord) -> int:
        return len(record.arrangement.slots) + self.filled

    def _record(self, index: int) -> ItemRecord:
        where, record = self._raw[index]
        return read_record(record, where, rule=self.answer_rule, among=self.among)

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

    def draw(self, tokenizer: Any, *, count: int, seed: int) -> Iterator[AskedRecord]:
        """Records with the units around the moved one in order."""
        if self.samples_there < count:
            times = f" x {self.repeats} repeats" if self.repeats > 1 else ""
            raise UsageError(f"{self.file!r} holds {len(self._raw)} records{times}; {count} samples are asked")
        records = [self._checked(index) for index in range(math.ceil(count / self.repeats))]
        clustered = self.repeats > 1 or any(record.get("group") is not None for _, record in self._raw)
        if len(self._fillers) < self.filled:
            raise UsageError(f"{self.fillers!r} holds {len(self._fillers)} fillers; {self.filled} are asked")
        return (self._asked(records[index // self.repeats], seed, index, clustered=clustered) for index in range(count))

    def _checked(self, index: int) -> ItemRecord:
        record = self._record(index)
        places, texts = self._places(record), record.arrangement.texts
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

    def _asked(self, record: ItemRecord, seed: int, index: int, *, clustered: bool) -> AskedRecord:
        source = random.Random(f"items {seed} {index}")
        others = record.arrangement.others()
        if index % self.repeats:
            source.shuffle(others)
        total = len(others) + self.filled
        for number, filler in enumerate(source.sample(self._fillers, self.filled)):  # evenly spread
            others.insert(int((number + 0.5) * total / self.filled), filler)
        cluster = record.group and f"group {record.group}"
        return AskedRecord(record, tuple(others), (cluster or record.where) if clustered else "")

    def draft(self, sample: AskedRecord, position: int) -> Draft:
        """Units as texts in a prompt, or as messages of a conversation."""
        record, places = sample.record, len(sample.others) + 1
        slot = position if self.depths is None else round(position * (places - 1) / (self.depths - 1))
        units, moved = record.arrangement.at(slot, sample.others)
        answers = (LETTERS[slot],) if self._letters else record.answers
        if record.arrangement.texts:
            told = self._text(str(record.question), [str(unit) for unit in units], moved, answers)
        else:
            placed = self._conversation(record, units, moved)
            text = str(placed.messages[placed.index]["content"])
            told = Draft(text, answers, placed.span, messages=placed.messages, moved_message=placed.index)
        return replace(told, target=record.target, cluster=sample.cluster)

    def _text(self, question: str, units: Sequence[str], moved: int, answers: tuple[str, ...]) -> Draft:
        letters = self._letters
        before, after = (part.replace("{question}", question) for part in self._around)
        form = self.entry or ("{letter}. {text}" if letters else "[{number}] {text}")
        listing = listed(units, head=before, between="\n", tail=after, form=form)
        template = "".join(self._around) if self.template else ""
        passages = () if letters else listing.passages  # whose order decides which letter is right
        return Draft(listing.text, answers, listing.items[moved], passages=passages, template=template)

    def _conversation(self, record: ItemRecord, units: Sequence[Unit], moved: int) -> Placed:
        told = record.arrangement.messages
        tools = [str(unit) for unit in units] if told else record.arrangement.tools
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
        placed = Placed((*described, *told, *asked), index, span)
        return as_text(placed) if self.calls == "text" else placed
