"""`PromptSource`: where prompts come from, which windows are taken, and whether their tokens are then shuffled."""

from dataclasses import dataclass
from typing import Any

from posbias.checks import checked
from posbias.errors import UsageError

WINDOWS = ("random", "starts")


@checked
@dataclass(frozen=True)
class PromptSource:
    """What `load_prompts` takes in place of a bare source, where the defaults do not fit."""

    source: Any = "default"
    """As `load_prompts` takes it."""
    windows: str = "random"
    """"random": anywhere in a document; "starts": the first tokens of each document, one window a document."""
    shuffle: bool = False
    """Put the tokens of each prompt into random order: a control without language but with its token frequencies."""

    def __post_init__(self) -> None:
        if isinstance(self.source, PromptSource):
            raise UsageError("a PromptSource holds a source, not another PromptSource")
        if self.windows not in WINDOWS:
            raise UsageError(f"windows must be one of {', '.join(WINDOWS)}, got {self.windows!r}")
        if not isinstance(self.shuffle, bool):
            raise UsageError(f"shuffle must be True or False, got {self.shuffle!r}")
