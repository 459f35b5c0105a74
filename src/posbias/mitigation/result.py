"""The result of a trial in typed fields, which its record holds as they are.

Arrays of the record: `positions`; `scores/MEASURE/ARM` [n_samples n_positions]; `text/ARM` [n_documents], nats per
token; ARM counts from 0, the unchanged model. Scalars: the fields of `MitigationTrial`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar

import numpy as np
from pydantic import InstanceOf, SkipValidation

from posbias.evaluation.evaluation import Reading
from posbias.evaluation.levels import RequirementCheck
from posbias.mitigation.judging import Judgement, MeasureChoice
from posbias.results.figures import Curve
from posbias.results.records import Record
from posbias.results.result import RESULTS, Result
from posbias.results.showing import Shown
from posbias.statistics import StoredInterval

ORDINARY_TEXT = "ordinary text"
"""Name of the side effect on it."""
Text = Annotated[str, SkipValidation()]
"""A text that stays the object it is: one that is made safe to show still spells what it stands for."""


@dataclass(frozen=True)
class Effort:
    """Work that the answers of one arm took."""

    seconds: float
    requests: int


@dataclass(frozen=True)
class ArmResult:
    """One arm of a finished trial."""

    name: Text
    method: str
    """Spelling of its method, at most 200 characters; empty: the unchanged model."""
    effort: Effort
    reading: Reading
    """Its answers that could be judged."""
    text_reason: str
    """Why ordinary text was not judged; empty if it was."""
    fitted: Mapping[str, Any] | None
    """How the method was fitted; None if it was not."""
    recipe: Text
    """Path of the recipe that was tried; empty if it was none."""
    directory: Text
    """Directory of its evaluation, below the run's."""
    needs_passages: bool


@RESULTS.register("mitigate")
@dataclass(frozen=True, eq=False, repr=False)
class MitigationTrial(Result):
    """Methods against position bias, tried on one model and task, and judged."""

    drawn_by: ClassVar = "posbias.mitigation.page:mitigation_report"
    record: InstanceOf[Record]
    task: str
    n_items: int
    model: str
    """Name of the model, or of what stands for it."""
    judgement: Judgement
    choice: MeasureChoice
    arms: tuple[ArmResult, ...]
    """The unchanged model first."""
    curves: Mapping[str, tuple[tuple[StoredInterval, ...], ...]]
    """Means by measure, arm and position."""
    left_out: tuple[str, ...]
    requirement: RequirementCheck | None = None
    tolerance: float = 0.02
    """Acceptable increase of the loss on ordinary text (nats per token)."""
    notices: Mapping[str, Any] = field(default_factory=dict)

    @property
    def recommended(self) -> ArmResult | None:
        """The arm of the recommended method; None: leave the model as it is."""
        return next((arm for arm in self.arms if arm.name == self.judgement.recommended), None)

    def scores(self, measure: str, arm: int) -> np.ndarray:
        """score[sample, position] of one arm, counted from 0, the unchanged model."""
        return self.record.arrays[f"scores/{measure}/{arm}"]

    def shown(self) -> Shown:
        """The curve of every arm in the measure that decided."""
        measure, method = self.judgement.measure, self.judgement.recommended
        title = f"{self.model}, {self.task}: {f'apply {method}' if method else 'leave the model as it is'}"
        arms = zip(self.arms, self.curves.get(measure, ()), strict=False)
        curves = tuple(Curve.of_intervals(arm.name, self.judgement.positions, means) for arm, means in arms)
        return Shown(title, curves, measure)
