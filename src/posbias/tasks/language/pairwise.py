"""Pairwise judgement: a judge's preference between two responses, asked in both orders.

The position is the slot of the better response: 0 where it is Response A, 1 where it is Response B. A judge without
position bias prefers the same response in both orders; one that names the same slot twice follows the slot.

Files are JudgeBench's (Tan et al. 2025, arXiv 2410.12784), one JSON object per line: `question`, `response_A`,
`response_B`, and `label`, "A>B" or "B>A"; other fields are passed over. Generated pairs are about people who do not
exist: the question holds what is to be known, and one response gives a wrong town.

The verdict is generated, as judges are used, and read by one rule (`verdict_of`) or a pattern of one's own, so that
local models and servers are judged alike. One response of each pair is better, so a tie counts as wrong, as does what
cannot be read; both are counted. The score by teacher forcing is that of the right letter.
"""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from posbias.errors import UsageError
from posbias.tasks.language.base import (
    LANGUAGE_TASKS,
    Draft,
    LanguageTask,
    check_path,
    listed,
    published_lines,
    text_field,
)
from posbias.tasks.language.documents import drawn_documents
from posbias.tasks.language.verdict_parsing import LETTERS, TIE, check_own, verdict_of
from posbias.tasks.language.words import CITIES

INSTRUCTION = "Two responses to a question are given. Decide which one is better.\n\n"
CLOSING = "\n\nAnswer with one letter, A or B."
LEAD_IN = "The better response is Response"
"""What a text ends with; a conversation ends before it."""
BETTER_SLOT = {"A>B": 0, "B>A": 1}
"""By label, which response of a line is the better one."""
SCHEMA = "question, response_A, response_B (texts) and label ('A>B' or 'B>A')"


@dataclass(frozen=True)
class ResponsePair:
    """A question with two responses."""

    question: str
    better: str
    worse: str


@LANGUAGE_TASKS.register("pairwise")
@dataclass(frozen=True)
class Pairwise(LanguageTask):
    """Say which of two responses is better; both orders are asked, and flips of the verdict counted."""

    file: str | None = None
    """A .jsonl or .jsonl.gz file in JudgeBench's schema; None: generated pairs."""
    pattern: str | None = None
    """A regular expression with one group that holds A, B or tie, such as `Winner: (A|B|tie)`: the only form that
    counts as a verdict, at its last match; None: the forms of `verdict_of`."""

    scoring: ClassVar[str] = "verdict"
    max_tokens: ClassVar[int] = 8
    counted: ClassVar[str] = "file"
    fixed_order: ClassVar[bool] = True
    lead_in: ClassVar[str] = LEAD_IN

    def __post_init__(self) -> None:
        super().__post_init__()
        check_path(self.name, "file", self.file)
        check_own(f"{self.name}: pattern", self.pattern, groups=1)

    @property
    def n_items(self) -> int:
        """Two slots."""
        return len(LETTERS)

    def draw(self, tokenizer: Any, *, count: int, seed: int) -> Iterator[ResponsePair]:
        """A question with the better and the worse response."""
        if self.file is None:
            return (_drawn_pair(seed, index) for index in range(count))
        return iter([_pair_of(record, where) for where, record in published_lines(self.file, count)])

    def draft(self, sample: ResponsePair, position: int) -> Draft:
        """The question, Response A and Response B, and what is asked."""
        responses = [sample.better, sample.worse] if position == 0 else [sample.worse, sample.better]
        listing = listed(
            responses,
            head=f"{INSTRUCTION}Question:\n{sample.question}\n\n",
            between="\n\n",
            tail=CLOSING + ("" if self.chat else f"\n\n{LEAD_IN}"),
            numbered=lambda slot: f"Response {LETTERS[slot - 1]}:\n",
        )
        return Draft(listing.text, (LETTERS[position],), listing.items[position], passages=listing.passages)

    def right(self, text: str, answers: Sequence[str]) -> float:
        """1 if the verdict names the better response; a tie, or what cannot be read, is wrong."""
        return float(verdict_of(text, self.pattern) in answers)

    def noted(self, text: str | None) -> dict[str, float | None]:
        """`first_pick`: 1 if the verdict names Response A, 0 if B; `tie`: 1 if it is a tie, 0 if it names a response.

        Either is None otherwise; `tie` only if there is no verdict that can be read.
        """
        verdict = None if text is None else verdict_of(text, self.pattern)
        return {
            "first_pick": float(verdict == LETTERS[0]) if verdict in LETTERS else None,
            "tie": None if verdict is None else float(verdict == TIE),
        }


def _pair_of(record: dict[str, Any], where: str) -> ResponsePair:
    try:
        question, *responses = (text_field(record, name, where) for name in ("question", "response_A", "response_B"))
        label = record.get("label")
        if not isinstance(label, str) or label not in BETTER_SLOT:
            raise UsageError(f"{where}: field 'label' must be 'A>B' or 'B>A', got {label!r:.80}")
    except UsageError as error:
        raise UsageError(f"{error}; a line holds {SCHEMA}") from None
    better = BETTER_SLOT[label]
    return ResponsePair(question, responses[better], responses[1 - better])


def _drawn_pair(seed: int, index: int) -> ResponsePair:
    """A text about a person, and the right and a wrong town in the same words."""
    documents = drawn_documents(2, seed, index)
    question = f"{documents.question[0].upper()}{documents.question[1:]}?"
    wrong = random.Random(f"pairwise {seed} {index}").choice([town for town in CITIES if town != documents.answers[0]])
    right_text, wrong_text = (f"{documents.gold.title} was born in {town}." for town in (documents.answers[0], wrong))
    return ResponsePair(f"{documents.gold.text}\n{question}", right_text, wrong_text)
