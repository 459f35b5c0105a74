"""Prompts without language, to compare with: uniform random tokens, and real prompts with their tokens shuffled."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Protocol, runtime_checkable

import numpy as np
from jaxtyping import Int64

from posbias.checks import check_seed
from posbias.prompts.prompts import Prompts
from posbias.prompts.tokens import TokenModel, check_request

EMBEDDED = 1 << 24
"""Numbers of the embedding looked at in one go (64 MB in float32)."""


@runtime_checkable
class Embedder(Protocol):
    """A model whose embedding can be looked at; `posbias.models.Model` is one."""

    width: int
    """Features of a token's vector."""

    def token_tensor(self, token_ids: Sequence[Sequence[int]]) -> Any:
        """Token ids on the model's device."""

    def embed(self, token_ids: Any) -> Any:
        """The vectors entering the network, [batch position feature]."""


def synthetic_prompts(model: TokenModel, *, n_positions: int, count: int, seed: int = 0) -> Prompts:
    """Prompts of uniform random tokens.

    Tokens are drawn from the whole vocabulary; where the tokenizer is known, without its special tokens and without
    embedding rows it has no token for; where the model can be asked, without tokens whose embedding is exactly zero
    (padding), which have no mixing. Within a prompt they are distinct where the vocabulary allows it, otherwise
    independent. The first prompts are the same for every count.

    Args:
        model: Gives `tokenizer`, `vocabulary_size` and `max_positions`.
        n_positions: Tokens in each prompt, 2 ... model.max_positions.
        count: How many prompts, >= 1.
        seed: >= 0.

    Returns:
        Prompts with source "synthetic".

    Raises:
        UsageError: an argument out of range.
    """
    check_request(model, n_positions=n_positions, count=count, seed=seed)
    candidates = embedded_tokens(_ordinary_tokens(model), model)
    distinct = n_positions <= len(candidates)
    token_ids = np.empty((count, n_positions), dtype=np.int64)
    for row in range(count):
        token_ids[row] = np.random.default_rng([seed, row]).choice(candidates, n_positions, replace=not distinct)
    return Prompts(token_ids, source="synthetic", seed=seed)


def shuffled(prompts: Prompts, seed: int = 0) -> Prompts:
    """The same prompts with the tokens of each in random order; the special tokens that open them stay in place.

    Raises:
        UsageError: the seed is not a whole number >= 0.
    """
    check_seed(seed)
    fixed = len(prompts.prefix)
    token_ids = prompts.token_ids.copy()
    for row in range(prompts.count):
        token_ids[row, fixed:] = np.random.default_rng([seed, row]).permutation(token_ids[row, fixed:])
    return replace(prompts, token_ids=token_ids, source=f"{prompts.source} (shuffled, seed {seed})")


def _ordinary_tokens(model: TokenModel) -> Int64[np.ndarray, "_"]:
    """The token ids that stand for text."""
    if model.tokenizer is None:
        return np.arange(model.vocabulary_size, dtype=np.int64)
    known = np.arange(min(model.vocabulary_size, len(model.tokenizer)), dtype=np.int64)
    return np.setdiff1d(known, np.asarray(model.tokenizer.all_special_ids, dtype=np.int64))


def embedded_tokens(token_ids: Int64[np.ndarray, "_"], model: TokenModel) -> Int64[np.ndarray, "_"]:
    """Those with a vector that is not zero; all of them where there is none, or where the model cannot be asked."""
    if not isinstance(model, Embedder):
        return token_ids
    step = max(EMBEDDED // model.width, 1)
    chunks = [token_ids[start : start + step] for start in range(0, len(token_ids), step)]
    known = [model.embed(model.token_tensor([chunk.tolist()]))[0].any(-1).cpu().numpy() for chunk in chunks]
    embedded = token_ids[np.concatenate(known)]
    return embedded if len(embedded) else token_ids
