"""`posbias audit`: the whole examination of one model."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from annotated_types import Ge

from posbias.auditing.options import AuditOptions
from posbias.cli import options
from posbias.cli.output import print_json, print_record, record_document, running, say
from posbias.evaluation.options import EvaluateOptions
from posbias.measurement.options import PassOptions

if TYPE_CHECKING:
    from posbias.evaluation.correlate import BehaviourPlan


@dataclass(frozen=True)
class BehaviourFlags:
    """Task that the model answers beside the audit."""

    behaviour: str | None = None
    """Correlate influence with the answers to a task, e.g. 'key_value(pairs=10)'."""
    behaviour_count: Annotated[int, Ge(1)] | None = None
    """Samples of the task; by default 12, of a file with fewer all."""
    behaviour_positions: str = "spread(5)"
    """all, spread(5), or some such as 0,4,9."""
    behaviour_max_tokens: Annotated[int, Ge(1)] | None = None
    """Tokens generated at most; by default the task's own number."""
    behaviour_kinds: str = "jacobian(probes=2),logprob"
    """Kinds of influence on the task's prompts, as for --kinds."""

    def plan(self, settings: AuditOptions) -> "BehaviourPlan | None":
        """What is evaluated and measured on the task beside an audit with these settings, if there is a task."""
        from posbias.evaluation.correlate import BehaviourPlan
        from posbias.measurement.kinds import resolve_kinds
        from posbias.tasks.language import LANGUAGE_TASKS

        if self.behaviour is None:
            return None
        task = LANGUAGE_TASKS.parse(self.behaviour)
        evaluation = EvaluateOptions(
            count=self.behaviour_count,
            positions=self.behaviour_positions,
            max_tokens=self.behaviour_max_tokens,
            seed=settings.seed,
            resume=settings.resume,
            overwrite=settings.overwrite,
        )
        evaluation = replace(evaluation, count=evaluation.count_of(task, usual=12))
        kinds = resolve_kinds(self.behaviour_kinds)
        return BehaviourPlan(task, evaluation.following(task), kinds)


def audit(
    model: str,
    *,
    prompts: options.PromptFlags,
    settings: AuditOptions,
    passes: Annotated[PassOptions, options.Take("output", "layers")],
    behaviour: BehaviourFlags,
    engine: options.EngineFlags,
    out: Path | None = None,
    flags: options.Printed,
) -> None:
    """Examine a model's position bias, trained and at initialisation.

    Measures the model, compares every theory with the measurement, and each with a flat line.

    Args:
        model: Hub id, directory, file.gguf, 'demo' or 'config:PATH_OR_ID'.
        out: Directory for record and report; by default runs/MODEL.

    Examples: `posbias audit demo --out runs/demo` · `posbias audit Qwen/Qwen3-0.6B --length 1024 --count 32 --prompts
    corpus.jsonl` · continue after an interruption: the same command with `--resume`
    """
    from posbias.auditing.run import audit as run_audit
    from posbias.auditing.run import audit_behaviour, link_behaviour
    from posbias.evaluation.correlate import check_behaviour
    from posbias.evaluation.evaluation import BEHAVIOUR
    from posbias.results.records import REPORT_FILE
    from posbias.runs.running import directory_names

    plan = behaviour.plan(settings)
    if plan is None:
        flags.refuse(options.names_of(BehaviourFlags), "needs a task: --behaviour 'key_value(pairs=10)'")
    options.check_rendered(settings.template_options, rendered=plan is not None and plan.task.by_template)
    directory = out or Path("runs") / next(iter(directory_names([model])))
    settings = replace(settings, source=prompts.source, engine=engine.of(settings.engine))
    flags = replace(flags, out=directory, overwrite=settings.overwrite)
    subject: Any = model
    if plan is not None:
        subject = settings.load(model)
        check_behaviour(subject, plan)
    with running(flags):
        audited = run_audit(subject, n_positions=prompts.length, prompts=prompts.count, out=directory, options=settings)
    records = {directory: audited.record}
    if plan is not None:
        beside = directory / BEHAVIOUR
        with running(replace(flags, out=beside)):
            answered = audit_behaviour(subject, plan, out=beside)
        link_behaviour(audited.record, directory)
        records[beside] = answered.record
    if flags.json:
        finished, *answers = map(record_document, records.values())
        print_json({**finished, **({"behaviour": answers[0]} if answers else {})})
        return
    for place, record in records.items():
        print_record(record)
        say(f"report: {place / REPORT_FILE}")
