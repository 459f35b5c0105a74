"""The letter that an answer or a judge names, read from prose; a tie; or None where that is not certain.

A letter stands in a mark, on a line of its own, behind a label ("Answer: B", "Verdict: B"), begins the text, or is in a
sentence that says it ("B is correct", "Response B is better"). An article, a first letter or a mere mention is none;
neither is what a clause denies, asks or supposes. What contradicts itself is not read (`readings.py`).
"""

import itertools
import math
import re
from functools import cache
from typing import Any, NamedTuple

from posbias.errors import UsageError
from posbias.tasks.language.readings import ANSWER, REASON, certain, clauses, marked, plain

TIE = "tie"
"""The verdict that neither response is better."""
LONGEST_PATTERN = 500
"""Characters of a pattern of one's own."""
PATTERN_SECONDS = 5.0
"""Longest search for a pattern of one's own in one text: some patterns take exponential time."""

_CALLED = r"(?i:the\s+|my\s+)?(?i:response|assistant|answer|output|option|model|candidate|reply|choice|letter)\s*"
_ADVERBS = (
    r"(?i:(?:clearly|slightly|much|far|also|therefore|thus|overall|still|marginally|significantly|definitely)\s+)*"
)
_BETTER = r"(?i:better|superior|preferable|preferred|stronger|winner)\b(?!-)"
_LEADING_WORDS = (
    r"(?:(?i:the|my|final|so|thus|therefore|hence|better|best|winning|preferred|winner|is|i|choose|pick|select|prefer"
    r"|response|assistant|output|option|model|candidate|choice|verdict|decision|preference|judge?ment"
    rf"|{ANSWER}|{{words}})\b[^\w✗✘❌✖¬≠]*)*"
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
    labels = "verdict|winner|preference|decision|judge?ment" if judged else f"{ANSWER}|option|choice|letter"
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

    def alone(part: str, *, mark: bool = False) -> str | None:
        return _alone(part if mark else REASON.split(part)[0], letters, judged=judged, mark=mark)

    def levels(text: str) -> list[list[Any]]:
        copied = _COPIED.search(text)
        if copied and ord(copied[2]) == ord(copied[1]) + 1:
            return [[]]
        lines = [line for line in text.splitlines() if line.strip()] or [""]
        told = [outcome for line in [*lines, _SENTENCE.split(text.rstrip(" .!;\n"))[-1]] if (outcome := alone(line))]
        on_top = told if alone(lines[-1]) else []
        telling = [line for line in lines if len({*_OPTION.findall(line)}) < 2]  # one with more lists the options
        for clause in clauses("\n".join(telling)):
            told = told + [_letter(match) for form in forms.told for match in form.finditer(clause)]
        begun = forms.leading.match(text)
        if begun and not _DENIED.search(lines[0]) and {*forms.mention.findall(text[begun.end() :])} <= {_letter(begun)}:
            told = [*told, _letter(begun)]
        marks = [(alone(inside, mark=True), heading) for inside, heading in marked(text)]
        return [[outcome for outcome, heading in marks if outcome or not heading], on_top, told]

    return certain(plain(text).replace("$", ""), levels, forms.mention.findall)


def verdict_of(text: str, pattern: str | None = None) -> str | None:
    """The response that a judge names, "A" or "B"; `TIE`; or None: there is no verdict that can be read.

    Args:
        text: What the judge wrote, thoughts left out.
        pattern: A regular expression of one's own with one group, the only form then; its last match counts, and the
            group must say A, B or tie (or C).

    Raises:
        UsageError: searching for the pattern takes too long.
    """
    if pattern is None:
        return letter_in(text, "AB", judged=True)
    matches = search_own(pattern, text)
    return _alone(plain(matches[-1]), "AB", judged=True, mark=True) if matches else None


def first_ranked(text: str, letters: str, pattern: str | None = None) -> str | None:
    """The response that a judge ranks first of several, by its letter; `TIE`; or None: no ranking can be read.

    A ranking is a chain such as `C > A = B`, or all letters in a line (`C, A, B`) or one a line; else it is `[[C]]`, or
    a line that is a letter, or tie, alone. One of all responses goes before those of a few. Of what a pattern of one's
    own finds last, the first letter counts.
    """
    if pattern is not None:
        matches = search_own(pattern, text)
        told = str(matches[-1]).strip() if matches else ""
        return told[:1] if told[:1] in tuple(letters) else TIE if told.lower() == TIE else None
    entry = rf"(?:{_CALLED})?[(\[]?\b([{letters}])\b[)\]]?"
    chain = re.compile(rf"{entry}(?:\s*(?:[<>]=|>+|<+|=+|-+>|[≥≤≻~≈→])\s*{entry})+")
    row = re.compile(rf"\W*(?:[^\W\d_]\w*(?:\s\w+){{0,5}}\s*:)?\W*{entry}(?:\s*[,;]\s*{entry})+\W*")
    item = re.compile(rf"\W*(?:\d+[.):]\s*)?{entry}\W*|\W*(?i:a\s+)?(?i:tie)\W*")

    def levels(text: str) -> list[list[Any]]:
        lines = [line for line in text.splitlines() if line.strip()]
        blocks = [
            list(block) for items, block in itertools.groupby(lines, lambda line: bool(item.fullmatch(line))) if items
        ]
        rankings = [match[0] for clause in clauses(text) for match in chain.finditer(clause)]
        rankings += filter(row.fullmatch, lines)
        rankings += [" > ".join(block) for block in blocks if len(block) == len(letters)]
        told: dict[bool, list[Any]] = {True: [], False: []}
        for ranking in rankings:
            named, signs = re.findall(rf"\b[{letters}]\b", ranking), re.findall(r"[<>=≥≤≻~≈→,;]+", ranking)
            if len({*named}) == len(named) and not re.search("[<≤]", ranking):
                first = TIE if signs[0][0] in "=~≈" else math.nan if signs[0] in (">=", "≥") else named[0]
                told[len(named) == len(letters)].append(first)
        single = [_letter(match) for block in blocks if len(block) == 1 and (match := item.fullmatch(block[0]))]
        marks = [inside.upper() for inside, _ in marked(text) if inside.upper() in (*letters, "TIE")]
        return [[TIE if mark == "TIE" else mark for mark in marks] + told[True], told[False], single]

    return certain(plain(text).translate(_QUOTES), levels, lambda _: ())


def check_own(owner: str, pattern: object, *, groups: int | None = None) -> None:
    """Refuse what is neither None nor a regular expression of a bounded length with so many groups (None: any)."""
    import regex

    if pattern is None:
        return
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


def _alone(text: str, letters: str, *, judged: bool, mark: bool) -> str | None:
    """The outcome that a text consists of; what is marked as one may be C, for a tie."""
    bare = text.translate(_QUOTES).strip()
    match = _forms(letters, judged).alone.fullmatch(bare)
    if match is None:
        known = _OUTCOMES if judged and mark else dict(zip(letters, letters, strict=True))
        return known.get(bare.upper()) if mark or len(bare) == 1 else None
    first, sign, second = (*match.groups(), None, None, None)[1:4]
    if first is None or sign is None:
        return None if bare.endswith("?") else _letter(match)
    return None if first == second else TIE if sign == "=" else first if sign == ">" else second
