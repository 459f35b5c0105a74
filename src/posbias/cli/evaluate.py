"""`posbias evaluate`: how well a model answers, by the position of the answer in its context."""

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from posbias.cli import options
from posbias.cli.output import running, say
from posbias.errors import RunError, UsageError

if TYPE_CHECKING:
    from posbias.evaluation import EvaluateOptions
    from posbias.evaluation.levels import Requirement, RequirementCheck
    from posbias.evaluation.responders import Responder, ServerResponder
    from posbias.tasks.language import LanguageTask

EXAMPLE = (
    "Examples: `posbias evaluate demo --task 'key_value(pairs=10)' --out runs/pairs` · a server: `posbias evaluate "
    "--server http://localhost:8000/v1 --served-model NAME --task 'documents(documents=10)' --out runs/server` · after "
    "an interruption the same command with `--resume` · tasks: `posbias list tasks`"
)
ANSWERS = "answers"
"""Folder of a server's answers, below the run directory."""
OWN_OPTIONS = {"cache", "reuse", "template_options"}
"""Options of a server that other flags set."""


@dataclass(frozen=True)
class DesignFlags:
    """Lengths that are compared, and how many samples are asked."""

    lengths: Annotated[
        str,
        typer.Option(help="Prompt lengths in tokens, such as 1024,4096,16384.", show_default="the task's own length"),
    ] = ""
    threshold: Annotated[float, typer.Option(help="Accuracy that defines the effective length.")] = 0.8
    methods: Annotated[
        str,
        typer.Option(
            help="Evaluate the first model under these too: recipes that `mitigate` wrote, or spelled methods.",
            show_default="none",
        ),
    ] = ""


@dataclass(frozen=True)
class TaskFlags:
    """The task, and what is done with it."""

    task: Annotated[str, typer.Option(help="Task, with its options in parentheses (`posbias list tasks`).")] = (
        "key_value(pairs=10)"
    )
    positions: Annotated[str, typer.Option(help="all, spread (at most 9), spread(5), or some such as 0,4,9.")] = (
        "spread"
    )
    count: Annotated[
        int | None,
        typer.Option(
            help="Samples, each requested at every position.",
            min=1,
            show_default="50, to judge methods 40; of a file with fewer all",
        ),
    ] = None
    max_tokens: Annotated[
        int | None, typer.Option(help="Most tokens of an answer.", min=1, show_default="the task's own")
    ] = None
    thinking_tokens: Annotated[
        int, typer.Option(help="Most additional tokens for thoughts before the answer.", min=0)
    ] = 0
    answer_pattern: Annotated[
        str | None,
        typer.Option(
            help="Regular expression whose group is the answer; the rest counts as thoughts.",
            show_default="marks such as <think>",
        ),
    ] = None
    template_options: options.TemplateOptions = ""
    allow_code: Annotated[bool, typer.Option("--allow-code", help="Let a task run Python code that it names.")] = False
    generate: Annotated[bool, typer.Option(help="Generate answers and judge them by the task's rule.")] = True
    score: Annotated[bool, typer.Option(help="Score the right answer by teacher forcing.")] = True

    def settings(
        self,
        *,
        seed: int,
        resume: bool,
        design: DesignFlags | None = None,
        require: "Requirement | None" = None,
    ) -> "EvaluateOptions":
        """The options of the library."""
        from posbias.evaluation import EvaluateOptions

        flags = {name: value for name, value in vars(self).items() if name not in ("task", "template_options")}
        asked: dict[str, Any] = {**flags, "seed": seed, "resume": resume}
        if design is not None:
            asked |= {**vars(design), "require": require}
        return EvaluateOptions(**asked)

    def for_template(self, task: "LanguageTask", *, served: bool) -> dict[str, Any]:
        """Parse the options of the chat template; a chat server renders every request as a conversation."""
        return options.parse_template_options(
            self.template_options, rendered=task.by_template or served, by="chat=True in the task"
        )


@dataclass(frozen=True)
class GateFlags:
    """A bound that a pipeline requires."""

    require: Annotated[
        str | None,
        typer.Option(
            help="Exit with 1 unless the whole interval meets it: worst>=0.8, mean>=0.7, spread<=0.2, "
            "effective_length>=4096 (evaluate --lengths).",
            show_default=False,
        ),
    ] = None

    @property
    def requirement(self) -> "Requirement | None":
        """The bound, if there is one."""
        from posbias.evaluation.levels import Requirement

        return None if self.require is None else Requirement.parse(self.require)

    def judge(self, check: "RequirementCheck", *, quiet: bool) -> None:
        """Say that the bound is met, or fail."""
        from posbias.report.evaluate import requirement_text

        if not check.met:
            raise RunError(requirement_text(check))
        if not quiet:
            say(requirement_text(check))


@dataclass(frozen=True)
class LocalFlags:
    """A model in this process."""

    batch: Annotated[
        int | None,
        typer.Option(help="Most prompts that a local model runs together.", min=1, show_default="as memory allows"),
    ] = None
    dtype: options.Dtype = options.AUTO
    device: options.Device = options.AUTO

    def responder(self, model: str, *, template_options: "Mapping[str, Any]") -> "Responder":
        """A loaded model that answers."""
        from posbias.evaluation.responders import LocalOptions, LocalResponder
        from posbias.measurement.measurement import Loading

        loading = Loading(dtype=self.dtype, device=self.device, template_options=template_options)
        return LocalResponder(loading.load(model), LocalOptions(batch=self.batch))


