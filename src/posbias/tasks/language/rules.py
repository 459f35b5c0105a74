"""Rules of scoring, for every task: is a generated text right, given the accepted answers?

A rule is spelled as a literal call such as `number(tolerance=0.5)`.
"""

import operator
import re
import string
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from functools import cache
from importlib import import_module
from runpy import run_path
from typing import Annotated, Any

from annotated_types import Interval

from posbias.checks import CountOrZero, NonNegative, checked
from posbias.errors import RunError, UsageError
from posbias.registry import Registry
from posbias.tasks.language.calls import Called, calls_in
from posbias.tasks.language.readings import TIE, check_own, explicit, letter_in, number_in, search_own

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


@dataclass(frozen=True, kw_only=True)
class Rule:
    """A rule by which a generated text is right or wrong: it says an accepted answer, or the value of one is read."""

    name: str
    says: Callable[[str, str], float] | None = None
    """True if a text says an accepted answer, or how much of it, 0 ... 1; None if a value is read."""
    read: Callable[[str], Any] = lambda _: None
    """The one value that a text tells, or None where that is not certain; it counts as wrong."""
    accepted: Callable[[str], Any] | None = None
    """The value of an accepted answer, or None if it is none; by default `read`."""
    same: Callable[[Any, Any], bool] = operator.eq
    """True if a value counts as an accepted one."""
    wanted: str = "a letter"
    """What an accepted answer must be, if a value is read."""
    broken: Callable[[str, str], bool] = lambda text, answer: False
    """True if no text that begins so can say an accepted answer."""
    refuse: Callable[[str], object] | None = None
    """Refuses an accepted answer that cannot be judged otherwise."""
    text: bool = True
    """True if an accepted answer is a text that a model may say: it is scored by teacher forcing, too."""
    one_line: bool = False
    """True if the first line alone that is not blank is judged."""
    first: bool = False
    """True if the first value of several is the one that counts, so that nothing behind it does."""
    schema: Mapping[str, Any] | None = None
    """JSON schema of an answer, for servers that keep to one; None: a text of any form is judged."""
    function: str | None = None
    """Code of one's own that scores a text."""

    def _accepted(self, answer: str) -> Any:
        return (self.accepted or self.read)(answer)

    def check(self, answer: str, where: str) -> None:
        """Refuse an accepted answer, from a field of a file, that cannot be judged by this rule."""
        try:
            if self.refuse is not None:
                self.refuse(answer)
            elif self.says is None and self.function is None and self._accepted(answer) is None:
                raise UsageError(f"the answer must be {self.wanted}, got {answer!r:.80}")
        except UsageError as error:
            raise UsageError(f"{where}: {error}") from None

    def readable(self, text: str) -> bool:
        """True if it is certain what a text says of what is judged, such as a number; else it counts as wrong."""
        return self.says is not None or self.function is not None or self.read(text) is not None

    def settled(self, text: str, answers: Sequence[str] = ()) -> bool:
        """True if nothing that might follow a text, which was cut off, changes how it is judged.

        Of a value: a mark or label tells it, and the last word, which may have been cut, has no part in it.
        """
        if answers and all(self.broken(text, answer) for answer in answers):
            return True
        told = self.read(text)
        if told is None or self.first:
            return told is not None or (self.one_line and "\n" in unfenced(text))
        return explicit(text) and bool(self.read(text.rstrip().rpartition(" ")[0]) == told)

    def right(self, text: str, answers: Sequence[str]) -> float:
        """The score of a text, 0 ... 1: 1 if it says one of the answers (at least 1, none empty)."""
        if isinstance(answers, str) or not answers or not all(answers):
            raise UsageError(f"answers must be a list of at least 1 text, none empty, got {answers!r}")
        if self.function is not None:
            return _scored(self.function, text, answers)
        said = unfenced(text).partition("\n")[0].strip() if self.one_line else text
        if self.says is not None:
            return max(float(self.says(said, answer)) for answer in answers)
        told = self.read(said)
        return float(told is not None and any(self.same(told, self._accepted(answer)) for answer in answers))


@RULES.register("contains")
def contains() -> Rule:
    """An accepted answer occurs anywhere in the text, ignoring case.

    Source: Liu et al. 2024, section 3.1, key-value retrieval.
    """
    return Rule(name="contains", says=lambda said, answer: answer.lower() in said.lower())


@RULES.register("best_subspan_em")
def best_subspan_em() -> Rule:
    """An accepted answer occurs in the first line that is not blank, both normalised (`normalise_answer`).

    Only the text before that line's end counts: the answer stands in the context, so that a model which copies
    the context on and on would otherwise be right.

    Source: Liu et al. 2024, section 2.2. As published but for empty answers, which there are always right, and for
    blank lines before an answer, with which it is always wrong there.
    """

    def normalised(answer: str) -> str:
        if not (normal := normalise_answer(answer)):
            raise UsageError(f"answer {answer!r} holds nothing but articles and punctuation, so it cannot be scored")
        return normal

    return Rule(
        name="best_subspan_em",
        says=lambda said, answer: normalised(answer) in normalise_answer(said),
        refuse=normalised,
        one_line=True,
    )


