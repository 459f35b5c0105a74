"""The results of `evaluate`: answers of a model to one task, at one length or several, as stored and as read back.

The record has the verb "evaluate". Arrays: `positions` [n_positions] int64; `scores/NAME` [n_samples n_positions], NaN
if there is none, NAME as in `Evaluation.tables`; with influence on the same prompts `influence/SOURCE[/KIND]/WHAT`
[n_samples n_positions], shares of a prompt's influence. Scalars: the fields of `Evaluation` under their names, curves
as `PositionCurve`. The texts go beside it, one JSON object per line. Several lengths (verb "evaluate_lengths") are an
evaluation each, with their arrays below LENGTH/.

The effective length is a lower bound. A length is reached if the worst depth's low end is at least the threshold, and
all shorter lengths are reached. No correction for the number of cells is due: to claim too much, the worst cell of the
first length that truly fails would have to pass its own test, which happens in at most 5 % of runs, in 2.9 % at the
threshold 0.8 (`tests/evaluation/test_lengths.py` computes it exactly).
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from pydantic import InstanceOf

from posbias.checks import checked
from posbias.errors import UsageError
from posbias.evaluation.curve import (
    DECIDING,
    SAMPLES_FOR_CLAIM,
    Independent,
    PositionCurve,
    Scores,
    complete_samples,
    position_means,
)
from posbias.evaluation.levels import EFFECTIVE_LENGTH, Requirement, RequirementCheck, check_requirement, levels_of
from posbias.evaluation.options import EvaluateOptions
from posbias.evaluation.reading import Reading, Verdicts
from posbias.evaluation.responders.base import REFUSED
from posbias.evaluation.samples import independent
from posbias.files import write_file
from posbias.results.records import Record, plain, read_record, remove_record
from posbias.results.result import RESULTS, Result, from_stored, result_of
from posbias.results.showing import Shown
from posbias.runs.parts import below
from posbias.statistics import CONFIDENCE, POWER, Interval, StoredInterval, StoredNumber
from posbias.tasks.language import LanguageTask

MEASURES = {
    "accuracy": "accuracy",
    "values_found": "share of the values found",
    "logprob": "log-probability of the answer per token (nats)",
    "reciprocal_rank": "1 / rank of the answer's first token",
    "starts": "answers that begin with the right one",
}
"""Names of the measures in words."""
GENERATED = ("accuracy", "values_found", "starts")
"""Measures that rest on generated answers."""
OUTPUTS_FILE = "outputs.jsonl"
LENGTHS = "evaluate_lengths"
"""Verb of records that hold evaluations at several lengths."""
BEHAVIOUR = "behaviour"
"""Folder of an audited model's evaluation, below the audit's directory."""
SCORES = "scores/"


@dataclass(frozen=True)
class Unjudged:
    """One prompt without an answer that could be judged."""

    sample: str
    position: int | None
    reason: str
    """A key of `reading.UNJUDGED`."""
    detail: str = ""
    """The server's words, by what a prompt is too long, or the mark of a call in a form that is not read."""


@dataclass(frozen=True)
class RankCorrelation:
    """One rank correlation over positions."""

    controlled: str
    """What was held fixed, a key of `correlate.CONTROLS`."""
    value: StoredInterval
    """Value in -1 ... 1, with its interval over samples; NaN if a curve is constant or too few positions are left."""
    p: StoredNumber
    """Share of permutations of the positions that correlate at least as strongly, either sign; NaN as the value."""
    established: bool
    """True if the interval leaves out 0, with samples enough for a claim, and permutations agree at 5 %."""
    adjusted_p: float | None = None
    """`p` corrected for the number of correlations, if there were several (`correlate.corrected`)."""

    @property
    def p_value(self) -> float:
        """The corrected p-value, or `p` if there is none."""
        return self.p if self.adjusted_p is None else self.adjusted_p


