"""A judge's verdict, read out of its prose: the response that it names in an anchored form, a tie, or nothing.

A verdict stands in double brackets, in a tag, on a line of its own, behind a label ("Verdict: B"), or in a sentence
that says it ("Response B is better"). An article, a first letter or a mere mention is none, and neither is what a
sentence denies, asks or supposes. What contradicts itself is not read.
"""

import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from posbias.errors import UsageError

LETTERS = ("A", "B")
"""What a judge calls two responses."""
TIE = "tie"
"""The verdict that neither response is better."""
LONGEST_PATTERN = 500
"""Characters of a pattern of one's own."""
PATTERN_SECONDS = 5.0
"""Longest search for a pattern of one's own in one text: some patterns take exponential time."""

_LETTER = r"[(\[]?([AB])[)\]]?"
_CALLED = r"(?i:the\s+|my\s+)?(?i:response|assistant|answer|output|option|model|candidate|reply|choice)\s*"
_ENDS = r"(?=\s*(?:\Z|[.,;:!()\[\]\n–—-]|(?i:because|since|as|over|is|was|here|overall|due)\b))"
"""What may follow a letter that is named; not another noun, an `or`, a slash."""
_ADVERBS = (
    r"(?i:(?:clearly|slightly|much|far|also|therefore|thus|overall|still|marginally|significantly|definitely)\s+)*"
)
_BETTER = r"(?i:better|superior|preferable|preferred|stronger|winner)\b(?!-)"
_COMPARED = r"([AB])\s*([<>=])[<>=]*\s*([AB])"
_BRACKETED = re.compile(rf"\[\[\s*(?i:(A|B|C|tie)|{_COMPARED})\s*\]\]")
_TAGGED = re.compile(
    r"<(?P<tag>answer|verdict|choice|winner|decision|judge?ment|preference)>(?P<inside>[^<]*)</(?P=tag)>"
    r"|\\boxed\{(?:\\text\{)?(?P<boxed>[^{}]*)\}"
    r'|"(?:answer|verdict|choice|winner|decision|judge?ment|preference|better|preferred)"\s*:\s*"(?P<field>[^"]*)"',
    re.IGNORECASE,
)
_BEFORE_LETTER = (
    r"(?:(?i:the|my|final|so|thus|therefore|hence|better|best|winning|preferred|winner|is|i|choose|pick|select|prefer"
    r"|response|assistant|answer|output|option|model|candidate|choice|verdict|decision|preference|judge?ment)\b[^\w]*)*"
)
_ALONE = re.compile(rf"\W*{_BEFORE_LETTER}(?:([AB])|(?i:it'?s?\s+(?:is\s+)?)?(?i:an?\s+)?(?i:(tie|draw)))\W*")
"""A line, or the inside of a tag, that is a verdict and nothing else."""
_LABELLED = re.compile(
    r"(?i:\b(?:verdict|winner|preference|decision|judge?ment)\s*(?:is|:|=)+\s*)"
    rf"(?:{_COMPARED}|(?:{_CALLED})?{_LETTER}{_ENDS}|(?i:(?:a\s+)?(tie|draw)\b))"
)
_LEADING = re.compile(
    rf"\W*(?:{_CALLED})?{_LETTER}(?:\W+(?i:because|since)\b|\s*[:,(–—-](?!.*\b(?!\1)[AB]\b))", re.DOTALL
)
_SAID = tuple(
    re.compile(pattern)
    for pattern in (
        # Options of a question are letters, too: only responses are called right.
        rf"\b(?i:response|assistant|model|candidate)\s+{_LETTER}\s+{_ADVERBS}"
        rf"(?i:wins\b|(?:is|was)\s+{_ADVERBS}(?:the\s+)?{_ADVERBS}(?:{_BETTER}|(?:right|correct)\b"
        rf"|best(?:\s+(?:response|answer|one|choice|option))?{_ENDS}))",
        rf"\b{_LETTER}\s+{_ADVERBS}(?i:wins\b|(?:is|was)\s+{_ADVERBS}(?:the\s+)?{_ADVERBS}{_BETTER})",
        rf"\b{_BETTER}\s*(?i:response|answer|one|assistant|reply|choice|output)?\s*(?i:is|was|:)\s*(?:{_CALLED})?{_LETTER}{_ENDS}",
        r"(?i:\bI(?:'d|'ll)?\s+(?:would\s+|will\s+)?)"
        rf"{_ADVERBS}(?i:choose|prefer|pick|select|favou?r|go\s+with|vote\s+for)\s+(?:{_CALLED})?{_LETTER}{_ENDS}",
    )
)
_UNSURE = re.compile(
    r"\b(?:if|whether|unless|at first|few|not|cannot|neither|nor|never|no(?!,)|hardly|could|might|may|would\s+be)\b"
    r"|n't\b|\?\Z"
    r"|\b(?:false|untrue|wrong|incorrect)\s+(?:that|to)\b"
    r"|\b(?:who|some|someone|anyone|they|many)\s+(?:\w+\s+)?(?:say|think|claim|argue)s?\b",
    re.IGNORECASE,
)
_CONTRAST = re.compile(r"\b(?:but|however|yet|closer (?:look|inspection|reading))\b", re.IGNORECASE)
"""What a concession ends with: a verdict that stands before it alone, with the other response named behind, is none."""
_OUTCOMES = {"A": "A", "B": "B", "C": TIE, "TIE": TIE, "DRAW": TIE}
_DECORATION = str.maketrans({"*": "", "`": "", "#": "", "_": " ", '"': "", "“": "", "”": "", "’": "'", "‘": "'"})


