"""Running text of a given length in tokens, with the borders of its clauses: where a needle can be put.

Text comes from the default corpus or a text file; lengths and depths are counted in the model's own tokens.
"""

import re
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import numpy as np

from posbias.errors import UsageError
from posbias.prompts.sources import Group, default_corpus, text_file

CLAUSE_END = re.compile(r"(?<=[.!?;:]) ")
"""Also clauses, since verse and statutes have sentences of hundreds of tokens."""
CUT = " ..."
"""What stands where the text was cut."""
CHARACTERS_PER_TOKEN = 8
"""Text read for each token asked: English has 4 to 5, so that enough is left after cutting at a sentence."""


@dataclass(frozen=True)
class Haystack:
    """A text as clauses, with the tokens before each border."""

    clauses: tuple[str, ...]
    borders: tuple[int, ...]
    """Tokens before clause 0, 1 ... and after the last: one more than there are clauses, ascending from 0."""

    def border_at(self, depth: float) -> int:
        """The border nearest to a depth, by tokens: number of clauses before it.

        Args:
            depth: 0 = before the first clause ... 1 = after the last.
        """
        return int(np.argmin(np.abs(np.array(self.borders) - depth * self.borders[-1])))


def corpus_groups(corpus: str | None, tokens: int) -> list[Group]:
    """The files text is drawn from: the default corpus, or one text file.

    Raises:
        UsageError: the file is missing, empty or not readable.
    """
    return default_corpus() if corpus is None else [text_file(Path(corpus), tokens)]


def drawn_haystack(groups: list[Group], tokens: int, tokenizer: Any, source: Random) -> Haystack:
    """Text from a random place of a random file: it begins with a clause and ends with a word, within `tokens`.

    Args:
        groups: Files to choose from, each as likely.
        tokens: Most tokens of the text, >= 1.
        tokenizer: A fast Hugging Face tokenizer.
        source: Chooses the place.

    Raises:
        UsageError: the file has too little text.
    """
    group = source.choice(groups)
    documents = source.choice(group.segments)()
    text = " ".join(" ".join(document.split()) for document in documents if isinstance(document, str))
    wanted = CHARACTERS_PER_TOKEN * tokens
    start = source.randrange(max(1, len(text) - wanted))
    begin = CLAUSE_END.search(text, start) if start else None
    text = text[begin.end() if begin else 0 :][:wanted]
    offsets = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)["offset_mapping"]
    if len(offsets) < tokens:
        raise UsageError(f"{group.name} has too little text: {len(offsets)} tokens where {tokens} are asked")
    ends = np.array([end for _, end in offsets])
    text = text[: ends[tokens - 1]].rsplit(" ", 1)[0]
    cuts = [match.start() for match in CLAUSE_END.finditer(text)]
    before = np.searchsorted(ends, [*cuts, len(text)], side="left") + 1
    clauses = CLAUSE_END.split(text)
    if not text.endswith((".", "!", "?")):
        clauses[-1] += CUT
    return Haystack(tuple(clauses), (0, *(int(count) for count in before)))
