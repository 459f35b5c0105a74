"""What is compared in one report: a *subject* (a model as trained, or re-initialised) with everything known about it.

A subject holds measured kinds, theories, mixing per layer, and for every (kind, theory) pair a comparison: every
registered distance, and the same for the flat line, without which a distance says little. The audit fills
`MeasuredKind`, `TheoryProfile` and `Mixing` and calls `compare_subject`; the report reads the result back from the
record (report/layout.py).
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import numpy as np
from jaxtyping import Float64, Int64

from posbias.checks import checked
from posbias.comparison.metrics import METRICS, finite
from posbias.comparison.sampling import (
    Contrast,
    PromptComparison,
    Sample,
    compare_with_prompts,
    contrast,
    summarise,
)
from posbias.errors import UsageError
from posbias.profiles import Profile, uniform_profile
from posbias.statistics import Interval


@dataclass(frozen=True, eq=False)
class Distances:
    """Every registered metric of one pair of profiles; each is also an attribute (`distances.wasserstein`)."""

    values: Mapping[str, float]
    """Metric name to value; NaN where undefined, infinite where a profile has zeros that the other has not."""

    def __getattr__(self, name: str) -> float:
        values: Mapping[str, float] = self.__dict__.get("values", {})
        if name not in values:
            raise AttributeError(f"no metric {name!r}; known: {', '.join(values)}")
        return values[name]

    def as_record(self) -> dict[str, float | None]:
        """Plain numbers for a record; None where undefined or infinite."""
        return {name: finite(value) for name, value in self.values.items()}


@dataclass(frozen=True, eq=False)
class Comparison(Distances):
    """The distances of a prediction to a measurement, and in `.flat` those of the flat line to the same."""

    flat: Distances


@checked
def compare(predicted: Profile, measured: Profile) -> Comparison:
    """Every registered distance of a prediction to a measurement, beside the flat line's.

    Returns:
        One attribute per metric (`wasserstein`, `spearman` ...), and `.flat` with the same for the flat baseline.

    Raises:
        UsageError: profiles of different lengths.
    """
    if predicted.n_positions != measured.n_positions:
        raise UsageError(
            f"cannot compare a profile of {predicted.n_positions} positions with one of {measured.n_positions};"
            " both need the same length"
        )
    flat = uniform_profile(measured.n_positions)
    return Comparison(
        _distances(predicted.influence, measured.influence), Distances(_distances(flat.influence, measured.influence))
    )


def _distances(
    predicted: Float64[np.ndarray, "n_positions"], measured: Float64[np.ndarray, "n_positions"]
) -> dict[str, float]:
    return {name: float(METRICS[name](predicted, measured)) for name in METRICS}


@dataclass(frozen=True, eq=False)
class MeasuredKind:
    """One kind of measured influence ("jacobian", "probability" ...)."""

    profile: Profile
    """Average over units, with its pointwise interval where there is one."""
    per_prompt: Float64[np.ndarray, "n_units n_positions"] | None = None
    """Influence per unit, raw or normalised; without it nothing gets an interval and no claim is made."""
    scales: Float64[np.ndarray, "n_units"] | None = None
    """How much each unit counts in `profile`: its raw total, where raw influences were averaged; None: all the same."""

    @property
    def sample(self) -> Sample | None:
        """The units as normalised profiles."""
        return None if self.per_prompt is None else Sample.of(self.per_prompt, self.scales)

    @property
    def n_independent(self) -> int:
        """Independently drawn units; 0 where no units are known."""
        return 0 if self.per_prompt is None else len(self.per_prompt)


@dataclass(frozen=True, eq=False)
class TheoryProfile:
    """What one theory says about the subject."""

    profile: Profile
    per_prompt: Float64[np.ndarray, "n_units n_positions"] | None = None
    """One prediction per unit of the measurement, in the same order, where the theory reads the prompt; its normalised
    average should be `profile`, as `of_prompts` makes it."""
    sample: Sample | None = None
    """Units of its own that `profile` averages, drawn independently of the measurement's: they are resampled too."""

    @classmethod
    def of_prompts(cls, per_prompt: Float64[np.ndarray, "n_units n_positions"]) -> "TheoryProfile":
        """Normalise each unit's prediction and average, as the measurement is."""
        sample = Sample.of(per_prompt)
        return cls(Profile(sample.average), sample.units)


