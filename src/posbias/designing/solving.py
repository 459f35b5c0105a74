"""The free parameter of a design, and the search for the values that bring the profile to a target.

The misfit is the variance over positions of ln(profile / target), the last position apart unless the target says what
it is there: 0 where the shapes agree, whatever the residual stream keeps. Rollouts have exact gradients by the adjoint
unless there are content, sinks or windows; what they do not give, and mean field, is differenced.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
from jaxtyping import Float64
from scipy.optimize import minimize

from posbias.architecture import Alibi, Architecture, GammaKey, SlidingWindow
from posbias.architecture.keys import MAX_ALPHA
from posbias.designing.exact import key_bias_for, telescoping_alphas
from posbias.designing.result import Power, Target
from posbias.errors import UsageError
from posbias.progress import announce
from posbias.registry import Registry
from posbias.theory.rollout import ProfileGradient, Rollout, profile_gradient, rollout_profile

LEFT = {
    "spline": "key_bias is exact at one length, gamma_key is defined at every length",
    "gamma_alibi": "gamma_key, beside which a model's own slopes stay",
    "mixing": "give other mixings (--mixing), one design each",
    "sinks": "they could only switch attention off; predict has them: --sinks",
    "residual_scale": "--mixing: a branch added s times is mixing s / (1 + s)",
    "norm_placement": "a design for each configuration, --model config:PATH",
}
"""Free parameters that posbias had."""
FREE: Registry["Free"] = Registry("free parameter", left=LEFT)
Vector = Float64[np.ndarray, "_"]
LEAST = 1e-200
"""Least influence that counts; smaller ones count as this."""
STEP = 1e-5
"""Step of differences, in the coordinates of the search: mean field is smooth to 1e-10."""
LEAST_ALPHA = 0.05
"""Least exponent that a search tries: 95 % of a row stays on the first key."""
STEEPEST = 0.4
"""Steepest slope that a search tries."""
MODEL_ALPHA = 60.0
"""Largest exponent that a search tries on a network, whose logits are float32: 490 nats over 4096 keys."""
SHARED_ALPHAS = (3.0, 30.0, 1000.0)
"""Exponents shared by all layers from which a search may begin."""
ROUGH = {"maxiter": 20, "ftol": 1e-6, "gtol": 1e-6}
"""Search from every start; the fine one goes on from the best end."""
FINE = {"maxiter": 300, "ftol": 1e-12, "gtol": 1e-9}
NEAR_END = 1e-3
"""A value this near to an end of its range, as a share of the range, is at it."""


class Free(ABC):
    """One sort of parameter that a design may change; a search moves in the logarithms of its values."""

    name: ClassVar[str]
    by_head: ClassVar[bool] = False
    """True for a value of every head, the same in all layers; otherwise of every layer, the same for all heads."""
    least: float
    most: float
    """The ends of the range that a search tries."""

    def bounds(self, base: Architecture) -> Float64[np.ndarray, "parameters 2"]:
        """The logarithms of the least and the largest value of every parameter."""
        return np.tile(np.log([self.least, self.most]), (base.heads if self.by_head else base.depth, 1))

    def plain(self, values: Vector) -> list[Any]:
        """The parameters as a user would write them."""
        return [float(value) for value in np.exp(values)]

    @abstractmethod
    def starts(self, base: Architecture) -> list[Vector]:
        """Starts of a search, the unchanged architecture first."""

    def aimed(self, base: Architecture, target: Target, n_positions: int) -> list[Vector]:
        """Starts of a rollout's search, from solutions that are exact for this target or one like it."""
        return []

    @abstractmethod
    def change(self, base: Architecture, values: Vector) -> Architecture:
        """The architecture with these values."""

    def gradient(self, values: Vector, by_profile: ProfileGradient) -> Vector:
        """Derivatives by the coordinates of the search, from those of a functional of the profile; nan: not known."""
        return np.full(len(values), np.nan)


@FREE.register("gamma_key")
@dataclass(frozen=True)
class GammaKeys(Free):
    """alpha of every layer; from 95 % of a row on the first key to all of it on the query's own."""

    most: float = MAX_ALPHA
    least = LEAST_ALPHA

    def starts(self, base: Architecture) -> list[Vector]:
        """No bias, one exponent for all, and exponents that fall or rise with depth."""
        falling = np.log(1.3) * np.arange(base.depth)[::-1] * min(1.0, 8 / base.depth)
        shared = [np.full(base.depth, np.log(alpha)) for alpha in SHARED_ALPHAS]
        return [np.zeros(base.depth), shared[0], falling, falling[::-1], *shared[1:]]

    def aimed(self, base: Architecture, target: Target, n_positions: int) -> list[Vector]:
        """Exponents that make the nearest power law exactly, and the one that is nearest to the exact key bias."""
        nearest = _steepness(np.log(target.shape(n_positions)[:-1]))
        exponent = target.exponent if isinstance(target, Power) else max(nearest, LEAST_ALPHA - 1)
        with np.errstate(divide="ignore"):
            exact = np.log(telescoping_alphas(exponent, base.layer_mixing))
        mixing = base.layer_mixing
        try:
            biased = key_bias_for(target.profile(n_positions, float(np.prod(1 - mixing))), mixing)
        except UsageError:  # no key bias meets the target without content and sinks
            return [exact]
        alpha = max(1 + _steepness(biased[:-1]), LEAST_ALPHA)
        return [exact, np.full(base.depth, np.log(alpha))]

    def change(self, base: Architecture, values: Vector) -> Architecture:
        """Gamma keys in every layer."""
        return replace(base, encoding=[GammaKey(alpha) for alpha in self.plain(values)])

    def gradient(self, values: Vector, by_profile: ProfileGradient) -> Vector:
        """Heads of a layer together."""
        return np.asarray(by_profile.alphas.sum(axis=1) * np.exp(values))


