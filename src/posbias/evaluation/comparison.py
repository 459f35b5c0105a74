"""Several evaluations of one task side by side: what differs from the first, paired over the same samples.

Before and after quantising, with a longer context, under a method, or another model. The endpoints of every other
evaluation (mean, worst position, spread) are one family of tests, its differences by position another; both are
corrected (Holm) over all evaluations. A difference that rare ones the other way, in no sample, could undo is none.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any, ClassVar

import numpy as np
from pydantic import InstanceOf

from posbias.checks import checked
from posbias.errors import UsageError
from posbias.evaluation.curve import ALPHA, SAMPLES_FOR_CLAIM, Change, Scores, position_means
from posbias.evaluation.evaluation import MEASURES, SCORES, Evaluation, load_evaluation, measures_of
from posbias.evaluation.levels import (
    MEAN,
    SPREAD,
    WORST,
    RequirementCheck,
    change_between,
    changes_of,
    samples_needed,
)
from posbias.evaluation.recovery import gains_of, recovery_less
from posbias.results.figures import MEASURED, Curve
from posbias.results.naming import numbered
from posbias.results.records import Record, plain
from posbias.results.result import COMPARISONS, RESULTS, Result
from posbias.results.showing import Shown
from posbias.statistics import StoredInterval, holm_over
from posbias.tasks.language import LANGUAGE_TASKS

SAME = ("task", "file_sha256", "skip", "max_tokens", "thinking_tokens", "answer_pattern")
"""Settings that evaluations must share to be paired."""


@dataclass(frozen=True)
class Compared:
    """One evaluation beside the first; of the first itself only names and means."""

    name: str
    means: tuple[StoredInterval, ...]
    """Mean at every shared position."""
    changes: Mapping[str, Change] = field(default_factory=dict)
    """Its mean, worst position and spread less those of the first; empty for the first, or with too few samples."""
    p: Mapping[str, float] = field(default_factory=dict)
    """Holm-corrected p-values of these changes."""
    differences: tuple[Change, ...] = ()
    """Its mean less the first's, at every position."""
    difference_p: tuple[float, ...] = ()
    """Holm-corrected p-values of the differences."""
    withheld: str = ""
    """Why its generated answers decide nothing, as `Evaluation.withheld`."""
    recovery: tuple[StoredInterval, ...] = ()
    """Its recovery less the first's: mean over positions, then at each; the ends hold for all evaluations at once."""
    no_recovery: str = ""
    """Why its recovery, which was measured, is not compared."""

    @property
    def rises(self) -> dict[str, bool]:
        """The changes that are established, by endpoint: True for a rise, False for a fall."""
        return {name: change.value.value > 0 for name, change in self.changes.items() if self.p[name] < ALPHA}


@RESULTS.register("compare_evaluations")
@dataclass(frozen=True, eq=False, repr=False)
class EvaluationComparison(Result):
    """Evaluations of one task on the same samples, each less the first."""

    drawn_by: ClassVar = "posbias.evaluation.finished_page:evaluation_comparison_report"
    record: InstanceOf[Record]
    task: str
    measure: str
    """A key of `MEASURES`."""
    positions: tuple[int, ...]
    n_items: int
    n_samples: int
    """Samples that are complete in all evaluations."""
    samples_needed: int
    """Complete samples below which nothing is compared."""
    compared: tuple[Compared, ...]
    """The first, then the others."""
    evaluations: Mapping[str, InstanceOf[Evaluation]] = field(default_factory=dict)
    """All of them if they were made for the comparison, by the names of their directories, where a run that is read
    back has them."""
    requirement: RequirementCheck | None = None
    """The check of a bound that was required, the first that fails; None if there was none."""

    def shown(self) -> Shown:
        """A curve for every evaluation."""
        first, *others = (Curve.of_intervals(entry.name, self.positions, entry.means) for entry in self.compared)
        curves = (replace(first, stroke=MEASURED), *others)
        measure = MEASURES[self.measure]
        title = f"{self.task}: {measure} by position"
        return Shown(title, curves, measure)


@checked
def compare_evaluations(evaluations: Sequence[Any], *, names: Sequence[str] = ()) -> EvaluationComparison:
    """Evaluations of one task on the same samples, each less the first, by the first measure that all of them have.

    Args:
        evaluations: Two or more `Evaluation` results or directories of finished runs; the first is the baseline. The
            first samples and the positions that all of them have are compared.
        names: What they are called; by default by their models.

    Raises:
        UsageError: fewer than two, other settings or samples, several lengths, or no measure that all of them have.
    """
    loaded = [load_evaluation(evaluation, "a comparison") for evaluation in evaluations]
    _check_paired(loaded)
    first = loaded[0]
    measure, tables = _chosen(loaded)
    positions = [place for place in first.positions if all(place in other.positions for other in loaded)]
    if not positions:
        raise UsageError("the evaluations share no position, so nothing can be compared")
    count, columns = min(map(len, tables)), ([run.positions.index(place) for place in positions] for run in loaded)
    shared = [table[:count, places] for table, places in zip(tables, columns, strict=True)]
    needed, complete = samples_needed(np.hstack(shared)), ~np.isnan(np.hstack(shared)).any(axis=1)
    baseline, *others = paired = [table[complete] for table in shared]
    decided = all(measure in run.measures for run in loaded)  # what withheld answers would say is shown, not compared
    named, n_samples = names or _names(loaded), int(complete.sum())
    means = [position_means(table) if n_samples else () for table in paired]
    compared = [
        Compared(name, mean, withheld=run.withheld) for name, mean, run in zip(named, means, loaded, strict=True)
    ]
    if n_samples >= needed and decided:
        compared[1:] = _tested(compared[1:], baseline, others)
    if all(run.recovery is not None for run in loaded):
        compared = _with_recovery(compared, loaded, positions, count)
    resolved = {
        "title": f"{first.task}: {', '.join(named[1:])} beside {named[0]}",
        "task": first.task,
        "runs": [evaluation.record.run_id for evaluation in loaded],
        "measure": measure,
        "positions": positions,
    }
    record = Record("compare_evaluations", {"measure": measure}, resolved, seeds=dict(first.record.seeds))
    record.scalars = {"n_items": first.n_items, "n_samples": n_samples, "samples_needed": needed}
    record.scalars["compared"] = [plain(asdict(entry)) for entry in compared]
    record.arrays = {f"{SCORES}{number}": table for number, table in enumerate(paired)}
    return EvaluationComparison.from_record(record)


