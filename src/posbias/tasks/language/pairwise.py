"""Judgement of responses: a judge's preference between two, asked in both orders.

The position is the slot of the better response: 0 if it is Response A. A judge without position bias prefers the same
response in both orders; one that names the same slot twice follows the slot.

Files of pairs are JudgeBench's (Tan et al. 2025, arXiv 2410.12784), one JSON object per line: `question`, `response_A`,
`response_B`, and `label`, "A>B" or "B>A". Those of one `group` count as one sample; other fields are passed over.
Generated ones are about people who do not exist: the question holds what is to be known, and the worse response gives a
wrong town.

The verdict is generated, as judges are used, and read by one rule (`verdict`), so that local models and servers are
judged alike. One response is better, so a tie counts as wrong, as does what cannot be read; both are counted. The score
by teacher forcing is that of the right letter.
"""

import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from posbias.checks import FileName
from posbias.tasks.language.base import LANGUAGE_TASKS, Asked, LanguageTask, Line, Text, line_of, published_lines
from posbias.tasks.language.documents import CITIES, drawn_documents
from posbias.tasks.language.readings import TIE
from posbias.tasks.language.rules import LETTERS


class PairLine(Line):
    """A line of a file, as JudgeBench has them."""

    question: Text
    response_A: Text  # noqa: N815  as published
    response_B: Text  # noqa: N815
    label: Literal["A>B", "B>A"]
    group: str | int | None = None


@LANGUAGE_TASKS.register("pairwise")
@dataclass(frozen=True)
class Pairwise(LanguageTask):
    """Say which of two responses is better; both orders are asked, and flips of the verdict counted.

    Source: JudgeBench, arXiv 2410.12784.
    """

    file: FileName | None = None
    """A .jsonl or .jsonl.gz file of pairs; None: generated."""
    template: FileName | None = field(default=None, kw_only=True)
    """A file with the prompt in words of one's own, such as criteria: {responses} once, {question} at least once."""

    scoring: ClassVar[str] = "verdict"
    counted: ClassVar[str] = "file"
    published: ClassVar[frozenset[str]] = frozenset({"original_id", "response_model"})
    max_tokens: ClassVar[int] = 8
    lead_in: ClassVar[str] = "The better response is Response"
    fixed_order: ClassVar[bool] = True
    stands_alone: ClassVar[bool] = False
    n_items: ClassVar[int] = 2
    slot: ClassVar[str] = "responses"
    usual_form: ClassVar[str] = "Response {letter}:\n{text}"
    between: ClassVar[str] = "\n\n"
    wording: ClassVar[tuple[str, ...]] = ("template",)
    """Parameters that change what is said about the same samples."""

    def __post_init__(self) -> None:
        if self.template is not None:
            object.__setattr__(self, "lead_in", "")  # the answer continues words of one's own

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

    def draw(self, tokenizer: Any, *, count: int, seed: int) -> Iterator[Asked]:
        """A question with its responses, the better one first."""
        if self.file is None:
            return (_drawn(seed, index) for index in range(count))
        lines = [(where, line_of(PairLine, record, where)) for where, record in published_lines(self.file, count)]
        grouped = any(line.group not in (None, "") for _, line in lines)
        asked = []
        for where, line in lines:
            # One without a group, where others have one, is alone in its own.
            cluster = where if line.group in (None, "") else f"group {line.group}"
            better, worse = (line.response_A, line.response_B)[:: 1 if line.label == "A>B" else -1]
            asked.append(Asked(line.question, (), better, (worse,), cluster=cluster if grouped else ""))
        return iter(asked)

    @property
    def plain(self) -> tuple[str, str]:
        """The question before the responses, and what is asked behind them."""
        head = "Two responses to a question are given. Decide which one is better.\n\n"
        asked = "\n\nAnswer with one letter, A or B." + ("" if self.chat else f"\n\n{self.lead_in}")
        return f"{head}Question:\n{{question}}\n\n", asked


def _drawn(seed: int, index: int) -> Asked:
    """A text about a person, and the right and a wrong town in the same words."""
    asked = drawn_documents(2, seed, index)
    (right,), person = asked.answers, asked.moved
    wrong = random.Random(f"pairwise {seed} {index}").choice([town for town in CITIES if town != right])
    better, worse = (f"{person['title']} was born in {town}." for town in (right, wrong))
    question = f"{asked.question[0].upper()}{asked.question[1:]}?"
    return Asked(f"{person['text']}\n{question}", (), better, (worse,))
