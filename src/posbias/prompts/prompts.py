"""`Prompts`: equally long sequences of token ids with their origin; what every measurement runs on.

Two controls without language stand beside them: uniform random tokens, and prompts with their tokens shuffled. Between
text and token ids: text is tokenised once, whole, without special tokens; the ones the tokenizer would put before it
(BOS) are found separately, so that they open a prompt and never stand inside one.
"""

import hashlib
from dataclasses import dataclass, replace
from typing import Annotated, Any, Protocol, runtime_checkable

import numpy as np
from annotated_types import Ge
from jaxtyping import Int, Int64

from posbias.checks import CELLS, Natural, checked, checked_value
from posbias.errors import UsageError, check_most

EMBEDDED = 1 << 24
"""Numbers of the embedding looked at in one go (64 MB in float32)."""


@runtime_checkable
class TokenModel(Protocol):
    """The part of a model that prompts need to know; `posbias.models.model.Model` has it."""

    tokenizer: Any
    """A Hugging Face tokenizer, or None for a model that only takes token ids."""
    vocabulary_size: int
    """Valid token ids are 0 ... vocabulary_size - 1."""
    max_positions: int | None
    """Longest input in tokens; None if unbounded."""


def check_request(model: TokenModel, *, n_positions: int, count: int, seed: int) -> None:
    """Refuse lengths, counts and seeds that no source could serve, or the model does not take."""
    checked_value("n_positions", n_positions, Annotated[int, Ge(2)])
    if model.max_positions is not None and n_positions > model.max_positions:
        rope = getattr(getattr(model, "config", None), "rope_parameters", None) or {}
        kind = rope.get("rope_type", "default")
        # Configurations of other kinds than YaRN may name the stretched length already.
        scaled = "" if kind in ("default", "yarn") else f" (its RoPE scaling {kind!r} is not counted)"
        raise UsageError(
            f"n_positions must be at most the model's {model.max_positions} positions{scaled}, got {n_positions}"
        )
    checked_value("count", count, Annotated[int, Ge(1)])
    checked_value("seed", seed, Natural)
    check_most(f"count x n_positions = {count} x {n_positions}", int(count) * int(n_positions), CELLS)


@checked
@dataclass(frozen=True, eq=False, repr=False)
class Prompts:
    """`count` prompts of exactly `n_positions` tokens each; no padding."""

    token_ids: Int64[np.ndarray, "count n_positions"]
    source: str = "token ids"
    """The source of the tokens: "default", a file name, "token ids"."""
    seed: int | None = None
    """The seed that chose the windows; None if nothing was drawn."""
    prefix: tuple[int, ...] = ()
    """Special tokens (usually one BOS) that open every prompt because the tokenizer puts them before any text."""

    def __post_init__(self) -> None:
        if self.token_ids.ndim != 2 or self.token_ids.size == 0:
            raise UsageError(f"prompts need shape [count, n_positions], both >= 1; got {self.token_ids.shape}")
        if self.token_ids.min() < 0:
            raise UsageError(f"token ids must be >= 0, got {self.token_ids.min()}")

    def __repr__(self) -> str:
        return f"Prompts({self.count} of {self.n_positions} tokens, source={self.source!r}, seed={self.seed})"

    @property
    def count(self) -> int:
        """Number of prompts."""
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
            "sha256": self.sha256,
        }


@checked
@dataclass(frozen=True)
class PromptSource:
    """A source for `load_prompts`, with settings other than the defaults."""

    source: Any = "default"
    """Any source that `load_prompts` takes."""
    shuffle: bool = False
    """Put the tokens of each prompt into random order: a control without language but with its token frequencies."""


def synthetic_prompts(model: TokenModel, *, n_positions: int, count: int, seed: int) -> Prompts:
    """Prompts of uniform random tokens.

    Tokens are drawn from the whole vocabulary; if the tokenizer is known, without its special tokens and without
    embedding rows it has no token for; if the model can be asked, without tokens whose embedding is exactly zero
    (padding), which have no mixing. Within a prompt they are distinct if the vocabulary allows it, otherwise
    independent. The first prompts are the same for every count. Arguments as `load_prompts`, which checks them.
    """
    candidates = np.arange(model.vocabulary_size, dtype=np.int64)
    if model.tokenizer is not None:
        special = np.asarray(model.tokenizer.all_special_ids, dtype=np.int64)
        candidates = np.setdiff1d(candidates[: len(model.tokenizer)], special)
    if hasattr(model, "embed"):
        whole: Any = model
        chunks = np.array_split(candidates, 1 + candidates.size * whole.width // EMBEDDED)
        has_vector = [whole.embed(whole.token_tensor([chunk.tolist()]))[0].any(-1).cpu().numpy() for chunk in chunks]
        embedded = candidates[np.concatenate(has_vector)]
        candidates = embedded if len(embedded) else candidates
    distinct = n_positions <= len(candidates)
    token_ids = np.empty((count, n_positions), dtype=np.int64)
    for row in range(count):
        token_ids[row] = np.random.default_rng([seed, row]).choice(candidates, n_positions, replace=not distinct)
    return Prompts(token_ids, source="synthetic", seed=seed)


def shuffled(prompts: Prompts, seed: int = 0) -> Prompts:
    """Put the tokens of each prompt into random order; the special tokens that open them stay in place."""
    checked_value("seed", seed, Natural)
    fixed = len(prompts.prefix)
    token_ids = prompts.token_ids.copy()
    for row in range(prompts.count):
        token_ids[row, fixed:] = np.random.default_rng([seed, row]).permutation(token_ids[row, fixed:])
    return replace(prompts, token_ids=token_ids, source=f"{prompts.source} (shuffled, seed {seed})")


def check_vocabulary(token_ids: Int[np.ndarray, "..."], model: TokenModel, source: str) -> None:
    """Refuse token ids the model has no embedding for; the message names the first one."""
    wrong = np.argwhere((token_ids < 0) | (token_ids >= model.vocabulary_size))
    if len(wrong):
        first = token_ids[tuple(wrong[0])]
        raise UsageError(
            f"{source}: token id {first} is outside the model's vocabulary 0 ... {model.vocabulary_size - 1}"
        )


def as_token_ids(values: Any, source: str) -> Int64[np.ndarray, "..."]:
    """An int64 array from nested lists, an array or a tensor of whole numbers; others are refused, and ragged ones."""
    if hasattr(values, "detach"):
        values = values.detach().cpu()
    try:
        array = np.asarray(values)
    except (ValueError, TypeError, OverflowError):
        raise UsageError(f"{source}: token ids are ragged or not numbers") from None
    if array.dtype.kind not in "iu" or (
        array.dtype == np.uint64 and array.size and array.max() > np.iinfo(np.int64).max
    ):
        raise UsageError(f"{source}: token ids must be whole numbers below 2^63, got {array.dtype} values")
    return array.astype(np.int64)