def _tested(compared: Sequence[Compared], baseline: Scores, others: Sequence[Scores]) -> list[Compared]:
    """Evaluations with what differs from the baseline, on complete samples, p-values corrected over all of them."""
    found = [changes_of(baseline, other) for other in others]
    changes = [{name: of[name].confirmed() for name in (MEAN, WORST, SPREAD)} for of in found]
    places = [[change_between(*pair).confirmed() for pair in zip(other.T, baseline.T, strict=True)] for other in others]
    changes_p = holm_over([{name: change.p for name, change in of.items()} for of in changes])
    places_p = holm_over([dict(enumerate(change.p for change in of)) for of in places])
    return [
        replace(entry, changes=of, p=p, differences=tuple(at), difference_p=tuple(at_p.values()))
        for entry, of, p, at, at_p in zip(compared, changes, changes_p, places, places_p, strict=True)
    ]


def _with_recovery(
    compared: Sequence[Compared], evaluations: Sequence[Evaluation], positions: Sequence[int], count: int
) -> list[Compared]:
    """Evaluations with their recovery less the first's, on the samples that are scored throughout in both."""
    undefined = [run.recovery.undefined if run.recovery else "" for run in evaluations]
    gains = [
        gains_of(run.tables)[:count, [0, *(run.positions.index(place) + 1 for place in positions)]]
        for run in evaluations
    ]
    found = [compared[0]]
    for entry, new, why in zip(compared[1:], gains[1:], undefined[1:], strict=True):
        complete = ~np.isnan(np.hstack([gains[0], new])).any(axis=1)
        if not (why := undefined[0] or why) and complete.sum() < SAMPLES_FOR_CLAIM:
            why = f"{complete.sum()} samples are scored throughout in both, {SAMPLES_FOR_CLAIM} are needed"
        seed, tests = evaluations[0].record.seeds["samples"], len(compared) - 1
        less = () if why else recovery_less(new[complete], gains[0][complete], seed=seed, tests=tests)
        found.append(replace(entry, recovery=less, no_recovery=why))
    return found


def _check_paired(evaluations: Sequence[Evaluation]) -> None:
    """Refuse evaluations that do not share what pairs them; the words in which a judge is asked may differ."""
    if len(evaluations) < 2:
        raise UsageError(f"a comparison needs at least 2 evaluations, got {len(evaluations)}")
    if "cluster" in evaluations[0].tables and len({evaluation.count for evaluation in evaluations}) > 1:
        raise UsageError("evaluations whose samples form groups are compared if they have as many samples")

    def unworded(task: Any) -> str:
        parsed: Any = LANGUAGE_TASKS.parse(task)
        defaults = {field.name: field.default for field in fields(parsed)}
        return str(replace(parsed, **{name: defaults[name] for name in (*getattr(parsed, "wording", ()), "chat")}))

    asked = [{**dict.fromkeys(SAME), **run.record.resolved, "seed": run.record.seeds["samples"]} for run in evaluations]
    for name in (*SAME, "seed"):
        for other in asked[1:]:
            one, another = asked[0][name], other[name]
            if one != another and not (name == "task" and unworded(one) == unworded(another)):
                raise UsageError(f"evaluations with another {name} cannot be paired: {one!r:.100} and {another!r:.100}")


def _chosen(evaluations: Sequence[Evaluation]) -> tuple[str, list[Any]]:
    """A measure that all evaluations have, or else one that some withhold, and each one's table of it.

    Raises:
        UsageError: they have none in common.
    """
    tables: list[Mapping[str, Any]] = [evaluation.measures for evaluation in evaluations]
    if not set.intersection(*map(set, tables)) and any(evaluation.withheld for evaluation in evaluations):
        tables = [measures_of(evaluation.tables) for evaluation in evaluations]
    measure = next((name for name in MEASURES if all(name in table for table in tables)), None)
    if measure is None:
        has = (", ".join(run.measures) or "none, no answer could be judged" for run in evaluations)
        told = "; ".join(f"{run.title} has {names}" for run, names in zip(evaluations, has, strict=True))
        raise UsageError(f"a comparison needs a measure that all evaluations have: {told}")
    return measure, [table[measure] for table in tables]


@COMPARISONS.register("evaluate_lengths")  # which are refused by name
@COMPARISONS.register("evaluate")
def _pair(first: Result, second: Result) -> EvaluationComparison:
    """Two finished evaluations; the first is the baseline."""
    return compare_evaluations([first, second])


def _names(evaluations: Sequence[Evaluation]) -> list[str]:
    """Names that tell evaluations apart: the model with its method, the server's address, else a number."""
    same = len({evaluation.task for evaluation in evaluations}) == 1
    titles = [run.title.removesuffix(f": {run.task}") if same else run.title for run in evaluations]
    places = [str(evaluation.responder.get("address", "")).partition("//")[2] for evaluation in evaluations]
    pairs = list(zip(titles, places, strict=True))
    return numbered([f"{title} at {place}" if place and titles.count(title) > 1 else title for title, place in pairs])
