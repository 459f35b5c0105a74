"""How much blocks must know of each other: exact maps within a block, between blocks all but a little forgotten.

Random covectors are walked down with every block's exact signed map. Between blocks the gradients of the positions,
a matrix G [position, feature] per covector, are forgotten but for
- `directions`: each position's own direction; its sign is drawn anew, so that positions become incoherent;
- `energies`: each position's energy in every channel; all signs are drawn anew, as the theory has it;
and for the first k singular components of G, which keep their signs: k directions that positions share
(README.md, "How much must be carried between blocks").
"""

from collections.abc import Iterator

import numpy as np
import torch
from jaxtyping import Float
from signed_walks import generators, right_singular
from torch import Tensor
from variants import Experiment, draw_signs, run

from posbias.theory.power_rollout.local_maps import BACK_PROPAGATION
from posbias.theory.power_rollout.rollout import Trace

DRAWS = 4
VARIANTS = {
    "everything": ("all", 0),
    "directions": ("directions", 0),
    "directions + 1 shared": ("directions", 1),
    "directions + 2 shared": ("directions", 2),
    "energies": ("energies", 0),
    "energies + 1 shared": ("energies", 1),
}
"""Variant -> what is kept of every position between blocks, and how many shared directions."""


def _profiles(trace: Trace, seed: int) -> Iterator[tuple[str, np.ndarray]]:
    for variant, (kept, shared) in VARIANTS.items():
        generator = next(generators(seed, 1, trace.state.device))
        gradients = trace.pull_start(draw_signs((DRAWS, len(trace.state)), trace.state, generator), BACK_PROPAGATION)
        for block in reversed(range(len(trace.layers))):
            if kept != "all":
                gradients = _forget(gradients, kept, shared, generator)
            gradients = trace.pull_block(block, gradients, BACK_PROPAGATION)
            gradients = gradients / gradients.norm()
        profile = gradients.double().square().sum((0, -1)).sqrt().numpy()
        yield variant, profile / profile.sum()


def _forget(
    gradients: Float[Tensor, "draw position feature"], kept: str, shared: int, generator: torch.Generator
) -> Float[Tensor, "draw position feature"]:
    """The shared components as they are, and of the rest what `kept` says, with new signs."""
    directions = right_singular(gradients.double(), shared)
    together = (gradients.double() @ directions @ directions.transpose(1, 2)).to(gradients)
    rest = gradients - together
    if kept == "directions":
        return together + rest * draw_signs((*rest.shape[:-1], 1), rest, generator)
    sizes = rest.square().mean(0).sqrt().expand_as(rest)
    return together + sizes * draw_signs(tuple(rest.shape), rest, generator)


if __name__ == "__main__":
    run(Experiment("shared_direction", tuple(VARIANTS), DRAWS, _profiles), __doc__)
