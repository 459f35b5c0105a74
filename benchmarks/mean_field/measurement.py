"""Jacobian norms of freshly initialised models by plain automatic differentiation, cached seed by seed."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from families import Case

from posbias.models.hugging_face import HuggingFaceModel, Origin
from posbias.models.networks import random_network

PROBES = 8


@dataclass(frozen=True)
class Measured:
    """All seeds of one case."""

    squares: np.ndarray
    """[seed, position]: mean over probes of |v' J_j|^2."""
    mixing: np.ndarray
    """[seed, layer]: mean over tokens of |a| / (|x| + |a|)."""

    @property
    def norm(self) -> np.ndarray:
        """Root mean square over seeds."""
        return np.sqrt(self.squares.mean(axis=0))

    def half(self, which: int) -> np.ndarray:
        """Root mean square over every other seed."""
        return np.sqrt(self.squares[which::2].mean(axis=0))


def fresh_model(case: Case, seed: int) -> HuggingFaceModel:
    """The case's model with the weights of one seed."""
    return HuggingFaceModel(random_network(case.config(), seed=seed), origin=Origin("random", init_seed=seed))


def measure(case: Case, cache: Path) -> Measured:
    """Measure the case's seeds; seeds that the cache holds are not run again."""
    cache.mkdir(parents=True, exist_ok=True)
    rows = [_one_seed(case, seed, cache / f"{case.name}-{case.digest}-{seed}.npz") for seed in range(case.seeds)]
    return Measured(np.stack([row[0] for row in rows]), np.stack([row[1] for row in rows]))


def _one_seed(case: Case, seed: int, file: Path) -> tuple[np.ndarray, np.ndarray]:
    if file.exists():
        stored = np.load(file)
        return stored["squares"], stored["mixing"]
    model = fresh_model(case, seed)
    squares, mixing = jacobian_squares(model, case.n_positions, seed=seed)
    partial = file.with_suffix(".partial.npz")
    np.savez(partial, squares=squares, mixing=mixing)
    partial.rename(file)
    return squares, mixing


def jacobian_squares(model: HuggingFaceModel, n_positions: int, *, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """[position] mean over probes of |v' J_j|^2 on distinct random tokens, and [layer] mixing."""
    generator = torch.Generator().manual_seed(seed)
    special = 3
    tokens = special + torch.randperm(model.vocabulary_size - special, generator=generator)[:n_positions]
    embeddings = model.embed(tokens[None]).detach()
    entry = embeddings.expand(PROBES, -1, -1).clone().requires_grad_(True)
    hidden = model.last(entry).hidden
    probes = torch.randn(hidden.shape, generator=generator)
    (gradient,) = torch.autograd.grad((hidden * probes).sum(), entry)
    norms = model.branch_norms(tokens[None])
    mixing = (norms.branch / (norms.stream + norms.branch)).mean(dim=(1, 2))
    return gradient.double().square().sum(dim=2).mean(dim=0).numpy(), mixing.double().numpy()
