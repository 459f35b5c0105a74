"""Judgement of responses: a judge's preference between two, asked in both orders.

The position is the slot of the better response: 0 if it is Response A. A judge without position bias prefers the same
response in both orders; one that names the same slot twice follows the slot.

Files of pairs are JudgeBench's (Tan et al. 2025, arXiv 2410.12784), one JSON object per line: `question`, `response_A`,
`response_B`, and `label`, "A>B" or "B>A". Those of one `group` count as one sample; other fields are passed over.
Generated ones are about people who do not exist: the question holds what is to be known, and the worse response gives a
wrong town.

The verdict is generated, as judges are used, and read by one rule (`verdict_of`) or a pattern of one's own, so that
local models and servers are judged alike. One response is better, so a tie counts as wrong, as does what cannot be
read; both are counted. The score by teacher forcing is that of the right letter.
"""

import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, ClassVar

from posbias.checks import FileName
from posbias.errors import UsageError
from posbias.tasks.language.base import (
    LANGUAGE_TASKS,
    Draft,
    LanguageTask,
    around,
    group_field,
    listed,
    published_lines,
    text_field,
)
from posbias.tasks.language.documents import CITIES, drawn_documents
from posbias.tasks.language.readings import TIE, check_own
from posbias.tasks.language.rules import LETTERS, Verdict

LINE = "question, response_A, response_B (texts) and label ('A>B' or 'B>A')"
"""What a line of a file holds, for messages."""


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
    pattern: str | None = field(default=None, kw_only=True)
    """A regular expression with one group that holds a letter or tie, such as `Winner: (A|B|tie)`: the only form that
    counts as a verdict, at its last match; None: the forms of `verdict_of`."""

    counted: ClassVar[str] = "file"
    max_tokens: ClassVar[int] = 8
    lead_in: ClassVar[str] = "The better response is Response"
    fixed_order: ClassVar[bool] = True
    wording: ClassVar[tuple[str, ...]] = ("rubric", "template", "pattern")
    """Parameters that change what is said about the same samples."""

    def __post_init__(self) -> None:
        check_own(f"{self.name}: pattern", self.pattern, groups=1)
        if self.rubric is not None and not self.rubric.strip():
            raise UsageError(f"{self.name}: rubric must be a text with the criteria, got {self.rubric!r:.80}")
        if self.template is not None:
            object.__setattr__(self, "lead_in", "")  # the answer continues words of one's own

    @property
    def n_items(self) -> int:
        """Two slots."""
        return 2

    @cached_property
    def answer_rule(self) -> Verdict:
        """A verdict names the better of two responses."""
        return Verdict(self.pattern)

    def noted(self, text: str | None) -> dict[str, float | None]:
        """`first_pick`: 1 if the verdict names Response A, 0 if another; `tie`: 1 if it is a tie, 0 if it names one.

        Either is None otherwise; `tie` only if there is no verdict that can be read.
        """
        verdict = None if text is None else self.answer_rule.read(text)
        named = verdict is not None and verdict != TIE
        return {
            "first_pick": float(verdict == LETTERS[0]) if named else None,
            "tie": None if verdict is None else float(verdict == TIE),
        }

    def draw(self, tokenizer: Any, *, count: int, seed: int) -> Iterator[Judged]:
        """A question with its responses, the better one first."""
        if self.file is None:
            return (_drawn(seed, index) for index in range(count))
        lines = list(published_lines(self.file, count))
        groups = [group_field(record, where) for where, record in lines]
        alone = [f"group {group}" if group else where for group, (where, _) in zip(groups, lines, strict=True)]
        clusters = alone if any(groups) else [""] * len(lines)
        return iter([_read(record, where, cluster) for (where, record), cluster in zip(lines, clusters, strict=True)])

    def draft(self, sample: Judged, position: int) -> Draft:
        """The question, the responses in one of the orders, and what is asked."""
        question, responses, cluster = sample
        words = self._own_words if self.template is not None else ("", "")
        if self.template is not None:
            head, tail = (part.replace("{question}", question) for part in words)
        else:
            criteria = "" if self.rubric is None else f"Criteria:\n{self.rubric}\n\n"
            head = "Two responses to a question are given. Decide which one is better.\n\n"
            head += f"{criteria}Question:\n{question}\n\n"
            tail = "\n\nAnswer with one letter, A or B." + ("" if self.chat else f"\n\n{self.lead_in}")
        ordered = responses[:: -1 if position else 1]
        listing = listed(ordered, head=head, between="\n\n", tail=tail, form="Response {letter}:\n{text}")
        return Draft(
            listing.text,
            (LETTERS[position],),
            listing.items[position],
            passages=listing.passages,
            template="".join(words),
            cluster=cluster,
        )

    @cached_property
    def _own_words(self) -> tuple[str, str]:
        """The template's text before and after the responses, with the criteria."""
        words = around(self.name, str(self.template), "responses")
        if any("{rubric}" in part for part in words) != (self.rubric is not None):
            raise UsageError(
                f"{self.name}: template {self.template!r} must hold {{rubric}} exactly if a rubric is given"
            )
        before, after = (part.replace("{rubric}", self.rubric or "") for part in words)
        return before, after


def _read(record: dict[str, Any], where: str, cluster: str) -> Judged:
    """A line of a file, as JudgeBench has them."""
    try:
        label = record.get("label")
        if label not in ("A>B", "B>A"):
            raise UsageError(f"{where}: field 'label' must be 'A>B' or 'B>A', got {label!r:.80}")
        first, second = (text_field(record, f"response_{letter}", where) for letter in "AB")
        responses = (first, second) if label == "A>B" else (second, first)
        return text_field(record, "question", where), responses, cluster
    except UsageError as error:
        raise UsageError(f"{error}; a line holds {LINE}") from None


def _drawn(seed: int, index: int) -> Judged:
    """A text about a person, and the right and a wrong town in the same words."""
    documents = drawn_documents(2, seed, index)
    question = f"{documents.question[0].upper()}{documents.question[1:]}?"
    right = documents.answers[0]
    wrong = random.Random(f"pairwise {seed} {index}").choice([town for town in CITIES if town != right])
    told = [f"{documents.gold.title} was born in {town}." for town in (right, wrong)]
    return f"{documents.gold.text}\n{question}", (told[0], told[1]), ""