@dataclass(frozen=True)
class Correlations:
    """How two curves over positions hang together."""

    correlations: tuple[RankCorrelation, ...]
    """One for each of `correlate.CONTROLS`."""
    n_positions: int
    n_samples: int

    def of(self, controlled: str) -> RankCorrelation:
        """The correlation with this held fixed."""
        return next(entry for entry in self.correlations if entry.controlled == controlled)


@dataclass(frozen=True)
class InfluenceSeries:
    """A series of influence over positions, with its correlations."""

    source: str
    """"measured", or a theory."""
    kind: str | None
    what: str
    """"gold" (the answer's item) or "place" (a position where another item stands)."""
    means: tuple[StoredInterval, ...] = ()
    """Mean share of influence at each position."""
    correlations: Mapping[str, Correlations] = field(default_factory=dict)
    """Correlations with each measure of behaviour."""
    groups: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Titles of the runs that are pooled, by measure."""

    @property
    def array(self) -> str:
        """Name of its array in a record."""
        return "/".join(["influence", *filter(None, (self.source, self.kind, self.what))])

    @property
    def measured(self) -> bool:
        """True for a measurement, False for a theory's prediction."""
        return self.source == "measured"


@dataclass(frozen=True)
class Influence:
    """Influence of items on the prompts of an evaluation, and how it hangs together with the answers."""

    series: tuple[InfluenceSeries, ...]
    left_out: tuple[str, ...]
    """Theories that do not apply, and why."""


