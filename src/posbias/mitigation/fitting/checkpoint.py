"""A fit that is under way, kept every few steps, so that a killed one goes on from there with the same numbers."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from posbias.runs.parts import PartStore

EVERY = 25
"""Steps between two checkpoints: what an interruption costs at most."""


@dataclass(frozen=True, eq=False)
class Checkpoint:
    """Where the state of a fit is kept: a piece of a run's parts."""

    store: PartStore
    piece: str
    """Its name, which no other fit of the run has."""

    def resumed(self, free: Tensor, optimiser: torch.optim.Optimizer, losses: np.ndarray) -> int:
        """The first step that is still to be done; numbers, moments and losses are those before it, in place."""
        found = self.store.find(self.piece)
        if found is None:
            return 0
        with torch.no_grad():
            free.copy_(torch.from_numpy(found.pop("free")))
        step = int(found.pop("done")[0])
        losses[:step] = found.pop("losses")[:step]
        optimiser.state[free] = {name: torch.from_numpy(moment) for name, moment in found.items()}
        return step

    def keep(self, step: int, free: Tensor, optimiser: torch.optim.Optimizer, losses: np.ndarray) -> None:
        """Keep the state after a step, where it is one of every few."""
        if (step + 1) % EVERY == 0:
            moments = {name: moment.detach().numpy() for name, moment in optimiser.state[free].items()}
            kept = {"free": free.detach().numpy(), "done": np.array([step + 1]), "losses": losses}
            self.store.keep(self.piece, {**moments, **kept})
