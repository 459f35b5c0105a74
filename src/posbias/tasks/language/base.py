"""Parts that all tasks in language share: the example, the paired design, the registry, the reading of files.

One sample (the same items, the same question) is requested once per position; only the moved item changes its place, so
that positions are compared on equal terms. Variants are frozen dataclasses, spelled as literal calls.
"""

import hashlib
import random
import re
import sys
from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from itertools import islice
from pathlib import Path
from typing import Annotated, Any, ClassVar, TypeVar

from annotated_types import MinLen
from pydantic import BaseModel, ConfigDict, ValidationError

from posbias.checks import Count, Natural, checked_value
from posbias.errors import UsageError, check_most
from posbias.files import decoded, json_object, open_file, read_lines, read_whole
from posbias.prompts.tokens import Message, Span, control_pattern, leaves_thoughts_out, locate
from posbias.registry import Registry, Spelled
from posbias.tasks.language.rules import LETTERS, RULES, Rule

OF_A_STUDY = "studies/adapters/tasks.py of the sources registers it in Python; for entries of one's own take items"
LEFT = {
    "items(repeats=)": "write the record again, its units in another order, with one 'group' for both",
    "key_value(file=)": "pairs are drawn as the published ones were, random UUIDs; for others take items(file=...)",
    "pairwise(pattern=)": "answer_pattern (--answer-pattern)",
    "pairwise(rubric=)": "criteria stand in a prompt of one's own, template='prompt.txt'",
    "needle(literal=)": "items(file=...), with facts and questions that share no word",
    "needle(needles=)": "one needle is asked for",
    "needle(distractors=)": "items(file=...) with the sentences that mislead among the units, or documents()",
    "listwise": "pairwise, or items(file=..., rule='choice') with the responses as units",
    "hard_distractor": "items(file=...) with the misleading passage as the unit that moves",
    "multiple_choice": "items(file=..., rule='choice') with the options as units",
    **dict.fromkeys(
        [
            *("code_variables", "counts", "dates", "dialogue", "instructions", "json_fields", "roles", "table"),
            *("example_order", "token_copy"),
        ],
        OF_A_STUDY,
    ),
}
"""Tasks and parameters that posbias had, and what to do instead."""
LANGUAGE_TASKS: Registry["LanguageTask"] = Registry("task", left=LEFT)

MOST_ITEMS = 100_000
"""Items in one prompt: 10^5 key-value pairs are 8 MB of text, some four million tokens."""
MOST_EXAMPLES = 1_000_000
"""Examples of a task, samples times positions; records of a file."""

MEASURED_SAMPLES = 4
"""Samples that are measured, if a task has so many."""
FEWEST_ITEMS = 8
"""A task has a prompt of fewer items than this."""
FILLED = 0.9
"""Least share of a length that the items of a task must fill."""
NOTICES = {
    "gold_without_answer": "the passage marked as the right one holds none of the accepted answers",
    "gold_repeated": "the right passage stands in the prompt a second time",
    "answer_elsewhere": "another passage holds an accepted answer, too",
    "control_tokens": "the text spells control tokens",
    "thoughts_left_out": "the model's chat template leaves out thoughts of earlier answers",
    "call_not_offered": "an answer calls a tool that the prompt does not offer",
}
"""Oddities of samples that are read from a file, and of answers to them, by name."""
UNASKED = "{question}"
"""The question of a sample that has none: a fit has the model write one in its place."""
QUERIES = ("after", "before", "both")
"""Places of the question relative to the items."""
AS_GIVEN, QUESTION_FIRST, SHUFFLED = "given", "question_first", "shuffled"
ORDERS: Mapping[str, Callable[[int], Sequence[int]]] = {
    AS_GIVEN: range,
    QUESTION_FIRST: range,
    "ends": lambda n: [*range(0, n, 2), *reversed(range(1, n, 2))],
    "reversed": lambda n: range(n)[::-1],
}
"""Orders of retrieved passages: indices of the passages as given, from the first slot to the last. As retrieved; so,
with the question before them, too; the first, third, fifth ... from the beginning, the others from the end, so that
the least relevant are in the middle; the most relevant last, next to the question."""
Order = str | Sequence[int]
"""A name in ORDERS, SHUFFLED, or the indices themselves, as `posbias place` gives them."""


