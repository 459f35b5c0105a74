"""What is asked of one prompt, and what the answer looks like: shared by all kinds of influence."""

import zlib
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import torch
from jaxtyping import Float, Float64
from torch import Tensor

from posbias.measurement.outputs import Reading
from posbias.models.model import Model, Outputs


@dataclass(frozen=True, eq=False)
class Influence:
    """One kind of influence on one prompt, not normalised."""

    norms: Float64[np.ndarray, "n_positions"]
    """||.||_j, non-negative."""
    standard_errors: Float64[np.ndarray, "n_positions"] | None
    """Of the norms, from the spread over random draws (infinite with a single one); None where nothing was drawn."""
    details: dict[str, float] = field(default_factory=dict)
    """What else the kind found on the prompt, such as the gap of integrated gradients."""
    left_out: tuple[str, ...] = ()
    """What the norms miss, one sentence each, the same on every prompt that misses it."""


@dataclass(frozen=True, eq=False)
class Question:
    """One output of one model on one prompt."""

    model: Model
    reading: Reading
    key: tuple[int, int]
    """(seed, index of the prompt): random draws depend on these and the kind's name, on nothing else."""
    rows: int = 1
    """Copies of the prompt in the batch of a pass that is differentiated, >= 1."""

    @cached_property
    def embeddings(self) -> Float[Tensor, "one n_inputs feature"]:
        """The vectors that enter the network, not differentiable."""
        return self.model.embed(self.model.token_tensor([self.reading.token_ids.tolist()])).detach()

    def outputs(self, embeddings: Float[Tensor, "batch n_inputs feature"]) -> Outputs:
        """The outputs that are read, differentiable by the embeddings."""
        return self.model.outputs(embeddings, self.reading.positions)

    def generator(self, name: str) -> torch.Generator:
        """A generator of the prompt's and the name's own."""
        seed = np.random.SeedSequence([*self.key, zlib.crc32(name.encode())]).generate_state(1, np.uint64)[0]
        return torch.Generator().manual_seed(int(seed))
