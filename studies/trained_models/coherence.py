"""Which coherence the power rollout misses: exact back-propagation with random signs on one kind of junction at a time.

The theory adds energies wherever paths meet. Here the local maps are exact and the paths signed, and random signs are
put on chosen junctions only: between a branch and the stream, between heads, between the value, key and query paths, or
between positions. The measured profile is lost at the junction whose coherence matters (README.md).
"""

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import torch
from signed_walks import generators
from variants import Experiment, run

from posbias.models.attention_blocks import BLOCK_QUERIES
from posbias.theory.power_rollout.local_maps import Walk, draw_signs
from posbias.theory.power_rollout.rollout import PromptTrace

DRAWS, DRAWS_AT_ONCE = 16, 4
JUNCTIONS: dict[str, tuple[str, ...]] = {
    "none": (),
    "branches": ("branches",),
    "heads": ("branches", "heads"),
    "paths": ("branches", "paths"),
    "positions": ("branches", "positions"),
    "all but positions": ("branches", "heads", "paths"),
    "all": ("branches", "heads", "paths", "positions"),
}
"""Variant -> the junctions with random signs. A sign on a branch's terms also parts the branch from the stream."""


@dataclass
class JunctionSigns:
    """Random signs in the shapes a walk asks for, one factor for each kind of junction.

    A layer's walk asks for its MLP's signs, then, block by block of queries, for values, keys and queries. Products of
    independent factors are uncorrelated between terms that differ at any junction with a factor, which is all that a
    second moment sees.
    """

    junctions: tuple[str, ...]
    group: int
    """Query heads that share a key head."""
    blocks: int
    """Blocks of queries in a layer."""
    generator: torch.Generator
    _asked: int = 0
    _shared: dict[str, torch.Tensor] = field(default_factory=dict)

    def __call__(self, shape: tuple[int, ...], like: torch.Tensor) -> torch.Tensor:
        if not self.junctions:
            return torch.ones((1,) * len(shape)).to(like)
        step, self._asked = self._asked % (1 + 3 * self.blocks), self._asked + 1
        if step == 0:
            self._shared = {}
            return self._mlp(shape, like)
        block, path = divmod(step - 1, 3)
        return self._attention(shape, like, block=block, path=path)

    def _mlp(self, shape: tuple[int, ...], like: torch.Tensor) -> torch.Tensor:
        positions = shape[-2] if "positions" in self.junctions else 1
        return draw_signs((*shape[:-2], positions, 1), like, self.generator)

    def _attention(self, shape: tuple[int, ...], like: torch.Tensor, *, block: int, path: int) -> torch.Tensor:
        """Values (path 0), keys (1) and queries (2): [draw, key head, group x query, key or 1]."""
        draws, heads, rows, keys = shape
        queries = rows // self.group
        signs = self._factor("branches", (draws, 1, 1, 1, 1), like)
        if "heads" in self.junctions:
            signs = signs * self._factor("heads", (draws, heads, self.group, 1, 1), like)
        if "paths" in self.junctions:
            signs = signs * self._factor(f"path {path}", (draws, 1, 1, 1, 1), like)
        if "positions" in self.junctions:
            name = "queries" if path == 2 else "pairs"
            signs = signs * self._factor(f"{name} {block}", (draws, 1, 1, queries, keys), like)
        return signs.expand(draws, heads, self.group, queries, keys).reshape(shape)

    def _factor(self, name: str, shape: tuple[int, ...], like: torch.Tensor) -> torch.Tensor:
        """One draw per layer and name."""
        if name not in self._shared:
            self._shared[name] = draw_signs(shape, like, self.generator)
        return self._shared[name]


def _profiles(trace: PromptTrace, seed: int) -> Iterator[tuple[str, np.ndarray]]:
    parts, device = trace.description.layers[0].parts, trace.state.device
    n_positions = len(trace.embeddings)
    blocks = -(-n_positions // BLOCK_QUERIES)
    for variant, junctions in JUNCTIONS.items():
        generator = next(generators(seed, 1, device))
        signs = JunctionSigns(junctions, parts.heads // parts.key_heads, blocks, generator)
        walk = Walk(power=1, query=True, signs=signs)
        energy = np.zeros(n_positions)
        for _ in range(DRAWS // DRAWS_AT_ONCE):
            gradients = trace.pull(trace.covectors(DRAWS_AT_ONCE, generator), walk)
            energy += gradients.double().square().sum((0, -1)).numpy()
        profile = np.sqrt(energy)
        yield variant, profile / profile.sum()


if __name__ == "__main__":
    run(Experiment("coherence", tuple(JUNCTIONS), DRAWS, _profiles), __doc__)
