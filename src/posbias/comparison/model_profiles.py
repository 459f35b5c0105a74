"""All that is known about one model in one state (as trained, at initialisation), or about one architecture.

A *subject* holds measured kinds, theories, mixing per layer, and a comparison for every pair of kind and theory.
`comparison/stored.py` reads all of it back from a record.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import numpy as np
from jaxtyping import Float64, Int64

from posbias.comparison.contrasts import Contrast, contrast, summarise
from posbias.comparison.distance_intervals import PromptComparison, Sample, compare_with_prompts, distances
from posbias.profiles import Profile
from posbias.statistics import Interval, StoredNumber


@dataclass(frozen=True, eq=False)
class MeasuredKind:
    """One kind of measured influence ("jacobian", "probability" ...)."""

    profile: Profile
    """Average over units, with its pointwise interval if there is one."""
    per_prompt: Float64[np.ndarray, "n_units n_positions"] | None = None
    """Influence per unit, raw or normalised; without it nothing gets an interval and no claim is made."""
    scales: Float64[np.ndarray, "n_units"] | None = None
    """How much each unit counts in `profile`: its raw total, if raw influences were averaged; None: all the same."""
    standard_errors: Float64[np.ndarray, "n_units n_positions"] | None = None
    """Errors of raw influence, if it was estimated by random covectors."""

    @property
    def sample(self) -> Sample | None:
        """The units as normalised profiles."""
        return None if self.per_prompt is None else Sample.of(self.per_prompt, self.scales)

    @property
    def n_independent(self) -> int:
        """Independently drawn units; 0 if no units are known."""
        return 0 if self.per_prompt is None else len(self.per_prompt)


@dataclass(frozen=True, eq=False)
class TheoryProfile:
    """A theory's prediction for the subject."""

    profile: Profile
    per_prompt: Float64[np.ndarray, "n_units n_positions"] | None = None
    """One prediction per unit of the measurement, in the same order, if the theory reads the prompt; its normalised
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
    """Coefficients in [0, 1]; layer 0 is nearest the input."""
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

    @property
    def profiles(self) -> tuple[Profile, ...]:
        """One per layer."""
        ends = ([None] * len(self.layers) if rows is None else rows for rows in (self.low, self.high))
        return tuple(Profile(*rows) for rows in zip(self.influence, *ends, strict=True))


@dataclass(frozen=True, eq=False)
class KindComparison:
    """One theory against one measured kind."""

    kind: str
    theory: str
    metrics: Mapping[str, StoredNumber]
    """Every registered distance of the theory to the measurement; NaN if undefined."""
    flat: Mapping[str, StoredNumber]
    """Those of the flat line."""
    prompts: PromptComparison | None
    """Intervals and noise; None if the measurement has no single units."""


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
            comparisons.append(KindComparison(kind, name, *distances(theory.profile, measured.profile), prompts))
    return replace(subject, summaries=summaries, comparisons=tuple(comparisons))


def contrast_subjects(first: Subject, second: Subject, *, generator: np.random.Generator) -> dict[str, Contrast]:
    """Per measured kind that both subjects share: the first (trained) against the second (at initialisation)."""
    return {
        kind: contrast(first_sample, second_sample, generator=generator)
        for kind in first.measured
        if kind in second.measured
        and (first_sample := first.measured[kind].sample) is not None
        and (second_sample := second.measured[kind].sample) is not None
    }
