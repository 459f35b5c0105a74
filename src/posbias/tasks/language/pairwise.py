"""Judgement of responses: a judge's preference between two, or its ranking of several, asked in rotated orders.

The position is the slot of the best response: 0 if it is Response A. The others follow it in a circle, so that over all
positions every response stands in every slot once. A judge without position bias prefers the same response in all
orders; one that names the same slot every time follows the slot.

Files of pairs are JudgeBench's (Tan et al. 2025, arXiv 2410.12784), one JSON object per line: `question`, `response_A`,
`response_B`, and `label`, "A>B" or "B>A"; of lists: `question`, `responses` and `best`, the index of the best one.
Those of one `group` count as one sample; other fields are passed over. Generated ones are about people who do not
exist: the question holds what is to be known, and the other responses give a wrong town.

The verdict is generated, as judges are used, and read by one rule (`verdict_of`, `first_ranked`) or a pattern of one's
own, so that local models and servers are judged alike. One response is best, so a tie counts as wrong, as does what
cannot be read; both are counted. The score by teacher forcing is that of the right letter.
"""

import random
from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Annotated, Any, ClassVar

from annotated_types import Interval

from posbias.checks import FileName
from posbias.errors import UsageError
from posbias.tasks.language.answers import LETTERS
from posbias.tasks.language.base import (
    LANGUAGE_TASKS,
    Draft,
    LanguageTask,
    around,
    group_field,
    list_field,
    listed,
    published_lines,
    text_field,
)
from posbias.tasks.language.documents import drawn_documents
from posbias.tasks.language.rules import FirstRanked, NamingRule, Verdict
from posbias.tasks.language.verdict_parsing import TIE, check_own
from posbias.tasks.language.words import CITIES


@dataclass(frozen=True)
class Judged:
    """A question with its responses, the best one first."""

    question: str
    responses: tuple[str, ...]
    cluster: str = ""
    """See `Example.cluster`."""


@dataclass(frozen=True)
class Judgement(LanguageTask):
    """Responses to a question that a judge is to compare, by criteria and in words of one's own if they are given."""

    file: FileName | None = None
    """A .jsonl or .jsonl.gz file in the task's schema; None: generated."""
    rubric: str | None = field(default=None, kw_only=True)
    """Criteria that the judge is told."""
    template: FileName | None = field(default=None, kw_only=True)
    """A file with the prompt in words of one's own: {responses} once, {question} at least once, and {rubric} if one is
    given."""
    pattern: str | None = field(default=None, kw_only=True)
    """A regular expression with one group that holds a letter or tie, such as `Winner: (A|B|tie)`: the only form that
    counts as a verdict, at its last match; None: the forms of `verdict_of` and `first_ranked`."""

    fixed_order: ClassVar[bool] = True
    wording: ClassVar[tuple[str, ...]] = ("rubric", "template", "pattern")
    """Parameters that change what is said about the same samples."""
    line: ClassVar[str]
    """What a line of a file holds, for messages."""
    instruction: ClassVar[str]
    closing: ClassVar[str]

    def __post_init__(self) -> None:
        check_own(f"{self.name}: pattern", self.pattern, groups=1)
        if self.rubric is not None and not self.rubric.strip():
            raise UsageError(f"{self.name}: rubric must be a text with the criteria, got {self.rubric!r:.80}")
        if self.template is not None:
            object.__setattr__(self, "lead_in", "")  # the answer continues words of one's own

    @property
    def letters(self) -> str:
        """Names of the slots."""
        return LETTERS[: self.n_items]

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

    def _around(self, question: str) -> tuple[str, str]:
        """Texts before and after the responses."""
        if self.template is not None:
            before, after = (part.replace("{question}", question) for part in self._own_words)
            return before, after
        criteria = "" if self.rubric is None else f"Criteria:\n{self.rubric}\n\n"
        tail = self.closing + ("" if self.chat else f"\n\n{self.lead_in}")
        return f"{self.instruction.format(self.n_items)}{criteria}Question:\n{question}\n\n", tail

    def draft(self, sample: Judged, position: int) -> Draft:
        """The question, the responses in the order of a rotation, and what is asked."""
        head, tail = self._around(sample.question)
        count = len(sample.responses)
        listing = listed(
            [sample.responses[(slot - position) % count] for slot in range(count)],
            head=head,
            between="\n\n",
            tail=tail,
            form="Response {letter}:\n{text}",
        )
        letter, place, words = (
            LETTERS[position],
            listing.items[position],
            "".join(self._own_words if self.template else ()),
        )
        return Draft(listing.text, (letter,), place, passages=listing.passages, template=words, cluster=sample.cluster)

    def draw(self, tokenizer: Any, *, count: int, seed: int) -> Iterator[Judged]:
        """A question with its responses, the best one first."""
        if self.file is None:
            return (_drawn(self.n_items, seed, index) for index in range(count))
        lines = list(published_lines(self.file, count))
        groups = [group_field(record, where) for where, record in lines]
        alone = [f"group {group}" if group else where for group, (where, _) in zip(groups, lines, strict=True)]
        samples = [self._read(record, where) for where, record in lines]
        clusters = alone if any(groups) else [""] * len(lines)
        return (Judged(*sample, cluster) for sample, cluster in zip(samples, clusters, strict=True))

    def _read(self, record: dict[str, Any], where: str) -> tuple[str, tuple[str, ...]]:
        """The question of a line and its responses, the best one first."""
        try:
            responses, best = self.responses_of(record, where)
            return text_field(record, "question", where), (responses[best], *responses[:best], *responses[best + 1 :])
        except UsageError as error:
            raise UsageError(f"{error}; a line holds {self.line}") from None

    @abstractmethod
    def responses_of(self, record: dict[str, Any], where: str) -> tuple[list[str], int]:
        """The responses of a line, and the index of the best one."""

    @cached_property
    def answer_rule(self) -> NamingRule:
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


