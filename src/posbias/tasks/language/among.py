"""A whole task among others: a question with all that it takes moves through a prompt, and alone is to be answered.

Not a fact is looked for, but a task solved that stands far from where the answer is due. What stands around it are
tasks with their answers, tasks without, or ordinary text. A copy of the task at the end tells whether place or length
is at fault.

A file has one JSON object a line, {"question": "...", "answer": "..."}; without one there are sums, differences and
words whose letters are counted.
"""

import random
import string
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, ClassVar

from annotated_types import Ge

from posbias.checks import Count, FileName, OneOf
from posbias.errors import UsageError
from posbias.prompts.sources import default_corpus
from posbias.tasks.language.base import (
    LANGUAGE_TASKS,
    Asked,
    Draft,
    LanguageTask,
    Line,
    Text,
    line_of,
    published_lines,
)
from posbias.tasks.language.documents import CITIES

SOLVED, UNSOLVED, PLAIN = "solved", "unsolved", "plain"
WORDS = 30
"""Words of a filler of ordinary text, from anywhere in it."""


class TaskLine(Line):
    """A line of a file, and a generated task."""

    question: Text
    answer: Text


@LANGUAGE_TASKS.register("task_among")
@dataclass(frozen=True)
class TaskAmong(LanguageTask):
    """Answer one task of many, by its name; it moves among solved or unsolved ones, or ordinary text.

    Source: Zhang et al. 2026, arXiv 2605.23170, with GSM8K and ARC.
    """

    tasks: Annotated[Count, Ge(2)] = 10
    """Tasks in the prompt, or one and passages of text, >= 2; each is a position."""
    fillers: Annotated[str, OneOf(SOLVED, UNSOLVED, PLAIN)] = SOLVED
    """What stands around: `solved` tasks, with their answers, `unsolved` ones, or `plain` text."""
    copy: bool = False
    """The task stands a second time behind all others."""
    file: FileName | None = None
    """A .jsonl or .jsonl.gz file of tasks, from which fillers are drawn, too; None: generated."""
    rule: str = "whole_words"
    """How an answer is judged (`posbias list rules`)."""

    max_tokens: ClassVar[int] = 48
    counted: ClassVar[str] = "tasks"
    between: ClassVar[str] = "\n\n"
    plain: ClassVar[tuple[str, str]] = (
        "Answer only the task that is named at the end.\n\n",
        "\n\n{question}\nAnswer:",
    )

    def __post_init__(self) -> None:
        self.answer_rule  # noqa: B018  a rule that is none is refused at once

    def draw(self, tokenizer: Any, *, count: int, seed: int) -> Iterator[Asked]:
        """A task and its fillers."""
        lines: list[TaskLine] = []
        for where, record in published_lines(self.file) if self.file else ():
            lines.append(line_of(TaskLine, record, where))
            self.answer_rule.check(lines[-1].answer, f"{where}, field 'answer'")
        needed = max(count, 0 if self.fillers == PLAIN else self.tasks)
        if self.file is not None and len(lines) < needed:
            raise UsageError(f"{self.file!r} holds {len(lines)} tasks; {needed} are needed")
        corpus = default_corpus() if self.fillers == PLAIN else []
        texts = [" ".join(map(str, group.segments[0])).split() for group in corpus]
        return (self._asked(lines, texts, index, random.Random(f"task_among {seed} {index}")) for index in range(count))

    def _asked(self, lines: Sequence[TaskLine], texts: Sequence[list[str]], index: int, source: random.Random) -> Asked:
        task = lines[index] if lines else _generated(source)
        names: dict[str, None] = {}
        while len(names) < self.tasks:
            names["".join(source.choices(string.ascii_uppercase, k=4))] = None
        name, *others = names
        if self.fillers == PLAIN:
            around = []
            for _ in others:
                words = source.choice(texts)
                begin = source.randrange(len(words) - WORDS)
                around.append(f"... {' '.join(words[begin : begin + WORDS])} ...")
        else:
            rest = [*lines[:index], *lines[index + 1 :]]
            drawn = source.sample(rest, len(others)) if lines else [_generated(source) for _ in others]
            around = [f"Task {other}: {one.question}" for other, one in zip(others, drawn, strict=True)]
            if self.fillers == SOLVED:
                around = [f"{told}\nAnswer: {one.answer}" for told, one in zip(around, drawn, strict=True)]
        return Asked(f"Answer task {name}.", (task.answer,), f"Task {name}: {task.question}", tuple(around))

    def draft(self, sample: Asked, position: int) -> Draft:
        """The tasks in order, and at the end a copy of the one to answer, if that is wanted."""
        if self.copy and sample.moved is not None:
            sample = replace(sample, question=f"{sample.moved}\n\n{sample.question}")
        return super().draft(sample, position)


def _generated(source: random.Random) -> TaskLine:
    """A small task whose answer does not stand in the question."""
    first, second, word = source.randrange(20, 100), source.randrange(2, 10), source.choice(CITIES)
    question, answer = source.choice(
        [
            (f"What is {first} + {second}?", first + second),
            (f"What is {first} - {second}?", first - second),
            (f"How many letters does the word {word} have?", len(word)),
        ]
    )
    return TaskLine(question=question, answer=str(answer))
