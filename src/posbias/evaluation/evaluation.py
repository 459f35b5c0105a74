"""The result of `evaluate`: answers of a model to one task, as stored and as read back.

The record has the verb "evaluate". Arrays: `positions` [n_positions] int64; `scores/NAME` [n_samples n_positions], NaN
if there is none, NAME as in `Evaluation.tables`; with influence on the same prompts `influence/SOURCE[/KIND]/WHAT`
[n_samples n_positions], shares of a prompt's influence. Scalars: the fields of `Evaluation` under their names. The
texts go beside it, one JSON object per line.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from pydantic import InstanceOf

from posbias.errors import UsageError
from posbias.evaluation.curve import (
    SAMPLES_FOR_CLAIM,
    Independent,
    PositionCurve,
    Scores,
    complete_samples,
    independent,
)
from posbias.evaluation.levels import RECOVERY, UNKNOWN, Requirement, RequirementCheck, levels_of
from posbias.evaluation.reading import Reading, Verdicts
from posbias.evaluation.recovery import Recovery
from posbias.evaluation.responders.base import REFUSED
from posbias.files import json_object, read_lines, write_file
from posbias.results.records import Record, read_record, remove_record
from posbias.results.result import RESULTS, Result, from_stored, result_of
from posbias.results.showing import Shown
from posbias.statistics import StoredInterval, StoredNumber

MEASURES = {
    "accuracy": "accuracy",
    "logprob": "log-probability of the answer per token (nats)",
    "reciprocal_rank": "1 / rank of the answer's first token",
}
"""Names of the measures in words."""
GENERATED = ("accuracy",)
"""Measures that rest on generated answers."""
OUTPUTS_FILE = "outputs.jsonl"
LENGTHS = "evaluate_lengths"
"""Verb of records that hold evaluations at several lengths."""
BEHAVIOUR = "behaviour"
"""Folder of an audited model's evaluation, below the audit's directory."""
SCORES = "scores/"
REQUIRED = ("n_items", "skipped", "cut_off", "examples", "reading")
"""Scalars that no record may lack, though they have defaults."""


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
    """How two curves over positions hang together: a correlation for each of `correlate.CONTROLS`."""

    correlations: tuple[RankCorrelation, ...]
    n_positions: int
    n_samples: int

    def of(self, controlled: str) -> RankCorrelation:
        """The correlation with this held fixed."""
        return next(entry for entry in self.correlations if entry.controlled == controlled)


@dataclass(frozen=True)
class InfluenceSeries:
    """A series of influence over positions, with its correlations."""

    source: str
    """"measured"; in records of older runs a theory, too."""
    kind: str | None
    what: str
    """"gold": the item that holds the answer; in records of older runs also "place", a position of another item."""
    correlations: Mapping[str, Correlations] = field(default_factory=dict)
    """Correlations with each measure of behaviour."""
    groups: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Titles of the runs that are pooled, by measure."""

    @property
    def array(self) -> str:
        """Name of its array in a record."""
        return "/".join(["influence", *filter(None, (self.source, self.kind, self.what))])


