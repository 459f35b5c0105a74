"""Rules of scoring, for every task: is a generated text right, given the accepted answers?

A rule is spelled as a literal call such as `number(tolerance=0.5)`.
"""

import re
import string
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from runpy import run_path
from typing import Annotated, Any, ClassVar

from annotated_types import Interval

from posbias.checks import NonNegative
from posbias.errors import RunError, UsageError
from posbias.registry import Registry
from posbias.tasks.language.calls import Called, calls_in
from posbias.tasks.language.readings import TIE, check_own, explicit, letter_in, number_in, search_own, verdict_of

LEFT = {
    "literal": "python(function='file.py:function'), or regex, if its form is known",
    "first_ranked": "choice, with the responses as units",
    **dict.fromkeys(
        ["date", "json_value"], "python(function='file.py:function') reads it, or regex, if its form is known"
    ),
}
"""Rules that posbias had, and what to do instead."""
RULES: Registry["Rule"] = Registry("rule", left=LEFT)
LETTERS = string.ascii_uppercase[:10]
"""Letters of options; more would run into each other in prose ("I")."""
_ARTICLES = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)


FENCE = re.compile(r"\s*```\w*[ \t]*\n\s*(?!\s|```)")
"""The line that opens a block of code, with the blanks around it."""


def first_line(prediction: str) -> str:
    """The first line of a text that is neither blank nor the opening of a block, without blanks at its ends."""
    return unfenced(prediction).partition("\n")[0].strip()


def unfenced(text: str) -> str:
    """A text without blanks, and without the opening of a block of code, at its beginning."""
    opening = FENCE.match(text)
    return text[opening.end() :] if opening else text.lstrip()


def normalise_answer(text: str) -> str:
    """Lower case, without ASCII punctuation and English articles, white space collapsed to single spaces.

    Source: the SQuAD evaluation script (Rajpurkar et al. 2016).
    """
    bare = text.lower().translate(_PUNCTUATION)
    return " ".join(_ARTICLES.sub(" ", bare).split())


def starts_with(prediction: str, answers: Sequence[str], *, goes_on: bool) -> float | None:
    """1 if the prediction begins with an accepted answer, as whole words, both normalised; else 0.

    An accepted answer further on, as in a text that names several passages or copies the context, does not count. If
    the prediction was cut off (`goes_on`), None if it may still become an accepted answer.
    """
    normalised = normalise_answer(prediction)
    accepted = [normalise_answer(answer) for answer in checked_answers(answers)]
    if any(f"{normalised} ".startswith(f"{answer} ") for answer in accepted if answer):
        return 1.0
    return None if goes_on and any(answer.startswith(normalised) for answer in accepted) else 0.0


def share_found(prediction: str, values: Sequence[str]) -> float:
    """Share of several values that occur in the prediction, ignoring case, in 0 ... 1."""
    return sum(value.lower() in prediction.lower() for value in checked_answers(values)) / len(values)


def checked_answers(answers: Sequence[str]) -> Sequence[str]:
    """Accepted answers; none at all, or an empty one, which would occur everywhere, is refused."""
    if isinstance(answers, str) or not answers or not all(answers):
        raise UsageError(f"answers must be a list of at least 1 text, none empty, got {answers!r}")
    return answers


@dataclass(frozen=True)
class Rule(ABC):
    """A rule by which a generated text is right or wrong."""

    name: ClassVar[str]
    text: ClassVar[bool] = True
    """True if an accepted answer is a text that a model may say: it is scored by teacher forcing, too."""
    begins: ClassVar[bool] = True
    """True if a right answer may be expected to begin with an accepted one, which is measured beside."""
    one_line: ClassVar[bool] = False
    """True if the first line alone that is not blank is judged."""
    schema: ClassVar[Mapping[str, Any] | None] = None
    """JSON schema of an answer, for servers that keep to one; None: a text of any form is judged."""

    def check(self, answer: str) -> None:
        """Refuse an accepted answer that cannot be judged by this rule."""

    def readable(self, text: str) -> bool:
        """True if it is certain what a text says of what is judged, such as a number; else it counts as wrong."""
        return True

    def settled(self, text: str) -> bool:
        """True if nothing that might follow a text, which was cut off, belongs to what is judged."""
        return self.one_line and "\n" in unfenced(text)

    @abstractmethod
    def accepts(self, said: str, answer: str) -> bool:
        """True if a text, or its first line if that alone is judged, says an accepted answer."""

    def right(self, text: str, answers: Sequence[str]) -> float:
        """The score of a text, 0 ... 1: 1 if it says one of the answers."""
        said = first_line(text) if self.one_line else text
        return float(any(self.accepts(said, answer) for answer in checked_answers(answers)))


