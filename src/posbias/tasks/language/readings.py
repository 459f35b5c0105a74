"""What an answer says, read from a model's prose: a number, a day, a value of JSON; None where that is not certain.

A value is told by a mark (`\\boxed{}`, `[[ ]]`, `<answer>`, `####`, a field "answer" of JSON), else behind a label
("Answer: 12") or on a line of its own, else by being the only one that is named. All that tells one must agree, and
nothing behind a turn ("but", "wait") may tell another; what is denied, asked, supposed or bounded tells none. A further
question, with which models run on, is passed over with all behind it.
"""

import ast
import json
import math
import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from datetime import date
from typing import Any

from posbias.tasks.language.answers import first_line, normalise_answer

ANSWER = "answer|antwort|respuesta|réponse|resposta|risposta|antwoord|ответ|cevap|jawaban|答案|答え|回答|정답"
"""What an answer is called where it is labelled."""
_TAGS = "answer|verdict|choice|winner|decision|judge?ment|preference|better|preferred"
UNSURE = re.compile(
    r"\b(?:if|whether|unless|at first|few|cannot|neither|nor|never|no(?!,)|hardly|could|might|doubt\w*)\b|n't\b|\?\Z"
    r"|\bnot\b(?! [-$]?\d)|\bmay\b(?!,? (?:the )?\d)"
    r"|\b(?:false|untrue|wrong|incorrect)\s+(?:that|to)\b|\b(?:is|are|was)\s+(?:wrong|incorrect|false)\b"
    r"|\b(?:who|some|someone|anyone|they|many)\s+(?:\w+\s+)?(?:say|think|claim|argue)s?\b",
    re.IGNORECASE,
)
"""What a clause that tells no answer has; May is a month, too, and "not 5" denies that alone."""
_CLAUSE_ENDS = re.compile(
    r"[.;!](?=\s|\Z)|\n|(?<=\?)|,?(?<!\s)\s+(?=(?:but|however|yet|because|since|therefore|thus|hence)\b)|,\s*(?=so\b)",
    re.I,
)
_TURN = re.compile(
    r"\b(?:but|however|yet|although|closer (?:look|inspection|reading)"
    r"|(?P<back>wait|actually|correction|sorry|mistaken?|on (?:second thought|reflection)))\b",
    re.IGNORECASE,
)
"""What may take back all before it: `back` unless it is told again, the others if another value is named behind."""
REASON = re.compile(r"(?<=\w)\W+(?:because|since)\b")
_FENCED = re.compile(r"^[ \t]*(```|~~~)[^\n`]*\n(.*?)(?:^[ \t]*\1|\Z)", re.DOTALL | re.MULTILINE)
_FURTHER = re.compile(r"(?<=\S)\s*\n[^\w\n]*(?:question|problem|user|human|q)\s*\d*\s*:", re.IGNORECASE)
_STYLE = re.compile(
    r"\\(?:text|math|bf|rm|emph)\w*\s*\{([^{}]*)\}|\\[()\[\],!;]|\{(,)\}|^[ \t]*(?:```|~~~).*$"
    r"|(?<![^\W_])[*_`]+|[*_`]+(?![^\W_])",
    re.MULTILINE,
)
_SIGNS = str.maketrans("：（）’‘“”−", ":()''\"\"-")
_MARK = re.compile(
    r"\\boxed\s*\{((?:[^{}]|\{[^{}]*\})*)\}|\[\[([^\[\]]*)\]\]"
    rf"|<(?P<tag>{_TAGS})>([^<]*)</(?P=tag)>"
    rf'|"(?:{_TAGS})"\s*:\s*("[^"]*"|[^",}}\]\n]*)|^[ \t]*\#\#\#\#(?P<heading>[^\n]*)$',
    re.IGNORECASE | re.MULTILINE,
)
_NEAR = 200
"""Characters around a mark in which its clause is looked for."""
_LABEL = re.compile(rf"(?<![^\W_])(?:{ANSWER})(?:\s+\w+){{0,5}}?(?:\s*(?:\b(?:is|be)\b|[:=]))+[\s(\"]*", re.IGNORECASE)
_HEADING = re.compile(rf"^[^\w\n]*(?:\w+ )?({ANSWER})[^\w\n]*\n", re.IGNORECASE | re.MULTILINE)
"""An answer's name in a line of its own: a label of the next line."""
_ODD = (
    r"(?:(?P<odd>\b(?:before|after|than|least|most|or|from|between|either)\s+(?:the\s+)?|(?<![=>-])[<>≤≥]\s*)"
    r"|\b(?P<not>not)\s+)?"
)
_OR = r"(?P<more>\s+or\b)?"
_NUMBER = re.compile(
    rf"{_ODD}(?<![\w.,$€£¥₹'^/:%])(?P<minus>(?:minus|negative)\s+)?(?:(?P<sign>[-–+]\s*)?"
    r"(?P<money>\(?\\?(?:US|CA|AU?|NZ|HK)?[$€£¥₹]\s?)?(?P<second>[-–])?(?P<digits>\.?\d[\w.,'^/:%+–-]*)"
    r"|\b(?P<word>zero|two|three|four|five|six|seven|eight|nine|ten)\b|(?P<one>\A\W*one(?=\W*\Z))"
    r"|\b(?:eleven|twelve|\w+teen|(?:twen|thir|for|fif|six|seven|eigh|nine)ty|hundred|thousand|million|billion|dozen|half)"
    rf"\b(?:-\w+)?){_OR}",
    re.IGNORECASE,
)
_WORDS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")
_TERM = r"[\\^+*/]|\b\w\b"
"""What makes more of a number in a mark than a number with its unit."""
_WRITTEN = re.compile(
    r"(?P<whole>\d{1,3}(?:[,']\d{3})+|\d*)(?P<rest>(?:\.\d+)?(?:[eE][-+]?\d+)?)"
    r"(?:%|-?(?!(?:[kKMBTinxyz]|[mb]n?)\Z)[A-Za-zµ\u3040-\uffff]*)"
)
"""Digits as people write them, with a unit; "5k" is another number, and "1,5" or "3/4" may be meant otherwise."""
_MONTH = (
    "jan(?:uary)?|feb(?:ruary)?|mar(?:ch)?|apr(?:il)?|may|june?|july?|aug(?:ust)?|sept?(?:ember)?|oct(?:ober)?"
    "|nov(?:ember)?|dec(?:ember)?"
)
_PART = rf"(?:\d{{1,4}}(?:st|nd|rd|th)?|{_MONTH})(?!\w)"
_DAY = re.compile(
    rf"{_ODD}(?<![\w/-])(?P<day>{_PART}(?:(?:\s*[,./-]\s*|\s+of\s+|\s+)(?:the\s+)?{_PART}){{2,}})(?![\w/]){_OR}", re.I
)
_ENDED = re.compile(r'\s*(?:\Z|\n|[.;]\s*(?:\Z|\n)|,\s*"[^"]*"\s*:)')
"""What may follow a value of JSON: nothing, a line, the next field of its object."""
_ENTRY = re.compile(r"\W*\d{1,2}[.)]\s")
"""How an entry of a list begins; if it names a value, its own number is none."""
_LONGEST_LITERAL = 1000
"""Characters of a literal; the parser of Python breaks off the process at some of 50,000."""
_BARE = re.compile(r"[\w'.-]+(?: [A-Z0-9][\w'.-]*)*")
"""A name as it may stand for a text in JSON."""

