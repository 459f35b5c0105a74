"""What an answer says, read from a model's prose: a number, a letter, a judge's verdict; None where not certain.

A value is told by a mark (`\\boxed{}`, `[[ ]]`, `<answer>`, `####`, a field "answer" of JSON), else behind a label
("Answer: 12") or on a line of its own, else by being the only one that is named; a letter also begins the text, or is
in a sentence that says it ("B is correct", "Response B is better"). All that tells one must agree, and nothing behind a
turn ("but", "wait") may tell another; what is denied, asked, supposed or bounded tells none, nor does an article. A
further question, with which models run on, is passed over with all behind it.
"""

import math
import re
from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from typing import Any, NamedTuple

from posbias.errors import UsageError

TIE = "tie"
"""The verdict that neither response is better."""
LONGEST_PATTERN = 500
"""Characters of a pattern of one's own."""
PATTERN_SECONDS = 5.0
"""Longest search for a pattern of one's own in one text: some patterns take exponential time."""

_ANSWER = "answer|antwort|respuesta|réponse|resposta|risposta|antwoord|ответ|cevap|jawaban|答案|答え|回答|정답"
"""What an answer is called where it is labelled."""
_TAGS = "answer|verdict|choice|winner|decision|judge?ment|preference|better|preferred"
_UNSURE = re.compile(
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
_REASON = re.compile(r"(?<=\w)\W+(?:because|since)\b")
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
_LABEL = re.compile(rf"(?<![^\W_])(?:{_ANSWER})(?:\s+\w+){{0,5}}?(?:\s*(?:\b(?:is|be)\b|[:=]))+[\s(\"]*", re.IGNORECASE)
_HEADING = re.compile(rf"^[^\w\n]*(?:\w+ )?({_ANSWER})[^\w\n]*\n", re.IGNORECASE | re.MULTILINE)
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
_ENTRY = re.compile(r"\W*\d{1,2}[.)]\s")
"""How an entry of a list begins; if it names a value, its own number is none."""
_CALLED = r"(?i:the\s+|my\s+)?(?i:response|assistant|answer|output|option|model|candidate|reply|choice|letter)\s*"
_ADVERBS = (
    r"(?i:(?:clearly|slightly|much|far|also|therefore|thus|overall|still|marginally|significantly|definitely)\s+)*"
)
_BETTER = r"(?i:better|superior|preferable|preferred|stronger|winner)\b(?!-)"
_LEADING_WORDS = (
    r"(?:(?i:the|my|final|so|thus|therefore|hence|better|best|winning|preferred|winner|is|i|choose|pick|select|prefer"
    r"|response|assistant|output|option|model|candidate|choice|verdict|decision|preference|judge?ment"
    rf"|{_ANSWER}|{{words}})\b[^\w✗✘❌✖¬≠]*)*"
)
_DENIED = re.compile(
    r"\b(?:wrong|incorrect|false|not (?:correct|right|what|the|in|mentioned|stated))\b|\bno\W*\Z", re.IGNORECASE
)
_OPTION = re.compile(r"\b([A-J])[.):]\s")
_COPIED = re.compile(r"^\W*([A-J])[.):]\s[^\n]*\n\W*([A-J])\W*\Z", re.MULTILINE)
"""What may be the next of several options, cut off: "A. Oslo" with "B." in the line below."""
_OUTCOMES = {"A": "A", "B": "B", "C": TIE, "TIE": TIE, "DRAW": TIE}
_SENTENCE = re.compile(r"[.;!?\n]")
_QUOTES = str.maketrans("", "", '"#')


def _plain(text: str) -> str:
    """A text without the decoration of Markdown and LaTeX, up to a further question; marks and `$` stay."""
    bare = _STYLE.sub(lambda style: style[1] or style[2] or "", _FURTHER.split(text)[0].translate(_SIGNS))
    bare = re.sub(r"(\s)\1+", r"\1", bare)  # some models end in blanks without end
    return _HEADING.sub(r"\1: ", bare)


def _clauses(text: str) -> list[str]:
    """The clauses of a text that may tell something."""
    return [part.strip() for part in _CLAUSE_ENDS.split(text) if part.strip() and not _UNSURE.search(part.strip())]


def _marked(text: str) -> Iterator[tuple[str, bool]]:
    """What stands in marks that the clause around does not deny, with True if it may as well be a heading."""
    for match in _MARK.finditer(text):
        before, behind = text[max(0, match.start() - _NEAR) : match.start()], text[match.end() : match.end() + _NEAR]
        around = _CLAUSE_ENDS.split(before)[-1] + "." + _CLAUSE_ENDS.split(behind)[0]
        if not _UNSURE.search(around.strip()):
            inside = next(match[group] for group in (1, 2, 4, 5, 6) if match[group] is not None)
            yield inside.strip(' "'), match["heading"] is not None


def explicit(text: str) -> bool:
    """True if a mark or a label announces the answer, so that it is none of the values named on the way to it."""
    return bool(_MARK.search(text) or _LABEL.search(_plain(text)))


def _agreed(told: Sequence[Any]) -> Any | None:
    """The only value that is told; None for none and for several."""
    return told[0] if told and all(value == told[0] for value in told) else None


def _certain(text: str, levels: Callable[[str], list[list[Any]]], named: Callable[[str], Sequence[Any]]) -> Any | None:
    """The one value of the first level that tells any, unless a turn in the text may take it back.

    `levels` tells what a text tells, most explicit forms first; `named` finds all values that it names.
    """
    marks, *others = levels(text)
    value = _agreed(marks or next(filter(None, others), []))
    for turn in list(_TURN.finditer(text))[-1:]:
        behind = text[turn.end() :]
        if turn["back"] or (not marks and named(behind)):
            return value if value == _agreed(next(filter(None, levels(behind)), [])) else None
    return value


def number_in(text: str) -> float | None:
    """The number that a text gives: in digits, with a sign, a currency or a unit, or as a word up to ten."""

    def only(part: str) -> Any:
        """The value of a part; of an equation, that of its last side."""
        value = _agreed([value for *_, value in _numbers(part.rpartition("=")[2])])
        return math.nan if value is None else value

    def alone(line: str, beside: str = r"\w|\?\s*\Z") -> bool:
        """True if a part names a value and nothing that matches `beside`."""
        places = _numbers(line)
        for begin, end, _ in reversed(places):
            line = line[:begin] + line[end:]
        return bool(places) and not re.search(beside, line.replace(" x ", ""))

    def levels(text: str) -> list[list[Any]]:
        sure = _clauses(text)
        behind = [clause[match.end() :] for clause in sure for match in _LABEL.finditer(clause)]
        labelled = [part for part in behind if [begin for begin, *_ in _numbers(part)][:1] == [0]]
        lines = [_REASON.split(line)[0] for line in text.splitlines()]
        entries = [line[entry.end() :] for line in lines if (entry := _ENTRY.match(line))]
        return [
            [
                only(part) if alone(part, _TERM) else math.nan
                for part, heading in _marked(text)
                if _numbers(part) or not heading
            ],
            [only(part) for part in [*filter(alone, lines), *labelled]],
            [
                *(value for clause in sure for *_, value in _numbers(clause)),
                *(math.nan for entry in entries if _numbers(entry)),
            ],
        ]

    return _certain(_plain(text), levels, _numbers)


def _numbers(text: str) -> list[tuple[int, int, float]]:
    """What a text names, in order: begin, end, and the number, or NaN if it may be meant but cannot be read."""
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


class _Forms(NamedTuple):
    """Forms in which one of some letters is told."""

    alone: "re.Pattern[str]"
    """A line, or the inside of a mark, that is a letter, a tie, or two letters compared, and nothing else."""
    leading: "re.Pattern[str]"
    mention: "re.Pattern[str]"
    told: "tuple[re.Pattern[str], ...]"


@cache
def _forms(letters: str, judged: bool) -> _Forms:
    letter = rf"[(\[]?([{letters}])[)\]]?"
    ends = (
        r"(?=\s*(?:\Z|[.,;:!()\[\]–—]|-(?!\w)|(?i:over|as|is|was|here|overall|due)\b))"
        rf"(?!\s*(?:[/,&–-]|or\b|and\b)+\s*[(\[]?[{letters}]\b)"
    )
    best = rf"best(?:\s+(?:response|answer|one|choice|option))?{ends}"
    labels = "verdict|winner|preference|decision|judge?ment" if judged else f"{_ANSWER}|option|choice|letter"
    said: tuple[str, ...]
    if judged:  # options of a question are letters, too: only responses are called right
        said = (
            rf"\b(?i:response|assistant|model|candidate)\s+{letter}\s+{_ADVERBS}"
            rf"(?i:wins\b|(?:is|was)\s+{_ADVERBS}(?:the\s+)?{_ADVERBS}(?:{_BETTER}|(?:right|correct)\b|{best}))",
            rf"\b{letter}\s+{_ADVERBS}(?i:wins\b|(?:is|was)\s+{_ADVERBS}(?:the\s+)?{_ADVERBS}{_BETTER})",
            rf"\b{_BETTER}\s*(?i:response|answer|one|assistant|reply|choice|output)?\s*(?i:is|was|:)\s*(?:{_CALLED})?{letter}{ends}",
        )
    else:
        said = (
            rf"\b{letter}\s+{_ADVERBS}(?i:is|was)\s+(?:the\s+)?{_ADVERBS}(?i:correct|right|best)"
            rf"(?i:\s+(?:one|answer|choice|option|response))?{ends}",
        )
    said += (
        rf"(?<![^\W_])(?i:(?:{labels})(?:\s+(?!options|choices)\w+){{0,4}}?(?:\s*(?:\b(?:is|be)\b|[:=]))+)\s*"
        rf"(?:{_CALLED})?(?:{letter}{ends}|(?i:(?:a\s+)?(?:tie|draw)\b))",
        rf"(?i:\bI(?:'d|'ll)?\s+(?:would\s+|will\s+)?){_ADVERBS}"
        rf"(?i:choose|prefer|pick|select|favou?r|go\s+with|vote\s+for)\s+(?:{_CALLED})?{letter}{ends}",
    )
    words = _LEADING_WORDS.format(words="it" if judged else "correct|right|must|would|be")
    tie = r"|([AB])\s*([<>=])[<>=]*\s*([AB])|(?i:it'?s?\s+(?:is\s+)?)?(?i:an?\s+)?(?i:tie|draw)" if judged else ""
    signs = r"[^\w✗✘❌✖¬≠]*"
    return _Forms(
        re.compile(rf"{signs}{words}(?:([{letters}]){tie}){signs}"),
        re.compile(rf"\W*(?:{_CALLED})?(?:[(\[]([{letters}])[)\]]|([{letters}])\s*[:,(–—{'' if judged else '.)'}-])"),
        re.compile(
            rf"\b(?![AI]\s+(?!(?:is|was|because|since|and|or|as|seems|fits|wins|over|here|too)\b)\w)([{letters}])\b"
        ),
        tuple(map(re.compile, said)),
    )


def letter_in(text: str, letters: str, *, judged: bool = False) -> str | None:
    """The one of some letters that an answer names; of a judge, A, B or `TIE`; None if that is not certain."""
    forms = _forms(letters, judged)
    alone = partial(_alone, letters=letters, judged=judged)

    def levels(text: str) -> list[list[Any]]:
        copied = _COPIED.search(text)
        if copied and ord(copied[2]) == ord(copied[1]) + 1:
            return [[]]
        lines = [line for line in text.splitlines() if line.strip()] or [""]
        told = [outcome for line in [*lines, _SENTENCE.split(text.rstrip(" .!;\n"))[-1]] if (outcome := alone(line))]
        on_top = told if alone(lines[-1]) else []
        telling = [line for line in lines if len({*_OPTION.findall(line)}) < 2]  # one with more lists the options
        for clause in _clauses("\n".join(telling)):
            told = told + [_letter(match) for form in forms.told for match in form.finditer(clause)]
        begun = forms.leading.match(text)
        if begun and not _DENIED.search(lines[0]) and {*forms.mention.findall(text[begun.end() :])} <= {_letter(begun)}:
            told = [*told, _letter(begun)]
        marks = [(alone(inside, mark=True), heading) for inside, heading in _marked(text)]
        return [[outcome for outcome, heading in marks if outcome or not heading], on_top, told]

    return _certain(_plain(text).replace("$", ""), levels, forms.mention.findall)


def check_own(owner: str, pattern: object, *, groups: int | None = None) -> None:
    """Refuse what is no regular expression of a bounded length with so many groups (None: any)."""
    import regex

    if not isinstance(pattern, str) or not 0 < len(pattern) <= LONGEST_PATTERN:
        raise UsageError(
            f"{owner} must be a regular expression of 1 to {LONGEST_PATTERN} characters, got {pattern!r:.80}"
        )
    try:
        count = regex.compile(pattern).groups
    except (regex.error, OverflowError, RecursionError) as error:
        raise UsageError(f"{owner} {pattern!r:.80} is not a regular expression: {error}") from None
    if groups is not None and count != groups:
        raise UsageError(f"{owner} {pattern!r:.80} has {count} groups in brackets; allowed: {groups}")


def search_own(pattern: str, text: str) -> list[Any]:
    """All matches of a pattern of one's own, as `findall` gives them; UsageError after `PATTERN_SECONDS`."""
    import regex

    try:
        return list(regex.findall(pattern, text, timeout=PATTERN_SECONDS))
    except TimeoutError:
        raise UsageError(
            f"the pattern {pattern!r:.80} takes longer than {PATTERN_SECONDS:g} s on {len(text)} characters; choose "
            "one without nested repetitions"
        ) from None


def _letter(match: "re.Match[str]") -> str:
    """The letter that a form holds; a tie if it holds none."""
    return next((group for group in match.groups() if group), TIE)


def _alone(text: str, letters: str, *, judged: bool, mark: bool = False) -> str | None:
    """The outcome that a text, but for its reason, consists of; what is marked as one may be C, for a tie."""
    bare = (text if mark else _REASON.split(text)[0]).translate(_QUOTES).strip()
    match = _forms(letters, judged).alone.fullmatch(bare)
    if match is None:
        known = _OUTCOMES if judged and mark else dict(zip(letters, letters, strict=True))
        return known.get(bare.upper()) if mark or len(bare) == 1 else None
    first, sign, second = (*match.groups(), None, None, None)[1:4]
    if first is None or sign is None:
        return None if bare.endswith("?") else _letter(match)
    return None if first == second else TIE if sign == "=" else first if sign == ">" else second
