"""Answers as the published rule of question answering compares them."""

import re
import string

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)


def normalise_answer(text: str) -> str:
    """Lower case, without ASCII punctuation and English articles, white space collapsed to single spaces.

    Source: the SQuAD evaluation script (Rajpurkar et al. 2016).
    """
    bare = text.lower().translate(_PUNCTUATION)
    return " ".join(_ARTICLES.sub(" ", bare).split())
