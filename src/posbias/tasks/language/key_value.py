"""Key-value retrieval: the value of one key among many in a JSON object, whose pair is moved (Liu et al. 2024).

Pairs of random UUIDs are generated, or read from the published files (`ordered_kv_records`, `key`, `value`).
"""

import random
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Annotated, Any, ClassVar

from annotated_types import Ge

from posbias.checks import Count, FileName, OneOf
from posbias.errors import UsageError
from posbias.tasks.language.base import (
    LANGUAGE_TASKS,
    QUERIES,
    Draft,
    LanguageTask,
    list_field,
    listed,
    published_lines,
    text_field,
)

EXTRACT = "Extract the value corresponding to the specified key in the JSON object below."

Pair = tuple[str, str]


@LANGUAGE_TASKS.register("key_value")
@dataclass(frozen=True)
class KeyValue(LanguageTask):
    """Find the value of one key among many; the asked pair moves, all others keep their order.

    Source: Liu et al. 2024, arXiv 2307.03172, section 3; 75, 140 and 300 pairs, 500 examples each.
    """

    pairs: Annotated[Count, Ge(2)] = 75
    """Pairs in the object, >= 2; each is a position for the asked one."""
    file: FileName | None = None
    """A published .jsonl or .jsonl.gz file; None: generated pairs. Its lines must have exactly `pairs` pairs."""
    query: Annotated[str, OneOf(*QUERIES)] = "after"
    """Place of the key: `after` the object (as published), `before` it, or `both` (query-aware, as published)."""

    scoring: ClassVar[str] = "contains"
    max_tokens: ClassVar[int] = 100
    counted: ClassVar[str] = "pairs"

    @property
    def short_forms(self) -> tuple[LanguageTask, ...]:
        """Two pairs, if they are generated."""
        return (replace(self, pairs=2),) if self.file is None and self.pairs > 2 else ()

    def draw(self, tokenizer: Any, *, count: int, seed: int) -> Iterator[tuple[Pair, list[Pair]]]:
        """The asked pair and the others."""
        if self.file is None:
            return (drawn_pairs(self.pairs, seed, index) for index in range(count))
        return iter([self._pairs_of(record, where) for where, record in published_lines(self.file, count)])

    def _pairs_of(self, record: dict[str, Any], where: str) -> tuple[Pair, list[Pair]]:
        records = list_field(record, "ordered_kv_records", where)
        key, value = text_field(record, "key", where), text_field(record, "value", where)
        for entry in records:
            if not isinstance(entry, list) or len(entry) != 2 or not all(isinstance(part, str) for part in entry):
                raise UsageError(
                    f"{where}: an entry of 'ordered_kv_records' must be a [key, value] pair, got {entry!r}"
                )
        if len(records) != self.pairs:
            raise UsageError(f"{where} has {len(records)} pairs; {self.name}(pairs={self.pairs}) was asked")
        if len({entry[0] for entry in records}) < len(records):
            raise UsageError(f"{where}: a key occurs twice")
        if [key, value] not in records:
            raise UsageError(f"{where}: no gold: the asked key {key!r} with its value is not among the pairs")
        return (key, value), [(entry[0], entry[1]) for entry in records if entry[0] != key]

    def draft(self, sample: tuple[Pair, list[Pair]], position: int) -> Draft:
        """The published wording."""
        gold, distractors = sample
        entries = [f'"{key}": "{value}"' for key, value in [*distractors[:position], gold, *distractors[position:]]]
        key_line = f'Key: "{gold[0]}"\n'
        head = f"{EXTRACT}\n\n" + (f"{key_line}\n" if self.query != "after" else "") + "JSON data:\n{"
        tail = "}\n\n" + (key_line if self.query != "before" else "") + "Corresponding value:"
        listing = listed(entries, head=head, between=",\n ", tail=tail)
        twice = self.file is not None and any(gold[1].lower() in value.lower() for _, value in distractors)
        notices = ("answer_elsewhere",) if twice else ()
        return Draft(listing.text, (gold[1],), listing.items[position], passages=listing.passages, notices=notices)


def drawn_pairs(pairs: int, seed: int, index: int) -> tuple[Pair, list[Pair]]:
    """The asked pair and the other ones of a generated sample: version-4 UUIDs, keys all different."""
    source = random.Random(f"key_value {seed} {index}")
    values: dict[str, str] = {}
    while len(values) < pairs:
        value, key = (str(uuid.UUID(int=source.getrandbits(128), version=4)) for _ in range(2))
        values[key] = value
    gold, *distractors = values.items()
    return gold, distractors