@RESULTS.register("evaluate")
@dataclass(frozen=True, eq=False, repr=False)
class Evaluation(Result):
    """Answers of a model to one task, by the position of the item that they need."""

    drawn_by: ClassVar = "posbias.evaluation.page:evaluation_report"
    record: InstanceOf[Record]
    task: str = ""
    """Literal spelling; the names of files are cut to their last part."""
    count: int = 0
    """Samples, each requested at every position."""
    positions: tuple[int, ...] = ()
    """Positions of the moved item, ascending: the columns of every table."""
    n_items: int = 0
    """Items in each prompt."""
    tables: Mapping[str, InstanceOf[np.ndarray]] = field(default_factory=dict)
    """score[sample, position]: `correct` (1 or 0), `found`, `logprob` (nats, of the whole answer), `answer_tokens`,
    `first_rank` (of the answer's first token, 1 = the model's choice), `greedy`, `gold_token`, `prompt_tokens`,
    `too_long` (1 if it was), `starts` (1 if the answer begins with the right one), `cut` (1 if it was cut off
    before what the task's rule reads was complete), and what a task notes beside (`LanguageTask.noted`); NaN if there
    is none."""
    curves: Mapping[str, PositionCurve] = field(default_factory=dict)
    """A curve with its statistics for every measure: accuracy, log-probability per token, 1 / rank."""
    max_tokens: int | None = None
    thinking_tokens: int = 0
    responder: Mapping[str, Any] = field(default_factory=dict)
    """Description of the responder, as `Responder.describe` gives it."""
    file_sha256: str | None = None
    """Hash of the file that the samples were read from; None if the task makes its own."""
    examples: int = 0
    """Prompts: samples x positions."""
    skipped: Mapping[int, int] = field(default_factory=dict)
    """Examples that were too long, by position; only positions that lost some."""
    unjudged: tuple[Unjudged, ...] = ()
    """Every prompt without an answer that could be judged, and why."""
    cut_off: int = 0
    """Answers that ended at `max_tokens`, not by themselves."""
    unscored: int = 0
    """Right answers that should have been scored and were not, of the examples that were not skipped."""
    moved_blanks: int = 0
    """Examples whose prompt ended in blanks, with which the right answer begins instead."""
    reading: Reading | None = None
    """How many answers could be judged; None: an older record that does not say."""
    verdicts: Verdicts | None = None
    """Accuracy, flips and first picks of a judge that was asked in both orders; None for other tasks."""
    notices: Mapping[str, Any] = field(default_factory=dict)
    """Oddities of samples, as of `samples.notices_of`."""
    requirement: RequirementCheck | None = None
    """The bound that was required, checked; None if there was none."""
    influence: Influence | None = None
    """Influence on the same prompts, if it was measured."""
    reused: int = 0
    """Samples that were there, finished."""
    seconds: float = 0.0
    """Duration of the requests, over all sittings."""
    outputs: tuple[Mapping[str, Any], ...] = ()
    """Every generated text with its sample, position and answers; a run that is read back has them in OUTPUTS_FILE."""
    found: bool = False
    """True if its directory held it, finished, and nothing was asked."""

    @classmethod
    def from_record(cls, record: Record) -> "Evaluation":
        """The evaluation that a record holds."""
        scalars, arrays = record.scalars, record.arrays
        curves = {name: {**curve, "quantity": MEASURES.get(name, name)} for name, curve in scalars["curves"].items()}
        read = {
            **record.resolved,
            **{name: scalars[name] for name in ("n_items", "skipped", "cut_off", "examples")},  # none may be missing
            **scalars,
            "record": record,
            "positions": record.resolved["positions"],
            "tables": {name.removeprefix(SCORES): table for name, table in arrays.items() if name.startswith(SCORES)},
            "curves": curves,
        }
        return from_stored(cls, read)

    def shown(self) -> Shown:
        """The curve of the first measure (accuracy, if answers were generated); `curves` has the others."""
        if not self.curves:
            return Shown(f"{self.task}: nothing was scored")
        curve = next(iter(self.curves.values())).shown()
        return replace(curve, title=f"{self.task}; {curve.title}", facts=self.facts())

    @cached_property
    def measures(self) -> dict[str, Scores]:
        """Tables that the curves are drawn of, in units in which more is better."""
        return {name: table for name, table in measures_of(self.tables).items() if name in self.curves}

    @property
    def right(self) -> Independent:
        """Right (1) and wrong (0) answers of every independent sample, by position."""
        return independent(self.tables["correct"], self.tables)

    @property
    def withheld(self) -> str:
        """Why nothing is concluded from generated answers, as `Reading.withheld`; empty if they decide."""
        return "" if self.reading is None else self.reading.withheld

    @property
    def series(self) -> tuple[InfluenceSeries, ...]:
        """The series of influence that were measured on the same prompts."""
        return self.influence.series if self.influence else ()

    def check(self, require: Requirement) -> RequirementCheck:
        """The check of a bound on accuracy, or on log-probability if no answer was judged."""
        return check_requirement(require, measures_of(self.tables), self.withheld, arm=str(self.source or ""))

    @property
    def title(self) -> str:
        """Model and task."""
        return str(self.record.resolved.get("title", self.task))

    @property
    def source(self) -> str | None:
        """Name of the model, on a server or here."""
        model = self.responder.get("model")
        return model.get("source") if isinstance(model, Mapping) else model

    @property
    def local(self) -> bool:
        """True if the model ran in this process."""
        return self.responder.get("kind") == "local"

    @property
    def refused(self) -> list[Unjudged]:
        """Examples that a server refused, such as by a content filter."""
        return [prompt for prompt in self.unjudged if prompt.reason == REFUSED]

    @property
    def answered(self) -> int:
        """Examples that were answered: neither too long nor refused."""
        return self.examples - sum(self.skipped.values()) - len(self.refused)


def measures_of(tables: Mapping[str, Scores]) -> dict[str, Independent]:
    """Tables as `Evaluation.tables` in units in which more is better; those that hold nothing are left out.

    Samples that are not independent are averaged to one row, in the order of their first.
    """
    with np.errstate(invalid="ignore", divide="ignore"):
        measures = {
            "accuracy": tables["correct"],
            "values_found": tables["found"],
            "logprob": tables["logprob"] / tables["answer_tokens"],
            "reciprocal_rank": reciprocal_rank(tables["first_rank"], tables["logprob"]),
            "starts": tables.get("starts", np.full_like(tables["correct"], np.nan)),
        }
    return {name: independent(table, tables) for name, table in measures.items() if not np.isnan(table).all()}