@dataclass(frozen=True)
class ReadingRule(Rule):
    """A rule that reads one value out of a text, or nothing where that is not certain, and compares it."""

    begins: ClassVar[bool] = False  # "A" is an article, and a sign punctuation, to what compares beginnings
    wanted: ClassVar[str] = "a letter"
    """What an accepted answer must be."""

    @abstractmethod
    def read(self, text: str) -> Any | None:
        """The value, or None."""

    def accepted(self, answer: str) -> Any | None:
        """The value of an accepted answer; None if it is none."""
        return self.read(answer)

    def same(self, told: Any, accepted: Any) -> bool:
        """True if a value counts as an accepted one."""
        return bool(told == accepted)

    def check(self, answer: str) -> None:
        """Refuse what is no such value."""
        if self.accepted(answer) is None:
            raise UsageError(f"the answer must be {self.wanted}, got {answer!r:.80}")

    def readable(self, text: str) -> bool:
        """True if there is a value."""
        return self.read(text) is not None

    def settled(self, text: str) -> bool:
        """True if a mark or label tells a value that the last word, which may have been cut, has no part in."""
        told = self.read(text)
        return told is not None and explicit(text) and self.read(text.rstrip().rpartition(" ")[0]) == told

    def accepts(self, said: str, answer: str) -> bool:
        """True if the value is the accepted one."""
        told = self.read(said)
        return told is not None and self.same(told, self.accepted(answer))


@RULES.register("contains")
@dataclass(frozen=True)
class Contains(Rule):
    """An accepted answer occurs anywhere in the text, ignoring case.

    Source: Liu et al. 2024, section 3.1, key-value retrieval.
    """

    def accepts(self, said: str, answer: str) -> bool:
        """True if it occurs."""
        return answer.lower() in said.lower()


@RULES.register("best_subspan_em")
@dataclass(frozen=True)
class BestSubspan(Rule):
    """An accepted answer occurs in the first line that is not blank, both normalised (`normalise_answer`).

    Only the text before that line's end counts: the answer stands in the context, so that a model which copies
    the context on and on would otherwise be right.

    Source: Liu et al. 2024, section 2.2. As published but for empty answers, which there are always right, and for
    blank lines before an answer, with which it is always wrong there.
    """

    one_line: ClassVar[bool] = True

    def check(self, answer: str) -> None:
        """Refuse an answer that normalises to nothing and so would occur everywhere."""
        if not normalise_answer(answer):
            raise UsageError(f"answer {answer!r} holds nothing but articles and punctuation, so it cannot be scored")

    def accepts(self, said: str, answer: str) -> bool:
        """True if the answer is a span of the line."""
        self.check(answer)
        return normalise_answer(answer) in normalise_answer(said)


@RULES.register("whole_words")
@dataclass(frozen=True)
class WholeWords(Rule):
    """The first sentence of the first line holds an accepted answer as whole words, both normalised."""

    one_line: ClassVar[bool] = True

    def accepts(self, said: str, answer: str) -> bool:
        """True if the answer's words stand together in the sentence."""
        sentence = re.split(r"(?<=[.!?]) ", said)[0]
        return f" {normalise_answer(answer)} " in f" {normalise_answer(sentence)} "


@RULES.register("equals")
@dataclass(frozen=True)
class Equals(Rule):
    """The first line that is not blank is an accepted answer, but for case, and quotes or a full stop around it."""

    one_line: ClassVar[bool] = True

    def accepts(self, said: str, answer: str) -> bool:
        """True if they are the same."""
        bare, accepted = (" ".join(text.split()).strip("\"'`*“”.").casefold() for text in (said, answer))
        return bare == accepted


@RULES.register("regex")
@dataclass(frozen=True)
class Matches(Rule):
    """An accepted answer is a regular expression that is found anywhere in the text."""

    text: ClassVar[bool] = False
    begins: ClassVar[bool] = False

    def check(self, answer: str) -> None:
        """Refuse what is no regular expression."""
        check_own("the answer", answer)

    def accepts(self, said: str, answer: str) -> bool:
        """True if it is found."""
        return bool(search_own(answer, said))


