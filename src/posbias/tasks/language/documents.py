"""Question answering over several documents, of which one holds the answer and is moved (Liu et al. 2024).

Read from the published files (`question`, `answers`, `ctxs` with `title`, `text`, `isgold`), or from a generated
corpus. The wording is the published one.
"""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from posbias.checks import check_size
from posbias.errors import UsageError
from posbias.limits import ITEMS
from posbias.tasks.language.answers import normalise_answer
from posbias.tasks.language.base import LANGUAGE_TASKS, QUERIES, Draft, LanguageTask, check_choice
from posbias.tasks.language.document_corpus import MOST_DOCUMENTS, Document, DocumentSet, drawn_documents
from posbias.tasks.language.published import check_path, list_field, published_lines, text_field

INSTRUCTION = (
    "Write a high-quality answer for the given question using only the provided search results "
    "(some of which might be irrelevant)."
)
RANDOM_ORDER = " The search results are ordered randomly."
CONDITIONS = ("gold", "oracle", "closed_book")
ORDERS = ("given", "shuffled")


@LANGUAGE_TASKS.register("documents")
@dataclass(frozen=True)
class Documents(LanguageTask):
    """Answer a question from one of several documents; the gold one moves, the distractors keep their order.

    Source: Liu et al. 2024, "Lost in the middle", section 2; 10, 20 and 30 documents, gold at 0, 4, 9 ... 29.
    """

    documents: int = 10
    """Documents in the prompt, >= 1, at most 40 generated ones; the gold one and the first others of a line."""
    file: str | None = None
    """A published .jsonl or .jsonl.gz file; None: the generated corpus."""
    setting: str = "gold"
    """`gold`: all documents; `oracle`: only the gold one; `closed_book`: none. The last two have one position."""
    order: str = "given"
    """Of the distractors: as `given` (published: by relevance) or `shuffled`, the same at all positions."""
    mention_order: bool = False
    """Say in the prompt that the documents are ordered randomly (published wording)."""
    query: str = "after"
    """Where the question stands: `after` the documents (as published), `before`, or `both` (query-aware)."""

    scoring: ClassVar[str] = "best_subspan_em"
    max_tokens: ClassVar[int] = 100

    def __post_init__(self) -> None:
        super().__post_init__()
        check_path(self.name, "file", self.file)
        check_size(f"{self.name}: documents", self.documents, ITEMS)
        check_choice(self.name, "setting", self.setting, CONDITIONS)
        check_choice(self.name, "order", self.order, ORDERS)
        check_choice(self.name, "query", self.query, QUERIES)
        if not isinstance(self.mention_order, bool):
            raise UsageError(f"{self.name}: mention_order must be True or False, got {self.mention_order!r}")
        if self.file is None and self.documents > MOST_DOCUMENTS:
            raise UsageError(
                f"{self.name}: the generated corpus has at most {MOST_DOCUMENTS} documents, got {self.documents}"
            )

    @property
    def n_items(self) -> int:
        """One place per document; a single one without distractors."""
        return self.documents if self.setting == "gold" else 1

    @property
    def condition(self) -> str:
        """The setting."""
        return self.setting

    def drafts(self, tokenizer: Any, *, count: int, positions: Sequence[int], seed: int) -> Iterator[list[Draft]]:
        """One content is a question with its documents; see `LanguageTask.drafts`."""
        contents: Iterator[DocumentSet]
        if self.file is None:
            contents = (drawn_documents(self.documents, seed, index) for index in range(count))
        else:
            contents = iter([self._set_of(record, where) for where, record in published_lines(self.file, count)])
        return (
            [self._draft(content, distractors, place) for place in positions]
            for index, content in enumerate(contents)
            for distractors in [self._ordered(content.distractors, seed, index)]
        )

    def _set_of(self, record: dict[str, Any], where: str) -> DocumentSet:
        """The question and documents of a published line."""
        question = text_field(record, "question", where)
        answers = list_field(record, "answers", where)
        if not all(isinstance(answer, str) and answer for answer in answers):
            raise UsageError(f"{where}: field 'answers' must hold texts, got {answers!r:.80}")
        empty = [answer for answer in answers if not normalise_answer(answer)]
        if empty:
            raise UsageError(f"{where}: answer {empty[0]!r:.80} holds nothing but articles and punctuation")
        if self.setting == "closed_book":
            return DocumentSet(question, tuple(answers), Document("", ""), ())
        gold: list[Document] = []
        others: list[Document] = []
        for entry in list_field(record, "ctxs", where):
            if not isinstance(entry, dict):
                raise UsageError(f"{where}: an entry of 'ctxs' must be an object, got {entry!r:.80}")
            found = Document(text_field(entry, "title", where, empty=True), text_field(entry, "text", where))
            (gold if entry.get("isgold") is True else others).append(found)
        if len(gold) != 1:
            raise UsageError(f"{where}: {len(gold) or 'no'} documents are gold (isgold true); exactly 1 is needed")
        if len(others) + 1 < self.n_items:
            raise UsageError(f"{where} has {len(others) + 1} documents; {self.n_items} were asked")
        return DocumentSet(question, tuple(answers), gold[0], tuple(others[: self.n_items - 1]))

    def _ordered(self, distractors: tuple[Document, ...], seed: int, index: int) -> list[Document]:
        """The distractors in the order in which they stand around the gold document."""
        if self.setting != "gold":
            return []
        ordered = list(distractors)
        if self.order == "shuffled":
            random.Random(f"order {seed} {index}").shuffle(ordered)
        return ordered

    def _draft(self, content: DocumentSet, distractors: list[Document], place: int) -> Draft:
        asked = f"Question: {content.question}\n"
        if self.setting == "closed_book":
            return Draft(f"{asked}Answer:", content.answers, None)
        documents = [*distractors[:place], content.gold, *distractors[place:]]
        entries = [
            f"Document [{number}](Title: {document.title}) {document.text}"
            for number, document in enumerate(documents, start=1)
        ]
        head = f"{INSTRUCTION}{RANDOM_ORDER if self.mention_order else ''}\n\n"
        head += f"{asked}\n" if self.query != "after" else ""
        begin = len(head) + sum(len(entry) + 1 for entry in entries[:place])
        text = head + "\n".join(entries) + "\n\n" + (asked if self.query != "before" else "") + "Answer:"
        return Draft(text, content.answers, (begin, begin + len(entries[place])))