def reciprocal_rank(first_rank: Scores, logprob: Scores) -> Scores:
    """1 / rank; NaN throughout if a scored answer's rank is not known, for then only good ranks would be counted."""
    unknown = np.isnan(first_rank) & ~np.isnan(logprob)
    return np.full_like(first_rank, np.nan) if unknown.any() else np.asarray(1 / first_rank)


@checked
def write_outputs(evaluation: Evaluation, directory: Path) -> Path:
    """Write `Evaluation.outputs`, one JSON object per line; the record of an older run, with others, goes first."""
    path = directory / OUTPUTS_FILE
    lines = "".join(json.dumps(dict(row), ensure_ascii=False) + "\n" for row in evaluation.outputs)
    remove_record(directory)
    return write_file(path, lines.encode())


def load_evaluation(run: Result | str | Path, purpose: str, *, made_by: str = "posbias evaluate") -> Evaluation:
    """A finished evaluation at one length, read from its directory, or from that of the audit above it.

    Raises:
        UsageError: no run there, another sort of run, an unfinished one, or one at several lengths, for which
            `purpose` names what needs it.
    """
    if isinstance(run, Evaluation):
        return run
    if isinstance(run, Result):
        record = run.record
    else:
        below = Path(run) / BEHAVIOUR
        record = read_record(below if below.is_dir() else run)
    if record.verb == LENGTHS and record.status == "done":
        at_length = f"length-{next(iter(record.scalars['at']))}"
        raise UsageError(f"{purpose} needs an evaluation at one length, such as {at_length} below the directory")
    if record.verb != "evaluate" or record.status != "done":
        raise UsageError(f"{purpose} needs a finished run of {made_by}, got {record.verb!r} ({record.status})")
    evaluation = result_of(record)
    assert isinstance(evaluation, Evaluation)
    return evaluation


@dataclass(frozen=True)
class LengthLevel:
    """Accuracy at one length."""

    length: int
    """Tokens asked for."""
    n_complete: int
    """Samples answered at every depth."""
    worst: Interval
    """Accuracy at the worst depth; its high end holds jointly over all cells."""
    worst_depth: float
    """The depth with the lowest accuracy, 0 (begin) to 1 (end); the first of several."""
    mean: Interval
    withheld: str = ""
    """Why its answers decide nothing, as `Reading.withheld`; empty if they decide."""

    def reaches(self, threshold: float) -> bool | None:
        """True if it has this accuracy at every depth; None: not decided."""
        if self.withheld:
            return None
        if self.worst.low >= threshold:
            return True
        return False if self.worst.high < threshold else None

    def deciding(self, threshold: float) -> int:
        """About how many samples would tell the worst depth from a threshold with 80 % power, were it as estimated.

        Normal quantiles: n = ((z[1 - alpha/2] sqrt(t (1 - t)) + z[power] sqrt(p (1 - p))) / (p - t))^2; a p nearer to t
        than DECIDING is taken to be that far.
        """
        from scipy.special import ndtri

        share, distance = self.worst.value, max(DECIDING, abs(self.worst.value - threshold))
        spreads = (math.sqrt(value * (1 - value)) for value in (threshold, share))
        quantiles = ndtri((1 + CONFIDENCE) / 2), ndtri(POWER)
        return math.ceil((sum(map(math.prod, zip(quantiles, spreads, strict=True))) / distance) ** 2)