NAME = "name"
"""Mark of a name without quotes in `json_in`."""

Named = list[tuple[int, int, Any]]
"""What a text names, in order: begin, end, and the value, or NaN if it may be meant but cannot be read."""
Levels = Callable[[str], list[list[Any]]]
"""What a text tells, most explicit forms first."""


def bodies(text: str) -> list[str]:
    """What stands in fences, or the whole text if there are none, without backticks around."""
    text = _FURTHER.split(text)[0]
    return [part.strip().strip("`").strip() for part in [match[2] for match in _FENCED.finditer(text)] or [text]]


def plain(text: str) -> str:
    """A text without the decoration of Markdown and LaTeX, up to a further question; marks and `$` stay."""
    bare = _STYLE.sub(lambda style: style[1] or style[2] or "", _FURTHER.split(text)[0].translate(_SIGNS))
    bare = re.sub(r"(\s)\1+", r"\1", bare)  # some models end in blanks without end
    return _HEADING.sub(r"\1: ", bare)


def clauses(text: str) -> list[str]:
    """The clauses of a text that may tell something."""
    return [part.strip() for part in _CLAUSE_ENDS.split(text) if part.strip() and not UNSURE.search(part.strip())]


def marked(text: str) -> Iterator[tuple[str, bool]]:
    """What stands in marks that the clause around does not deny, with True if it may as well be a heading."""
    for match in _MARK.finditer(text):
        before, behind = text[max(0, match.start() - _NEAR) : match.start()], text[match.end() : match.end() + _NEAR]
        around = _CLAUSE_ENDS.split(before)[-1] + "." + _CLAUSE_ENDS.split(behind)[0]
        if not UNSURE.search(around.strip()):
            inside = next(match[group] for group in (1, 2, 4, 5, 6) if match[group] is not None)
            yield inside.strip(' "'), match["heading"] is not None


def explicit(text: str) -> bool:
    """True if a mark or a label announces the answer, so that it is none of the values named on the way to it."""
    return bool(_MARK.search(text) or _LABEL.search(plain(text)))


def agreed(told: Sequence[Any]) -> Any | None:
    """The only value that is told; None for none and for several."""
    return told[0] if told and all(value == told[0] for value in told) else None


def certain(text: str, levels: Levels, named: Callable[[str], Sequence[Any]]) -> Any | None:
    """The one value of the first level that tells any, unless a turn in the text may take it back."""
    marks, *others = levels(text)
    value = agreed(marks or next(filter(None, others), []))
    for turn in list(_TURN.finditer(text))[-1:]:
        behind = text[turn.end() :]
        if turn["back"] or (not marks and named(behind)):
            return value if value == agreed(next(filter(None, levels(behind)), [])) else None
    return value