@dataclass(frozen=True)
class ServerFlags:
    """A model on a server."""

    server: Annotated[
        list[str] | None,
        typer.Option(help="Base URL of an OpenAI-compatible server; evaluate takes several.", show_default=False),
    ] = None
    served_model: Annotated[
        list[str] | None,
        typer.Option(help="The model's name on the server; one for all, or one for each.", show_default=False),
    ] = None
    server_options: Annotated[str, typer.Option(help="Such as: kind='text', concurrency=8, timeout=300.")] = ""
    tokenizer: Annotated[
        str | None,
        typer.Option(
            help="Tokenizer of the model on the server, to count tokens: a directory, hub id or 'demo'.",
            show_default=False,
        ),
    ] = None

    @property
    def endpoints(self) -> list[tuple[str, str]]:
        """Every address with the name of its model."""
        servers, models = self.server or [], self.served_model or []
        if not servers:
            return []
        if not models:
            raise UsageError("--server needs --served-model, the name the server knows the model by")
        both = max(len(servers), len(models))
        if not {len(servers), len(models)} <= {1, both}:
            raise UsageError(
                f"--server and --served-model are given {len(servers)} and {len(models)} times; allowed: one of both, "
                "one of either for all of the other, or as many of each"
            )
        return list(zip(*(given * (both // len(given)) for given in (servers, models)), strict=True))

    def responder(self, directory: Path | None, *, reuse: bool, template_options: "Mapping[str, Any]") -> "Responder":
        """The model of the only server."""
        responders = self.responders(directory, reuse=reuse, template_options=template_options)
        if len(responders) > 1:
            raise UsageError(f"one server is asked here, got {len(responders)}; evaluate takes several")
        return responders[0]

    def responders(
        self, directory: Path | None, *, reuse: bool, template_options: "Mapping[str, Any]"
    ) -> "list[ServerResponder]":
        """The models of all servers; answers are kept in the run directory, so that a resumed run pays none twice."""
        from posbias.evaluation.responders import ServerOptions, ServerResponder
        from posbias.models.loading import load_tokenizer
        from posbias.registry import parse_literal_call

        spelled = self.server_options
        _, positional, named = parse_literal_call(f"server({spelled})", "server options")
        names = {field.name for field in fields(ServerOptions)} - OWN_OPTIONS
        if positional or set(named) - names:
            wrong = next(iter(sorted(set(named) - names)), str(positional[:1]))
            allowed = ", ".join(f"{name}=..." for name in sorted(names))
            raise UsageError(f"--server-options: unknown {wrong!r} (delays: the client's own); allowed: {allowed}")
        cache = None if directory is None else directory / ANSWERS
        settings = ServerOptions(**named, cache=cache, reuse=reuse, template_options=template_options)
        counting = None if self.tokenizer is None else load_tokenizer(self.tokenizer)
        return [ServerResponder(address, model, settings, tokenizer=counting) for address, model in self.endpoints]


@options.grouped
def evaluate(
    context: typer.Context,
    models: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[MODEL]...",
            help="Hub id, directory, file.gguf or 'demo'; of several, the others are compared with the first; "
            "none with --server.",
            show_default=False,
        ),
    ] = None,
    *,
    evaluated: TaskFlags,
    design: DesignFlags,
    local: LocalFlags,
    served: ServerFlags,
    resume: options.Resume = False,
    gate: GateFlags,
    flags: options.RunFlags,
) -> None:
    """Measure how well a model answers, by the answer's position. The item that holds the answer is moved."""
    from posbias import evaluate as evaluate_subjects
    from posbias.evaluation.evaluation import LengthEvaluation
    from posbias.mitigation.subjects import Unopened
    from posbias.tasks.language import LANGUAGE_TASKS

    names = models or []
    check_answerer(context, next(iter(names), None), served)
    task = LANGUAGE_TASKS.parse(evaluated.task)
    settings = evaluated.settings(seed=flags.seed, resume=resume, design=design, require=gate.requirement)
    template_options = evaluated.for_template(task, served=bool(served.server))
    with running(context, flags, resume=resume) as run:
        settings = replace(settings, directory=run.directory)
        opened = partial(local.responder, template_options=template_options)
        subjects: list[Any] = [Unopened(name, partial(opened, name)) for name in names]
        subjects += served.responders(run.directory, reuse=resume, template_options=template_options)
        single = len(subjects) == 1 and not settings.methods
        result = evaluate_subjects(subjects[0] if single else subjects, task, options=settings)
        parts = {} if single else dict(result.evaluations)
        if isinstance(result, LengthEvaluation):
            parts = {f"length-{length}": evaluation for length, evaluation in result.at.items()}
        for name, evaluation in parts.items():
            run.draw(evaluation.record, below=name)
        run.finish(result.record)
    if settings.require is not None:
        for evaluation in [result] if single else parts.values():
            gate.judge(evaluation.requirement, quiet=flags.json)


def check_answerer(context: typer.Context, model: str | None, served: ServerFlags) -> None:
    """Refuse flags that would do nothing."""
    server, tokenizer = served.server, served.tokenizer
    if (model is None) == (not server):
        raise UsageError("give one of MODEL and --server URL, not both")
    if model is not None and tokenizer is not None:
        raise UsageError(f"--tokenizer {tokenizer!r} goes with --server; a MODEL brings its own")
    of_a_model = options.names_of(LocalFlags)
    of_a_server = options.names_of(ServerFlags, without=["server", "tokenizer"])
    if server:
        _ = served.endpoints  # one of each, or as many
        options.refuse(context, of_a_model, "goes with a MODEL; a server runs its own")
    else:
        options.refuse(context, of_a_server, "goes with --server; a MODEL runs here")
