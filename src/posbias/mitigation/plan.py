"""The options of a trial.

The first samples of a task are for calibration: methods with parameters are fitted to them. The samples after them are
the test, which no fit sees.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Any

from annotated_types import Ge

from posbias.checks import CountOrZero, NonNegative, OneOf, Steps, checked
from posbias.errors import UsageError
from posbias.evaluation import EvaluateOptions
from posbias.evaluation.levels import Requirement
from posbias.evaluation.samples import CALIBRATED, calibrating
from posbias.mitigation.fitting import FitOptions
from posbias.mitigation.methods.base import MITIGATIONS
from posbias.registry import split_literals
from posbias.tasks.language import LanguageTask

ALL, DEFAULT = "all", "default"
"""Words for several methods at once; those that do not apply are left out with the reason."""
DEFAULT_METHODS = ("context_bias", "self_consistency(draws=3)", "temperature")
"""The methods that gained most often in nine places of studies/mitigation (9, 7 and 3), harmed there least (0, 1 and
0), and are fitted in minutes. `key_bias` gained in all nine, too: its fit takes seven times as many passes."""
JUDGING = 40
"""Samples that judge, if no number is given."""


@checked
@dataclass(frozen=True)
class MitigateOptions:
    """Methods that are tried, the samples that judge them, and the measure that decides."""

    methods: str | Sequence[Any] = DEFAULT
    """Spellings, objects or paths of recipes, listed or with commas between them; `all`: every registered method that
    applies; `default`: those of `DEFAULT_METHODS` that apply. A method with parameters to fit that is named without any
    is fitted to the calibration samples."""
    calibration: CountOrZero | None = None
    """Number of samples for fitting, which come first, >= 0; None: CALIBRATED, or a third of a file that has
    fewer than three times as many."""
    evaluation: EvaluateOptions = field(default_factory=EvaluateOptions)
    """Settings of the test, whose samples follow those for fitting: JUDGING, or what is left of a file; the run
    sets the directory."""
    by: Annotated[str, OneOf("accuracy", "starts", "logprob")] | None = None
    """Measure that decides: `accuracy` (the task's rule, such as that the right answer occurs), `starts` (that answers
    begin with it) or `logprob`; None: accuracy, unless it is near its floor or ceiling, or answers were cut off."""
    documents: CountOrZero = 16
    """Windows of ordinary text on which loss (nats per token) is compared (local models), >= 0; 0: none."""
    text: str = "default"
    """Source of that text, as for `load_prompts`; of the default corpus, two files judge and fits read the others."""
    length: Annotated[Steps, Ge(2)] = 256
    """Tokens of each window, >= 2."""
    tolerance: NonNegative = 0.02
    """Largest acceptable loss increase on ordinary text (nats per token), >= 0."""
    short: bool = True
    """Request the task's short forms, too, if it has any."""
    fitting: FitOptions = field(default_factory=FitOptions)
    """Settings of fits by gradient."""
    require: Requirement | None = None
    """A bound on the recommended model's curve, or on the unchanged one's if none is recommended."""

    def __post_init__(self) -> None:
        if isinstance(self.methods, str):
            methods = split_literals(self.methods)
            object.__setattr__(self, "methods", methods[0] if methods in ([ALL], [DEFAULT]) else methods)
        needed = "score" if self.by == "logprob" else "generate"
        if self.by is not None and not getattr(self.evaluation, needed):
            raise UsageError(f"mitigate: by {self.by} needs {needed}, which is switched off; leave out one of the two")
        self.evaluation.check_plain("mitigate")
        if self.evaluation.directory is not None:
            raise UsageError("mitigate: evaluation.directory is not read; give mitigate the directory of the run")
        if self.require is not None:
            self.evaluation.check_requirement(self.require)

    def following(self, task: LanguageTask) -> "MitigateOptions":
        """These settings for one task, as `EvaluateOptions.following`."""
        fitted = self.calibration
        if fitted is None:
            there = task.samples_there
            fitted = CALIBRATED if there is None else calibrating(there - self.evaluation.skip)
        ahead = replace(self.evaluation, skip=self.evaluation.skip + fitted)
        count = ahead.count_of(task, usual=JUDGING)
        replace(ahead, count=count).following(task)  # refuses a file with too few lines
        return replace(self, calibration=fitted, evaluation=replace(self.evaluation, count=count))

    @property
    def entries(self) -> list[Any]:
        """Spellings, objects and paths one by one, those of `all` and `default` among them."""
        if isinstance(self.methods, str):
            return list(MITIGATIONS if self.methods == ALL else DEFAULT_METHODS)
        return list(self.methods)