@dataclass(frozen=True)
class Draft:
    """A prompt as text, before it is rendered and tokenised."""

    text: str
    """The prompt; of a conversation, the message that holds the moved item."""
    answers: tuple[str, ...]
    """Any of these counts as right; at least one. A single empty one: the file has none, and a teacher's is to do."""
    gold: Span | None
    """The moved item in `text`, in characters, with its number; None if there is none."""
    passages: tuple[Span, ...] = ()
    """Every passage in characters of the prompt's text (of a conversation: its last message's), in order; the one that
    holds the answer is `passages[gold_position]`. Without the number that its slot gives it ("Document [1]"), so that
    passages can change places. Empty where the prompt lists none, as a needle in running text."""
    notices: tuple[str, ...] = ()
    """Oddities of the sample, keys of `NOTICES`."""
    messages: tuple[Message, ...] = ()
    """A conversation with roles of its own, of which `text` is message `moved_message`; empty: `text` is the prompt."""
    moved_message: int = -1
    """Index of the message that holds the moved item."""
    target: str | None = None
    """Text that is scored by teacher forcing; None: the first answer; empty: none is. Of an `Example` it follows the
    prompt, and begins with a blank as text would."""
    cluster: str = ""
    """Name that samples share which are not independent; empty for independent ones."""
    question: str = ""
    """What is asked of the items; empty if the last message of a conversation is."""
    origin: str = ""
    """Line of a file that the sample was read from, such as "own.jsonl, line 3"; empty if it was drawn."""
    place: int | None = None
    """Where the item stands that does not move, since an `order` puts it there."""


@dataclass(frozen=True, kw_only=True)
class Example(Draft):
    """One prompt with its answer and the exact place of the item that holds it."""

    prompt: str | tuple[Message, ...]
    """Text, or a conversation for the model's chat template to render."""
    target: str
    gold_position: int | None
    """Index of the moved item among the items, 0 = first; None if there is none (closed book)."""
    sample: str
    """Name of the sample: examples that share it differ only in where the moved item stands."""
    condition: str = "gold"
    """Content of the prompt, such as `gold`, `oracle` or `closed_book`."""
    gold_token: int | None = None
    """Index of the first token of the moved item in the tokenised prompt; None without a tokenizer or an item."""
    gold_end: int | None = None
    """One past the last token of the moved item; None as `gold_token`."""
    n_tokens: int | None = None
    """Tokens of the prompt as the model reads it, special ones included; None without a tokenizer."""
    moved_blanks: int = 0
    """Blanks that ended the prompt, and begin the target instead."""
    own_control: bool = False
    """True if control tokens that the prompt spells are meant as such, as in a template of one's own; otherwise they
    are ordinary text (`posbias.prompts.tokens`)."""
    control_tokens: tuple[str, ...] = ()
    """Control tokens of the model that the sample's own words spell; usual ones if the model's are not known."""

    def check_answers(self) -> None:
        """Refuse to be judged without a question and its right answer."""
        if "" in self.answers or self.question == UNASKED:
            raise UsageError(
                f"{self.origin}: replies are judged by 'question' and 'answers'; only fits with a teacher go without"
            )


Entry = str | Mapping[str, str]
"""A text, or fields by name, in a list of which one moves."""


@dataclass(frozen=True)
class Asked:
    """A drawn sample: a question, and entries in order, among which the one that answers it is moved."""

    question: str
    answers: tuple[str, ...]
    """Accepted answers; empty if the answer is the letter of the moved one's place."""
    moved: Any
    """An entry, or what a task of its own makes a prompt of; None if there is none."""
    others: tuple[Any, ...] = ()
    """The others in their order."""
    notices: tuple[str, ...] = ()
    """As `Draft.notices`; the next two likewise."""
    target: str | None = None
    cluster: str = ""
    rank: int | None = None
    """Place of the moved one as given, or where an `order` puts it; None: it has no place of its own."""

    def ordered(self, order: Order, source: random.Random) -> "Asked":
        """The sample with its entries in an order.

        Raises:
            UsageError: indices that do not name every entry once.
        """
        rank = self.rank or 0
        given, count = [*self.others[:rank], self.moved, *self.others[rank:]], len(self.others) + 1
        if order == SHUFFLED:
            stand: Sequence[int] = source.sample(range(count), count)
        else:
            stand = ORDERS[order](count) if isinstance(order, str) else order
        if sorted(stand) != list(range(count)):
            raise UsageError(f"an order must name each of {count} passages once, from 0, got {list(stand)}")
        others = tuple(given[index] for index in stand if index != rank)
        return replace(self, others=others, rank=list(stand).index(rank))


