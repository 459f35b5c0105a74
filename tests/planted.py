"""Planted bias: models and methods whose use of every position is known, by which the judgement itself is judged.

`planted_scores` draws answers as a model with a known curve gives them, before and after a method with a known effect;
`verdict_rates` says how often `judge` then comes to each verdict. `PlantedResponder` is the same as a model that
answers requests, for everything from a task to the page.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from jaxtyping import Float64

from posbias import MitigateOptions, Record, mitigate
from posbias.checks import Count, checked_value
from posbias.evaluation.curve import Scores
from posbias.evaluation.responders import PlantedResponder, Reply, Request, Responder
from posbias.mitigation.judging import SMALLEST, ArmScores, Judgement, Verdict, judge
from posbias.mitigation.methods.base import PromptMitigation
from posbias.mitigation.page import reasons

Curve = Float64[np.ndarray, "n_positions"]


@dataclass(frozen=True)
class Planted:
    """A model that uses its positions as planted, and methods that change that as planted."""

    curve: tuple[float, ...]
    """Chance of a right answer at each position without a method, each in [0, 1]."""
    methods: tuple[tuple[float, ...], ...]
    """The same with each method; a method without effect has the model's own curve."""
    difficulty: float = 0.15
    """Half the width by which samples differ in difficulty: every sample shifts all its chances alike, uniformly."""
    agreement: float = 0.7
    """Chance that an answer is drawn with the same luck before and after a method, in [0, 1]."""


def planted_scores(
    planted: Planted, *, count: int, generator: np.random.Generator, noise: float | None = None
) -> tuple[Scores, list[Scores]]:
    """score[sample, position] of `count` samples without a method, and with each.

    1 and 0 for right and wrong; with `noise` the chance itself plus normal noise of this standard deviation, as
    log-probabilities vary.
    """
    checked_value("planted: count", count, Count)
    shape = count, len(planted.curve)
    shift = generator.uniform(-planted.difficulty, planted.difficulty, size=(count, 1))
    luck = generator.random(shape) if noise is None else generator.normal(size=shape)

    def drawn(curve: Sequence[float], own: Scores) -> Scores:
        chances = np.array(curve) + shift
        return (own < chances).astype(np.float64) if noise is None else chances + noise * own

    scores = []
    for curve in planted.methods:
        other = generator.random(shape) if noise is None else generator.normal(size=shape)
        scores.append(drawn(curve, np.where(generator.random(shape) < planted.agreement, luck, other)))
    return drawn(planted.curve, luck), scores


def judged(
    planted: Planted,
    *,
    count: int,
    generator: np.random.Generator,
    noise: float | None = None,
) -> Judgement:
    """The judgement of one simulated run; methods are named by their numbers."""
    before, after = planted_scores(planted, count=count, generator=generator, noise=noise)
    tried = [ArmScores(str(number), scores) for number, scores in enumerate(after)]
    return judge(before, tried, positions=range(len(planted.curve)))


def trial_record(
    task: Any, responder: Responder, options: MitigateOptions | None = None, *, directory: Path | None = None
) -> Record:
    """The record of a trial."""
    return mitigate(responder, task, options=options, directory=directory).record


def reasons_of(verdict: Verdict, *, measure: str = "accuracy", smallest: float = SMALLEST) -> list[str]:
    """The reasons for a verdict that is given alone."""
    return reasons(verdict, Judgement(measure, (), (), (verdict,), None, smallest))


def verdict_rates(
    planted: Planted, *, count: int, runs: int, seed: int = 0, noise: float | None = None
) -> dict[str, float]:
    """Share of `runs` simulated runs in which any method gets each verdict."""
    generator = np.random.default_rng(seed)
    found: Counter[str] = Counter()
    for _ in range(runs):
        run = judged(planted, count=count, generator=generator, noise=noise)
        found.update({verdict.verdict for verdict in run.verdicts})
    return {verdict: number / runs for verdict, number in found.items()}


@dataclass(frozen=True)
class PlantedMethod(PromptMitigation):
    """A method that gives a planted responder another curve, in proportion to its strength."""

    name: ClassVar[str] = "planted"

    curve: tuple[float, ...] = (0.5, 0.5)
    """With the method at full strength: as many points as the responder's."""

    def replies(self, inner: Responder, requests: Sequence[Request], **how: bool) -> list[Reply]:
        """Those of the responder with its curve moved towards this one."""
        assert isinstance(inner, PlantedResponder)
        moved = (1 - self.strength) * np.array(inner.curve) + self.strength * np.array(self.curve)
        return PlantedResponder(moved.tolist(), seed=inner.seed).respond(requests, **how)
