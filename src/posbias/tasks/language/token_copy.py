"""Position copy in natural tokens: a list of common words, and the one at a given place is to be said again.

The counterpart, for finished models, of position copy on random tokens (Liu 2026). With a tokenizer only words that
are one token (with their leading space) are used, so that a place is a token.
"""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from posbias.checks import check_whole
from posbias.errors import UsageError
from posbias.tasks.language.base import LANGUAGE_TASKS, Draft, LanguageTask, check_choice
from posbias.tasks.language.words import COMMON

CUES = ("counted", "numbered", "repeated")


@LANGUAGE_TASKS.register("token_copy")
@dataclass(frozen=True)
class TokenCopy(LanguageTask):
    """Say again the word at a given place of a list; the asked word moves, all others keep their order.

    How the place is given: `counted` asks for "word number k" of a plain list, `numbered` writes the numbers into the
    list, `repeated` repeats the list up to the asked word (so that longer prompts go with later places).
    """

    length: int = 10
    """Words in the list, >= 2; each is a place for the asked one."""
    cue: str = "counted"
    """`counted`, `numbered` or `repeated`."""

    scoring: ClassVar[str] = "best_subspan_em"
    max_tokens: ClassVar[int] = 8

    def __post_init__(self) -> None:
        super().__post_init__()
        check_whole(f"{self.name}: length", self.length, least=2)
        check_choice(self.name, "cue", self.cue, CUES)
        if self.length > len(COMMON):
            raise UsageError(f"{self.name}: length must be 2 ... {len(COMMON)} words, got {self.length}")

    @property
    def n_items(self) -> int:
        """One place per word."""
        return self.length

    def drafts(self, tokenizer: Any, *, count: int, positions: Sequence[int], seed: int) -> Iterator[list[Draft]]:
        """One content is a list of words with the asked one; see `LanguageTask.drafts`.

        Raises:
            UsageError: the tokenizer has fewer of the words as single tokens than the list needs.
        """
        known = COMMON if tokenizer is None else single_tokens(COMMON, tokenizer)
        if len(known) < self.length:
            raise UsageError(
                f"{self.name}: only {len(known)} of {len(COMMON)} words are one token of this tokenizer; "
                f"{self.length} are asked"
            )
        return (
            [self._draft(words[0], words[1:], place) for place in positions]
            for index in range(count)
            for words in [random.Random(f"token_copy {seed} {index}").sample(known, self.length)]
        )

    def _draft(self, gold: str, others: list[str], place: int) -> Draft:
        words = [*others[:place], gold, *others[place:]]
        entries = [f"{number}. {word}" for number, word in enumerate(words, start=1)]
        head, between, told, tail = {
            "counted": ("Words:", "", [f" {word}" for word in words], f"\nWord number {place + 1} of the list is:"),
            "numbered": ("Words:\n", "\n", entries, f"\n\nWord number {place + 1} of the list is:"),
            "repeated": (
                "Words:",
                "",
                [f" {word}" for word in words],
                "\nWords:" + "".join(f" {word}" for word in words[:place]),
            ),
        }[self.cue]
        begin = len(head) + sum(len(entry) + len(between) for entry in told[:place])
        return Draft(head + between.join(told) + tail, (gold,), (begin, begin + len(told[place])))


def single_tokens(words: Sequence[str], tokenizer: Any) -> tuple[str, ...]:
    """The words that are one token when a space stands before them."""
    encoded = tokenizer([f" {word}" for word in words], add_special_tokens=False)["input_ids"]
    return tuple(word for word, token_ids in zip(words, encoded, strict=True) if len(token_ids) == 1)