def verdict_of(text: str, pattern: str | None = None) -> str | None:
    """The response that a judge names, "A" or "B"; `TIE`; or None: there is no verdict that can be read.

    The last `[[A]]`, `[[B]]` or `[[C]]` (a tie; also `[[A>B]]`), as judges that reason are told to close; else the last
    tag, `\\boxed{}` or JSON field; else a last line that is a verdict alone. Else all that is said otherwise must
    agree: a first line or last sentence that is a verdict alone, "Verdict: B", "Response B is better".

    Args:
        text: What the judge wrote, thoughts left out.
        pattern: A regular expression of one's own with one group, the only form then; its last match counts, and the
            group must say A, B or tie (or C).

    Raises:
        UsageError: searching for the pattern takes too long.
    """
    if pattern is not None:
        matches = search_own(pattern, text)
        return _alone(matches[-1], marked=True) if matches else None
    bracketed = [sentence for sentence in _sentences(text) if _BRACKETED.search(sentence)]
    if bracketed:
        return _agreed(_of_groups(match.groups()) for match in _BRACKETED.finditer(bracketed[-1]))
    tagged = [match["inside"] or match["boxed"] or match["field"] or "" for match in _TAGGED.finditer(text)]
    if tagged:
        return _alone(tagged[-1], marked=True)
    plain = text.translate(_DECORATION)
    lines = [line for line in plain.splitlines() if line.strip()]
    if not lines:
        return None
    first, last = _alone(lines[0]), _alone(lines[-1])
    if last is not None:
        return _agreed([first, last])
    sentences = list(_sentences(plain))
    leading = _LEADING.match(plain)
    outcomes = [first, *map(_alone, sentences[-1:]), None if leading is None else leading[1]]
    for sentence in sentences:
        if not _UNSURE.search(sentence):
            outcomes += [_of_groups(match.groups()) for match in _LABELLED.finditer(sentence)]
            outcomes += [match[1] for form in _SAID for match in form.finditer(sentence)]
    outcome, (_, *behind) = _agreed(outcomes), _CONTRAST.split(plain)
    conceded = outcome in LETTERS and any(
        letter != outcome for part in behind[-1:] for letter in re.findall(r"\b[AB]\b", part)
    )
    return None if conceded else outcome


def first_ranked(text: str, letters: str, pattern: str | None = None) -> str | None:
    """The response that a judge ranks first of several, by its letter; `TIE`; or None: no ranking can be read.

    The last ranking such as `C > A > B`, or a line `C, A, B`, or a numbered list, in which no letter stands twice; else
    the last `[[C]]`; else a line that is a letter, or tie, alone. Of what a pattern of one's own finds last, the first
    letter counts.
    """
    if pattern is not None:
        matches = search_own(pattern, text)
        marked = str(matches[-1]).strip() if matches else ""
        return marked[:1] if marked[:1] in tuple(letters) else TIE if marked.lower() == TIE else None
    plain, entry = text.translate(_DECORATION), rf"(?:{_CALLED})?[(\[]?([{letters}])\b[)\]]?"
    rankings = [match[0] for match in re.finditer(rf"\b{entry}(?:\s*>+\s*{entry})+", plain)]
    rankings += [line for line in plain.splitlines() if re.fullmatch(rf"[^\w]*{entry}(?:\s*[,;]\s*{entry})+\W*", line)]
    numbered = re.findall(rf"^\s*\d+[.):]\s*{entry}", plain, re.MULTILINE)
    for named in [re.findall(rf"\b[{letters}]\b", ranking) for ranking in reversed(rankings)] + [numbered]:
        if len(named) > 1 and len(set(named)) == len(named):
            return str(named[0])
    if bracketed := re.findall(rf"\[\[\s*([{letters}]|(?i:tie))\s*\]\]", plain):
        return TIE if bracketed[-1].lower() == TIE else str(bracketed[-1])
    alone = [
        match
        for line in plain.splitlines()
        if (match := re.fullmatch(rf"\W*{entry}\W*|\W*(?i:a\s+)?(?i:tie)\W*", line))
    ]
    return None if not alone else alone[-1][1] or TIE


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


def _sentences(text: str) -> Iterator[str]:
    """Parts of a text up to the end of a line or a sentence, a question mark included."""
    return (part.strip() for part in re.findall(r"[^.;!?\n]+\??", text) if part.strip())


def _alone(text: str, *, marked: bool = False) -> str | None:
    """The verdict that a text consists of; what is marked as one may be C, for a tie."""
    plain = text.strip().translate(_DECORATION)
    match = _ALONE.fullmatch(plain)
    if match is None:
        return _OUTCOMES.get(plain.upper()) if marked or plain in ("a", "b") else None
    return _of_groups(match.groups())


def _of_groups(groups: Sequence[str | None]) -> str | None:
    """The outcome of what a form holds: a letter, `tie`, or two letters with the sign between them."""
    parts = [group.upper() for group in groups if group is not None]
    if len(parts) == 3:
        first, sign, second = parts
        return None if first == second else TIE if sign == "=" else first if sign == ">" else second
    return _OUTCOMES.get(parts[0]) if parts else None


def _agreed(outcomes: Iterable[str | None]) -> str | None:
    """The only outcome that there is; None for none and for several."""
    different = {outcome for outcome in outcomes if outcome is not None}
    return different.pop() if len(different) == 1 else None
