"""Settings of `mitigate` and of the fits of its methods."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Annotated, Any

from annotated_types import Ge, Interval

from posbias.checks import Count, CountOrZero, Flag, Later, Natural, NonNegative, OneOf, Positive, Steps, checked
from posbias.errors import UsageError
from posbias.evaluation.options import CALIBRATED, EvaluateOptions
from posbias.registry import split_literals, split_settings

if TYPE_CHECKING:
    from posbias.evaluation.levels import Requirement
    from posbias.tasks.language import LanguageTask
else:
    Requirement = Annotated[Any, Later("posbias.evaluation.levels:Requirement")]

ALL, DEFAULT = "all", "default"
"""Words for several methods at once; those that do not apply are left out with the reason."""
DEFAULT_METHODS = ("context_bias", "self_consistency(draws=3)", "temperature")
"""The methods that gained most often in nine places of studies/mitigation (9, 7 and 3), harmed there least (0, 1 and
0), and are fitted in minutes. `key_bias` gained in all nine, too: its fit takes seven times as many passes."""
JUDGING = 40
"""Samples that judge, if no number is given."""


@checked
@dataclass(frozen=True)
class FitOptions:
    """Settings of a fit by gradient."""

    steps: Steps | None = None
    """Steps of one batch each, >= 1; None: 60 for adapters, 300 for all others."""
    batch: Count | None = None
    """Calibration prompts of a step, >= 1, with a window of text for every four if there is a penalty; None: 4 for
    adapters, 1 for all others."""
    rate: Positive | None = None
    """Rate of Adam at the first step; None: .05 (nats) for biases, .02 for factors of heads, .002 for adapters."""
    held_out: Annotated[float, Interval(ge=0, lt=1)] | None = None
    """Share of the calibration samples that no step sees, in [0, 1). The fit stops when their answers become no more
    probable, and keeps the numbers with which they were most probable; None: 0 for biases, .2 for adapters."""
    teacher: Annotated[str, OneOf("gold_alone", "best_place")] | None = None
    """Fit to answers of the unchanged model, and to how probable it finds every token of them, rather than to right
    ones, which are not read: `gold_alone`: to its answers with the gold passage alone; `best_place`: with that passage
    where its own answers are most probable, one place for all samples."""
    penalty: NonNegative = 1.0
    """Weight of the divergence on ordinary text, >= 0; unused if the method acts from the question on."""
    knots: tuple[int, ...] = (0, 1, 8, 64, 512)
    """Keys at which biases are fitted (0 at the last one), interpolated by splines; unused for a context bias."""
    from_question: bool = False
    """The method acts from the question on only: what a server has cached of the passages stays valid. An adapter does
    so from the words on that open the question in every calibration prompt."""
    scales: bool = True
    """Scale every head's logits, too, for the queries from the question on; unused if all queries have the bias."""
    seed: Natural = 0
    """Seed of the order of prompts and windows."""
    checkpointing: bool = False
    """Compute layers again in the backward pass, for less memory and more time; not from the question on, where few
    tokens have one."""

    @classmethod
    def parse(cls, text: str) -> "FitOptions":
        """Read settings from text: `steps=600, rate=0.02`."""
        return cls(**split_settings(text, "steps=600, rate=0.02"))

    def __post_init__(self) -> None:
        if self.knots:
            from posbias.architecture.keys import LogSpline

            LogSpline(values=(0.0,) * len(self.knots), knots=self.knots)

    def settled(self, defaults: Mapping[str, Any], **fixed: Any) -> "FitOptions":
        """All of them set: by the defaults of a fit where nothing was asked for, and as it takes them alone."""
        unset = {name: value for name, value in defaults.items() if getattr(self, name) is None}
        return replace(self, **unset, **fixed)


@checked
@dataclass(frozen=True)
class MitigateOptions:
    """Methods that are tried, the samples that judge them, and the measure that decides."""

    methods: str | Sequence[Any] = DEFAULT
    """Methods, or recipes that an earlier run wrote: key_bias,temperature(scale=0.16),recipe.json; default: the three
    that helped most often; all: every one that applies, which takes hours. One that is named without the parameters
    that it has to fit is fitted to the calibration samples."""
    calibration: CountOrZero | None = None
    """Samples for fitting, the first ones; they do not count in the verdict. By default 12, of a short file a third."""
    evaluation: Annotated[EvaluateOptions, Flag(None)] = field(default_factory=EvaluateOptions)
    """Settings of the test, whose samples follow those for fitting: JUDGING, or what is left of a file; the run
    sets the directory."""
    by: Annotated[str, OneOf("accuracy", "logprob")] | None = None
    """Measure that decides: accuracy (the task's rule, such as that the right answer occurs) or logprob; by default
    accuracy, unless it is near its floor or ceiling, or answers were cut off."""
    documents: CountOrZero = 16
    """Windows of ordinary text on which loss (nats per token) of a local model is compared; 0: none."""
    text: str = "default"
    """Source of that text: a file or data set, as for prompts; by default two files of the default corpus, whose others
    are read by fits."""
    length: Annotated[Steps, Ge(2), Flag(None)] = 256
    """Tokens of each window, >= 2."""
    tolerance: NonNegative = 0.02
    """Largest acceptable loss increase on ordinary text (nats per token)."""
    short: bool = True
    """Also test the task's short forms, if it has any: the gold document alone, none; two pairs."""
    fitting: Annotated[FitOptions, Flag("fit", default="")] = field(default_factory=FitOptions)
    """How methods are fitted by gradient, such as steps=600, rate=0.02 (see FitOptions)."""
    require: Requirement | None = None
    """A bound on the recommended model's curve, or on the unchanged one's if none is recommended: the whole interval
    must meet it (exit code 3 if not), such as worst>=0.8, mean>=0.7 or spread<=0.2."""

    def __post_init__(self) -> None:
        if isinstance(self.methods, str):
            methods = split_literals(self.methods)
            object.__setattr__(self, "methods", methods[0] if methods in ([ALL], [DEFAULT]) else methods)
        needed = "score" if self.by == "logprob" else "generate"
        if self.by is not None and not getattr(self.evaluation, needed):
            raise UsageError(f"mitigate: by {self.by} needs {needed}, which is switched off; leave out one of the two")
        if self.text.startswith(f"{DEFAULT}#"):
            raise UsageError(
                f"mitigate: text {self.text!r}: fits read the default corpus, too; give a file, or leave it out"
            )
        self.evaluation.check_plain("mitigate")
        if self.evaluation.directory is not None:
            raise UsageError("mitigate: evaluation.directory is not read; give mitigate the directory of the run")
        if self.require is not None:
            self.require.check_possible(generated=self.evaluation.generate, several_lengths=False)

    def following(self, task: "LanguageTask") -> "MitigateOptions":
        """These settings for one task, as `EvaluateOptions.following`."""
        fitted = self.calibration
        if fitted is None:
            there = task.samples_there
            fitted = CALIBRATED if there is None else min(CALIBRATED, (there - self.evaluation.skip) // 3)
        ahead = replace(self.evaluation, skip=self.evaluation.skip + fitted)
        count = ahead.count_of(task, usual=JUDGING)
        replace(ahead, count=count).following(task)  # refuses a file with too few lines
        return replace(self, calibration=fitted, evaluation=replace(self.evaluation, count=count))

    @property
    def entries(self) -> list[Any]:
        """Spellings, objects and paths one by one, those of `all` and `default` among them."""
        if isinstance(self.methods, str):
            from posbias.mitigation.methods.base import MITIGATIONS

            return list(MITIGATIONS if self.methods == ALL else DEFAULT_METHODS)
        return list(self.methods)
