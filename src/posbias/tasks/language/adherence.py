"""Rules at turn N: is a rule that was given earlier in a conversation still kept, and where must it stand?

A rule is a sentence and a check of replies (`CHECKS`). It stands at one of `PLACEMENTS`, the same conversation goes on
below it, and the reply to a turn keeps it or does not. The position that varies is the turn: 1 is the first question.

A file of rules is YAML: a list of `say` and `check`, such as `{say: "Answer in lower case.", check: lower_case}`.
Conversations are `.jsonl` with `messages` in OpenAI's format, whose questions are those of the user; without a file,
everyday questions about one topic each (`rules.yaml`).
"""

import json
import random
import re
import unicodedata
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, ClassVar

from posbias.checks import Count, FileName, OneOf
from posbias.errors import UsageError
from posbias.files import read_yaml
from posbias.prompts.tokens import Message
from posbias.registry import Registry
from posbias.tasks.language.base import LANGUAGE_TASKS, Draft, LanguageTask, Line, Text, line_of, published_lines
from posbias.tasks.language.calls import read_messages
from posbias.tasks.language.readings import check_own, search_own
from posbias.tasks.language.rules import Rule, unfenced

READY = Path(__file__).with_name("rules.yaml")
EVERY = re.compile(r"every\((\d+)\)")
PLACEMENTS = ("system", "first", "both", "last", "every(5)")
"""Where a rule stands: in the system message; before the first question; in the system message and behind the last
question; behind the last question alone; behind every k-th question, the first among them."""
MODEL, TRANSCRIPT = "model", "transcript"


@dataclass(frozen=True)
class Check:
    """What tells whether a reply keeps a rule."""

    kept: Callable[[str], bool]
    lasting: bool = False
    """True if a reply that breaks the rule breaks it however it goes on."""
    function: str | None = None
    """Code of one's own that decides."""


CHECKS: Registry[Check] = Registry("check")


@CHECKS.register("contains")
def contains(text: str) -> Check:
    """The reply holds this text, ignoring case."""
    return Check(lambda reply: text.casefold() in reply.casefold())


@CHECKS.register("lacks")
def lacks(text: str) -> Check:
    """The reply does not hold this text as words of its own, ignoring case."""
    words = re.compile(rf"(?<!\w){re.escape(text)}(?!\w)", re.IGNORECASE)
    return Check(lambda reply: words.search(reply) is None, lasting=True)


@CHECKS.register("starts_with")
def starts_with(text: str) -> Check:
    """The reply begins with this text, ignoring case, quotes and marks before it."""
    return Check(lambda reply: _bare(reply).startswith(_bare(text)), lasting=True)


@CHECKS.register("ends_with")
def ends_with(text: str) -> Check:
    """The reply ends with this text, ignoring case, quotes and a full stop behind it."""
    return Check(lambda reply: _bare(reply).endswith(_bare(text)))


@CHECKS.register("matches")
def matches(pattern: str) -> Check:
    """A regular expression is found in the reply."""
    check_own("matches: pattern", pattern)
    return Check(lambda reply: bool(search_own(pattern, reply)))


@CHECKS.register("most_words")
def most_words(words: Count) -> Check:
    """The reply has at most so many words."""
    return Check(lambda reply: len(reply.split()) <= words, lasting=True)


@CHECKS.register("lower_case")
def lower_case() -> Check:
    """No letter of the reply is a capital."""
    return Check(lambda reply: reply == reply.lower(), lasting=True)


@CHECKS.register("upper_case")
def upper_case() -> Check:
    """Every letter of the reply is a capital."""
    return Check(lambda reply: reply == reply.upper(), lasting=True)


@CHECKS.register("script")
def script(name: str) -> Check:
    """Most letters of the reply are of a script by its name in Unicode: LATIN, CJK, CYRILLIC, GREEK, ARABIC ..."""
    named = name.upper()

    def kept(reply: str) -> bool:
        letters = [unicodedata.name(letter, "") for letter in reply if letter.isalpha()]
        return 2 * sum(letter.startswith(named) for letter in letters) > len(letters)

    return Check(kept)


@CHECKS.register("json_keys")
def json_keys(keys: Sequence[str]) -> Check:
    """The reply is a JSON object with these keys, in a block of code or not, and nothing else."""

    def kept(reply: str) -> bool:
        try:
            told = json.loads(unfenced(reply).strip().removesuffix("```"))
        except ValueError:
            return False
        return isinstance(told, dict) and {*keys} <= told.keys()

    return Check(kept)


