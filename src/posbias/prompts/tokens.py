"""Between text and token ids: what prompts need of a tokenizer, and the checks that every token id passes.

Text is tokenised once, whole, without special tokens; the ones the tokenizer would put before it (BOS) are found
separately, so that they open a prompt and never stand inside one.
"""

from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

import numpy as np
from jaxtyping import Int, Int64

from posbias.checks import check_seed, check_whole
from posbias.errors import UsageError
from posbias.limits import CELLS

PROBE = "a"
"""Any text: it shows which special tokens the tokenizer puts before one."""


@runtime_checkable
class TokenModel(Protocol):
    """What prompts need to know of a model; `posbias.models.Model` has it."""

    tokenizer: Any
    """A Hugging Face tokenizer, or None for a model that only takes token ids."""
    vocabulary_size: int
    """Valid token ids are 0 ... vocabulary_size - 1."""
    max_positions: int | None
    """Longest input in tokens; None where unbounded."""


def check_request(model: TokenModel, *, n_positions: int, count: int, seed: int) -> None:
    """Refuse lengths, counts and seeds that no source could serve.

    Raises:
        UsageError: n_positions < 2 or beyond the model's positions, count < 1, seed < 0.
    """
    check_whole("n_positions", n_positions, least=2, numpy=True)
    if model.max_positions is not None and n_positions > model.max_positions:
        raise UsageError(f"n_positions must be at most the model's {model.max_positions} positions, got {n_positions}")
    check_whole("count", count, least=1, numpy=True)
    check_seed(seed)
    CELLS.check(f"count x n_positions = {count} x {n_positions}", int(count) * int(n_positions))


def check_vocabulary(token_ids: Int[np.ndarray, "..."], model: TokenModel, source: str) -> None:
    """Refuse token ids the model has no embedding for.

    Raises:
        UsageError: an id below 0 or at least vocabulary_size; the message names the first one.
    """
    wrong = np.argwhere((token_ids < 0) | (token_ids >= model.vocabulary_size))
    if len(wrong):
        found = token_ids[tuple(wrong[0])]
        raise UsageError(
            f"{source}: token id {found} is outside the model's vocabulary 0 ... {model.vocabulary_size - 1}"
        )


def as_token_ids(values: Any, source: str) -> Int64[np.ndarray, "..."]:
    """An int64 array from nested lists, an array or a tensor of whole numbers.

    Raises:
        UsageError: ragged, not whole numbers, or too large for 64 bits.
    """
    if hasattr(values, "detach"):
        values = values.detach().cpu()
    try:
        array = np.asarray(values)
    except (ValueError, TypeError, OverflowError):
        raise UsageError(f"{source}: token ids are ragged or not numbers{_row_lengths(values)}") from None
    if array.dtype.kind not in "iu" or (
        array.dtype == np.uint64 and array.size and array.max() > np.iinfo(np.int64).max
    ):
        raise UsageError(f"{source}: token ids must be whole numbers below 2^63, got {array.dtype} values")
    return array.astype(np.int64)


def opening(tokenizer: Any) -> tuple[int, ...]:
    """The special tokens the tokenizer puts before a text by default: usually BOS, or nothing."""
    full = [int(token) for token in tokenizer(PROBE)["input_ids"]]
    plain = [int(token) for token in tokenizer(PROBE, add_special_tokens=False)["input_ids"]]
    for start in range(len(full) - len(plain) + 1):
        if full[start : start + len(plain)] == plain:
            return tuple(full[:start])
    return ()


def tokenise(texts: Sequence[str], tokenizer: Any) -> list[Int64[np.ndarray, "_"]]:
    """Token ids of each text, no special tokens added, no length limit."""
    if not texts:
        return []
    encoded = tokenizer(list(texts), add_special_tokens=False, return_attention_mask=False, verbose=False)
    return [np.asarray(token_ids, dtype=np.int64) for token_ids in encoded["input_ids"]]


def _row_lengths(values: Any) -> str:
    """Where ragged rows first differ, for a message."""
    try:
        lengths = [len(row) for row in values]
    except TypeError:
        return ""
    other = next((row for row, length in enumerate(lengths) if length != lengths[0]), None)
    return "" if other is None else f": row 0 has {lengths[0]} values, row {other} has {lengths[other]}"
