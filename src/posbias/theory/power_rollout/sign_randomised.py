"""Sign-randomised back-propagation: exact local maps, an independent random sign on every path term.

What the power rollout approximates: its energies assume that contributions of different paths are unrelated. Here they
are made so, and nothing else is assumed: every channel of every local map is exact (docs/theory, section 5).
"""

from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from jaxtyping import Float64, Int64

from posbias.checks import checked
from posbias.errors import RunError
from posbias.models.model import Model
from posbias.profiles import Profile
from posbias.progress import track
from posbias.prompts.prompts import Prompts
from posbias.statistics import estimate
from posbias.theory.power_rollout.probes import check_draws, check_request, covectors, draw_signs, generators
from posbias.theory.power_rollout.prompt_trace import trace_model
from posbias.theory.power_rollout.walk import Walk

DRAWS_AT_ONCE = 4
"""Draws that share one recomputation of attention; more would need more memory."""


@dataclass(frozen=True, eq=False)
class SignRandomised:
    """What is left of influence when no two paths agree on a direction."""

    profile: Profile
    """Mean over normalised prompts, with pointwise intervals over prompts."""
    per_prompt: Float64[np.ndarray, "count n_positions"]
    """Root of each prompt's mean energy over draws, normalised."""
    energies: Float64[np.ndarray, "count draws n_positions"]
    """||g_j||^2 of every draw, scaled so that a prompt's mean over draws sums to 1. Heavy-tailed."""
    low: Float64[np.ndarray, "n_positions"]
    """Lower end of the profile's pointwise interval over draws, these prompts fixed."""
    high: Float64[np.ndarray, "n_positions"]
    target: str
    seed: int

    @property
    def per_draw(self) -> Float64[np.ndarray, "count draws n_positions"]:
        """Each draw's own profile: how far one set of signs is from another."""
        return _profiles(self.energies)


@checked
def sign_randomised_rollout(
    model: Model, prompts: Prompts, *, draws: int = 32, seed: int = 0, target: str = "jacobian"
) -> SignRandomised:
    """The unbiased reference for incoherence: energies of back-propagation with random signs on its path terms.

    A path term is one of, for each layer: the MLP branch of one position; for one head and a (query, key) pair, what
    passes by the key's value, and what passes by the key's weight; for one head and query, what passes by its query.
    The stream's own identity path and the norms carry no sign. A path from the last position to j takes one term, or
    the identity, at each branching, and two different paths differ somewhere; so their signs are uncorrelated, and

        E ||g_j||^2 = sum over paths to j of ||J_path' v||^2

    over the signs, with v at the final state and J_path the product of the path's exact Jacobians.

    For the target "jacobian" a draw also takes random signs in the channels of the final state, as a probe would.

    Args:
        model: A Hugging Face model of any described family, or a reference model.
        prompts: Equally long prompts.
        draws: Sets of signs per prompt, at least 2. Energies are unbiased at any number; their root, the profile, is
            biased by the order of the spread over draws squared.
        seed: Of the signs; prompts draw independently of each other.
        target: One of TARGETS.

    Returns:
        The profile with intervals over prompts and over draws, and every draw's energies.

    Raises:
        UsageError: undescribed family, unknown target, fewer than 2 draws, prompts too long for the model.
        RunError: activations or energies are not finite.

    Source: docs/theory, section 5.
    """
    check_request(model, prompts, target=target)
    check_draws("draws", draws, seed)
    sources = generators(seed, len(prompts.token_ids), model.device)
    rows = [
        _prompt_energies(model, ids, source, draws=draws, target=target)
        for ids, source in zip(track(prompts.token_ids, "sign-randomised rollout"), sources, strict=True)
    ]
    energies = np.stack([row / row.mean(0).sum() for row in rows])
    per_prompt = _profiles(energies.mean(1))
    low, high = _over_draws(energies)
    return SignRandomised(Profile.mean_of(per_prompt), per_prompt, energies, low, high, target, seed)


@torch.no_grad()
def _prompt_energies(
    model: Model,
    token_ids: Int64[np.ndarray, "n_positions"],
    generator: torch.Generator,
    *,
    draws: int,
    target: str,
) -> Float64[np.ndarray, "draws n_positions"]:
    """||g_j||^2 of one prompt, draw by draw."""
    trace = trace_model(model, token_ids, target=target)
    walk = Walk(power=1, query=True, signs=partial(draw_signs, generator=generator))
    rows = []
    for start in range(0, draws, DRAWS_AT_ONCE):
        vectors = covectors(trace, min(DRAWS_AT_ONCE, draws - start), generator)
        gradients = trace.pull(vectors, walk)
        rows.append(gradients.double().square().sum(-1).cpu().numpy())
    energies = np.concatenate(rows)
    if not np.all(np.isfinite(energies)) or energies.sum() == 0:
        raise RunError(
            "sign-randomised energies are not finite and positive; load it in a wider type (float32, float64)"
        )
    return energies


def _profiles(energies: Float64[np.ndarray, "*rows n_positions"]) -> Float64[np.ndarray, "*rows n_positions"]:
    roots = np.sqrt(energies)
    return np.asarray(roots / roots.sum(-1, keepdims=True))


def _over_draws(
    energies: Float64[np.ndarray, "count draws n_positions"],
) -> tuple[Float64[np.ndarray, "n_positions"], Float64[np.ndarray, "n_positions"]]:
    """Interval of the mean profile over draws, the prompts fixed: each prompt's draws are a sample of their own."""
    count, draws, _ = energies.shape
    left_out = _profiles((energies.sum(axis=1, keepdims=True) - energies) / (draws - 1))
    value = _profiles(energies.mean(axis=1)).mean(axis=0)
    return estimate(value, *((1 - draws) * rows / count for rows in left_out)).ends(least=0.0, most=1.0)
