"""An attention run as its report reads it: values per layer, head and position with their intervals, from the record.

The layout of the arrays is described in auditing/attention.py.
"""

from dataclasses import dataclass

import numpy as np
from jaxtyping import Float64

from posbias.errors import UsageError
from posbias.profiles import Profile
from posbias.records import Record
from posbias.statistics import Interval, mean_of

VERB = "attention"


@dataclass(frozen=True, eq=False)
class Line:
    """A value per layer or position, with the ends of its interval where it has one."""

    value: Float64[np.ndarray, "n_points"]
    low: Float64[np.ndarray, "n_points"] | None
    high: Float64[np.ndarray, "n_points"] | None


@dataclass(frozen=True, eq=False)
class AttentionView:
    """One run of verb "attention"."""

    record: Record

    def __post_init__(self) -> None:
        record = self.record
        if record.status != "done":
            raise UsageError(
                f"the run {record.run_id} did not finish ({record.error}); only finished runs can be drawn"
            )
        if record.verb != VERB or "distance/per_prompt" not in record.arrays:
            raise UsageError(f"an attention report needs a record of verb {VERB!r}, got {record.verb!r}")

    @property
    def title(self) -> str:
        """The model's name."""
        return str(self.record.resolved.get("title", "model"))

    @property
    def thresholds(self) -> list[float]:
        """Of the sink scores."""
        return [float(threshold) for threshold in self.record.scalars["sink_thresholds"]]

    @property
    def n_positions(self) -> int:
        """Positions of every prompt."""
        return int(self.record.arrays["sinks/per_prompt"].shape[-1])

    @property
    def count(self) -> int:
        """Prompts."""
        return len(self.record.arrays["distance/per_prompt"])

    @property
    def depth(self) -> int:
        """Layers."""
        return int(self.record.arrays["distance/per_prompt"].shape[1])

    def array(self, name: str) -> np.ndarray:
        """An array of the record.

        Raises:
            UsageError: there is none.
        """
        if name not in self.record.arrays:
            raise UsageError(f"the {self.record.verb} run {self.record.run_id} has no array {name}")
        return self.record.arrays[name]

    def by_head(self, name: str) -> Float64[np.ndarray, "layers heads"]:
        """Mean over prompts."""
        return np.asarray(self.array(f"{name}/per_prompt").mean(axis=0))

    def by_layer(self, name: str) -> Line:
        """Mean over prompts, and over heads where there are heads."""
        values = self.array(f"{name}/per_prompt")
        value = values.reshape(*values.shape[:2], -1).mean(axis=(0, 2))
        return Line(value, *self._ends(f"{name}/low", f"{name}/high"))

    def overall(self, name: str) -> Interval:
        """Mean over layers (and heads) and prompts, with its 95 % interval over prompts."""
        values = self.array(f"{name}/per_prompt")
        each = values.reshape(len(values), -1).mean(axis=1)
        return mean_of(each).interval(least=0.0 if each.min() >= 0 else -np.inf)

    def sinks(self, threshold: int) -> Line:
        """Sink score of every position."""
        low, high = (end if end is None else end[threshold] for end in self._ends("sinks/low", "sinks/high"))
        return Line(self.array("sinks/per_prompt")[:, threshold].mean(axis=0), low, high)

    def rollouts(self) -> dict[str, Profile]:
        """Every rollout's profile, in the order of the record."""
        found = {}
        for name in self.record.scalars["rollouts"]:
            low, high = self._ends(f"rollouts/{name}/low", f"rollouts/{name}/high")
            found[name] = Profile(self.array(f"rollouts/{name}/influence"), low, high)
        return found

    def _ends(self, low: str, high: str) -> tuple[np.ndarray | None, np.ndarray | None]:
        """The ends of an interval; None where a single prompt leaves it open."""
        ends = self.array(low), self.array(high)
        return ends if np.isfinite(ends).any() else (None, None)
