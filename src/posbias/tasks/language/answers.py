"""What rules of scoring read in a generated text: its first line, its words without forms."""

import re
import string
from collections.abc import Sequence

from posbias.errors import UsageError

LETTERS = string.ascii_uppercase[:10]
"""Letters of options; more would run into each other in prose ("I")."""
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
