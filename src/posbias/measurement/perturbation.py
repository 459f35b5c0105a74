"""Perturbation: how far the prediction moves when one token is replaced by another.

A check on all gradient kinds that differentiates nothing: it compares the model's output on real prompts that differ
in one token.
"""

from dataclasses import dataclass
from typing import Annotated, ClassVar

import numpy as np
import torch
from annotated_types import Ge
from jaxtyping import Float, Float64, Int64
from torch import Tensor

from posbias.checks import Count
from posbias.errors import RunError, UsageError
from posbias.measurement.blocks import first_in_forward
from posbias.measurement.kinds import KINDS, Experiment
from posbias.measurement.outputs import Influence, Question
from posbias.models.devices import in_float64
from posbias.models.hugging_face import Prefix, trusted_prefix


@KINDS.register("perturbation")
@dataclass(frozen=True)
class Perturbation(Experiment):
    """KL(p || p') of the next-token distribution, token j replaced by a random other one, in nats (mean over draws).

    KL is of second order in a small change, so that it gathers on few positions; `root` takes the square root of the
    mean, which is comparable with the gradient kinds. For the mean of several outputs, KL is averaged over them.

    Cost: `draws` forward passes for every measured position, each over what follows the position (half the prompt on
    average) where the network's cache of keys and values can be trusted with the unchanged beginning, which is tried
    on every prompt and reported in `details`; over the whole prompt otherwise. That is as much as `draws` N / 2 forward
    passes of a prompt of N positions, 1 / `batch` more for the unchanged prompt: take `positions` for long contexts.
    """

    draws: Count = 2
    """Other tokens tried at each position, uniform over the vocabulary, >= 1."""
    positions: Annotated[Count, Ge(3)] | None = None
    """Measure only so many positions, >= 3: the first, the last, and one at random in each of equally long stretches
    between, whose positions all get its value. None: all positions."""
    root: bool = False
    """Take the root of KL, which is linear in a small change, as gradients are."""
    batch: Count = 16
    """Changed prompts per forward pass, >= 1; changes memory and speed alone."""

    takes_targets: ClassVar[bool] = False

    @property
    def sampled(self) -> bool:
        """Always."""
        return True

    @torch.no_grad()
    def measure(self, question: Question) -> Influence:
        """Mean KL with its standard error over draws; `details` say whether prefixes were reused."""
        generator = question.generator(self.name)
        size = question.reading.n_positions
        places, stretches = self._places(size, generator)
        tokens = self._other_tokens(question, places, generator)
        prefix = trusted_prefix(question.model, question.embeddings)
        changed, replacements = np.repeat(places, self.draws), tokens.ravel()
        chunks = (slice(start, start + self.batch) for start in range(0, tokens.size, self.batch))
        moved = [_moved(question, prefix, changed[chunk], replacements[chunk]) for chunk in chunks]
        divergence = np.concatenate(moved).reshape(tokens.shape)
        if not np.all(np.isfinite(divergence)):
            where = first_in_forward(question.model, question.embeddings)
            raise RunError(f"{self.name}: the output on prompt {question.key[1]} is not finite{where}")
        mean = divergence.mean(axis=1)
        spread = np.full_like(mean, np.inf)
        if self.draws > 1:
            spread = divergence.std(axis=1, ddof=1) / np.sqrt(self.draws)
        if self.root:
            mean = np.sqrt(mean)
            spread = np.divide(spread, 2 * mean, out=np.zeros_like(mean), where=mean > 0)
        details = {"prefix_reused": float(prefix is not None)}
        return Influence(np.repeat(mean, stretches), np.repeat(spread, stretches), details)

    def _places(
        self, size: int, generator: torch.Generator
    ) -> tuple[Int64[np.ndarray, "places"], Int64[np.ndarray, "places"]]:
        """The positions that are measured, ascending, and the number of positions that each stands for."""
        if self.positions is None or self.positions >= size:
            return np.arange(size), np.ones(size, dtype=np.int64)
        stretches = np.array_split(np.arange(1, size - 1), self.positions - 2)
        inner = [int(stretch[int(torch.randint(len(stretch), (), generator=generator))]) for stretch in stretches]
        return np.array([0, *inner, size - 1]), np.array([1, *map(len, stretches), 1])

    def _other_tokens(
        self, question: Question, places: Int64[np.ndarray, "places"], generator: torch.Generator
    ) -> Int64[np.ndarray, "places draws"]:
        """Uniform draws from all tokens except the one that stands there."""
        present = question.reading.token_ids[places][:, None]
        alternatives = question.model.vocabulary_size - 1
        if alternatives < 1:
            raise UsageError("perturbation needs a vocabulary of at least 2 tokens")
        tokens = torch.randint(alternatives, (len(places), self.draws), generator=generator).numpy()
        return np.asarray(tokens + (tokens >= present))


def _moved(
    question: Question, prefix: Prefix | None, places: Int64[np.ndarray, "copies"], tokens: Int64[np.ndarray, "copies"]
) -> Float64[np.ndarray, "copies"]:
    """KL from the prompt's own outputs, in nats, of copies with one token replaced each, at ascending places."""
    reading, model = question.reading, question.model
    start = 0 if prefix is None else int(places[0])
    read = np.array([position for position in reading.positions if position >= start])
    if read.size == 0:
        return np.zeros(len(places))
    # The unchanged prompt runs in the same batch, so that rounding cancels.
    token_ids = np.tile(reading.token_ids[start:], (len(places) + 1, 1))
    token_ids[np.arange(1, len(token_ids)), places - start] = tokens
    embeddings = model.embed(model.token_tensor(token_ids.tolist()))
    rows = (read - start).tolist()
    if prefix is None:
        moved = divergences(model.outputs(embeddings, rows).logits)
    else:
        moved = divergences(prefix.outputs(start, embeddings, rows).logits)
        # The prefix is trusted with causal networks alone: what comes later cannot have moved the output.
        moved[places[:, None] > read] = 0
    return np.asarray(reading.share * moved.sum(axis=1))


def divergences(logits: Float[Tensor, "copies outputs vocabulary"]) -> Float64[np.ndarray, "changed outputs"]:
    """KL(p || p') of the first row from every other one in nats, by terms that are all >= 0: sum p (e^u - 1 - u)."""
    result = np.empty((len(logits) - 1, logits.shape[1]))
    unchanged = in_float64(logits[0]).log_softmax(dim=-1)
    for row, changed in enumerate(logits[1:]):
        change = in_float64(changed).log_softmax(dim=-1) - unchanged
        terms = unchanged.exp() * (torch.expm1(change) - change)
        # A token that the model rules out (logit -inf) adds nothing.
        result[row] = terms.masked_fill(unchanged == -torch.inf, 0).sum(dim=-1).cpu().numpy()
    return result
