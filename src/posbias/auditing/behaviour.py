"""The tie measured on one model: what weighs and what is used, on the very same prompts.

The model answers a task at several positions (`evaluate`); then, on each of those prompts, influence and theories are
summed over the tokens of the item that holds the answer and of every other place. Kinds that score tokens score the
first token of the right answer, where it is decided which item is used; the others look at the last position's output.

Beside an evaluation's record: arrays `tie/SOURCE[/KIND]/WHAT` [n_contents n_positions], shares of a prompt's influence;
scalars `tie`: {series: [{source, kind, what, means: [interval], ties: {measure: Tie.as_record}}], left_out: [text]}.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from posbias.auditing.behaviour_weighing import Name, Weighing
from posbias.comparison import interval_record
from posbias.evaluation import EvaluateOptions, Evaluation, Pair, evaluate, evaluation_record, tie, write_outputs
from posbias.evaluation.responders import LocalOptions, LocalResponder
from posbias.evaluation.statistics import Scores, holm, position_means
from posbias.evaluation.ties import CONTROLS
from posbias.measurement import Kind, resolve_kinds
from posbias.models import Model
from posbias.parts import PartStore, clear_parts, made_by
from posbias.records import Record, run_directory
from posbias.report.behaviour import write_behaviour_report
from posbias.tasks.language import LANGUAGE_TASKS, LanguageTask

DEFAULT_KINDS = ("jacobian(probes=2)", "logprob")
LEVEL = 0.05
"""Of a corrected p-value."""


@dataclass(frozen=True)
class BehaviourPlan:
    """What is asked and measured."""

    task: str | LanguageTask
    evaluation: EvaluateOptions = field(default_factory=lambda: EvaluateOptions(count=16))
    """Contents, positions, seed; influence is measured on the same prompts. Its directory is set by the run."""
    kinds: tuple[str | Kind, ...] = DEFAULT_KINDS
    prompt_theories: bool = True
    """Whether theories that read every prompt are computed too; each takes as long as a few backward passes."""

    @property
    def asked(self) -> LanguageTask:
        """The task as an object."""
        return LANGUAGE_TASKS.parse(self.task) if isinstance(self.task, str) else self.task


def audit_behaviour(
    model: Model,
    plan: BehaviourPlan,
    *,
    out: str | Path | None = None,
    arguments: Mapping[str, Any] | None = None,
    command: str = "",
) -> Record:
    """Answers by position, influence and theories of the same prompts, and how they hang together.

    Args:
        model: With a tokenizer that knows character offsets.
        plan: Task, contents, kinds.
        out: Run directory; with it an interrupted run can be resumed.
        arguments: What the user passed, for the record.
        command: What repeats the run in a shell.

    Raises:
        UsageError: wrong input, a task whose items have no places, or a tokenizer without offsets.
        RunError: the run failed; finished contents and prompts are kept.
    """
    given = {"task": str(plan.asked), "count": plan.evaluation.count} if arguments is None else dict(arguments)
    kinds = resolve_kinds(list(plan.kinds))
    with run_directory(out, verb="evaluate", arguments=given) as directory:
        options = replace(plan.evaluation, directory=directory)
        evaluation = evaluate(plan.asked, LocalResponder(model, LocalOptions()), options=options)
        weighing = Weighing(
            model, kinds, evaluation, _store(model, evaluation, kinds, plan, directory), plan.prompt_theories
        )
        series, left_out = weighing.series()
        record = evaluation_record(evaluation, given, command=command)
        record.resolved["kinds"] = [str(kind) for kind in kinds]
        _store_tie(record, evaluation, series, left_out)
        if directory is not None:
            write_outputs(evaluation, directory)
            record.save(directory)
            write_behaviour_report(record, directory)
            clear_parts(directory)
    return record


def _store(
    model: Model, evaluation: Evaluation, kinds: Sequence[Kind], plan: BehaviourPlan, directory: Path | None
) -> PartStore:
    """Where measured prompts are kept, beside the answers, which were already taken over or begun anew."""
    settings = {
        "verb": "audit_behaviour",
        "model": model.describe(),
        "kinds": [str(kind) for kind in kinds],
        "prompt_theories": plan.prompt_theories,
        "positions": list(evaluation.positions),
        "seed": evaluation.options.seed,
        "made_by": made_by(),
    }
    return PartStore(directory, settings, resume=True)


def _store_tie(
    record: Record, evaluation: Evaluation, series: Mapping[tuple[Name, str], Scores], left_out: Sequence[str]
) -> None:
    entries = []
    for ((source, kind), what), table in series.items():
        record.arrays["/".join(["tie", source, *([] if kind is None else [kind]), what])] = table
        generator = np.random.default_rng(evaluation.options.seed)
        entries.append(
            {
                "source": source,
                "kind": kind,
                "what": what,
                "means": [interval_record(mean) for mean in position_means(table, generator=generator)],
                "ties": dict(_ties(evaluation, table)),
            }
        )
    correct_for_number(entries)
    record.scalars["tie"] = {"series": entries, "left_out": list(left_out)}


def correct_for_number(entries: Sequence[Mapping[str, Any]]) -> None:
    """Correct the p-values for the number of series and measures (Holm, for each control by itself), in place.

    A tie then counts as established only where the corrected p-value is at most 0.05, too.
    """
    for controlled in CONTROLS:
        family = [
            correlation
            for entry in entries
            for found in entry["ties"].values()
            for correlation in found["correlations"]
            if correlation["controlled"] == controlled and correlation["p"] is not None
        ]
        adjusted = holm(np.array([correlation["p"] for correlation in family]))
        for correlation, p_value in zip(family, adjusted, strict=True):
            correlation["adjusted_p"] = float(p_value)
            correlation["established"] = bool(correlation["established"] and p_value <= LEVEL)


def _ties(evaluation: Evaluation, table: Scores) -> Iterator[tuple[str, dict[str, Any]]]:
    """The tie of one series to every measure that has contents in common with it."""
    for measure, scores in evaluation.measures.items():
        pair = Pair(table, scores, evaluation.positions, evaluation.n_items)
        if len(pair.complete[0]):
            yield measure, tie(pair, seed=evaluation.options.seed).as_record()