@dataclass(frozen=True)
class EffectiveLength:
    """The length up to which accuracy is at least the threshold at every depth, so far as the samples decide it."""

    threshold: float
    at_least: int
    """Longest length that is reached (tokens); 0 if none is."""
    by_estimate: int
    """The same by the estimates alone."""
    below: int | None
    """The length after it, if its worst depth is established to lie below the threshold."""
    undecided: int | None
    """The length after it, if the samples decide neither."""


@RESULTS.register(LENGTHS)
@dataclass(frozen=True, eq=False, repr=False)
class LengthEvaluation(Result):
    """Answers of a model to one task at several lengths: an evaluation each, and what they say together."""

    drawn_by: ClassVar = "posbias.evaluation.page:length_report"
    record: InstanceOf[Record]
    task: str = ""
    threshold: float = 0.8
    """Accuracy that the effective length asks for at every depth."""
    depths: tuple[float, ...] = ()
    """Depths of the columns, 0 (begin) to 1 (end)."""
    not_evaluated: tuple[int, ...] = ()
    """Longer lengths, from the first that is too long for the model throughout."""
    at: Mapping[int, InstanceOf[Evaluation]] = field(default_factory=dict)
    """The evaluation at each length, ascending, without its texts if it was read back."""
    requirement: RequirementCheck | None = None
    """The bound that was required, checked; None if there was none."""
    found: ClassVar[bool] = False

    @classmethod
    def from_record(cls, record: Record) -> "LengthEvaluation":
        """The evaluations that a record holds."""
        at = {
            int(length): Evaluation.from_record(
                Record("evaluate", {}, **part, arrays=below(record.arrays, f"{length}/"), seeds=record.seeds)
            )
            for length, part in record.scalars["at"].items()
        }
        return from_stored(cls, {**record.resolved, **record.scalars, "record": record, "at": at})

    @property
    def lengths(self) -> tuple[int, ...]:
        """Lengths that were evaluated, ascending."""
        return tuple(self.at)

    @property
    def reused(self) -> int:
        """Samples that were there, finished."""
        return sum(evaluation.reused for evaluation in self.at.values())

    @property
    def too_long(self) -> dict[int, int]:
        """Samples that were too long for the model at some depth, by length; only lengths that lost some."""
        tables = {length: evaluation.tables["too_long"] for length, evaluation in self.at.items()}
        lost = {length: int((table > 0).any(axis=1).sum()) for length, table in tables.items()}
        lost |= {length: len(next(iter(tables.values()))) for length in self.not_evaluated}
        return {length: samples for length, samples in lost.items() if samples}

    @cached_property
    def levels(self) -> list[LengthLevel]:
        """The level of every length; high ends hold jointly over all lengths that were asked for."""
        curves = len(self.at) + len(self.not_evaluated)
        return [_level(length, evaluation, self.depths, curves=curves) for length, evaluation in self.at.items()]

    @property
    def effective_length(self) -> EffectiveLength:
        """The length up to which accuracy is high enough."""
        return effective_length(self.levels, self.threshold)

    @cached_property
    def cells(self) -> dict[int, tuple[Interval, ...]]:
        """Accuracy of every length and depth, each with its own interval."""
        return {length: position_means(evaluation.right) for length, evaluation in self.at.items()}

    def shown(self) -> Shown:
        """The effective length."""
        return Shown(f"{self.task} at {', '.join(map(str, self.lengths))} tokens", facts=self.facts())

    def check(self, require: Requirement) -> RequirementCheck:
        """The check of a bound on the effective length, or on the worst cell."""
        if require.what == EFFECTIVE_LENGTH:
            effective = self.effective_length
            value = Interval(effective.by_estimate, effective.at_least, np.inf)
            return RequirementCheck.of(require, EFFECTIVE_LENGTH, value)
        if require.what != "worst":
            raise UsageError(f"requirement {require}: allowed with several lengths: worst, {EFFECTIVE_LENGTH}")
        ends = [level.worst for level in self.levels]
        value = Interval(*(min(getattr(end, name) for end in ends) for name in ("value", "low", "high")))
        withheld = "; ".join(f"at {level.length} tokens {level.withheld}" for level in self.levels if level.withheld)
        return RequirementCheck.of(require, "accuracy", value, withheld=withheld)


