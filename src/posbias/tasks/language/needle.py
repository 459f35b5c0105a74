"""Needle in text: a fact put between two clauses of running text, at depths counted in the model's own tokens.

The text comes from the default corpus or a text file.
"""

import random
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, ClassVar

import numpy as np
from annotated_types import Ge

from posbias.checks import Count, FileName, Steps
from posbias.errors import UsageError
from posbias.prompts.sources import Group, default_corpus, text_file
from posbias.prompts.tokens import encode, tokenised
from posbias.tasks.language.base import LANGUAGE_TASKS, Asked, Draft, LanguageTask, Text
from posbias.tasks.language.documents import CITIES

MERGES = 2
"""Tokens kept free for the needle and each end of the text: joining texts may split tokens anew."""
ATTEMPTS = 20
"""Texts tried until one has a clause border of its own near each depth."""
CLAUSE_END = re.compile(r"(?<=[.!?;:]) ")
"""Also clauses, since verse and statutes have sentences of hundreds of tokens."""
CHARACTERS_PER_TOKEN = 8
"""Text read for each token asked: English has 4 to 5, so that enough is left after cutting at a sentence."""


@dataclass(frozen=True)
class Hidden(Asked):
    """A text as clauses, the others, with the sentence that is put into it."""

    borders: tuple[int, ...] = (0,)
    """Tokens before clause 0, 1 ... and after the last: one more than there are clauses, ascending from 0."""

    def border_at(self, depth: float) -> int:
        """Clauses before the border nearest to a depth, by tokens; depth 0: before the first, 1: after the last."""
        return int(np.argmin(np.abs(np.array(self.borders) - depth * self.borders[-1])))


@LANGUAGE_TASKS.register("needle")
@dataclass(frozen=True)
class Needle(LanguageTask):
    """Find the number of a city that one sentence of a long text states; that sentence, or yours, moves through it."""

    tokens: Annotated[Steps, Ge(64)] = 1024
    """Length of the whole prompt: the text is cut at a word to fill it (tokens, >= 64)."""
    depths: Annotated[Count, Ge(2)] = 11
    """Positions of the needle, evenly spaced from before the first clause to after the last, >= 2."""
    corpus: FileName | None = None
    """A UTF-8 text file; None: the default corpus of the package."""
    needle: Text | None = None
    """A sentence of your own in all samples, with its question and answer; None: about a city, drawn for each."""
    question: Text | None = None
    """What is asked, with `needle`."""
    answer: Text | None = None
    """The answer, which the needle must hold."""

    scoring: ClassVar[str] = "contains"
    max_tokens: ClassVar[int] = 48
    counted: ClassVar[str] = "depths"
    by_tokens: ClassVar[bool] = True
    between: ClassVar[str] = " "
    plain: ClassVar[tuple[str, str]] = (
        "Read the text and answer the question that follows it.\n\n",
        "\n\nQuestion: {question}\nAnswer:",
    )

    def __post_init__(self) -> None:
        own = (self.needle, self.question, self.answer)
        if any(own) and not all(own):
            raise UsageError(f"{self.name}: needle, question and answer go together; give all three, or none")
        if str(self.answer) not in str(self.needle):
            raise UsageError(f"{self.name}: the needle must hold the answer {self.answer!r:.80}: {self.needle!r:.80}")

    def at_length(self, tokens: int, tokenizer: Any, *, seed: int = 0) -> "Needle":
        """The same depths in a text of another length, which needs no measuring."""
        return replace(self, tokens=tokens)

    def draw(self, tokenizer: Any, *, count: int, seed: int) -> Iterator[Hidden]:
        """A text with its needle."""
        if tokenizer is None or not getattr(tokenizer, "is_fast", False):
            raise UsageError(
                f"{self.name} counts depths in tokens, so it needs the model's (fast) tokenizer; of a server's "
                "model give a copy: --tokenizer"
            )
        groups = default_corpus() if self.corpus is None else [text_file(Path(self.corpus), self.tokens)]
        sources = (random.Random(f"needle {seed} {index}") for index in range(count))
        return (self._hidden(tokenizer, groups, source) for source in sources)

    def _hidden(self, tokenizer: Any, groups: list[Group], source: random.Random) -> Hidden:
        town, value = source.sample(CITIES, 1)[0], source.sample(range(1_000_000, 10_000_000), 1)[0]
        needle = self.needle or f"The number of {town} is {value}."
        question, answer = self.question or f"What is the number of {town}?", self.answer or str(value)
        asked = Hidden(question, (answer,), needle)
        bare = self.wrapped(self.draft(asked, 0).text)
        room = self.tokens - len(encode(bare, tokenizer).token_ids) - 3 * MERGES
        if room < 1:
            raise UsageError(f"{self.name}: tokens={self.tokens} leaves no room for text beside question and needle")
        for _ in range(ATTEMPTS):
            clauses, borders = drawn_text(groups, room, tokenizer, source)
            elsewhere = any(answer.lower() in clause.lower() for clause in clauses)
            hidden = replace(asked, others=clauses, borders=borders, notices=("answer_elsewhere",) * elsewhere)
            if len({hidden.border_at(position / (self.depths - 1)) for position in range(self.depths)}) == self.depths:
                return hidden
        raise UsageError(
            f"{self.name}: texts of {self.tokens} tokens do not have {self.depths} different depths between clauses; "
            "ask for fewer depths or more tokens"
        )

    def draft(self, sample: Hidden, position: int) -> Draft:
        """The text with the needle before a clause."""
        told = super().draft(sample, sample.border_at(position / (self.depths - 1)))
        return replace(told, passages=())  # clauses are no passages that may change places


def drawn_text(
    groups: Sequence[Group], tokens: int, tokenizer: Any, source: random.Random
) -> tuple[tuple[str, ...], tuple[int, ...]]:
    """Clauses and borders of text from a random place of a random file: from a clause to a word, within `tokens`."""
    group = source.choice(groups)
    documents = source.choice(list(group.segments))
    text = " ".join(" ".join(document.split()) for document in documents if isinstance(document, str))
    characters = CHARACTERS_PER_TOKEN * tokens
    start = source.randrange(max(1, len(text) - characters))
    begin = CLAUSE_END.search(text, start) if start else None
    text = text[begin.end() if begin else 0 :][:characters]
    offsets = tokenised(text, tokenizer).offsets
    if len(offsets) < tokens:
        raise UsageError(f"{group.name} has too little text: {len(offsets)} tokens, needs {tokens}")
    ends = np.array([end for _, end in offsets])
    text = text[: ends[tokens - 1]].rsplit(" ", 1)[0]
    cuts = [match.start() for match in CLAUSE_END.finditer(text)]
    before = np.searchsorted(ends, [*cuts, len(text)], side="left") + 1
    clauses = CLAUSE_END.split(text)
    if not text.endswith((".", "!", "?")):
        clauses[-1] += " ..."
    return tuple(clauses), (0, *(int(count) for count in before))