@RULES.register("number")
@dataclass(frozen=True)
class Number(ReadingRule):
    """The one number that the text gives is an accepted one: marked, labelled, alone in a line, or the only one."""

    tolerance: NonNegative = 0.0
    """Largest difference that still counts as right, >= 0."""

    wanted: ClassVar[str] = "a number"
    schema: ClassVar[Mapping[str, Any]] = {"type": "number"}

    def read(self, text: str) -> Any | None:
        """The number (`number_in`)."""
        return number_in(text)

    def same(self, told: Any, accepted: Any) -> bool:
        """True if they differ by no more than the tolerance."""
        return bool(abs(told - accepted) <= self.tolerance * (1 + 1e-12))


@RULES.register("call")
@dataclass(frozen=True)
class Call(ReadingRule):
    """The first tool that is called is the accepted one: a name or, as JSON, a name and the arguments that must be so.

    Calls are those that a server tells of, or what the text holds in the forms of `calls_in`.
    """

    text: ClassVar[bool] = False
    wanted: ClassVar[str] = "a tool's name, or an object with name and arguments"

    def read(self, text: str) -> Called | None:
        """The first call."""
        return next(iter(calls_in(text)), None)

    def accepted(self, answer: str) -> Called | None:
        """A call, or a tool's name alone."""
        return self.read(answer) or (None if answer.lstrip().startswith("{") else Called(answer, {}))

    def same(self, told: Called, accepted: Called) -> bool:
        """True if the tool is called with all that is accepted."""
        return told.meets(accepted.name, accepted.arguments)

    def settled(self, text: str) -> bool:
        """True if there is a call: the first one counts."""
        return self.readable(text)


@RULES.register("choice")
@dataclass(frozen=True)
class Choice(ReadingRule):
    """The text names the letter of the moved unit, which units are listed with."""

    options: Annotated[int, Interval(ge=1, le=len(LETTERS))] = len(LETTERS)
    """Options among which one is named."""

    @property
    def schema(self) -> Mapping[str, Any]:  # type: ignore[override]  # read-only, as all of a frozen class
        """One of the letters."""
        return {"type": "string", "enum": [*LETTERS[: self.options]]}

    def read(self, text: str) -> str | None:
        """The letter of an option (`letter_in`)."""
        return letter_in(text, LETTERS[: self.options])


@RULES.register("verdict")
@dataclass(frozen=True)
class Verdict(ReadingRule):
    """The text says which of two responses, A or B, is better (`verdict_of`)."""

    schema: ClassVar[Mapping[str, Any]] = {"type": "string", "enum": ["A", "B", TIE]}

    def read(self, text: str) -> str | None:
        """A, B, `TIE`, or None."""
        return verdict_of(text)


@RULES.register("python")
@dataclass(frozen=True)
class Python(Rule):
    """A function of one's own scores the text: `function(text, answers)` gives 0 ... 1."""

    function: str
    """`package.module:function`, or `file.py:function`."""

    text: ClassVar[bool] = False
    begins: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if not re.fullmatch(r"[^:]+:[A-Za-z_]\w*", self.function):
            raise UsageError(f"python: function must be module:function or file.py:function, got {self.function!r}")

    def accepts(self, said: str, answer: str) -> bool:
        """True if the function gives 1."""
        return self.right(said, [answer]) == 1

    def right(self, text: str, answers: Sequence[str]) -> float:
        """What the function returns."""
        function = _imported(self.function)
        try:
            score = float(function(text, list(answers)))
        except Exception as error:  # whatever one's own code raises
            raise RunError(f"{self.function} failed: {type(error).__name__}: {error}") from error
        if not 0 <= score <= 1:
            raise RunError(f"{self.function} must return 0 ... 1, got {score!r}")
        return score


@cache
def _imported(path: str) -> Callable[[str, list[str]], Any]:
    place, _, name = path.rpartition(":")
    try:
        function = run_path(place)[name] if place.endswith(".py") else getattr(import_module(place), name)
    except Exception as error:  # whatever a module raises while it is imported
        raise UsageError(f"cannot import {path!r}: {type(error).__name__}: {error}") from error
    if not callable(function):
        raise UsageError(f"{path!r} is no function")
    return function  # type: ignore[no-any-return]
