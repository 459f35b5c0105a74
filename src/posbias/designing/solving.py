"""The search for exponents of gamma keys that bring the profile to a target.

The misfit is the variance over positions of ln(profile / target), the last position apart unless the target says what
it is there: 0 where the shapes agree, whatever the residual stream keeps. Rollouts have exact gradients by the adjoint
unless there are content or sinks; what they do not give, and mean field, is differenced.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from jaxtyping import Float64
from scipy.optimize import minimize

from posbias.architecture import Architecture, GammaKey
from posbias.architecture.keys import MAX_ALPHA
from posbias.designing.exact import key_bias_for, telescoping_alphas
from posbias.designing.result import Power, Target
from posbias.errors import UsageError
from posbias.progress import announce
from posbias.theory.rollout import Rollout, exponent_gradient, rollout_profile

Vector = Float64[np.ndarray, "_"]
LEAST = 1e-200
"""Least influence that counts; smaller ones count as this."""
STEP = 1e-5
"""Step of differences, in the coordinates of the search: mean field is smooth to 1e-10."""
LEAST_ALPHA = 0.05
"""Least exponent that a search tries: 95 % of a row stays on the first key."""
MODEL_ALPHA = 60.0
"""Largest exponent that a search tries on a network, whose logits are float32: 490 nats over 4096 keys."""
SHARED_ALPHAS = (3.0, 30.0, 1000.0)
"""Exponents shared by all layers from which a search may begin."""
ROUGH = {"maxiter": 20, "ftol": 1e-6, "gtol": 1e-6}
"""Search from every start; the fine one goes on from the best end."""
FINE = {"maxiter": 300, "ftol": 1e-12, "gtol": 1e-9}
NEAR_END = 1e-3
"""A value this near to an end of its range, as a share of the range, is at it."""


@dataclass(frozen=True, eq=False)
class Problem:
    """A misfit to be made small over the exponent of every layer; the coordinates of a search are their logarithms."""

    base: Architecture
    target: Target
    lengths: Sequence[int]
    most: float = MAX_ALPHA
    """Largest exponent that a search tries: all of a row stays on the query's own position."""
    profile: Callable[[Architecture, int], Vector] | None = None
    """The theory's profile, to be differenced; None: the rollout, with its adjoint."""

    def architecture(self, values: Vector) -> Architecture:
        """The architecture with gamma keys of these exponents in its layers."""
        return replace(self.base, encoding=[GammaKey(alpha) for alpha in np.exp(values).tolist()])

    def misfit(self, values: Vector) -> float:
        """Mean misfit over lengths, without gradient."""
        changed = self.architecture(values)
        theory = self.profile or (lambda changed, n: rollout_profile(changed, n_positions=n))
        return float(np.mean([misfit_of(theory(changed, n), self.target)[0] for n in self.lengths]))

    def misfit_and_gradient(self, values: Vector) -> tuple[float, Vector]:
        """Mean misfit over lengths, and its derivative by every coordinate; differenced if it is not known."""
        if self.profile is not None or not self.base.bare:
            total, steps = self.misfit(values), STEP * np.eye(len(values))
            return total, np.array([(self.misfit(values + step) - total) / STEP for step in steps])
        total, gradient = 0.0, np.zeros(len(values))
        for n_positions in self.lengths:
            rollout = Rollout(self.architecture(values), n_positions)
            value, cotangent = misfit_of(rollout.pull(rollout.unit(-1)), self.target)
            by_values = exponent_gradient(rollout, cotangent).sum(axis=1) * np.exp(values)
            total, gradient = total + value / len(self.lengths), gradient + by_values / len(self.lengths)
        return total, gradient

    def starts(self) -> list[Vector]:
        """Starts of a search, the likeliest first.

        No bias, one exponent for all, and exponents that fall or rise with depth; of a rollout before these exponents
        that make the nearest power law exactly, and the one that is nearest to the exact key bias.
        """
        depth, mixing, n_positions = self.base.depth, self.base.layer_mixing, max(self.lengths)
        falling = np.log(1.3) * np.arange(depth)[::-1] * min(1.0, 8 / depth)
        shared = [np.full(depth, np.log(alpha)) for alpha in SHARED_ALPHAS]
        starts = [np.zeros(depth), shared[0], falling, falling[::-1], *shared[1:]]
        if self.profile is not None:
            return starts
        nearest = _steepness(np.log(self.target.shape(n_positions)[:-1]))
        exponent = self.target.exponent if isinstance(self.target, Power) else max(nearest, LEAST_ALPHA - 1)
        with np.errstate(divide="ignore"):
            exact = np.log(telescoping_alphas(exponent, mixing))
        try:
            biased = key_bias_for(self.target.profile(n_positions, float(np.prod(1 - mixing))), mixing)
        except UsageError:  # no key bias meets the target without content and sinks
            return [exact, *starts]
        alpha = max(1 + _steepness(biased[:-1]), LEAST_ALPHA)
        return [exact, np.full(depth, np.log(alpha)), *starts]

    def solve(self, *, starts: int, seed: int, near: Vector | None = None) -> Vector:
        """The best end of several searches by L-BFGS-B within bounds, the likeliest starts first.

        Args:
            starts: Number of searches.
            seed: Seed of the random starts.
            near: The only start, if a good one is known.
        """
        ends, generator = np.log([LEAST_ALPHA, self.most]), np.random.default_rng(seed)
        candidates = self.starts() if near is None else [near]
        n_random = starts - len(candidates) if near is None else 0
        depth = self.base.depth
        candidates += [candidates[k % len(candidates)] + generator.normal(0, 0.3, depth) for k in range(n_random)]
        # Equal misfits are one start.
        by_misfit = {round(self.misfit(start), 9): start for start in (np.clip(each, *ends) for each in candidates)}
        ranked = [by_misfit[misfit] for misfit in sorted(by_misfit)][:starts]
        search: dict[str, Any] = {"fun": self.misfit_and_gradient, "jac": True, "method": "L-BFGS-B"}
        search["bounds"] = np.tile(ends, (depth, 1))
        rough = ROUGH if self.profile is None else {**ROUGH, "ftol": 1e-8}
        found = [minimize(x0=start, **search, options=rough) for start in ranked]
        best = min(found, key=lambda end: float(end.fun))
        if self.profile is None:
            best = minimize(x0=best.x, **search, options=FINE)
            if not best.success:
                announce(f"the search ended early: {best.message}")
        return np.asarray(best.x)

    def at_ends(self, values: Vector) -> int:
        """How many values lie at an end of their range: a wider one might do better."""
        low, high = np.log([LEAST_ALPHA, self.most])
        near = NEAR_END * (high - low)
        return int(((values <= low + near) | (values >= high - near)).sum())


def _steepness(logs: Vector) -> float:
    """Exponent of the power law of the position, counted from 1, whose logarithm is nearest to these values."""
    along = np.log1p(np.arange(logs.size))
    along -= along.mean()
    return float(along @ logs / (along @ along)) if logs.size > 1 else 0.0


def misfit_of(profile: Vector, target: Target) -> tuple[float, Vector]:
    """Variance of ln(profile / target) over the positions that count, and its derivative by every profile entry."""
    n_positions = profile.size
    counted = slice(0, n_positions if target.whole else n_positions - 1)
    influence = np.maximum(profile[counted], LEAST)
    gaps = np.log(influence) - np.log(target.shape(n_positions)[counted])
    gaps -= gaps.mean()
    gradient = np.zeros(n_positions)
    gradient[counted] = 2 * gaps / (gaps.size * influence)
    return float(np.mean(gaps**2)), gradient