@RESULTS.register("evaluate")
@dataclass(frozen=True, eq=False, repr=False)
class Evaluation(Result):
    """Answers of a model to one task, by the position of the item that they need."""

    drawn_by: ClassVar = "posbias.evaluation.page:evaluation_report"
    said_by: ClassVar = "posbias.evaluation.page:verdict_of"
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
    """score[sample, position]: `correct` (1 or 0), `logprob` (nats, of the whole answer), `answer_tokens`,
    `first_rank` (of the answer's first token, 1 = the model's choice), `gold_token`, `prompt_tokens`, `too_long` (1 if
    it was), `cut` (1 if it was cut off before what the task's rule reads was complete), what a task notes beside
    (`LanguageTask.noted`), and for recovery `logprob_alone` and `logprob_bare`; NaN if there is none."""
    curves: Mapping[str, PositionCurve] = field(default_factory=dict)
    """A curve with its statistics for every measure that answers decide."""
    max_tokens: int | None = None
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
    reading: Reading = field(default_factory=Reading)
    """How many answers could be judged."""
    verdicts: Verdicts | None = None
    """Accuracy, flips and first picks of a judge that was asked in both orders; None for other tasks."""
    notices: Mapping[str, Any] = field(default_factory=dict)
    """Oddities of samples, as of `samples.notices_of`."""
    recovery: Recovery | None = None
    """How much of the gain of the moved item is left among the others; None if it was not measured."""
    requirement: RequirementCheck | None = None
    """The bound that was required, checked; None if there was none."""
    series: tuple[InfluenceSeries, ...] = ()
    """Influence on the same prompts and how it hangs together with the answers, if it was measured."""
    reused: int = 0
    """Samples that were there, finished."""
    seconds: float = 0.0
    """Duration of the requests, over all sittings."""
    outputs: tuple[Mapping[str, Any], ...] = ()
    """Every generated text with its sample, position and answers; a run that is read back, or was found finished, has
    them in OUTPUTS_FILE."""

    @classmethod
    def from_record(cls, record: Record) -> "Evaluation":
        """The evaluation that a record holds."""
        scalars, arrays = record.scalars, record.arrays
        read = {
            **record.resolved,
            **{name: scalars[name] for name in REQUIRED},
            **scalars,
            "record": record,
            "positions": record.resolved["positions"],
            "tables": {name.removeprefix(SCORES): table for name, table in arrays.items() if name.startswith(SCORES)},
            "series": (scalars.get("influence") or {}).get("series", ()),
        }
        return from_stored(cls, read)

    def shown(self) -> Shown:
        """The curve of the first measure (accuracy, if answers were generated); `curves` has the others."""
        if not self.curves:
            return Shown(f"{self.task}: nothing was scored")
        curve = next(iter(self.curves.values())).shown()
        return replace(curve, title=f"{self.task}; {curve.title}")

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
        return self.reading.withheld

    def check(self, require: Requirement, *, arm: str = "") -> RequirementCheck:
        """The check of a bound on recovery, on accuracy, or on log-probability if no answer was judged.

        It is not met with too few complete samples, nor by answers that decide nothing.
        """
        arm, recovery, measures = arm or str(self.source or ""), self.recovery or Recovery(), measures_of(self.tables)
        if require.what == RECOVERY:
            return require.check(recovery.worst, RECOVERY, arm=arm, withheld=recovery.undefined)
        measure = "accuracy" if "accuracy" in measures else "logprob"
        scores, value = measures.get(measure), UNKNOWN
        if scores is not None and len(complete_samples(scores)) >= SAMPLES_FOR_CLAIM:
            value = getattr(levels_of(scores), require.what)
        return require.check(value, measure, arm=arm, withheld=self.withheld if measure == "accuracy" else "")

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
    def refused(self) -> list[Unjudged]:
        """Examples that a server refused, such as by a content filter."""
        return [prompt for prompt in self.unjudged if prompt.reason == REFUSED]


def measures_of(tables: Mapping[str, Scores]) -> dict[str, Independent]:
    """Tables as `Evaluation.tables` in units in which more is better; those that hold nothing are left out.

    Samples that are not independent are averaged to one row, in the order of their first.
    """
    with np.errstate(invalid="ignore", divide="ignore"):
        measures = {
            "accuracy": tables["correct"],
            "logprob": tables["logprob"] / tables["answer_tokens"],
            "reciprocal_rank": 1 / tables["first_rank"],
        }
    # If a scored answer's rank is not known there are none, for then only good ranks would be counted.
    if (np.isnan(tables["first_rank"]) & ~np.isnan(tables["logprob"])).any():
        del measures["reciprocal_rank"]
    return {name: independent(table, tables) for name, table in measures.items() if not np.isnan(table).all()}


def write_outputs(outputs: Sequence[Mapping[str, Any]], directory: Path) -> Path:
    """Write `Evaluation.outputs`, one JSON object per line; the record of an older run, with others, goes first."""
    lines = "".join(json.dumps(dict(row), ensure_ascii=False) + "\n" for row in outputs)
    remove_record(directory)
    return write_file(directory / OUTPUTS_FILE, lines.encode())


def outputs_of(run: Path) -> list[dict[str, Any]]:
    """The rows of OUTPUTS_FILE in the directory of an evaluation, or in that of the audit above it."""
    file = (run / BEHAVIOUR if (run / BEHAVIOUR).is_dir() else run) / OUTPUTS_FILE
    rows = [json_object(line, where) for where, line in read_lines(file)]
    if not all("prompt_sha256" in row for row in rows):
        raise UsageError(f"{str(file)!r} is of an older posbias, which kept no hashes of prompts; evaluate again")
    return rows


def load_evaluation(run: Result | str | Path, purpose: str, *, made_by: str = "posbias evaluate") -> Evaluation:
    """A finished evaluation at one length, read from its directory, or from that of the audit above it.

    Raises:
        UsageError: no run there, an unfinished one, or another sort, such as at several lengths; the evaluations that
            it has are named, and by `purpose` what needs one.
    """
    if isinstance(run, Evaluation):
        return run
    if isinstance(run, Result):
        record = run.record
    else:
        below = Path(run) / BEHAVIOUR
        record = read_record(below if below.is_dir() else run)
    if record.verb != "evaluate" or record.status != "done":
        parts = [] if isinstance(run, Result) else sorted(str(file.parent) for file in Path(run).rglob(OUTPUTS_FILE))
        has = f"; it has {', '.join(parts)}" if parts else ""
        raise UsageError(f"{purpose} needs a finished run of {made_by}, got {record.verb!r} ({record.status}){has}")
    evaluation = result_of(record)
    assert isinstance(evaluation, Evaluation)
    return evaluation
