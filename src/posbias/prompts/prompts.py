"""`Prompts`: equally long sequences of token ids with their origin; what every measurement runs on."""

import hashlib
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Int64

from posbias.checks import checked
from posbias.errors import UsageError


@checked
@dataclass(frozen=True, eq=False)
class Prompts:
    """`count` prompts of exactly `n_positions` tokens each; no padding."""

    token_ids: Int64[np.ndarray, "count n_positions"]
    source: str = "token ids"
    """Where they came from: "default", a file name, "token ids"."""
    seed: int | None = None
    """The seed that chose the windows; None where nothing was drawn."""
    prefix: tuple[int, ...] = ()
    """Special tokens (usually one BOS) that open every prompt because the tokenizer puts them before any text."""
    windows: str | None = None
    """"random" or "starts", where windows were drawn from documents."""
    duplicates: int = 0
    """Windows passed over while drawing because their text was there already, but for case and white space; of a file
    of conversations, those passed over because their rendered text was."""

    def __post_init__(self) -> None:
        if self.token_ids.ndim != 2 or self.token_ids.size == 0:
            raise UsageError(f"prompts need shape [count, n_positions], both >= 1; got {self.token_ids.shape}")
        if self.token_ids.min() < 0:
            raise UsageError(f"token ids must be >= 0, got {self.token_ids.min()}")

    def __repr__(self) -> str:
        return f"Prompts({self.count} of {self.n_positions} tokens, source={self.source!r}, seed={self.seed})"

    @property
    def count(self) -> int:
        """How many prompts."""
        return int(self.token_ids.shape[0])

    @property
    def n_positions(self) -> int:
        """Tokens in each prompt."""
        return int(self.token_ids.shape[1])

    @property
    def sha256(self) -> str:
        """Hash of the token ids (int64, little-endian, row by row): the same prompts, the same hash."""
        return hashlib.sha256(self.token_ids.astype("<i8").tobytes()).hexdigest()

    def describe(self) -> dict[str, Any]:
        """Plain values for a record."""
        return {
            "source": self.source,
            "seed": self.seed,
            "count": self.count,
            "n_positions": self.n_positions,
            "prefix": list(self.prefix),
            "windows": self.windows,
            "duplicates": self.duplicates,
            "sha256": self.sha256,
        }