@RULES.register("whole_words")
def whole_words() -> Rule:
    """The first sentence of the first line holds an accepted answer as whole words, both normalised."""

    def says(said: str, answer: str) -> bool:
        sentence = re.split(r"(?<=[.!?]) ", said)[0]
        return f" {normalise_answer(answer)} " in f" {normalise_answer(sentence)} "

    return Rule(name="whole_words", says=says, one_line=True)


@RULES.register("equals")
def equals() -> Rule:
    """The first line that is not blank is an accepted answer, but for case, and quotes or a full stop around it."""

    def bare(text: str) -> str:
        return " ".join(text.split()).strip("\"'`*“”.").casefold()

    return Rule(name="equals", says=lambda said, answer: bare(said) == bare(answer), one_line=True)


@RULES.register("similar")
@checked
def similar(after: CountOrZero = 0) -> Rule:
    """A share: how alike the text is to an accepted answer (difflib's ratio); 0 if it does not begin as that does.

    The first `after` characters must be the same, and are left out of the ratio.

    Source: openai/mrcr, where they are a random beginning that is asked for.
    """

    def says(said: str, answer: str) -> float:
        begun = said.startswith(answer[:after])
        return SequenceMatcher(None, said[after:], answer[after:]).ratio() if begun else 0.0

    return Rule(name="similar", says=says, broken=lambda text, answer: not answer[:after].startswith(text[:after]))


@RULES.register("regex")
def regex() -> Rule:
    """An accepted answer is a regular expression that is found anywhere in the text."""
    return Rule(
        name="regex",
        says=lambda said, answer: bool(search_own(answer, said)),
        refuse=lambda answer: check_own("the answer", answer),
        text=False,
    )


@RULES.register("number")
@checked
def number(tolerance: NonNegative = 0.0) -> Rule:
    """The one number that the text gives is an accepted one: marked, labelled, alone in a line, or the only one.

    It may differ by `tolerance` (>= 0).
    """
    return Rule(
        name="number",
        read=number_in,
        same=lambda told, accepted: abs(told - accepted) <= tolerance * (1 + 1e-12),
        wanted="a number",
        schema={"type": "number"},
    )


@RULES.register("call")
def call() -> Rule:
    """The first tool that is called is the accepted one: a name or, as JSON, a name and the arguments that must be so.

    Calls are those that a server tells of, or what the text holds in the forms of `calls_in`.
    """

    def read(text: str) -> Called | None:
        return next(iter(calls_in(text)), None)

    def accepted(answer: str) -> Called | None:
        return read(answer) or (None if answer.lstrip().startswith("{") else Called(answer, {}))

    return Rule(
        name="call",
        read=read,
        accepted=accepted,
        same=lambda told, accepted: told.meets(accepted.name, accepted.arguments),
        wanted="a tool's name, or an object with name and arguments",
        text=False,
        first=True,
    )


@RULES.register("choice")
@checked
def choice(options: Annotated[int, Interval(ge=1, le=len(LETTERS))] = len(LETTERS)) -> Rule:
    """The text names the letter of the moved unit, one of so many `options` that units are listed with."""
    letters = LETTERS[:options]
    schema = {"type": "string", "enum": [*letters]}
    # "A" is an article to what compares beginnings.
    return Rule(name="choice", read=lambda text: letter_in(text, letters), schema=schema)


@RULES.register("verdict")
def verdict() -> Rule:
    """The text says which of two responses, A or B, is better, or that it is a tie."""
    schema = {"type": "string", "enum": ["A", "B", TIE]}
    return Rule(name="verdict", read=lambda text: letter_in(text, "AB", judged=True), schema=schema)


@RULES.register("python")
@checked
def python(function: str) -> Rule:
    """A function of one's own scores the text: `function(text, answers)` gives 0 ... 1.

    It is spelled `package.module:function`, or `file.py:function`.
    """
    if not re.fullmatch(r"[^:]+:[A-Za-z_]\w*", function):
        raise UsageError(f"python: function must be module:function or file.py:function, got {function!r}")
    return Rule(name="python", function=function, text=False)


def _scored(path: str, text: str, answers: Sequence[str]) -> float:
    """What a function of one's own gives."""
    function = _imported(path)
    try:
        score = float(function(text, list(answers)))
    except Exception as error:  # whatever one's own code raises
        raise RunError(f"{path} failed: {type(error).__name__}: {error}") from error
    if not 0 <= score <= 1:
        raise RunError(f"{path} must return 0 ... 1, got {score!r}")
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
