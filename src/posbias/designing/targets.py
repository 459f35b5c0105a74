"""Target profiles: what a design aims at, on any number of positions.

A registered target is the shape of what attention moves; the residual stream adds its own share on the last position,
P0 = prod_l (1 - m_l), which no bias takes away. A given profile is the whole profile, that share included.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar

import numpy as np
from annotated_types import Interval
from jaxtyping import Float64

from posbias.comparison.stored import profile_stems
from posbias.errors import UsageError
from posbias.profiles import Profile
from posbias.registry import Registry
from posbias.runs.records import MEASURED_PART, RECORD_FILE, read_record

TARGETS: Registry["Target"] = Registry("target")
Vector = Float64[np.ndarray, "n_positions"]


class Target(ABC):
    """A positive weight for every position of a context of any length."""

    name: ClassVar[str]
    whole: ClassVar[bool] = False
    """True for a whole profile, the residual stream's share on the last position included."""

    @abstractmethod
    def shape(self, n_positions: int) -> Vector:
        """Shares of the positions; they sum to 1."""

    def profile(self, n_positions: int, residual: float) -> Vector:
        """The whole profile when the residual stream keeps the share `residual` on the last position.

        Raises:
            UsageError: a whole profile with less than that on its last position.
        """
        shape = self.shape(n_positions)
        if not self.whole:
            shape = (1 - residual) * shape
            shape[-1] += residual
        elif shape[-1] <= residual:
            raise UsageError(
                f"the target's last position has {shape[-1]:.4g}, but the residual stream alone leaves "
                f"{residual:.4g} there; the last position needs more than that, or the mixing must be larger"
            )
        return shape

    def __str__(self) -> str:
        return TARGETS.spell(self)


@TARGETS.register("flat")
@dataclass(frozen=True)
class Flat(Target):
    """An equal share for every position."""

    def shape(self, n_positions: int) -> Vector:
        """1/N everywhere."""
        return np.full(n_positions, 1 / n_positions)


@TARGETS.register("power")
@dataclass(frozen=True)
class Power(Target):
    """Gamma(j + 1 + exponent) / j!, nearly (j + 1)^exponent: the power laws that gamma keys hold at every length."""

    exponent: Annotated[float, Interval(gt=-1, le=100)]
    """Exponent in (-1, 100]: above 0 recency, below 0 primacy, 0 flat."""

    def shape(self, n_positions: int) -> Vector:
        """Shares by running products, so that no two large log-gammas are subtracted."""
        steps = np.log1p(self.exponent / np.arange(1, max(n_positions, 1)))
        return _normalised(np.concatenate([[0.0], np.cumsum(steps)])[:n_positions])


@TARGETS.register("recency")
@dataclass(frozen=True)
class Recency(Target):
    """exp(rate (j + 1) / N): the last position outweighs the first by exp(rate); below 0 primacy."""

    rate: Annotated[float, Interval(ge=-50, le=50)] = 3.0
    """Rate in [-50, 50]."""

    def shape(self, n_positions: int) -> Vector:
        """Exponential in the relative position."""
        return _normalised(self.rate * np.arange(1, n_positions + 1) / n_positions)


@TARGETS.register("u_shape")
@dataclass(frozen=True)
class UShape(Target):
    """middle + (1 - middle) (2x - 1)^2 over the context x in [0, 1]: the ends outweigh the middle; above 1 a hump."""

    middle: Annotated[float, Interval(ge=0.001, le=1000)] = 0.25
    """Weight of the middle over that of the ends, in [0.001, 1000]."""

    def shape(self, n_positions: int) -> Vector:
        """A parabola."""
        along = np.linspace(-1, 1, n_positions) if n_positions > 1 else np.zeros(1)
        return _normalised(np.log(self.middle + (1 - self.middle) * along**2))


@dataclass(frozen=True, eq=False)
class Given(Target):
    """A profile in hand: measured, predicted, or from a file."""

    name: ClassVar[str] = "given"
    whole: ClassVar[bool] = True

    influence: Vector

    def __post_init__(self) -> None:
        values = self.influence
        if values.ndim != 1 or values.size < 2 or not np.all(np.isfinite(values)) or values.min() <= 0:
            low = values.min() if values.size else "none"
            raise UsageError(f"a target needs at least two values, all finite and > 0; the least is {low}")

    def shape(self, n_positions: int) -> Vector:
        """The profile itself; at another length its density on the relative position, the last position apart."""
        values = np.asarray(self.influence / self.influence.sum())
        if n_positions == values.size:
            return values
        last = values[-1]
        inner = np.interp(np.linspace(0, 1, n_positions - 1), np.linspace(0, 1, values.size - 1), values[:-1])
        return np.asarray(np.append(inner * (1 - last) / inner.sum(), last))

    def __str__(self) -> str:
        return f"a profile of {self.influence.size} positions"


def resolve_target(target: Any) -> Target:
    """A target from an object, its literal spelling, a `Profile`, a sequence of weights, a CSV file, or a finished run.

    A CSV file has one weight per line, or a header with a column `influence`. A run is given by its directory or its
    record.json; its measured profile is taken, otherwise the predicted one; if it has several, one is named behind a
    colon: `runs/x:measured/logprob`.

    Raises:
        UsageError: none of these; values that are not finite and positive; several profiles and none chosen.
    """
    if isinstance(target, Target):
        return target
    if isinstance(target, Profile):
        return Given(target.influence)
    if isinstance(target, str | Path) and str(target).endswith(".csv"):
        return Given(_read_csv(Path(target)))
    if isinstance(target, Path) or (isinstance(target, str) and "(" not in target and target not in TARGETS):
        directory, _, chosen = str(target).partition(":")
        if isinstance(target, Path) or "/" in directory or Path(directory).exists():
            return Given(_read_run(Path(directory), chosen))
    if isinstance(target, str):
        return TARGETS.parse(target)
    if isinstance(target, Sequence | np.ndarray):
        try:
            weights = np.asarray(target, dtype=np.float64)
        except (TypeError, ValueError):
            raise UsageError("a target needs numbers, one per position") from None
        return Given(weights)
    raise UsageError(f"{target!r} is no target; known: {', '.join(TARGETS)}, a Profile, weights, a run, or a .csv file")


def _read_csv(path: Path) -> Vector:
    try:
        lines = path.read_text(encoding="utf-8").split()
        names = lines[0].split(",") if lines else []
        headed = "influence" in names
        column = names.index("influence") if headed else 0
        return np.loadtxt(lines[headed:], delimiter=",", usecols=column, ndmin=1)
    except (OSError, ValueError) as error:
        raise UsageError(
            f"cannot read the target {path}: {error}; every line needs one number, or a header with a column influence"
        ) from None


def _read_run(directory: Path, chosen: str) -> Vector:
    record = read_record(directory.parent if directory.name == RECORD_FILE else directory)
    stems = profile_stems(record)
    measured = [name for name in stems if MEASURED_PART in name.split("/")]
    allowed = [chosen] if chosen in stems else [] if chosen else measured or stems
    if len(allowed) != 1:
        raise UsageError(
            f"the {record.verb} run {directory} has {len(stems)} profiles; as a target write "
            f"{directory}:NAME with one of {', '.join(sorted(stems))}"
            if stems
            else f"the {record.verb} run {directory} has no profile to aim at"
        )
    return np.asarray(record.arrays[f"{allowed[0]}/influence"], dtype=np.float64)


def _normalised(logs: Vector) -> Vector:
    weights = np.exp(logs - logs.max())
    return np.asarray(weights / weights.sum())