@FREE.register("alibi")
@dataclass(frozen=True)
class AlibiSlopes(Free):
    """The slope of every head; from no bias over any context to a third of the weight lost per position."""

    by_head = True
    least, most = 1e-9, STEEPEST

    def starts(self, base: Architecture) -> list[Vector]:
        """Nearly none, the published slopes, and a wide spread."""
        published = np.log(Alibi().linear_slopes(base.heads))
        spread = np.linspace(np.log(1e-4), np.log(STEEPEST), base.heads)
        return [np.full(base.heads, np.log(1e-6)), published, spread]

    def change(self, base: Architecture, values: Vector) -> Architecture:
        """ALiBi in every layer."""
        return replace(base, encoding=Alibi(tuple(self.plain(values))))

    def gradient(self, values: Vector, by_profile: ProfileGradient) -> Vector:
        """Slopes of all layers together."""
        return np.asarray(by_profile.slopes.sum(axis=0) * np.exp(values))


@FREE.register("windows")
@dataclass(frozen=True)
class Windows(Free):
    """Positions that attention sees in every layer, the query's own included; whole numbers, searched in logarithms."""

    least, most = 2.0, 65536.0

    def plain(self, values: Vector) -> list[Any]:
        """Whole numbers."""
        return [round(value) for value in np.exp(values)]

    def starts(self, base: Architecture) -> list[Vector]:
        """One width for all layers, from narrow to wide."""
        return [np.full(base.depth, np.log(width)) for width in np.geomspace(4, 16384, 25)]

    def change(self, base: Architecture, values: Vector) -> Architecture:
        """Sliding windows in place of the masks."""
        return replace(base, mask=[SlidingWindow(width) for width in self.plain(values)])


@dataclass(frozen=True, eq=False)
class Problem:
    """A misfit to be made small over free parameters of one sort."""

    base: Architecture
    free: Free
    target: Target
    lengths: Sequence[int]
    profile: Callable[[Architecture, int], Vector] | None = None
    """The theory's profile, to be differenced; None: the rollout, with its adjoint."""

    def architecture(self, values: Vector) -> Architecture:
        """The architecture with these values."""
        return self.free.change(self.base, values)

    def misfit(self, values: Vector) -> float:
        """Mean misfit over lengths, without gradient."""
        changed = self.architecture(values)
        theory = self.profile or (lambda changed, n: rollout_profile(changed, n_positions=n))
        return float(np.mean([misfit_of(theory(changed, n), self.target)[0] for n in self.lengths]))

    def misfit_and_gradient(self, values: Vector) -> tuple[float, Vector]:
        """Mean misfit over lengths, and its derivative by every parameter; one that is not known is differenced."""
        total, gradient = 0.0, np.zeros(len(values))
        if self.profile is not None:
            total, gradient = self.misfit(values), np.full(len(values), np.nan)
        for n_positions in self.lengths if self.profile is None else ():
            rollout = Rollout(self.architecture(values), n_positions)
            value, cotangent = misfit_of(rollout.pull(rollout.unit(-1)), self.target)
            by_values = self.free.gradient(values, profile_gradient(rollout, cotangent))
            total, gradient = total + value / len(self.lengths), gradient + by_values / len(self.lengths)
        for index in np.flatnonzero(np.isnan(gradient)):
            ahead = self.misfit(values + STEP * np.eye(len(values))[index])
            gradient[index] = (ahead - total) / STEP
        return total, gradient

    def solve(self, *, starts: int, seed: int, near: Vector | None = None) -> Vector:
        """The best end of several searches, the likeliest starts first: L-BFGS-B within bounds, for windows COBYQA.

        Args:
            starts: Number of searches.
            seed: Seed of the random starts.
            near: The only start, if a good one is known.
        """
        bounds, generator = self.free.bounds(self.base), np.random.default_rng(seed)
        candidates = [near] if near is not None else self.free.starts(self.base)
        if near is None and self.profile is None:
            candidates = [*self.free.aimed(self.base, self.target, max(self.lengths)), *candidates]
        n_random = starts - len(candidates) if near is None else 0
        candidates += [candidates[k % len(candidates)] + generator.normal(0, 0.3, len(bounds)) for k in range(n_random)]
        # Equal misfits are one start: windows wider than the context are all alike.
        by_misfit = {
            round(self.misfit(start), 9): start for start in (np.clip(values, *bounds.T) for values in candidates)
        }
        ranked = [by_misfit[misfit] for misfit in sorted(by_misfit)][:starts]
        search: dict[str, Any] = {"fun": self.misfit_and_gradient, "jac": True, "method": "L-BFGS-B", "bounds": bounds}
        whole, options = isinstance(self.free, Windows), ROUGH
        if whole:
            search = {"fun": self.misfit, "method": "COBYQA", "bounds": bounds}
            options = {"initial_tr_radius": 0.3, "final_tr_radius": 0.02, "maxfev": 100 * len(bounds)}
        elif self.profile is not None:
            options = {**ROUGH, "ftol": 1e-8}
        ends = [minimize(x0=start, **search, options=options) for start in ranked]
        best = min(ends, key=lambda end: float(end.fun))
        if not whole and self.profile is None:
            best = minimize(x0=best.x, **search, options=FINE)
            if not best.success:
                announce(f"the search ended early: {best.message}")
        return np.asarray(best.x)

    def at_ends(self, values: Vector) -> int:
        """How many values lie at an end of their range: a wider one might do better."""
        low, high = self.free.bounds(self.base).T
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