@LANGUAGE_TASKS.register("pairwise")
@dataclass(frozen=True)
class Pairwise(Judgement):
    """Say which of two responses is better; both orders are asked, and flips of the verdict counted.

    Source: JudgeBench, arXiv 2410.12784.
    """

    counted: ClassVar[str] = "file"
    max_tokens: ClassVar[int] = 8
    lead_in: ClassVar[str] = "The better response is Response"
    line: ClassVar[str] = "question, response_A, response_B (texts) and label ('A>B' or 'B>A')"
    instruction: ClassVar[str] = "Two responses to a question are given. Decide which one is better.\n\n"
    closing: ClassVar[str] = "\n\nAnswer with one letter, A or B."

    @property
    def n_items(self) -> int:
        """Two slots."""
        return 2

    def responses_of(self, record: dict[str, Any], where: str) -> tuple[list[str], int]:
        """As JudgeBench has them."""
        label = record.get("label")
        if label not in ("A>B", "B>A"):
            raise UsageError(f"{where}: field 'label' must be 'A>B' or 'B>A', got {label!r:.80}")
        return [text_field(record, f"response_{letter}", where) for letter in "AB"], int(label == "B>A")


@LANGUAGE_TASKS.register("listwise")
@dataclass(frozen=True)
class Listwise(Judgement):
    """Rank several responses; the one that is put first counts, in as many rotated orders as there are responses."""

    responses: Annotated[int, Interval(ge=3, le=8)] = field(default=4, kw_only=True)
    """Responses to each question (two: `pairwise`)."""

    counted: ClassVar[str] = "responses"
    max_tokens: ClassVar[int] = 32
    lead_in: ClassVar[str] = "From best to worst:"
    line: ClassVar[str] = "question (text), responses (texts) and best (the index of the best one)"
    instruction: ClassVar[str] = "{} responses to a question are given. Rank them from best to worst.\n\n"
    closing: ClassVar[str] = "\n\nAnswer with the letters from best to worst, such as B > A > C."

    @cached_property
    def answer_rule(self) -> FirstRanked:
        """The best response is ranked first."""
        return FirstRanked(self.responses, self.pattern)

    def noted(self, text: str | None) -> dict[str, float | None]:
        """`first_pick` and `tie`, as for pairs, and `chosen`: the slot that is ranked first."""
        verdict = None if text is None else self.answer_rule.read(text)
        slot = None if verdict is None or verdict == TIE else float(LETTERS.index(verdict))
        return {**super().noted(text), "chosen": slot}

    def responses_of(self, record: dict[str, Any], where: str) -> tuple[list[str], int]:
        """A list, and the index of its best."""
        responses, best = list_field(record, "responses", where), record.get("best")
        if len(responses) != self.responses or not all(isinstance(text, str) and text for text in responses):
            raise UsageError(f"{where}: field 'responses' must be a list of {self.responses} texts")
        if type(best) is not int or not 0 <= best < self.responses:
            raise UsageError(f"{where}: field 'best' must be 0 ... {self.responses - 1}, got {best!r:.80}")
        return responses, best


def _drawn(count: int, seed: int, index: int) -> Judged:
    """A text about a person, and the right and wrong towns in the same words."""
    documents = drawn_documents(2, seed, index)
    question = f"{documents.question[0].upper()}{documents.question[1:]}?"
    wrong = [town for town in CITIES if town != documents.answers[0]]
    source = random.Random(f"pairwise {seed} {index}")
    towns = [documents.answers[0], *([source.choice(wrong)] if count == 2 else source.sample(wrong, count - 1))]
    texts = tuple(f"{documents.gold.title} was born in {town}." for town in towns)
    return Judged(f"{documents.gold.text}\n{question}", texts)