def length_evaluation(
    evaluations: Mapping[int, Evaluation], *, task: str, options: EvaluateOptions, depths: tuple[float, ...]
) -> LengthEvaluation:
    """The result of evaluations of one task at ascending lengths, each at as many depths.

    Lengths are missing from the first that is too long throughout.
    """
    first = next(iter(evaluations.values()))
    resolved = {name: fact for name, fact in first.record.resolved.items() if name not in ("positions", "fingerprint")}
    resolved |= {
        "title": f"{first.source or 'model'}: {task}",
        "task": task,
        "lengths": list(evaluations),
        "not_evaluated": [length for length in options.lengths if length not in evaluations],
        "depths": list(depths),
        "threshold": options.threshold,
        "related": {f"{length} tokens": f"length-{length}/report.html" for length in evaluations},
    }
    record = Record(LENGTHS, {}, resolved, {"at": {}}, seeds=dict(first.record.seeds))
    for length, evaluation in evaluations.items():
        part = evaluation.record
        record.scalars["at"][str(length)] = {"resolved": part.resolved, "scalars": part.scalars}
        record.arrays |= {f"{length}/{name}": table for name, table in part.arrays.items()}
    found = LengthEvaluation.from_record(record)
    record.scalars["levels"] = [plain(asdict(level)) for level in found.levels]
    record.scalars["effective_length"] = plain(asdict(found.effective_length))
    return replace(found, at=evaluations)


def _level(length: int, evaluation: Evaluation, depths: Sequence[float], *, curves: int) -> LengthLevel:
    scores: Scores = evaluation.right
    means, n_complete = [cell.value for cell in position_means(scores)], len(complete_samples(scores))
    worst = mean = Interval(float(np.nanmin(means, initial=np.inf)), 0.0, 1.0)
    if n_complete >= SAMPLES_FOR_CLAIM:
        levels = levels_of(scores, curves=curves)
        worst, mean = levels.worst, levels.mean
    return LengthLevel(length, n_complete, worst, depths[int(np.nanargmin(means))], mean, evaluation.withheld)


def effective_length(levels: Sequence[LengthLevel], threshold: float) -> EffectiveLength:
    """The bound of ascending lengths: the last before the first that is not reached."""
    reached = [level.reaches(threshold) is True for level in levels]
    likely = [level.worst.value >= threshold and not level.withheld for level in levels]
    n_reached, n_likely = ([*passed, False].index(False) for passed in (reached, likely))
    following = levels[n_reached] if n_reached < len(levels) else None
    fails = following is not None and following.reaches(threshold) is False
    lengths = [0, *(level.length for level in levels)]
    return EffectiveLength(
        threshold=threshold,
        at_least=lengths[n_reached],
        by_estimate=lengths[n_likely],
        below=following.length if following is not None and fails else None,
        undecided=None if following is None or fails else following.length,
    )


def depths_of(tasks: Mapping[int, LanguageTask], options: EvaluateOptions) -> tuple[float, ...]:
    """The depths of the columns, 0 to 1, as the longest prompts have them: with fewer items they are nearly the same.

    Raises:
        UsageError: lengths at which another number of positions would be evaluated.
    """
    positions = {length: options.positions_of(task) for length, task in tasks.items()}
    if len({len(columns) for columns in positions.values()}) > 1:
        counts = ", ".join(f"{len(columns)} at {length}" for length, columns in positions.items())
        fewest = min(len(columns) for columns in positions.values())
        raise UsageError(
            f"evaluate: lengths need as many positions at each, got {counts}; --positions 'spread({fewest})'"
        )
    longest = max(positions)
    return tuple(position / max(1, tasks[longest].n_items - 1) for position in positions[longest])
