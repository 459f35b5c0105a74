"""Rules that judge the answers to items of one's own, spelled as literal calls such as `number(tolerance=0.5)`."""

import importlib.util
import math
import re
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any, ClassVar

from posbias.errors import RunError, UsageError
from posbias.registry import Registry
from posbias.tasks.language.answers import LETTERS, choice_match, choice_of, first_line, substring_match
from posbias.tasks.language.verdict_parsing import check_own, search_own

RULES: Registry["Rule"] = Registry("rule")
NUMBER = r"[-+−]?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?(?:[eE][-+]?\d+)?"
"""A number as people write it, with commas between thousands."""
LABELLED = re.compile(
    rf"(?:\\boxed\{{|####|\b(?:answer|total|result)\s*(?:is|:|=)+|=)\s*[^\w\n+−-]{{0,3}}({NUMBER})", re.IGNORECASE
)


@dataclass(frozen=True)
class Rule(ABC):
    """A rule by which a generated text is right or wrong."""

    name: ClassVar[str]
    text: ClassVar[bool] = True
    """True if an accepted answer is a text that a model may say: it is scored by teacher forcing, too."""
    one_line: ClassVar[bool] = False
    """True if the first line alone is judged."""
    letters: ClassVar[bool] = False
    """True if the answer is the letter of the moved unit's place, which the file does not say."""

    @property
    def own_code(self) -> str | None:
        """The Python code of one's own that it runs."""
        return None

    def check(self, answer: str) -> None:
        """Refuse an accepted answer that cannot be judged by this rule."""

    def readable(self, text: str) -> bool:
        """True if a text holds what is judged, such as a number; what does not is wrong."""
        return True

    @abstractmethod
    def right(self, text: str, answers: Sequence[str]) -> float:
        """The score of a text, 0 ... 1."""


@RULES.register("contains")
@dataclass(frozen=True)
class Contains(Rule):
    """An accepted answer occurs anywhere in the text, ignoring case."""

    def right(self, text: str, answers: Sequence[str]) -> float:
        """1 or 0."""
        return substring_match(text, answers)


@RULES.register("equals")
@dataclass(frozen=True)
class Equals(Rule):
    """The first line that is not blank is an accepted answer, but for case, blanks around it and a full stop."""

    one_line: ClassVar[bool] = True

    def right(self, text: str, answers: Sequence[str]) -> float:
        """1 or 0."""
        line = _bare(first_line(text))
        return float(any(line == _bare(answer) for answer in answers))


def _bare(text: str) -> str:
    return " ".join(text.split()).rstrip(".").casefold()


@RULES.register("regex")
@dataclass(frozen=True)
class Matches(Rule):
    """An accepted answer is a regular expression that is found anywhere in the text."""

    text: ClassVar[bool] = False

    def check(self, answer: str) -> None:
        """Refuse what is no regular expression."""
        check_own("the answer", answer)

    def right(self, text: str, answers: Sequence[str]) -> float:
        """1 or 0."""
        return float(any(search_own(answer, text) for answer in answers))


@RULES.register("number")
@dataclass(frozen=True)
class Number(Rule):
    """The number that a text gives is an accepted one: the last behind a label ("answer: 42", "= 42"), or the first."""

    tolerance: float = 0.0
    """Largest difference that still counts as right, >= 0."""

    def __post_init__(self) -> None:
        if not 0 <= self.tolerance < math.inf:
            raise UsageError(f"number: tolerance must be at least 0 and finite, got {self.tolerance!r}")

    def check(self, answer: str) -> None:
        """Refuse what is no number."""
        if not re.fullmatch(NUMBER, answer.strip()):
            raise UsageError(f"the answer must be a number, got {answer!r:.80}")

    def readable(self, text: str) -> bool:
        """True if there is a number."""
        return bool(_stated(text))

    def right(self, text: str, answers: Sequence[str]) -> float:
        """1 or 0."""
        slack = self.tolerance * (1 + 1e-12)
        return float(any(abs(_value(given) - _value(answer)) <= slack for given in _stated(text) for answer in answers))


def _stated(text: str) -> list[str]:
    """The number that a text gives; none or one."""
    return LABELLED.findall(text)[-1:] or re.findall(rf"(?<![\w.]){NUMBER}", text)[:1]


def _value(text: str) -> float:
    return float(text.strip().replace(",", "").replace("−", "-"))


@RULES.register("choice")
@dataclass(frozen=True)
class Choice(Rule):
    """The text names the letter of the moved unit, which units are listed with."""

    letters: ClassVar[bool] = True

    def readable(self, text: str) -> bool:
        """True if a letter is named."""
        return choice_of(text, LETTERS) is not None

    def right(self, text: str, answers: Sequence[str]) -> float:
        """1 or 0."""
        return choice_match(text, answers)


@RULES.register("python")
@dataclass(frozen=True)
class Python(Rule):
    """A function of one's own scores the text: `function(text, answers)` gives 0 ... 1."""

    function: str
    """`package.module:function`, or `file.py:function`."""

    text: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if not isinstance(self.function, str) or not re.fullmatch(r"[^:]+:[A-Za-z_]\w*", self.function):
            raise UsageError(f"python: function must be module:function or file.py:function, got {self.function!r}")

    @property
    def own_code(self) -> str:
        """The function."""
        return self.function

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
        if place.endswith(".py"):
            spec = importlib.util.spec_from_file_location(Path(place).stem, place)
            if spec is None or spec.loader is None:
                raise ImportError(f"no module in {place!r}")
            module = importlib.util.module_from_spec(spec)
            sys.modules.setdefault(spec.name, module)  # dataclasses look their module up
            spec.loader.exec_module(module)
        else:
            module = import_module(place)
        function = getattr(module, name)
    except Exception as error:  # whatever a module raises while it is imported
        raise UsageError(f"cannot import {path!r}: {type(error).__name__}: {error}") from error
    if not callable(function):
        raise UsageError(f"{path!r} is no function")
    return function  # type: ignore[no-any-return]