@CHECKS.register("python")
def python(function: str) -> Check:
    """A function of one's own decides, `own.py:kept`, called with the reply and a list; --allow-code permits it."""
    from posbias.tasks.language.rules import python as own

    return Check(lambda reply: own(function).right(reply, ["kept"]) >= 1, function=function)


def _bare(text: str) -> str:
    return text.strip("\"'`*“”.# \n\t").casefold()


class RuleLine(Line):
    """A rule in a file."""

    say: Text
    check: Text


@dataclass(frozen=True)
class Told:
    """A sample: a conversation under a rule."""

    name: str
    """Of the conversation, which several rules may share."""
    say: str
    check: str
    messages: tuple[Message, ...]
    """The conversation without the rule."""


@LANGUAGE_TASKS.register("rules")
@dataclass(frozen=True)
class RulesAtTurns(LanguageTask):
    """Keep a rule that was given earlier in a conversation; the turn varies, and where the rule stands."""

    file: FileName | None = None
    """YAML: a list of rules, each `say` (a sentence) and `check` (such as lower_case or ends_with(text='Over.')); None:
    twelve rules that small models can keep."""
    conversations: FileName | None = None
    """A .jsonl file of conversations, `messages` in OpenAI's format; None: everyday questions, 20 turns."""
    placements: Sequence[str] = PLACEMENTS
    """Where the rule stands, a list of: system, first, both, last, every(5) (any number)."""
    replies: Annotated[str, OneOf(MODEL, TRANSCRIPT)] = MODEL
    """Replies to earlier turns: of the `model`, under the rule at the first placement and made once for all; or as in
    the `transcript`."""
    histories: Mapping[str, Any] = field(default_factory=dict, repr=False)
    """The model's replies so far, by conversation and rule."""

    alone: bool = False
    """True for the question of a turn without those before it, behind which a rule has just been told."""

    max_tokens: ClassVar[int] = 128
    counted: ClassVar[str] = "turns"
    first_position: ClassVar[int] = 1
    sampled: ClassVar[str] = "conversations"
    stands_alone: ClassVar[bool] = False
    by_template: ClassVar[bool] = True
    wording: ClassVar[tuple[str, ...]] = ("placements",)

    def __post_init__(self) -> None:
        object.__setattr__(self, "placements", tuple(self.placements))
        for placement in self.placements:
            if placement not in PLACEMENTS and not ((k := EVERY.fullmatch(placement)) and int(k[1]) > 0):
                raise UsageError(f"rules: placement {placement!r}; allowed: system, first, both, last, every(5)")
        if not self.placements or len({*self.placements}) < len(self.placements):
            raise UsageError(f"rules: placements must be at least 1, each once, got {list(self.placements)}")
        if self.replies == TRANSCRIPT and self.conversations is None:
            raise UsageError("rules: replies='transcript' takes conversations='file.jsonl'")

    @cached_property
    def rules(self) -> list[tuple[RuleLine, Check]]:
        """Every rule of the file with its check."""
        given = read_yaml(self.file or READY, "rules")
        given = given.get("rules") if isinstance(given, dict) else given
        if not isinstance(given, list) or not given:
            raise UsageError(f"{self.file!r}: need a list of rules, each with 'say' and 'check'")
        read = [line_of(RuleLine, rule, f"{self.file!r}, rule {number}") for number, rule in enumerate(given, 1)]
        return [(rule, CHECKS.parse(rule.check)) for rule in read]

    @cached_property
    def told(self) -> list[tuple[str, tuple[Message, ...]]]:
        """Every conversation by its name."""
        told: list[tuple[str, tuple[Message, ...]]] = []
        if self.conversations is None:
            ready = read_yaml(READY, "rules")
            system = {"role": "system", "content": ready["system"]}
            for topic in ready["topics"]:
                asked = [turn.format(topic=topic) for turn in ready["turns"]]
                random.Random(topic).shuffle(asked)
                told.append((topic, (system, *({"role": "user", "content": text} for text in asked))))
            return told
        for where, line in published_lines(self.conversations):
            messages = tuple(read_messages(line.get("messages") or (), where))
            told.append((where, messages))
            if not _questions(messages):
                raise UsageError(f"{where}: need 'messages' with at least one of the user")
            if self.replies == MODEL and any(message["role"] == "tool" for message in messages):
                raise UsageError(f"{where}: a conversation with calls of tools takes replies='transcript'")
        return told

    @cached_property
    def n_items(self) -> int:
        """One more than the turns that every conversation has, which are counted from 1."""
        return 1 + min(len(_questions(messages)) for _, messages in self.told)

    @property
    def samples_there(self) -> int:
        """Pairs of a conversation and a rule."""
        return len(self.told) * len(self.rules)

    @property
    def own_code(self) -> str | None:
        """The first check that is code of one's own."""
        return next((check.function for _, check in self.rules if check.function), None)

    @cached_property
    def answer_rule(self) -> Rule:
        """A reply is right if it keeps the rule, whose check is spelled as the accepted answer."""
        checks = {rule.check: check for rule, check in self.rules}
        return Rule(
            name="kept",
            says=lambda reply, check: checks[check].kept(reply),
            broken=lambda reply, check: checks[check].lasting and not checks[check].kept(reply),
            text=False,
        )

    def at_length(self, tokens: int, tokenizer: Any, *, seed: int = 0) -> LanguageTask:
        """Refused: turns make a conversation longer."""
        raise UsageError("rules: turns stand for lengths; --turns 1,5,10,20 takes the place of --lengths")

    def draw(self, tokenizer: Any, *, count: int, seed: int) -> Iterator[Told]:
        """Conversations in order under the rules in turn, so that few samples have many conversations."""
        told, rules = self.told, [rule for rule, _ in self.rules]
        if count > self.samples_there:
            raise UsageError(
                f"rules: {len(told)} conversations x {len(rules)} rules are {self.samples_there} samples, {count} are "
                "asked; a lower count, or more conversations"
            )
        order = random.Random(f"rules {seed}").sample(range(len(rules)), len(rules))
        samples = []
        for number in range(count):
            (name, messages), around = told[number % len(told)], number // len(told) + number
            rule = rules[order[around % len(rules)]]
            samples.append(Told(name, rule.say, rule.check, messages))
        return iter(samples)

    def draft(self, sample: Told, position: int) -> Draft:
        """The conversation up to a turn, the rule at the first placement."""
        messages = self.bare(sample, position)
        questions = _questions(messages)
        placement = self.placements[0]
        told = {"system": [], "first": questions[:1]}.get(placement, questions[-1:])
        if every := EVERY.fullmatch(placement):
            told = questions[:: int(every[1])]
        for at in told:
            parts = [sample.say, messages[at]["content"]]
            messages[at] = {**messages[at], "content": "\n\n".join(parts if placement == "first" else parts[::-1])}
        if placement in ("system", "both"):
            own = [messages.pop(0)["content"]] if messages[0]["role"] == "system" else []
            messages.insert(0, {"role": "system", "content": "\n".join([*own, sample.say])})
        text = str(messages[-1]["content"])
        return Draft(text, (sample.check,), (0, len(text)), messages=tuple(messages), target="", cluster=sample.name)

    def bare(self, sample: Told, turn: int) -> list[Message]:
        """The conversation up to a turn without the rule, the replies of the model or of the transcript in it."""
        messages = [message for message in sample.messages if message["role"] == "system"]
        questions = _questions(sample.messages)
        if self.alone:
            return [*messages, sample.messages[questions[turn - 1]]]
        if self.replies == TRANSCRIPT:
            return list(sample.messages[: questions[turn - 1] + 1])
        said = self.histories.get(history_of(sample), ())
        if len(said) < turn - 1:
            raise UsageError(
                "rules: the model's replies are made by evaluate, of one model at its own length; elsewhere take "
                "replies='transcript'"
            )
        for number, at in enumerate(questions[:turn]):
            messages.append(sample.messages[at])
            if number < turn - 1:
                messages.append({"role": "assistant", "content": said[number]})
        return messages


def _questions(messages: Sequence[Message]) -> list[int]:
    """Indices of the user's messages, the turns."""
    return [at for at, message in enumerate(messages) if message["role"] == "user"]


def history_of(sample: Told) -> str:
    """Name of the replies of one conversation under one rule."""
    return f"{sample.name}: {sample.say}"
