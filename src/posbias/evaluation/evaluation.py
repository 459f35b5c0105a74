"""The result of `evaluate`: answers of a model to one task, as stored and as read back.

The record has the verb "evaluate". Arrays: `positions` [n_positions] int64; `scores/NAME` [n_samples n_positions], NaN
if there is none, NAME as in `Evaluation.tables`; with influence on the same prompts `influence/SOURCE[/KIND]/WHAT`
[n_samples n_positions], shares of a prompt's influence. Scalars: the fields of `Evaluation` under their names. The
texts go beside it, one JSON object per line.

What cannot be judged (cut off, unread, empty, refused) counts as wrong, or is missing, and need not be like the rest.
So there is one rule: if more than a tenth of the answers are of any of these kinds, nothing is concluded from them.
"""

import json
from collections import Counter
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
from posbias.evaluation.recovery import Recovery
from posbias.evaluation.responders.base import REFUSED
from posbias.files import json_object, read_lines, write_file
from posbias.results.records import Record, read_record, remove_record
from posbias.results.result import RESULTS, Result, from_stored, result_of
from posbias.results.showing import Shown
from posbias.statistics import Interval, StoredInterval, StoredNumber, bounded_mean

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


UNJUDGED = {
    "too_long": "longer than the model's context",
    "refused": "refused by the server",
    "unfinished": "still within thoughts",
    "cut_off": "cut off before what the task's rule reads was complete",
    "empty": "empty",
    "unread": "without what the task's rule judges (a verdict, letter, number or call)",
}
"""Reasons why there is no answer to judge. Prompts of the first two are left out, answers of the others are wrong."""
IN_A_VERDICT = {"cut_off": "cut off too early", "unread": "unreadable"}
"""The longer of these reasons as a verdict has them, which is a line."""
LEFT_OUT = ("too_long", "refused")
MOST_UNJUDGED = 0.1
"""Share of the answers that may not be judged; beyond it nothing is concluded from the others."""


@dataclass(frozen=True)
class Reading:
    """Counts of the answers of one evaluation that were judged, and of those that could not be."""

    answers: int = 0
    """Answers, and prompts that a server refused."""
    unjudged: Mapping[str, int] = field(default_factory=dict)
    """Those without anything to judge, by their reason in `UNJUDGED`."""
    thought: int = 0
    """Answers that came with thoughts, finished or not."""
    right: StoredNumber = np.nan
    """Share of the answers that is right by the task's rule; NaN if there is none."""

    @property
    def withheld(self) -> str:
        """Why nothing is concluded from the answers, as a clause; empty if enough of them could be judged."""
        lost = sum(self.unjudged.values())
        if lost <= MOST_UNJUDGED * self.answers:
            return ""
        words = UNJUDGED | IN_A_VERDICT
        kinds = [f"{self.unjudged[reason]} {words[reason]}" for reason in UNJUDGED if reason in self.unjudged]
        return f"{lost} of {self.answers} answers cannot be judged, more than {MOST_UNJUDGED:.0%}: {', '.join(kinds)}"


def reading_of(correct: Scores, outputs: Sequence[Mapping[str, Any]]) -> Reading:
    """Count the answers of `Evaluation.outputs`, right or wrong as the table has them; nothing is generated: 0."""
    if all(row["text"] is None for row in outputs):
        return Reading()
    reasons = Counter(row["unjudged"] for row in outputs if row["unjudged"] not in (None, "too_long"))
    answers = sum(row["text"] is not None or row["finish"] == REFUSED for row in outputs)
    thought = sum(bool((row["thoughts"] or "").strip()) for row in outputs)
    return Reading(answers, dict(reasons), thought, np.nan if np.isnan(correct).all() else float(np.nanmean(correct)))


@dataclass(frozen=True)
class Verdicts:
    """Rates of a judge's verdicts on pairs of responses; intervals are over pairs, or over their groups."""

    accuracy: StoredInterval
    """Share of right verdicts, over both orders; a tie is wrong, as is what cannot be read."""
    flip_rate: StoredInterval
    """Share of pairs whose preferred response changes with the order, the same slot being named twice; of pairs with a
    response named in both orders."""
    first_pick: StoredInterval
    """Share of verdicts that name the first response, in the same pairs; 1/2 without position bias."""
    tie_rate: StoredInterval
    """Share of ties among the verdicts of pairs with one in both orders."""
    n_both: int
    """Pairs with a response named in both orders."""
    ties: int
    """Answers that call a tie."""


def judge_verdicts(tables: Mapping[str, Scores]) -> Verdicts:
    """Rates of verdicts in both orders: the better response stands in slot 0 (column 0), then in slot 1.

    Args:
        tables: As `Evaluation.tables`. `correct`: 1 if the verdict is right, NaN if the prompt was skipped;
            `first_pick`: 1 if it names the first slot, 0 if the second, NaN if it names none; `tie`: 1 if it is a tie,
            0 if it names a response, NaN else. Pairs of one group are one independent unit, their mean.
    """
    first_pick, tie = tables["first_pick"], tables["tie"]

    def rate(values: Scores) -> Interval:
        """The mean over both orders, NaN where one lacks, whatever its distribution; infinite if there is none."""
        means = independent(values.mean(axis=1, keepdims=True), tables)[:, 0]
        known = means[~np.isnan(means)]
        return bounded_mean(known) if len(known) else Interval(np.nan, -np.inf, np.inf)

    flipped = np.where(np.isnan(first_pick).any(axis=1), np.nan, first_pick[:, 0] == first_pick[:, 1])
    return Verdicts(
        accuracy=rate(tables["correct"]),
        flip_rate=rate(flipped[:, None]),
        first_pick=rate(first_pick),
        tie_rate=rate(tie),
        n_both=int((~np.isnan(flipped)).sum()),
        ties=int(np.nansum(tie)),
    )


@dataclass(frozen=True)
class Unjudged:
    """One prompt without an answer that could be judged."""

    sample: str
    position: int | None
    reason: str
    """A key of `UNJUDGED`."""
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
