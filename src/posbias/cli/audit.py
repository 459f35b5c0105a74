"""`posbias audit`: the whole examination of one model."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from posbias.cli import options
from posbias.cli.output import print_json, print_record, record_document, say

if TYPE_CHECKING:
    from posbias.auditing import AuditOptions, BehaviourPlan
    from posbias.runs.records import Record

EXAMPLE = (
    "Examples: `posbias audit demo --out runs/demo` · `posbias audit Qwen/Qwen3-0.6B --length 1024 --count 32 "
    "--prompts corpus.jsonl` · continue after an interruption: the same command with `--resume`"
)


@dataclass(frozen=True)
class BehaviourFlags:
    """The task that is put to the model beside the audit."""

    behaviour: Annotated[
        str | None,
        typer.Option(
            help="Correlate influence with the answers to a task, e.g. 'key_value(pairs=10)'.", show_default=False
        ),
    ] = None
    behaviour_count: Annotated[int, typer.Option(help="Samples.", min=1)] = 12
    behaviour_positions: Annotated[str, typer.Option(help="all, spread(5), or some such as 0,4,9.")] = "spread(5)"
    behaviour_tokens: Annotated[
        int | None, typer.Option(help="Generated at most.", min=1, show_default="the task's own")
    ] = None
    behaviour_kinds: Annotated[str, typer.Option(help="Kinds of influence on the task's prompts; as --kinds.")] = (
        "jacobian(probes=2),logprob"
    )
    behaviour_theories: Annotated[
        bool, typer.Option(help="Theories that read each of the task's prompts: the slower ones.")
    ] = True

    def plan(self, spelled: str, settings: "AuditOptions") -> "BehaviourPlan":
        """What is evaluated and measured where `spelled` is the task."""
        from posbias.auditing import BehaviourPlan
        from posbias.evaluation import EvaluateOptions
        from posbias.measurement.kinds import resolve_kinds
        from posbias.tasks.language import LANGUAGE_TASKS

        task = LANGUAGE_TASKS.parse(spelled)
        evaluation = EvaluateOptions(
            count=self.behaviour_count,
            positions=self.behaviour_positions,
            max_tokens=self.behaviour_tokens,
            seed=settings.seed,
            resume=settings.resume,
            overwrite=settings.overwrite,
            max_memory=settings.max_memory,
        )
        evaluation.positions_of(task)  # refused before a model is loaded
        kinds = resolve_kinds(options.split_literals(self.behaviour_kinds))
        return BehaviourPlan(task, evaluation, kinds, self.behaviour_theories)


@options.grouped
def audit(
    context: typer.Context,
    model: options.Model,
    *,
    prompts: options.PromptFlags,
    kinds: options.Kinds = "jacobian,probability",
    initialisations: Annotated[
        int | None, typer.Option(help="Re-initialisations to measure; default: up to 8.", min=0, show_default=False)
    ] = None,
    loading: options.ModelFlags,
    checkpointing: options.Checkpointing = False,
    precision_prompts: options.PrecisionPrompts = 1,
    behaviour: BehaviourFlags,
    engine: options.EngineFlags,
    max_memory: options.MaxMemory = None,
    seed: options.Seed = 0,
    resume: options.Resume = False,
    overwrite: options.Overwrite = False,
    out: Annotated[Path | None, options.out_option("Directory for record and report.", default="runs/MODEL")] = None,
    json: options.Json = False,
) -> None:
    """Examine a model trained and at initialisation. Every theory stands beside it; writes record and report."""
    from posbias.auditing import AuditOptions, audit_behaviour, directory_names, link_behaviour, preflight_behaviour
    from posbias.auditing import audit as run_audit
    from posbias.evaluation.evaluation import BEHAVIOUR
    from posbias.measurement.outputs import PassOptions

    if behaviour.behaviour is None:
        options.refuse(context, options.names_of(BehaviourFlags), "needs a task: --behaviour 'key_value(pairs=10)'")
    directory = out or Path("runs") / next(iter(directory_names([model])))
    settings = AuditOptions(
        source=prompts.source,
        kinds=tuple(options.split_literals(kinds)),
        seed=seed,
        initialisations=initialisations,
        resume=resume,
        overwrite=overwrite,
        passes=PassOptions(checkpointing=checkpointing, precision_prompts=precision_prompts),
        **vars(loading),
        max_memory=options.bytes_of(max_memory),
        engine=engine.made(),
        command=options.command_line(context),
    )
    if behaviour.behaviour is None:
        finished = run_audit(model, n_positions=prompts.length, prompts=prompts.count, out=directory, options=settings)
        if json:
            print_json(record_document(finished.record))
        else:
            _show(finished.record, directory)
        return
    plan = behaviour.plan(behaviour.behaviour, settings)
    loaded = loading.load(model, max_memory=settings.max_memory)
    plan = preflight_behaviour(loaded, plan)
    finished = run_audit(loaded, n_positions=prompts.length, prompts=prompts.count, out=directory, options=settings)
    arguments = {**options.passed_arguments(context), "out": str(directory)}
    answered = audit_behaviour(loaded, plan, out=directory / BEHAVIOUR, arguments=arguments, command=settings.command)
    link_behaviour(finished.record, directory)
    if json:
        print_json({**record_document(finished.record), "behaviour": record_document(answered)})
    else:
        _show(finished.record, directory)
        _show(answered, directory / BEHAVIOUR)


def _show(record: "Record", directory: Path) -> None:
    from posbias.runs.records import REPORT_FILE

    print_record(record)
    say(f"report: {directory / REPORT_FILE}")