def number_in(text: str) -> float | None:
    """The number that a text gives: in digits, with a sign, a currency or a unit, or as a word up to ten."""
    return _read(plain(text), _numbers)


def day_in(text: str) -> date | None:
    """The day that a text gives, year, month and day in any order that can be told."""
    return _read(re.sub(rf"\b({_MONTH})\.", r"\1", plain(text), flags=re.IGNORECASE), _days)


def json_in(text: str) -> tuple[Any, Any] | None:
    """The JSON value of a text, beside True if it is a truth value (in Python 0 or 1, too); or `NAME` and a bare name.

    It stands in fences, begins the text, or is the only object or list in it; a first line may be a literal of Python.
    """
    told: list[Any] = []
    for body in bodies(text):
        begun = _decoded(body)
        if begun and _ENDED.match(begun[1]):
            told += [begun, *filter(None, map(_decoded, begun[1].splitlines()[1:]))]
            continue
        line = first_line(body).strip("`")
        if len(line) <= _LONGEST_LITERAL:
            with (
                warnings.catch_warnings(action="ignore"),
                suppress(ValueError, SyntaxError, TypeError, MemoryError, RecursionError),
            ):
                told.append((ast.literal_eval(line), ""))
                continue
        end = 0
        for begin in re.finditer(r"[\[{]", body):
            if begin.start() >= end and (found := _decoded(body[begin.start() :])):
                told.append(found)
                end = len(body) - len(found[1])
    if told:
        return agreed([(isinstance(value, bool), value) for value, _ in told])
    name = first_line(plain(text)).rstrip(".")
    return (NAME, normalise_answer(name)) if _BARE.fullmatch(name) and not _TURN.search(text) else None


def _decoded(text: str) -> tuple[Any, str] | None:
    """The JSON value with which a text begins, and what follows it."""
    with suppress(ValueError, RecursionError):
        value, end = json.JSONDecoder().raw_decode(text)
        return value, text[end:]
    return None


def _read(text: str, named: Callable[[str], Named]) -> Any | None:
    """The value that a text tells, if that is certain."""

    def only(part: str) -> Any:
        """The value of a part; of an equation, that of its last side."""
        value = agreed([value for *_, value in named(part.rpartition("=")[2])])
        return math.nan if value is None else value

    def alone(line: str, beside: str = r"\w|\?\s*\Z") -> bool:
        """True if a part names a value and nothing that matches `beside`."""
        places = named(line)
        for begin, end, _ in reversed(places):
            line = line[:begin] + line[end:]
        return bool(places) and not re.search(beside, line.replace(" x ", ""))

    def levels(text: str) -> list[list[Any]]:
        sure = clauses(text)
        behind = [clause[match.end() :] for clause in sure for match in _LABEL.finditer(clause)]
        labelled = [part for part in behind if [begin for begin, *_ in named(part)][:1] == [0]]
        lines = [REASON.split(line)[0] for line in text.splitlines()]
        entries = [line[entry.end() :] for line in lines if (entry := _ENTRY.match(line))]
        return [
            [
                only(part) if alone(part, _TERM) else math.nan
                for part, heading in marked(text)
                if named(part) or not heading
            ],
            [only(part) for part in [*filter(alone, lines), *labelled]],
            [
                *(value for clause in sure for *_, value in named(clause)),
                *(math.nan for entry in entries if named(entry)),
            ],
        ]

    return certain(text, levels, named)


def _numbers(text: str) -> Named:
    return [(*match.span(), _number(match)) for match in _NUMBER.finditer(text) if not match["not"]]


def _number(match: "re.Match[str]") -> float:
    signs = (match["sign"] or "") + (match["second"] or "")
    if match["odd"] or match["more"] or len(signs) > 1 or (match["money"] or "").startswith("("):
        return math.nan  # a bound or a choice, an entry of a list, "($5)" as accountants write a debt
    written = _WRITTEN.fullmatch((match["digits"] or "").rstrip(".,:'^/+–-"))
    if match["word"] or match["one"]:
        size = float(_WORDS.index((match["word"] or "one").lower()))
    elif written is None or not match["digits"]:
        return math.nan
    else:
        size = float(re.sub("[,']", "", written["whole"]) + written["rest"])
    return -size if match["minus"] or signs in ("-", "–") else size


def _days(text: str) -> Named:
    return [(*match.span(), _day(match)) for match in _DAY.finditer(text) if not match["not"]]


def _day(match: "re.Match[str]") -> Any:
    """The day of three parts with a year of four digits, if it does not matter which part dateutil takes for it."""
    from dateutil import parser

    parts = re.findall(r"\d+|[a-z]{3,}", re.sub(r"(?<=\d)(?:st|nd|rd|th)|\bthe\b", "", match["day"].lower()))
    years = [part for part in parts if part.isdigit() and len(part) > 2]
    if match["odd"] or match["more"] or len(parts) != 3 or list(map(len, years)) != [4]:
        return math.nan
    first, told = parts[0] == years[0], set()
    for day_first in (False, not first):
        with suppress(ValueError, OverflowError):
            told.add(parser.parse(" ".join(parts), dayfirst=day_first, yearfirst=first).date())
    return told.pop() if len(told) == 1 else math.nan
