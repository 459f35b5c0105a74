"""The behaviour of an audited model: its answers to a task, and influence on the same prompts, as a run of its own."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from posbias.checks import checked
from posbias.evaluation import Evaluation, evaluate_responder, write_outputs
from posbias.evaluation.evaluation import BEHAVIOUR
from posbias.evaluation.influence import BehaviourPlan, check_behaviour, with_influence
from posbias.evaluation.responders import LocalOptions, LocalResponder
from posbias.models.model import Model
from posbias.report import conclude, write_report
from posbias.runs.records import REPORT_FILE, Record
from posbias.runs.running import held, run_directory


@checked
def link_behaviour(audit: Record, directory: Path) -> Path:
    """Let the page of a finished audit lead to that of the behaviour below it, and draw it anew."""
    related = {"behaviour: does what weighs also get used?": f"{BEHAVIOUR}/{REPORT_FILE}"}
    with held(directory):
        if audit.resolved.get("related") != related:
            audit.resolved["related"] = related
            audit.write_run(directory)
        return write_report([audit], directory)


@checked
def audit_behaviour(
    model: Model,
    plan: BehaviourPlan,
    *,
    out: str | Path | None = None,
    arguments: Mapping[str, Any] | None = None,
    command: str = "",
) -> Evaluation:
    """Answers by position, influence and theories of the same prompts, and how they hang together.

    Args:
        model: With a tokenizer that knows character offsets.
        plan: Task, samples, kinds.
        out: Run directory; with it an interrupted run can be resumed.
        arguments, command: As the user passed them, for the record.

    Raises:
        UsageError: wrong input, a task whose items have no places, a tokenizer without offsets, or prompts that do not
            fit into memory.
        RunError: the run failed; finished samples and prompts are kept.
    """
    passed = {"task": str(plan.asked), "count": plan.evaluation.count} if arguments is None else dict(arguments)
    resume, overwrite = plan.evaluation.resume, plan.evaluation.overwrite
    with run_directory(
        out, verb="evaluate", arguments=passed, command=command, resume=resume, overwrite=overwrite
    ) as run:
        directory = run.directory
        options, responder = replace(plan.evaluation, directory=directory), LocalResponder(model, LocalOptions())
        check_behaviour(model, plan)
        evaluation = evaluate_responder(responder, plan.asked, options, beside=plan.measured)
        if evaluation.found and directory is not None:
            conclude(evaluation, directory, found=True)
            return evaluation
        evaluation.record.called(passed, command)
        if directory is not None and directory.name == BEHAVIOUR:
            evaluation.record.resolved["related"] = {"the audit of the model": f"../{REPORT_FILE}"}
        evaluation = with_influence(model, plan, evaluation, directory)
        if directory is not None:
            write_outputs(evaluation, directory)
            conclude(evaluation, directory)
    return evaluation