OWN_FIELD = re.compile(r"\{(?!number\}|letter\})(\w+)\}")
"""A field of a form that an entry fills."""


def listed(
    entries: Sequence[Entry],
    gold: int,
    answers: tuple[str, ...],
    *,
    around: tuple[str, str] = ("", ""),
    between: str = "\n",
    form: str = "{text}",
) -> Draft:
    """A prompt that lists entries in a form such as `[{number}] {title}: {text}`; entry `gold` is the moved one.

    What stands before the first field of an entry's own, `{number}` and `{letter}` among it, is its slot's and stays
    where it is when entries change places.
    """
    before, *own = OWN_FIELD.split(form)  # text, name, text, name, text ...
    told, items, passages, begin = [], [], [], len(around[0])
    for slot, entry in enumerate(entries):
        fields = {"text": entry} if isinstance(entry, str) else entry
        lead = before.replace("{number}", str(slot + 1)).replace("{letter}", LETTERS[slot : slot + 1])
        told.append(lead + "".join(part if place % 2 else fields[part] for place, part in enumerate(own)))
        items.append((begin, begin + len(told[-1])))
        passages.append((begin + len(lead), begin + len(told[-1])))
        begin += len(told[-1]) + len(between)
    return Draft(around[0] + between.join(told) + around[1], answers, items[gold], passages=tuple(passages))


def check_form(owner: str, form: str | None, *allowed: str) -> None:
    """Refuse a form of entries that does not hold one of these lists of fields; other fields are text."""
    known = {name for fields in allowed for name in fields.split()}
    fields = " ".join(name for name in re.findall(r"\{(\w+)\}", form or "") if name in known)
    if form is not None and fields not in allowed:
        spelled = [" ".join(f"{{{name}}}" for name in fields.split()) for fields in allowed]
        raise UsageError(f"{owner}: entry must hold, in this order, {' or '.join(spelled)}, got {form!r}")


def check_order(task: "LanguageTask", why_not: str) -> None:
    """Refuse an order that is none, or of a task that has none, for a reason; a template has its question in place."""
    order: Order | None = getattr(task, "order", None)
    if isinstance(order, str) and order not in (*ORDERS, SHUFFLED):
        raise UsageError(f"{task.name}: order {order!r}; allowed: {', '.join((*ORDERS, SHUFFLED))}, or indices")
    if order == QUESTION_FIRST and getattr(task, "template", None) is not None:
        why_not = "a template says itself where the question stands"
    if order is not None and why_not:
        raise UsageError(f"{task.name}: order {order!r}: {why_not}")


