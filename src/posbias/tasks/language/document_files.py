"""Question sets from files: a question, its accepted answers, and documents of which one holds the answer.

One JSON object per line, in one of two schemas, which the lines' own fields tell apart; other fields are passed over.
Of one's own:

    {"question": "...", "answers": ["...", ...], "documents": [{"text": "...", "title": "...", "is_gold": true}, ...]}

where `title` may be left out and documents stand in the order of retrieval; or as published with "Lost in the middle"
(Liu et al. 2024): `question`, `answers`, `ctxs` [{`title`, `text`, `isgold`}].
"""

import re
from dataclasses import dataclass, replace
from typing import Any

from posbias.errors import UsageError
from posbias.tasks.language.answers import normalise_answer
from posbias.tasks.language.base import list_field, published_lines, text_field

UNSPACED = r"\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u9fff\uf900-\ufaff"
"""Letters of scripts that set no blanks between words: Thai, Lao, Burmese, Khmer, Japanese, Chinese."""
APART = rf"(?<![^\W{UNSPACED}])", rf"(?![^\W{UNSPACED}])"
"""Before and behind words that are no part of a longer one."""


@dataclass(frozen=True)
class Document:
    """A passage with its title."""

    title: str | None
    """Title; None if the file gives none, and then the prompt shows none."""
    text: str


@dataclass(frozen=True)
class DocumentSet:
    """A question, the document that answers it, and documents that do not."""

    question: str
    answers: tuple[str, ...]
    gold: Document
    distractors: tuple[Document, ...]
    """Other documents in their given order (of a file: by relevance)."""
    notices: tuple[str, ...] = ()
    """Oddities, keys of `NOTICES`."""


OWN, PUBLISHED = "documents", "ctxs"
"""Fields that list the documents, of which a line has one."""
FLAGS = {OWN: "is_gold", PUBLISHED: "isgold"}
"""Field of a document that is true for the gold one; published lines may leave it out of others."""
LINES = {
    OWN: "question, answers [text ...], documents [{text, title (may be left out), is_gold (true or false)} ...]",
    PUBLISHED: "question, answers [text ...], ctxs [{title, text, isgold} ...]",
}
"""What a line holds, for messages."""


def read_sets(path: str, *, count: int, documents: int) -> list[DocumentSet]:
    """The first `count` questions of a file, each with the first of its documents (>= 1), the gold one among them.

    Raises:
        UsageError: a line that does not hold what its schema says, too few lines, or too few documents.
    """
    sets = []
    for where, record in published_lines(path, count):
        document_set = _set_of(record, where)
        there = 1 + len(document_set.distractors)
        if there < documents:
            raise UsageError(f"{where} has {there} documents; {documents} were asked (documents={there} takes all)")
        sets.append(replace(document_set, distractors=document_set.distractors[: documents - 1]))
    return sets


def read_questions(path: str, *, count: int) -> list[DocumentSet]:
    """The first `count` questions of a file without any document, which its lines need not have."""
    nothing = Document(None, "")
    return [DocumentSet(*_question_of(record, where), nothing, ()) for where, record in published_lines(path, count)]


def _question_of(record: dict[str, Any], where: str) -> tuple[str, tuple[str, ...]]:
    """A question and its accepted answers."""
    question = text_field(record, "question", where)
    answers = list_field(record, "answers", where)
    if not all(isinstance(answer, str) and answer for answer in answers):
        raise UsageError(f"{where}: field 'answers' must hold texts, got {answers!r:.80}")
    empty = [answer for answer in answers if not normalise_answer(answer)]
    if empty:
        raise UsageError(f"{where}: answer {empty[0]!r:.80} holds nothing but articles and punctuation")
    return question, tuple(answers)


def noticed(document_set: DocumentSet) -> DocumentSet:
    """A question with its documents, and what is odd about them.

    That the gold document has an answer is decided as the published scoring rule finds answers; another document only
    has it where it stands there as words of its own, not as part of another one.
    """
    answers = [normalise_answer(answer) for answer in document_set.answers]
    alone = re.compile("|".join(f"{APART[0]}{re.escape(answer)}{APART[1]}" for answer in answers))
    distractors = [_said(document) for document in document_set.distractors]
    text = normalise_answer(document_set.gold.text)
    odd = {
        "gold_without_answer": not any(answer in _said(document_set.gold) for answer in answers),
        "gold_repeated": any(normalise_answer(document.text) == text for document in document_set.distractors),
        "answer_elsewhere": any(map(alone.search, distractors)),
    }
    return replace(document_set, notices=tuple(name for name, holds in odd.items() if holds))


def _said(document: Document) -> str:
    """A document's title and text, normalised."""
    return normalise_answer(f"{document.title or ''} {document.text}")


def _set_of(record: dict[str, Any], where: str) -> DocumentSet:
    """A line with all its documents; messages end with the schema that it was read by."""
    there = [schema for schema in LINES if schema in record]
    if len(there) != 1:
        fields = "both 'documents' and 'ctxs'" if there else "neither 'documents' nor 'ctxs'"
        raise UsageError(f"{where} has {fields}; a line holds either {LINES[OWN]}, or as published {LINES[PUBLISHED]}")
    try:
        question, answers = _question_of(record, where)
        return DocumentSet(question, answers, *_documents_of(record, there[0], where))
    except UsageError as error:
        raise UsageError(f"{error}; a line holds {LINES[there[0]]}") from None


def _documents_of(record: dict[str, Any], schema: str, where: str) -> tuple[Document, tuple[Document, ...]]:
    """The gold document of a line, and the others in their order."""
    gold: list[Document] = []
    distractors: list[Document] = []
    for number, entry in enumerate(list_field(record, schema, where), start=1):
        of_document = f"{where}, document {number}"
        if not isinstance(entry, dict):
            raise UsageError(f"{of_document}: an entry of {schema!r} must be an object, got {entry!r:.80}")
        flag = entry.get(FLAGS[schema])
        if schema == OWN and not isinstance(flag, bool):
            raise UsageError(f"{of_document}: field {FLAGS[schema]!r} must be true or false, got {flag!r:.80}")
        titled = schema == PUBLISHED or entry.get("title") is not None
        title = text_field(entry, "title", of_document, empty=True) if titled else None
        (gold if flag is True else distractors).append(Document(title, text_field(entry, "text", of_document)))
    if len(gold) != 1:
        raise UsageError(f"{where}: {len(gold) or 'no'} documents are gold ({FLAGS[schema]} true); exactly 1 is needed")
    return gold[0], tuple(distractors)
