"""Settings of `compare`."""

from dataclasses import dataclass

from posbias.checks import Natural, checked


@checked
@dataclass(frozen=True)
class CompareOptions:
    """Settings of `compare`: which profiles of the two runs are compared, and the seed of resamples."""

    theory: str | None = None
    """This prediction of the first run only, or this kind measured there; by default all its theories, or all its
    kinds if it has none."""
    kind: str | None = None
    """This measured kind of the second run only; all by default."""
    subject: str | None = None
    """Subject of a run that holds several: trained or initialised. By default the only subject of the other run, if
    it has one, otherwise "trained"."""
    seed: Natural = 0
    """Seed of resamples of prompts, >= 0."""
