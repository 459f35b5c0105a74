"""Theories by exact signed local maps: with random signs, at constant attention weights, along a shared direction.

Random signs make true what the power rollout assumes, that contributions of different paths are unrelated, and assume
nothing else. The value path is the Jacobian with every attention weight held constant. A shared direction carries what
positions have in common with its sign (docs/theory, section 5).
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Float64
from torch import Tensor

from posbias.checks import check_size
from posbias.errors import RunError
from posbias.limits import REPEATS
from posbias.profiles import Profile
from posbias.statistics import estimate, mean_ends, mean_of
from posbias.theory.base import THEORIES, ModelTheory, Prediction
from posbias.theory.power_rollout.rollout import PromptTrace, traced_prompts
from posbias.theory.power_rollout.trace import check_target
from posbias.theory.power_rollout.walk import BACK_PROPAGATION, THEORY, Walk, draw_signs

AT_ONCE = 4
"""Draws or probes that share one recomputation of attention; more would need more memory."""
CONSTANT_ATTENTION = Walk(power=1, key=False)
"""Signed maps along values alone."""

Row = Float64[np.ndarray, "n_positions"]


@THEORIES.register("sign_randomised")
@dataclass(frozen=True)
class SignRandomised(ModelTheory):
    """Back-propagation with an independent random sign on every path: the reference for incoherence.

    A path term is one of, for each layer: the MLP branch of one position; for one head and a (query, key) pair, what
    passes by the key's value, and what passes by the key's weight; for one head and query, what passes by its query.
    The stream's own identity path and the norms carry no sign. A path from the last position to j takes one term, or
    the identity, at each branching, and two different paths differ somewhere; so their signs are uncorrelated, and

        E ||g_j||^2 = sum over paths to j of ||J_path' v||^2

    over the signs, with v at the final state and J_path the product of the path's exact Jacobians. For the target
    "jacobian" a draw also takes random signs in the channels of the final state, as a probe would.

    A prompt's profile is the root of its mean energy over draws, normalised. Arrays: `draws/energies`
    [prompt, draw, position], ||g_j||^2 of every draw (heavy-tailed), scaled so that a prompt's mean over draws sums
    to 1; `draws/low` and `draws/high`, the profile's pointwise interval over draws, these prompts fixed.
    """

    draws: int = 32
    """Sets of signs per prompt, at least 2. Energies are unbiased at any number; their root, the profile, is biased by
    the order of the spread over draws squared."""
    target: str = "jacobian"
    """One of TARGETS."""

    def __post_init__(self) -> None:
        check_target(self.target)
        check_size("draws", self.draws, REPEATS, least=2, numpy=True)

    def predict(self, subject: Any, n_positions: int, prompts: Any = None, *, seed: int = 0) -> Prediction:
        """The mean over prompts, with one interval over prompts and one over draws; prompts draw independently."""
        self.check_reading(subject, prompts, n_positions)
        rows = [self.energies_of(*each) for each in traced_prompts(subject, prompts, target=self.target, seed=seed)]
        energies = np.stack([row / row.mean(0).sum() for row in rows])
        per_prompt = _profiles(energies.mean(1))
        profile, (low, high) = Profile.mean_of(per_prompt), _over_draws(energies)
        found = {
            "half_width_over_draws": _half_width(profile.influence, low, high),
            "half_width_over_prompts": _half_width(profile.influence, profile.low, profile.high),
        }
        arrays = {"draws/low": low, "draws/high": high, "draws/energies": energies}
        return self.mean_of(per_prompt, seed, found=found, arrays=arrays)

    @torch.no_grad()
    def energies_of(self, trace: PromptTrace, generator: torch.Generator) -> Float64[np.ndarray, "draws n_positions"]:
        """||g_j||^2 of one prompt, draw by draw."""
        walk = Walk(power=1, query=True, signs=partial(draw_signs, generator=generator))
        rows = []
        for start in range(0, self.draws, AT_ONCE):
            gradients = trace.pull(trace.covectors(min(AT_ONCE, self.draws - start), generator), walk)
            rows.append(gradients.double().square().sum(-1).cpu().numpy())
        energies = np.concatenate(rows)
        if not np.all(np.isfinite(energies)) or energies.sum() == 0:
            raise RunError(
                "sign-randomised energies are not finite and positive; load it in a wider type (float32, float64)"
            )
        return energies


@THEORIES.register("value_path")
@dataclass(frozen=True)
class ValuePath(ModelTheory):
    """The exact Jacobian with attention weights held constant, and the share of it that passes by the weights.

    The profile is proportional to ||J_value_j||_F. Arrays: `score_path/per_prompt` [prompt, position],
    ||(J - J_value)_j||_F / ||J_j||_F of each prompt, above 1 where the two parts cancel; its mean `score_path/value`
    with the pointwise interval over prompts `score_path/low` and `score_path/high`; `score_path/total` [prompt], the
    same ratio with squares summed over all positions first. Details: `share_error` and `total_error`, their standard
    errors over probes (jackknife; 0 for a score, whose gradient is exact), and `squares`
    [prompt, probe, position, quantity], of every probe v: ||v'J_j||^2, ||v'J_value_j||^2 and ||v'(J - J_value)_j||^2.
    """

    probes: int = 8
    """Random probes of the final state per prompt, at least 2; a score's gradient needs none."""
    target: str = "jacobian"
    """One of TARGETS."""

    def __post_init__(self) -> None:
        check_target(self.target)
        check_size("probes", self.probes, REPEATS, least=2, numpy=True)

    def predict(self, subject: Any, n_positions: int, prompts: Any = None, *, seed: int = 0) -> Prediction:
        """The value path's profile, and ||J - J_value|| / ||J|| by position and in total."""
        self.check_reading(subject, prompts, n_positions)
        rows = [self.squares_of(*each) for each in traced_prompts(subject, prompts, target=self.target, seed=seed)]
        squares = np.stack(rows)
        norms = np.sqrt(squares.mean(1))[..., 1]
        (share, share_error), (total, total_error) = _ratio(squares), _ratio(squares.sum(2, keepdims=True))
        low, high = mean_ends(share, least=0.0)
        shares = {"per_prompt": share, "value": share.mean(0), "low": low, "high": high, "total": total[:, 0]}
        return self.mean_of(
            norms / norms.sum(axis=1, keepdims=True),
            seed,
            found={
                "score_path_share": mean_of(total[:, 0]).interval(least=0.0),
                "score_path_share_error_of_probes": float(np.linalg.norm(total_error) / len(squares)),
            },
            arrays={f"score_path/{name}": array for name, array in shares.items()},
            details={"share_error": share_error, "total_error": total_error[:, 0], "squares": squares},
        )

    @torch.no_grad()
    def squares_of(
        self, trace: PromptTrace, generator: torch.Generator
    ) -> Float64[np.ndarray, "probes n_positions quantity"]:
        """Squared norms of one prompt's gradients, probe by probe; of a score's own gradient once."""
        probes, rows = self.probes if self.target == "jacobian" else 1, []
        for start in range(0, probes, AT_ONCE):
            vectors = trace.covectors(min(AT_ONCE, probes - start), generator)
            whole, value = (trace.pull(vectors, walk).double() for walk in (BACK_PROPAGATION, CONSTANT_ATTENTION))
            parts = (whole, value, whole - value)
            rows.append(torch.stack([part.square().sum(-1) for part in parts], -1).cpu().numpy())
        squares = np.concatenate(rows)
        if not np.all(np.isfinite(squares)):
            raise RunError("gradients of the value path are not finite; load it in a wider type (float32, float64)")
        return squares


