"""Influence and behaviour of one model: what weighs and what is used, on the very same prompts.

The model answers a task at several positions (`evaluate`); then, on each of those prompts, influence and theories are
summed over the tokens of the item that holds the answer and of every other place. Kinds that score tokens score the
first token of the right answer, where it is decided which item is used; the others look at the last position's output.

Beside an evaluation's record: arrays `influence/SOURCE[/KIND]/WHAT` [n_samples n_positions], shares of a prompt's
influence; scalars `influence`: {series: [{source, kind, what, means: [interval], correlations: {measure:
Correlations.as_record}}], left_out: [text]}.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from posbias.auditing.behaviour_cost import influence_cost
from posbias.auditing.behaviour_weighing import Name, Weighing
from posbias.checks import checked
from posbias.directories import held
from posbias.evaluation import (
    EvaluateOptions,
    Evaluation,
    Pair,
    correlate,
    evaluate,
    evaluation_record,
    finished_evaluation,
    write_outputs,
)
from posbias.evaluation.correlation import correct_for_number
from posbias.evaluation.pooling import array_name
from posbias.evaluation.record import BEHAVIOUR
from posbias.evaluation.responders import LocalOptions, LocalResponder
from posbias.evaluation.statistics import Scores, position_means
from posbias.measurement import Kind, resolve_kinds
from posbias.models import Model
from posbias.parts import PartStore, fingerprint, made_by
from posbias.records import REPORT_FILE, Record, remove_record, run_directory
from posbias.report import conclude, write_report
from posbias.tasks.language import LANGUAGE_TASKS, LanguageTask

DEFAULT_KINDS = ("jacobian(probes=2)", "logprob")


@checked
@dataclass(frozen=True)
class BehaviourPlan:
    """What is asked and measured."""

    task: str | LanguageTask
    evaluation: EvaluateOptions = field(default_factory=lambda: EvaluateOptions(count=16))
    """Contents, positions, seed; influence is measured on the same prompts. Its directory is set by the run."""
    kinds: tuple[str | Kind, ...] = DEFAULT_KINDS
    prompt_theories: bool = True
    """Whether theories that read every prompt are computed too; each takes as long as a few backward passes."""
    cost: Mapping[str, Any] | None = None
    """What `preflight_behaviour` expects of the influence; None: it is still to be asked."""

    @property
    def asked(self) -> LanguageTask:
        """The task as an object."""
        return LANGUAGE_TASKS.parse(self.task) if isinstance(self.task, str) else self.task


def preflight_behaviour(model: Model, plan: BehaviourPlan) -> BehaviourPlan:
    """The plan with the expected cost of the influence, before anything is asked or measured.

    Raises:
        UsageError: it does not fit into memory, a wrong task, or a tokenizer without offsets.
    """
    kinds = tuple(resolve_kinds(list(plan.kinds)))
    cost = influence_cost(model, plan.asked, kinds=kinds, options=plan.evaluation)
    return replace(plan, cost=cost)


def link_behaviour(audit: Record, directory: Path) -> Path:
    """Let the page of a finished audit lead to that of the behaviour below it, and draw it anew.

    Raises:
        RunError: the directory cannot be written.
    """
    related = {"behaviour: does what weighs also get used?": f"{BEHAVIOUR}/{REPORT_FILE}"}
    with held(directory):
        if audit.resolved.get("related") != related:
            audit.resolved["related"] = related
            audit.save(directory)
        return write_report([audit], directory)


@checked
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
        plan: Task, samples, kinds.
        out: Run directory; with it an interrupted run can be resumed.
        arguments: What the user passed, for the record.
        command: What repeats the run in a shell.

    Raises:
        UsageError: wrong input, a task whose items have no places, a tokenizer without offsets, or prompts that do not
            fit into memory.
        RunError: the run failed; finished samples and prompts are kept.
    """
    given = {"task": str(plan.asked), "count": plan.evaluation.count} if arguments is None else dict(arguments)
    kinds = resolve_kinds(list(plan.kinds))
    beside = {"kinds": [str(kind) for kind in kinds], "prompt_theories": plan.prompt_theories}
    with run_directory(out, verb="evaluate", arguments=given, resume=plan.evaluation.resume) as directory:
        options, responder = replace(plan.evaluation, directory=directory), LocalResponder(model, LocalOptions())
        finished = finished_evaluation(plan.asked, responder, options, **beside)
        if finished is not None and directory is not None:
            conclude(finished, directory, found=True)
            return finished
        plan = preflight_behaviour(model, plan) if plan.cost is None else plan
        evaluation = evaluate(plan.asked, responder, options=options)
        weighing = Weighing(
            model, kinds, evaluation, _store(model, evaluation, kinds, plan, directory), plan.prompt_theories
        )
        series, left_out = weighing.series()
        record = evaluation_record(evaluation, given, command=command)
        told = fingerprint({"evaluation": evaluation.fingerprint, **beside})
        record.resolved |= {"kinds": beside["kinds"], "fingerprint": told}
        if directory is not None and directory.name == BEHAVIOUR:
            record.resolved["related"] = {"the audit of the model": f"../{REPORT_FILE}"}
        record.scalars["cost_of_influence"] = dict(plan.cost or {})
        _store_correlations(record, evaluation, series, left_out)
        if directory is not None:
            remove_record(directory)  # of an older run, which had other outputs
            write_outputs(evaluation, directory)
            conclude(record, directory)
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


def _store_correlations(
    record: Record, evaluation: Evaluation, series: Mapping[tuple[Name, str], Scores], left_out: Sequence[str]
) -> None:
    entries = []
    for ((source, kind), what), table in series.items():
        record.arrays[array_name(source, kind, what)] = table
        entries.append(
            {
                "source": source,
                "kind": kind,
                "what": what,
                "means": [mean.as_record() for mean in position_means(table)],
                "correlations": dict(_correlations(evaluation, table)),
            }
        )
    correct_for_number(entries)
    record.scalars["influence"] = {"series": entries, "left_out": list(left_out)}


def _correlations(evaluation: Evaluation, table: Scores) -> Iterator[tuple[str, dict[str, Any]]]:
    """The correlations of one series with every measure that has samples in common with it."""
    for measure, scores in evaluation.measures.items():
        pair = Pair(table, scores, evaluation.positions, evaluation.n_items)
        if len(pair.complete):
            yield measure, correlate(pair, seed=evaluation.options.seed).as_record()
