"""Judgement of responses: a judge's preference between two, asked in both orders.

The position is the slot of the better response: 0 if it is Response A. A judge without position bias prefers the same
response in both orders; one that names the same slot twice follows the slot.

Files of pairs are JudgeBench's (Tan et al. 2025, arXiv 2410.12784), one JSON object per line: `question`, `response_A`,
`response_B`, and `label`, "A>B" or "B>A". Those of one `group` count as one sample; other fields are passed over.
Generated ones are about people who do not exist: the question holds what is to be known, and the worse response gives a
wrong town.

The verdict is generated, as judges are used, and read by one rule (`verdict_of`), so that local models and servers are
judged alike. One response is better, so a tie counts as wrong, as does what cannot be read; both are counted. The score
by teacher forcing is that of the right letter.
"""

import random
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal

from posbias.checks import FileName
from posbias.errors import UsageError
from posbias.tasks.language.base import (
    LANGUAGE_TASKS,
    Draft,
    LanguageTask,
    Line,
    Text,
    line_of,
    listed,
    published_lines,
)
from posbias.tasks.language.documents import CITIES, drawn_documents
from posbias.tasks.language.readings import TIE, verdict_of
from posbias.tasks.language.rules import LETTERS


class PairLine(Line):
    """A line of a file, as JudgeBench has them."""

    question: Text
    response_A: Text  # noqa: N815  as published
    response_B: Text  # noqa: N815
    label: Literal["A>B", "B>A"]
    group: str | int | None = None


Judged = tuple[str, tuple[str, str], str]
"""A question, its responses, the better one first, and the name of its cluster (`Example.cluster`)."""


@LANGUAGE_TASKS.register("pairwise")
@dataclass(frozen=True)
class Pairwise(LanguageTask):
    """Say which of two responses is better; both orders are asked, and flips of the verdict counted.

    Source: JudgeBench, arXiv 2410.12784.
    """

    file: FileName | None = None
    """A .jsonl or .jsonl.gz file of pairs; None: generated."""
    rubric: str | None = field(default=None, kw_only=True)
    """Criteria that the judge is told."""
    template: FileName | None = field(default=None, kw_only=True)
    """A file with the prompt in words of one's own: {responses} once, {question} at least once, and {rubric} if one is
    given."""

    scoring: ClassVar[str] = "verdict"
    counted: ClassVar[str] = "file"
    max_tokens: ClassVar[int] = 8
    lead_in: ClassVar[str] = "The better response is Response"
    fixed_order: ClassVar[bool] = True
    slot: ClassVar[str] = "responses"
    wording: ClassVar[tuple[str, ...]] = ("rubric", "template")
    """Parameters that change what is said about the same samples."""

    def __post_init__(self) -> None:
        if self.rubric is not None and not self.rubric.strip():
            raise UsageError(f"{self.name}: rubric must be a text with the criteria, got {self.rubric!r:.80}")
        if self.template is not None:
            object.__setattr__(self, "lead_in", "")  # the answer continues words of one's own

    @property
    def n_items(self) -> int:
        """Two slots."""
        return 2

    def noted(self, text: str | None) -> dict[str, float | None]:
        """`first_pick`: 1 if the verdict names Response A, 0 if another; `tie`: 1 if it is a tie, 0 if it names one.

        Either is None otherwise; `tie` only if there is no verdict that can be read.
        """
        verdict = None if text is None else verdict_of(text)
        named = verdict is not None and verdict != TIE
        return {
            "first_pick": float(verdict == LETTERS[0]) if named else None,
            "tie": None if verdict is None else float(verdict == TIE),
        }

    def draw(self, tokenizer: Any, *, count: int, seed: int) -> Iterator[Judged]:
        """A question with its responses, the better one first."""
        if self.file is None:
            return (_drawn(seed, index) for index in range(count))
        lines = [(where, line_of(PairLine, record, where)) for where, record in published_lines(self.file, count)]
        grouped = any(line.group not in (None, "") for _, line in lines)
        return iter([_judged(line, where if grouped else "") for where, line in lines])

    @property
    def plain(self) -> tuple[str, str]:
        """The question before the responses, and what is asked behind them."""
        criteria = "" if self.rubric is None else f"Criteria:\n{self.rubric}\n\n"
        head = "Two responses to a question are given. Decide which one is better.\n\n"
        asked = "\n\nAnswer with one letter, A or B." + ("" if self.chat else f"\n\n{self.lead_in}")
        return f"{head}{criteria}Question:\n{{question}}\n\n", asked

    def _own_words(self, template: str) -> tuple[str, str]:
        words = super()._own_words(template)
        if any("{rubric}" in part for part in words) != (self.rubric is not None):
            raise UsageError(f"{self.name}: template {template!r} must hold {{rubric}} exactly if a rubric is given")
        before, after = (part.replace("{rubric}", self.rubric or "") for part in words)
        return before, after

    def draft(self, sample: Judged, position: int) -> Draft:
        """The question, the responses in one of the orders, and what is asked."""
        question, responses, cluster = sample
        told = listed(
            responses[:: -1 if position else 1],
            position,
            (LETTERS[position],),
            around=self.framed(question),
            between="\n\n",
            form="Response {letter}:\n{text}",
        )
        return replace(told, cluster=cluster)


def _judged(line: PairLine, place: str) -> Judged:
    """A line with the better response first; one without a group, where others have one, is alone in its own."""
    responses = line.response_A, line.response_B
    cluster = place if line.group in (None, "") else f"group {line.group}"
    return line.question, responses if line.label == "A>B" else responses[::-1], cluster


def _drawn(seed: int, index: int) -> Judged:
    """A text about a person, and the right and a wrong town in the same words."""
    documents = drawn_documents(2, seed, index)
    question = f"{documents.question[0].upper()}{documents.question[1:]}?"
    right = documents.answers[0]
    wrong = random.Random(f"pairwise {seed} {index}").choice([town for town in CITIES if town != right])
    told = [f"{documents.gold.title} was born in {town}." for town in (right, wrong)]
    return f"{documents.gold.text}\n{question}", (told[0], told[1]), ""