def _profiles(energies: Float64[np.ndarray, "*rows n_positions"]) -> Float64[np.ndarray, "*rows n_positions"]:
    roots = np.sqrt(energies)
    return np.asarray(roots / roots.sum(-1, keepdims=True))


def _over_draws(energies: Float64[np.ndarray, "count draws n_positions"]) -> tuple[Row, Row]:
    """Interval of the mean profile over draws, the prompts fixed: each prompt's draws are a sample of their own."""
    count, draws, _ = energies.shape
    left_out = _profiles((energies.sum(axis=1, keepdims=True) - energies) / (draws - 1))
    value = _profiles(energies.mean(axis=1)).mean(axis=0)
    return estimate(value, *((1 - draws) * rows / count for rows in left_out)).ends(least=0.0, most=1.0)


def _half_width(middle: Row, low: Any, high: Any) -> float:
    """Half the width of a pointwise interval as a share of the profile, median over positions with influence."""
    known = middle > 0
    return float(np.median((high - low)[known] / (2 * middle[known])))


def _ratio(
    squares: Float64[np.ndarray, "count probes places quantity"],
) -> tuple[Float64[np.ndarray, "count places"], Float64[np.ndarray, "count places"]]:
    """sqrt(sum over probes of the difference / of the whole), 0 where both vanish, and its jackknife error."""

    def share(sums: Float64[np.ndarray, "*rows quantity"]) -> Float64[np.ndarray, "*rows"]:
        whole, difference = sums[..., 0], sums[..., 2]
        ratio = np.divide(difference, whole, out=np.zeros_like(whole), where=whole > 0)
        return np.asarray(np.sqrt(ratio))

    total = squares.sum(1)
    probes = squares.shape[1]
    without = share(total[:, None] - squares) if probes > 1 else share(squares)
    spread = np.square(without - without.mean(1, keepdims=True)).sum(1)
    return share(total), np.sqrt((probes - 1) / probes * spread)