@dataclass(frozen=True)
class LanguageTask(Spelled, ABC):
    """A task that asks for one item of a context, whose position is varied."""

    chat: bool | None = field(default=None, kw_only=True)
    """True for conversations (one message of the user) that the model's own chat template renders, False for text;
    None: a file's entries pass the template if there is one, all else is text."""

    scoring: ClassVar[str]
    """Spelling of the rule of scoring, for tasks without a parameter `rule`."""
    max_tokens: ClassVar[int]
    """Tokens a model may generate for its answer."""
    lead_in: ClassVar[str] = ""
    """The beginning of a sentence with which a text prompt ends: a text that continues the prompt is read with it, a
    message that answers the prompt without."""
    counted: ClassVar[str]
    """The parameter that counts the items among which one is moved."""
    fixed_order: ClassVar[bool] = False
    """True if the right answer depends on which passage stands where, so that nobody else may rearrange them."""
    published: ClassVar[frozenset[str]] = frozenset()
    """Fields by which lines of a published file are told from lines of one's own."""
    first_position: ClassVar[int] = 0
    """1 where positions are turns."""
    usual_form: ClassVar[str] = "{text}"
    """How an entry is listed, if no parameter `entry` says otherwise."""
    by_tokens: ClassVar[bool] = False
    """True if samples are made with a tokenizer, so that another one makes others."""
    sampled: ClassVar[str] = "file"
    """The parameter that names the file of samples, one a line."""
    slot: ClassVar[str] = ""
    """The field of a `template` of one's own, if the task takes one, in whose place the items stand."""

    between: ClassVar[str] = "\n"
    """What stands between two entries."""

    @property
    def plain(self) -> tuple[str, str]:
        """Texts before and after the entries without a template of one's own, with `{question}` in them."""
        return "", ""

    @property
    def form(self) -> str:
        """How an entry is listed."""
        return getattr(self, "entry", None) or self.usual_form

    @cached_property
    def words(self) -> tuple[str, str]:
        """Texts before and after the entries, as `plain`, or of one's own template."""
        template = getattr(self, "template", None)
        if template is None:
            return self.plain
        text = decoded(read_whole(template, "template"), repr(template)).removesuffix("\n")
        if text.count(f"{{{self.slot}}}") != 1 or "{question}" not in text:
            raise UsageError(
                f"{self.name}: template {template!r} must hold {{{self.slot}}} once and {{question}} at least once"
            )
        before, _, after = text.partition(f"{{{self.slot}}}")
        return before, after

    @property
    def n_items(self) -> int:
        """Positions that the moved item can take, >= 1."""
        return int(getattr(self, self.counted))

    @property
    def short_forms(self) -> "tuple[LanguageTask, ...]":
        """Tasks with the same questions and little or no context, in which positions hardly matter."""
        return ()

    @property
    def stop(self) -> tuple[str, ...]:
        """Texts at which a generated answer may end without a change of its score: its first line alone may count."""
        return ("\n",) if self.answer_rule.one_line else ()

    @property
    def stands_alone(self) -> bool:
        """True if the question has the same answer where the moved item stands without the others."""
        return True

    @property
    def samples_there(self) -> int | None:
        """Samples that a file of one's own holds; None for a task that draws as many as it is asked for."""
        path = getattr(self, "file", None)
        return None if path is None else sum(1 for _ in published_lines(path))

    @abstractmethod
    def draw(self, tokenizer: Any, *, count: int, seed: int) -> Iterator[Any]:
        """Samples in order, lazily, from which `draft` makes prompts; files are read and checked at once."""

    def draft(self, sample: Any, position: int) -> Draft:
        """The prompt of a drawn sample with the moved item at a position; here of an `Asked`, as a list."""
        before, after = (part.replace("{question}", sample.question) for part in self.words)
        if sample.moved is None:
            return Draft(before + after, sample.answers, None)
        place = None if getattr(self, "order", None) is None else sample.rank
        position = position if place is None else place
        entries = [*sample.others[:position], sample.moved, *sample.others[position:]]
        answers = sample.answers or (LETTERS[position],)
        told = listed(entries, position, answers, around=(before, after), between=self.between, form=self.form)
        return replace(told, notices=sample.notices, target=sample.target, cluster=sample.cluster, place=place)

    @cached_property
    def answer_rule(self) -> Rule:
        """The rule by which a generated text is right."""
        named = getattr(self, "rule", None)
        return RULES.parse(self.scoring if named is None else named)

    @property
    def own_code(self) -> str | None:
        """Code of one's own that judges answers; None if there is none."""
        return self.answer_rule.function

    def noted(self, text: str | None) -> dict[str, float | None]:
        """Further numbers of a generated text (None: there is none) beside its score: a table each, by name."""
        return {}

    def positions(self, positions: Sequence[int] | None = None) -> tuple[int, ...]:
        """The given positions (each once, in first_position ... n_items - 1) in ascending order, or all of them."""
        check_most(f"{self.name}: a prompt", self.n_items, MOST_ITEMS, "items")
        known = range(self.first_position, self.n_items)
        if positions is None:
            return tuple(known)
        wrong = [position for position in positions if type(position) is not int or position not in known]
        if wrong or not positions:
            example, allowed = repr(wrong[0]) if wrong else "none", f"{known.start} ... {known.stop - 1}"
            raise UsageError(f"{self.name}: positions must be whole numbers {allowed}, got {example}")
        if len(set(positions)) < len(positions):
            raise UsageError(f"{self.name}: each position once, got {list(positions)}")
        return tuple(sorted(positions))

    @property
    def by_template(self) -> bool:
        """True if a model's chat template, where there is one, renders the prompts.

        Where `chat` leaves it open, it renders the entries of a file of one's own. Generated prompts and files as
        published are text, and so is a template of one's own, which may hold the marks of a conversation.
        """
        path = getattr(self, "file", None)
        if self.chat is not None or path is None or getattr(self, "template", None) is not None:
            return bool(self.chat)
        _, first = next(published_lines(path), ("", {}))
        return not self.published or not self.published <= first.keys()

    def asked_of(self, tokenizer: Any) -> "LanguageTask":
        """This task as it is put to a model in this process, of which this is the tokenizer."""
        if self.chat is None and self.by_template and getattr(tokenizer, "chat_template", None):
            return replace(self, chat=True)
        return self

    def with_items(self, items: int) -> "LanguageTask":
        """This task with another number of items."""
        counted: dict[str, Any] = {self.counted: items}
        return replace(self, **counted)

    def at_length(self, tokens: int, tokenizer: Any, *, seed: int = 0) -> "LanguageTask":
        """This task with as many items as fit into prompts of so many tokens.

        The longest prompt of `MEASURED_SAMPLES` decides; one of another sample may be a few tokens longer.

        Raises:
            UsageError: a task or tokenizer with which no length can be asked for, a length below the shortest prompt,
                or one that the items do not fill.
        """
        fixed = type(getattr(self, self.counted)) is not int or getattr(self, "setting", "gold") != "gold"
        if fixed or tokenizer is None:
            why = "has a fixed number of items" if fixed else "counts no tokens without a tokenizer"
            raise UsageError(f"{self} {why}, so its prompts cannot be made {tokens} tokens long")
        measured = min(MEASURED_SAMPLES, self.samples_there or MEASURED_SAMPLES)

        def longest(items: int) -> int:
            prompts = self.with_items(items).examples(tokenizer, count=measured, positions=[0], seed=seed)
            return max(int(prompt.n_tokens or 0) for prompt in prompts)

        @cache
        def length(items: int) -> int:
            """Tokens of the longest prompt; endless if there are not so many items."""
            with suppress(UsageError):
                return longest(items)
            return sys.maxsize

        least = next((items for items in range(FEWEST_ITEMS) if length(items) < sys.maxsize), FEWEST_ITEMS)
        if (shortest := longest(least)) > tokens:  # where there is none at all, it says why
            raise UsageError(f"{self}: its shortest prompt has {shortest} tokens; {tokens} are asked")
        high = max(1, 2 * least)
        while length(high) <= tokens:
            high *= 2
        low = least - 1 + bisect_right(range(least, high), tokens, key=length)  # prompts grow with their items
        if length(low + 1) == sys.maxsize and length(low) < FILLED * tokens:
            raise UsageError(f"{self.name}: its {low} items make prompts of {length(low)} tokens; {tokens} are asked")
        return self.with_items(low)

    def examples(
        self, tokenizer: Any, *, count: int, positions: Sequence[int] | None = None, seed: int = 0
    ) -> Iterator[Example]:
        """Examples of `count` samples, all positions of one sample together, in ascending order.

        Args:
            tokenizer: The model's own Hugging Face tokenizer, for exact places and lengths; None if it is not to
                be had, which leaves `gold_token` and `n_tokens` open.
            count: Samples, >= 1.
            positions: Of the moved item among 0 ... n_items - 1; None: all.
            seed: Chooses the samples, >= 0. The first 8 of 16 are the 8.

        Raises:
            UsageError: an argument out of range, or a file that does not hold what is asked (its line is named).
        """
        checked_value(f"{self.name}: count", count, Count)
        checked_value(f"{self.name}: seed", seed, Natural)
        columns = self.positions(positions)
        check_most(f"{self.name}: count x positions", count * len(columns), MOST_EXAMPLES, "examples")
        samples, path = self.draw(tokenizer, count=count, seed=seed), getattr(self, self.sampled, None)
        lines = [""] if path is None else [where for where, _ in islice(read_lines(path), count)]
        return (
            self._example(tokenizer, replace(self.draft(sample, position), **told), position, f"{seed}-{index}")
            for index, sample in enumerate(samples)
            for told in [dict[str, Any](question=getattr(sample, "question", ""), origin=lines[index % len(lines)])]
            for position in columns
        )

    def stripped_examples(self, tokenizer: Any, *, count: int, seed: int = 0) -> Iterator[tuple[Example, Example]]:
        """Of each of `count` samples the moved item alone, and the prompt without it; arguments as of `examples`."""
        for index, sample in enumerate(self.draw(tokenizer, count=count, seed=seed)):
            stripped = (replace(sample, others=(), rank=0, moved=moved) for moved in (sample.moved, None))
            alone, bare = (self._example(tokenizer, self.draft(one, 0), 0, f"{seed}-{index}") for one in stripped)
            yield alone, bare

    def wrapped(self, text: str) -> str | tuple[Message, ...]:
        """The text itself, or a conversation of one message where chat is asked."""
        return ({"role": "user", "content": text},) if self.chat else text

    def _joined(self, draft: Draft) -> tuple[str, str]:
        """The prompt's text, and the right answer as it would follow it, its first tokens formed as in running text.

        Blanks that end a text (not a passage in it) begin the answer instead, for tokens begin with a blank rather
        than end with one; behind a line's end the answer begins without.
        """
        text, answer = draft.text, draft.answers[0] if draft.target is None else draft.target
        if self.chat or draft.messages:
            return text, answer
        listed_to = max([stop for _, stop in draft.passages] + [0 if draft.gold is None else draft.gold[1]], default=0)
        stop = max(len(text.rstrip(" \t")), listed_to)
        begun = text[stop:] or ("" if text[-1:].isspace() else " ")
        return text[:stop], answer and begun + answer

    def _example(self, tokenizer: Any, draft: Draft, position: int, sample: str) -> Example:
        text, target = self._joined(draft)
        prompt = draft.messages or self.wrapped(text)
        told = "\n".join(str(message.get("content") or "") for message in draft.messages) or draft.text
        template = "".join(self.words) if getattr(self, "template", None) else ""
        spelled, meant = (control_pattern(tokenizer).findall(text) for text in (told, template))
        if meant and (self.chat or len(spelled) > len(meant)):
            second_source = "a chat template" if self.chat else f"sample {sample}"
            raise UsageError(
                f"{self.name}: both the template and {second_source} hold control tokens ({meant[0]!r}), of which only "
                "the template's would be meant; take them out of one of the two"
            )
        left_out = ("thoughts_left_out",) if leaves_thoughts_out(prompt, tokenizer) else ()
        gold = [] if draft.gold is None else [draft.gold]
        spans, n_tokens = locate(prompt, gold, tokenizer, own_control=bool(meant), message=draft.moved_message)
        first, end = spans[0] if spans else (None, None)
        return Example(
            **vars(draft) | {"text": text, "target": target, "notices": draft.notices + left_out},
            prompt=prompt,
            gold_position=None if draft.gold is None else position if draft.place is None else draft.place,
            sample=sample,
            condition=getattr(self, "setting", "gold"),
            gold_token=first,
            gold_end=end,
            n_tokens=n_tokens,
            moved_blanks=len(draft.text) - len(text),
            own_control=bool(meant),
            control_tokens=() if meant else tuple(dict.fromkeys(spelled)),
        )