@dataclass(frozen=True, eq=False)
class Mixing:
    """Mixing coefficient per layer, by one definition ("frobenius" over the sequence, or "token_mean")."""

    value: Float64[np.ndarray, "n_layers"]
    """In [0, 1]; layer 0 is nearest the input."""
    low: Float64[np.ndarray, "n_layers"] | None = None
    high: Float64[np.ndarray, "n_layers"] | None = None


@dataclass(frozen=True, eq=False)
class Depth:
    """How the measured profile forms: one profile per layer's output."""

    layers: Int64[np.ndarray, "n_layers"]
    influence: Float64[np.ndarray, "n_layers n_positions"]
    """Rows sum to 1."""
    low: Float64[np.ndarray, "n_layers n_positions"] | None = None
    high: Float64[np.ndarray, "n_layers n_positions"] | None = None


@dataclass(frozen=True, eq=False)
class KindComparison:
    """One theory against one measured kind."""

    kind: str
    theory: str
    comparison: Comparison
    prompts: PromptComparison | None
    """Intervals and noise; None where the measurement has no single units."""


@dataclass(frozen=True, eq=False)
class Subject:
    """A model in one state, or a bare architecture, with all that was measured and predicted for it."""

    name: str
    """"trained", "initialised", or what the run was about."""
    measured: Mapping[str, MeasuredKind] = field(default_factory=dict)
    theories: Mapping[str, TheoryProfile] = field(default_factory=dict)
    mixing: Mapping[str, Mixing] = field(default_factory=dict)
    depth: Depth | None = None
    summaries: Mapping[str, Mapping[str, Interval]] = field(default_factory=dict)
    """Per measured kind, every statistic (shares, minimum ...) with its interval."""
    comparisons: tuple[KindComparison, ...] = ()

    @property
    def n_positions(self) -> int:
        """Positions of the profiles; 0 for a subject without any."""
        profiles = [entry.profile for entry in self.measured.values()]
        profiles += [entry.profile for entry in self.theories.values()]
        return profiles[0].n_positions if profiles else 0


def compare_subject(subject: Subject, *, generator: np.random.Generator) -> Subject:
    """The subject with its summaries and with every applicable theory compared to every measured kind.

    The generator is the source of all resamples; the theories of one kind see the same ones.
    """
    summaries: dict[str, Mapping[str, Interval]] = {}
    comparisons: list[KindComparison] = []
    for kind, measured in subject.measured.items():
        sample = measured.sample
        if sample is not None:
            summaries[kind] = summarise(sample, generator=generator)
        seed = int(generator.integers(2**63))
        for name, theory in subject.theories.items():
            prompts = None
            if sample is not None:
                paired = theory.profile if theory.per_prompt is None else theory.per_prompt
                predicted = paired if theory.sample is None else theory.sample
                prompts = compare_with_prompts(predicted, sample, generator=np.random.default_rng(seed))
            comparison = compare(theory.profile, measured.profile)
            comparisons.append(KindComparison(kind, name, comparison, prompts))
    return replace(subject, summaries=summaries, comparisons=tuple(comparisons))


def contrast_subjects(first: Subject, second: Subject, *, generator: np.random.Generator) -> dict[str, Contrast]:
    """Per measured kind that both subjects share: the first (trained) against the second (at initialisation)."""
    return {
        kind: contrast(sample, other, generator=generator)
        for kind in first.measured
        if kind in second.measured
        and (sample := first.measured[kind].sample) is not None
        and (other := second.measured[kind].sample) is not None
    }
