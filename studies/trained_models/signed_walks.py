"""A walk with exact signed local maps beside the power rollout's energies.

A shared direction carries what positions have in common with its sign (docs/theory, section 5).
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float, Float64
from torch import Tensor

from posbias.checks import Natural, checked_value
from posbias.errors import RunError
from posbias.theory.power_rollout.local_maps import BACK_PROPAGATION, THEORY
from posbias.theory.power_rollout.rollout import Trace


def generators(seed: int, count: int, device: torch.device) -> Iterator[torch.Generator]:
    """One generator for each of `count` prompts, all from `seed` (>= 0) and independent of each other."""
    checked_value("seed", seed, Natural)
    states = [child.generate_state(1, np.uint64)[0] for child in np.random.SeedSequence(seed).spawn(count)]
    return (torch.Generator(device).manual_seed(int(state >> np.uint64(1))) for state in states)


@dataclass(frozen=True, eq=False)
class SharedDirectionPrompt:
    """The prediction for one prompt."""

    profile: Float64[np.ndarray, "n_positions"]
    """Sums to 1."""
    own: Float64[np.ndarray, "layers"]
    """Share of the energy below each block, from the first on, that the last position's own gradient holds."""
    shared: Float64[np.ndarray, "layers"]
    """Share that the other positions hold along the shared directions; the rest are energies."""


@torch.no_grad()
def shared_direction_of(
    trace: Trace, vectors: Float[Tensor, "probe state"], *, directions: int = 1
) -> SharedDirectionPrompt:
    """The power rollout with what positions share carried exactly, from covectors at the final state.

    Closer than `power_rollout` where positions do not add in unrelated directions (at initialisation, scrambled tokens,
    Gemma), at the price of a signed walk per covector and two of energies: about what measuring costs.

    The gradients of all positions between blocks, G, are the last position's own row, the part of every other row along
    one direction m, and energies e of everything else, with c exact for the last position's own path:

        G <- J_block' (kept);  kept <- g_last and g_j m m';  e <- c (J o J)_block' e + mean over covectors (G - kept)^2

    m is the first right singular vector of the rows g_j / |g_j|^(1/2): between the direction of most energy, which a
    few late positions decide, and that of most positions. As many directions as positions or features are
    back-propagation.

    Raises:
        RunError: energies are not finite.

    Source: ours; docs/theory, section 5.
    """
    kept = trace.pull_start(vectors, BACK_PROPAGATION)
    energy = torch.zeros_like(kept[0])
    shares = []
    for block in reversed(range(len(trace.layers))):
        pulled = trace.pull_block(block, kept, BACK_PROPAGATION)
        energy = _pull_energies(trace, block, energy, own=(kept[:, -1], pulled[:, -1]))
        kept = along_shared(pulled, directions)
        energy = energy + (pulled - kept).square().mean(0)
        by_position = kept.square().sum(-1).mean(0)
        total = by_position.sum() + energy.sum()
        kept, energy = kept / total.sqrt(), energy / total
        shares.append([float(by_position[-1] / total), float(by_position[:-1].sum() / total)])
    signed = trace.pull_end(kept, BACK_PROPAGATION).double().square().sum(-1).mean(0)
    influence = (signed + trace.pull_end(energy, THEORY).double().sum(-1)).sqrt().cpu().numpy()
    if not np.all(np.isfinite(influence)):
        raise RunError(
            "the shared-direction rollout's energies are not finite; load it in a wider type (float32, float64)"
        )
    own, shared = np.array(shares[::-1]).T
    return SharedDirectionPrompt(np.asarray(influence / influence.sum()), own, shared)


def _pull_energies(
    trace: Trace,
    block: int,
    energy: Float[Tensor, "position feature"],
    own: tuple[Float[Tensor, "probe feature"], Float[Tensor, "probe feature"]],
) -> Float[Tensor, "position feature"]:
    """Energies through one block, grown as the last position's exact gradient grows on its own path.

    Squared maps lose the cancellation between a block's paths, so that energies grow too fast beside what is carried
    with its sign. The last position alone reads itself: its energy is known both ways, from its `own` gradients above
    and below the block.
    """
    above, below = own
    alone = torch.zeros_like(energy)
    alone[-1] = above.square().mean(0)
    pulled, grown = trace.pull_block(block, torch.stack([energy, alone]), THEORY)
    estimate, exact = grown[-1].sum(), below.square().mean(0).sum()
    growth: Tensor = pulled * (exact / estimate) if bool(estimate > 0) else pulled
    return growth


def along_shared(
    gradients: Float[Tensor, "draw position feature"], count: int
) -> Float[Tensor, "draw position feature"]:
    """The last position's gradients as they are, and the others' part along their `count` shared directions."""
    exact = gradients.double()
    lengths = exact.norm(dim=-1, keepdim=True)
    rows = torch.where(lengths > 0, exact / lengths.clamp_min(torch.finfo(torch.float64).tiny).sqrt(), 0)
    directions = right_singular(rows[:, :-1], count)
    kept = exact @ directions @ directions.transpose(1, 2)
    kept[:, -1] = exact[:, -1]
    return kept.to(gradients)


def right_singular(rows: Float[Tensor, "draw row feature"], count: int) -> Float[Tensor, "draw feature _"]:
    """The first right singular vectors, by the smaller of the two products."""
    n_rows, width = rows.shape[1:]
    if n_rows >= width:
        right: Tensor = torch.linalg.eigh(rows.transpose(1, 2) @ rows).eigenvectors
        return right[..., max(0, width - count) :]
    left = torch.linalg.eigh(rows @ rows.transpose(1, 2)).eigenvectors[..., max(0, n_rows - count) :]
    basis: Tensor = torch.linalg.qr(rows.transpose(1, 2) @ left).Q
    return basis