@dataclass(frozen=True, eq=False)
class SharedDirectionPrompt:
    """The prediction for one prompt."""

    profile: Float64[np.ndarray, "n_positions"]
    """Sums to 1."""
    own: Float64[np.ndarray, "layers"]
    """Share of the energy below each block, from the first on, that the last position's own gradient holds."""
    shared: Float64[np.ndarray, "layers"]
    """Share that the other positions hold along the shared directions; the rest are energies."""


@THEORIES.register("shared_direction")
@dataclass(frozen=True)
class SharedDirection(ModelTheory):
    """The power rollout with what positions share carried exactly: closer, at the price of a measurement.

    Closer than `power_rollout` where positions do not add in unrelated directions (at initialisation, scrambled tokens,
    Gemma), at the price of a signed walk per covector and two of energies: about what measuring costs. It says of what
    influence is made, block by block, rather than sparing the measurement. Details: `own` and `shared`
    [prompt, layer], as in `SharedDirectionPrompt`.

    The gradients of all positions between blocks, G, are the last position's own row, the part of every other row along
    one direction m, and energies e of everything else, with c exact for the last position's own path:

        G <- J_block' (kept);  kept <- g_last and g_j m m';  e <- c (J o J)_block' e + mean over covectors (G - kept)^2

    m is the first right singular vector of the rows g_j / |g_j|^(1/2): between the direction of most energy, which a
    few late positions decide, and that of most positions.

    Source: ours; docs/theory, section 5.
    """

    probes: int = 2
    """Random covectors at the final state for the target "jacobian", at least 2; a score has one, its gradient."""
    directions: int = 1
    """Shared directions, >= 0; as many as positions or features is back-propagation."""
    target: str = "jacobian"
    """One of TARGETS."""

    def __post_init__(self) -> None:
        check_target(self.target)
        check_size("probes", self.probes, REPEATS, least=2, numpy=True)
        check_size("directions", self.directions, REPEATS, least=0, numpy=True)

    def predict(self, subject: Any, n_positions: int, prompts: Any = None, *, seed: int = 0) -> Prediction:
        """The mean over prompts, with its interval; prompts draw their covectors independently."""
        self.check_reading(subject, prompts, n_positions)
        rows = []
        for trace, source in traced_prompts(subject, prompts, target=self.target, seed=seed):
            vectors = trace.covectors(self.probes if self.target == "jacobian" else 1, source)
            rows.append(shared_direction_of(trace, vectors, directions=self.directions))
        details = {"own": np.stack([row.own for row in rows]), "shared": np.stack([row.shared for row in rows])}
        return self.mean_of(np.stack([row.profile for row in rows]), seed, details=details)


@torch.no_grad()
def shared_direction_of(
    trace: PromptTrace, vectors: Float[Tensor, "probe state"], *, directions: int = 1
) -> SharedDirectionPrompt:
    """The prediction for a prompt that was traced before, from covectors at its final state.

    Raises:
        RunError: energies are not finite.
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
    trace: PromptTrace,
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
