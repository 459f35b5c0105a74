"""Documents of which one distracts, and moves: where does a passage that looks right do most harm?

The document with the answer stays in a place that is drawn for each sample. Retrieved distractors do not weigh alike
everywhere (arXiv 2505.15561); `place` optimises an order by both curves, that of the answer and that of the distractor.
"""

import random
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from typing import Any

from posbias.errors import UsageError
from posbias.tasks.language.base import LANGUAGE_TASKS, Draft, LanguageTask
from posbias.tasks.language.document_files import Document, DocumentSet
from posbias.tasks.language.documents import Documents
from posbias.tasks.language.words import CITIES


@LANGUAGE_TASKS.register("hard_distractor")
@dataclass(frozen=True)
class HardDistractor(Documents):
    """Answer a question from documents of which the hardest distractor moves; the gold one keeps a place of its own.

    Of a file, the hardest is the one that the retriever found first. Generated, it says of a namesake what is asked.
    """

    without: bool = False
    """True leaves the distractor out: the same prompts without it, at one position, show how much it takes."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.without, bool):
            raise UsageError(f"{self.name}: without must be True or False, got {self.without!r}")
        if self.setting != "gold" or self.order != "given":
            raise UsageError(f"{self.name}: setting and order must be 'gold' and 'given'")
        if self.documents < 2:
            raise UsageError(f"{self.name}: documents must be at least 2, got {self.documents}")

    @property
    def n_items(self) -> int:
        """Places of the distractor among the others, the gold document apart; one without it."""
        return 1 if self.without else int(self.documents) - 1

    @property
    def plain(self) -> Documents:
        """The task whose prompts these are."""
        return Documents(**{parameter.name: getattr(self, parameter.name) for parameter in fields(Documents)})

    @property
    def short_forms(self) -> tuple[LanguageTask, ...]:
        """The gold document alone, and none."""
        return self.plain.short_forms

    def draw(self, tokenizer: Any, *, count: int, seed: int) -> Iterator[DocumentSet]:
        """The samples of `documents`."""
        return self.plain.draw(tokenizer, count=count, seed=seed)

    def draft(self, sample: DocumentSet, position: int) -> Draft:
        """The prompt of `documents`; it lists no passages, since the one that moves does not hold the answer."""
        source = random.Random(f"{self.name} {sample.question}")
        hard, *others = sample.distractors if self.file is not None else _with_namesake(sample, source)
        place = source.randrange(int(self.documents))
        if self.without:
            return replace(
                super().draft(replace(sample, distractors=tuple(others)), min(place, len(others))), passages=()
            )
        ordered = replace(sample, distractors=(*others[:position], hard, *others[position:]))
        whole = super().draft(ordered, place)
        moved = position + (position >= place)
        return replace(whole, gold=whole.passages[moved], passages=())


def _with_namesake(sample: DocumentSet, source: random.Random) -> tuple[Document, ...]:
    """The distractors, the first of them about another person of the same name."""
    told = " ".join(document.text for document in (sample.gold, *sample.distractors))
    town = source.choice([city for city in CITIES if city not in told] or list(CITIES))
    name = str(sample.gold.title)
    text = (
        f"Another {name}, a cousin of that name, was born in {town} and never left. In {town} everybody knew {name}, "
        f"who kept an inn there."
    )
    return (Document(name, text), *sample.distractors[1:])