Text = Annotated[str, MinLen(1)]


class Line(BaseModel):
    """A line of a file, or an object in one, with its fields; others are passed over unless a line forbids them."""

    model_config = ConfigDict(strict=True)


Fields = TypeVar("Fields", bound=Line)


def line_of(fields: type[Fields], record: object, where: str) -> Fields:
    """A record as its fields have it.

    Raises:
        UsageError: a field is missing or holds something else; the message lists the fields.
    """
    try:
        return fields.model_validate(record)
    except ValidationError as error:
        fault = error.errors(include_url=False)[0]
        named = f", field {'.'.join(map(str, fault['loc']))!r}" if fault["loc"] else ""
        wrong, allowed = fault["msg"].removeprefix("Value error, "), ", ".join(fields.model_fields)
        raise UsageError(f"{where}{named}: {wrong}, got {fault['input']!r:.80}; its fields: {allowed}") from None


def published_lines(path: str, count: int | None = None) -> Iterator[tuple[str, dict[str, Any]]]:
    """The first `count` records of a file, each with the name of its line for messages; blank lines are passed over.

    None: all of them, of at most as many lines as a task may have examples.
    """
    n_read = 0
    for n_read, (where, line) in enumerate(read_lines(path), 1):
        yield where, json_object(line, where)
        if n_read == count:
            return
        check_most(f"{path!r}: what one file holds", n_read, MOST_EXAMPLES, "examples")
    if count is not None:
        raise UsageError(f"{path!r} holds {n_read} examples; {count} asked")


def file_sha256(task: object) -> str | None:
    """Hash of the file that a task's samples are read from; None if it makes its own, or that is no plain file."""
    path = getattr(task, "file", None) or getattr(task, "corpus", None)
    if path is None or not Path(path).is_file():
        return None
    with open_file(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
