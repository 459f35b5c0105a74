"""Published scoring rules: is a generated text right, given the accepted answers?"""

import re
import string
from collections.abc import Callable, Sequence

from posbias.errors import UsageError
from posbias.registry import Registry
from posbias.tasks.language.verdict_parsing import verdict_of

LETTERS = string.ascii_uppercase[:10]
"""Letters of options; more would run into each other in prose ("I")."""
SCORERS: Registry[Callable[[str, Sequence[str]], float]] = Registry("scoring rule")
_ARTICLES = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)


def first_line(prediction: str) -> str:
    """The first line of a text that is not blank, without blanks at its ends."""
    return prediction.lstrip().partition("\n")[0].strip()


def normalise_answer(text: str) -> str:
    """Lower case, without ASCII punctuation and English articles, white space collapsed to single spaces.

    Source: the SQuAD evaluation script (Rajpurkar et al. 2016).
    """
    bare = text.lower().translate(_PUNCTUATION)
    return " ".join(_ARTICLES.sub(" ", bare).split())


@SCORERS.register("best_subspan_em")
def best_subspan_em(prediction: str, answers: Sequence[str]) -> float:
    """1 if an accepted answer occurs in the first line of the prediction that is not blank, both normalised; else 0.

    Only the text before that line's end counts: the answer stands in the context, so that a model which copies
    the context on and on would otherwise be right.

    Raises:
        UsageError: no answer, or one that normalises to nothing and so would occur everywhere.

    Source: Liu et al. 2024, section 2.2. As published but for empty answers, which there are always right, and for
    blank lines before an answer, with which it is always wrong there.
    """
    line = normalise_answer(first_line(prediction))
    accepted = [normalise_answer(answer) for answer in _checked(answers)]
    empty = [answer for answer, bare in zip(answers, accepted, strict=True) if not bare]
    if empty:
        raise UsageError(f"answer {empty[0]!r} holds nothing but articles and punctuation, so it cannot be scored")
    return float(any(answer in line for answer in accepted))


@SCORERS.register("substring")
def substring_match(prediction: str, answers: Sequence[str]) -> float:
    """1 if an accepted answer occurs anywhere in the prediction, ignoring case; else 0.

    Source: Liu et al. 2024, section 3.1, key-value retrieval.
    """
    return float(any(answer.lower() in prediction.lower() for answer in _checked(answers)))


@SCORERS.register("verdict")
def verdict_match(prediction: str, answers: Sequence[str]) -> float:
    """1 if the verdict (`verdict_of`) is the accepted letter; else 0, also for a tie and if there is none."""
    return float(verdict_of(prediction) in _checked(answers))


@SCORERS.register("choice")
def choice_match(prediction: str, answers: Sequence[str]) -> float:
    """1 if the option that is named (`choice_of`) is the accepted letter; else 0, also if none is named."""
    return float(choice_of(prediction, LETTERS) in _checked(answers))


def choice_of(text: str, letters: str) -> str | None:
    """The option that an answer names by its letter, or None.

    The last letter in double brackets or `\\boxed{}`, else behind a label ("Answer: B", "the answer is B"); else the
    one with which the answer begins, alone or before a sign or the option's text ("B", "(B)", "B. Oslo"). An article
    ("A dog") is none.
    """
    one_of = f"([{letters}])"
    for pattern in (
        rf"(?:\[\[\s*|\\boxed\{{\s*(?:\\text\{{)?){one_of}\b",
        rf"(?i:\b(?:answer|option|choice)\s*(?:is|:|=)+\s*)[(\[*]*{one_of}\b(?!\s+[a-z])",
    ):
        if labelled := re.findall(pattern, text):
            return str(labelled[-1])
    begun = re.match(rf"[\W_]*{one_of}(?=[).:,\]*]|\s*\Z|\s*\n)", text)
    return None if begun is None else begun[1]


def starts_with(prediction: str, answers: Sequence[str], *, goes_on: bool) -> float | None:
    """1 if the prediction begins with an accepted answer, as whole words, both normalised; else 0.

    An accepted answer further on, as in a text that names several passages or copies the context, does not count. If
    the prediction was cut off (`goes_on`), None if it may still become an accepted answer.
    """
    normalised = normalise_answer(prediction)
    accepted = [normalise_answer(answer) for answer in _checked(answers)]
    if any(f"{normalised} ".startswith(f"{answer} ") for answer in accepted if answer):
        return 1.0
    return None if goes_on and any(answer.startswith(normalised) for answer in accepted) else 0.0


def share_found(prediction: str, values: Sequence[str]) -> float:
    """Share of several values that occur in the prediction, ignoring case, in 0 ... 1."""
    return sum(substring_match(prediction, [value]) for value in _checked(values)) / len(values)


def _checked(answers: Sequence[str]) -> Sequence[str]:
    if isinstance(answers, str) or not answers or not all(answers):
        raise UsageError(f"answers must be a list of at least 1 text, none empty, got {answers!r}")
    return answers
