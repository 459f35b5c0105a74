"""Options that several verbs share, one definition each, alone and in groups; and the parsing of their values.

A verb takes a group as one parameter (`prompts: options.PromptFlags`); `grouped` spreads its fields over the command
line, where each is an option of its own. The default of a verb's parameter holds the verb's defaults.
"""

import ast
import inspect
import shlex
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import typer

from posbias.errors import UsageError

if TYPE_CHECKING:
    from posbias.models.hugging_face import HuggingFaceModel
    from posbias.models.reference.network import ReferenceTransformer
    from posbias.prompts.prompts import Prompts, PromptSource
    from posbias.runs.engines import Engine

AUTO = "auto"
"""Device and precision if none is given: `models.devices.AUTO`, spelled here because that takes torch."""
UNRECORDED = {"json", "resume", "overwrite"}
"""Options that change no result."""


def directory(text: str) -> Path:
    """Parse the name of a directory; an empty one (often a shell variable that is not set) is refused."""
    if not text.strip():
        raise typer.BadParameter("allowed: the name of a directory, '.' for this one")
    return Path(text)


def out_option(what: str, *, default: bool | str = False) -> Any:
    """Declare `--out` with the help `what`; `default` as a verb's help shows it."""
    return typer.Option("--out", help=what, parser=directory, metavar="<path>", show_default=default)


Model = Annotated[str, typer.Argument(help="Hub id, directory, file.gguf, 'demo' or 'config:PATH_OR_ID'.")]
Out = Annotated[Path | None, out_option("Directory for record and report.")]
Seed = Annotated[int, typer.Option(help="Seed of everything that is drawn.", min=0)]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document on stdout and nothing else.")]
Length = Annotated[int, typer.Option(help="Context length N in positions.", min=1)]
Count = Annotated[int, typer.Option(help="How many prompts.", min=1)]
Mixing = Annotated[
    str,
    typer.Option(
        help="Share of attention in each layer's update, 0 to 1: number, or list per layer; 0.1 is a residual "
        "network, 1 is attention alone."
    ),
]
RESIDUAL = "0.1"
"""Mixing if none is given: `architecture.spec.RESIDUAL_MIXING`, spelled here because that takes numpy."""
DEFAULT_MIXING = (
    f"Mixing {RESIDUAL} in every layer is the default (--mixing): attention carries a tenth of each layer's "
    "update and the residual stream nine tenths; five published models have 0.06 to 0.14 on average."
)
"""A caveat."""
Kinds = Annotated[
    str,
    typer.Option(help="Comma-separated: jacobian, probability, logprob, logit, integrated_gradients, perturbation."),
]
InitSeed = Annotated[
    int | None,
    typer.Option(help="Replace the weights by random initial ones, drawn with this seed.", show_default=False),
]
Dtype = Annotated[
    str,
    typer.Option(help="float32, bfloat16, float16, float64, own: the model's, or auto: float32 on a CPU, else own."),
]
Device = Annotated[
    str,
    typer.Option(
        help="Where to run: cpu, cuda, cuda:1, mps ...; auto: an accelerator if there is one; spread: all devices, "
        "and the disk if needed (auto also spreads if no single device holds the model)."
    ),
]
TemplateOptions = Annotated[
    str,
    typer.Option(
        help="Options of the chat template that renders conversations, such as enable_thinking=False.",
        show_default="none",
    ),
]
Resume = Annotated[bool, typer.Option("--resume", help="Continue an interrupted run without redoing what it finished.")]
Overwrite = Annotated[
    bool, typer.Option("--overwrite", help="Replace finished work in --out, which is refused otherwise.")
]
Checkpointing = Annotated[
    bool, typer.Option("--checkpointing", help="Use less memory and more time (gradient checkpointing).")
]


@dataclass(frozen=True)
class PromptFlags:
    """Source, number and length of the prompts."""

    prompts: Annotated[
        str | None,
        typer.Option(
            help="'default', 'synthetic', a .txt or .jsonl file ('file.jsonl#field'), "
            "'hf:owner/name:split', or 'chat:FILE.jsonl' (conversations)."
        ),
    ] = "default"
    shuffle: Annotated[
        bool, typer.Option("--shuffle", help="Put each prompt's tokens in random order, as a control.")
    ] = False
    length: Length = 512
    count: Count = 16

    @property
    def source(self) -> "PromptSource":
        """The text that prompts are drawn from."""
        from posbias.prompts.prompts import PromptSource

        return PromptSource("default" if self.prompts is None else self.prompts, self.shuffle)

    def drawn(self, model: "HuggingFaceModel | ReferenceTransformer", *, seed: int) -> "Prompts":
        """Draw the prompts, in a model's own tokens."""
        from posbias.prompts.loading import load_prompts

        return load_prompts(self.source, model, n_positions=self.length, count=self.count, seed=seed)


@dataclass(frozen=True)
class ModelFlags:
    """State, precision and device of a model, and options of its chat template."""

    init_seed: InitSeed = None
    dtype: Dtype = AUTO
    device: Device = AUTO
    template_options: TemplateOptions = ""

    def settings(self, prompts: str | None, *, chat_task: bool = False) -> dict[str, Any]:
        """Settings of `load_model`; options of a chat template are refused if no conversation is rendered."""
        conversations = chat_task or (prompts or "").startswith("chat:")
        options = parse_template_options(self.template_options, rendered=conversations, by="--prompts chat:FILE.jsonl")
        return {**vars(self), "template_options": options}

    def load(self, source: str, *, prompts: str | None) -> "HuggingFaceModel | ReferenceTransformer":
        """Load the model that `prompts` are for."""
        from posbias.measurement.measurement import Loading

        return Loading(**self.settings(prompts)).load(source)


@dataclass(frozen=True)
class EngineFlags:
    """Place where units of work are done."""

    engine: Annotated[str, typer.Option(help="Where the work is done: local, or ray (a cluster).")] = "local"
    workers: Annotated[
        int | None,
        typer.Option(
            help="Processes in parallel, each with one prompt (in training: one stack).",
            min=1,
            show_default="1; ray: all",
        ),
    ] = None
    threads: Annotated[
        int | None,
        typer.Option(
            help="Threads per prompt or stack; the same number gives bit-identical results.",
            min=1,
            show_default="all cores",
        ),
    ] = None
    ray_address: Annotated[
        str | None, typer.Option(help="host:port of a Ray cluster, or auto.", show_default="one on this machine")
    ] = None

    def made(self) -> "Engine":
        """Make the engine of a spelling such as "ray(retries=5)", with the settings of the other options."""
        from posbias.runs.engines import ENGINES

        engine = ENGINES.parse(self.engine)
        options = {"workers": self.workers, "threads": self.threads, "address": self.ray_address}
        added: dict[str, Any] = {name: value for name, value in options.items() if value is not None}
        if "address" in added and not any(field.name == "address" for field in fields(engine)):
            raise UsageError(f"--ray-address goes with --engine ray, got --engine {engine.name}")
        return replace(engine, **added)


@dataclass(frozen=True)
class RunFlags:
    """The seed of a run, and where it leaves its result."""

    seed: Seed = 0
    out: Out = None
    overwrite: Overwrite = False
    json: Json = False


def grouped(verb: Callable[..., None]) -> Callable[..., None]:
    """Turn a verb that takes groups of options into a command that takes each of them."""
    parameters = list(inspect.signature(verb).parameters.values())
    groups: dict[str, Any] = {entry.name: entry.annotation for entry in parameters if is_dataclass(entry.annotation)}
    spread = []
    for parameter in parameters:
        if parameter.name not in groups:
            spread.append(parameter)
            continue
        defaults = groups[parameter.name]() if parameter.default is parameter.empty else parameter.default
        for name, annotation in get_type_hints(groups[parameter.name], include_extras=True).items():
            spread.append(parameter.replace(name=name, annotation=annotation, default=getattr(defaults, name)))

    @wraps(verb)
    def command(**values: Any) -> None:
        for name, group in groups.items():
            values[name] = group(**{field.name: values.pop(field.name) for field in fields(group)})
        verb(**values)

    command.__signature__ = inspect.Signature(spread)  # type: ignore[attr-defined]
    return command


def names_of(group: Any, *, without: Iterable[str] = ()) -> list[str]:
    """The names of a group's options."""
    return [field.name for field in fields(group) if field.name not in without]


def given(context: typer.Context, names: Iterable[str] | None = None) -> dict[str, list[str]]:
    """Words of every option given on the command line (of `names`), by its long name; arguments by theirs."""
    words = {}
    for parameter in context.command.params:
        name = str(parameter.name)
        source = context.get_parameter_source(name)
        if source is None or source.name != "COMMANDLINE" or (names is not None and name not in names):
            continue
        value, flag = _plain(context.params[name]), parameter.opts[0]
        values = [str(item) for item in value] if isinstance(value, list) else [str(value)]
        if parameter.param_type_name == "argument":
            words[name] = values
        elif isinstance(value, bool):
            words[flag] = [flag if value else parameter.secondary_opts[0]]
        else:
            words[flag] = [word for item in values for word in (flag, item)]
    return words


def refuse(context: typer.Context, names: Iterable[str], reason: str) -> None:
    """Refuse options that would do nothing here; `reason` follows the option's name."""
    for words in given(context, names).values():
        raise UsageError(f"{words[0]} {reason}")


def passed_arguments(context: typer.Context) -> dict[str, Any]:
    """The command's parameters as passed, defaults included, as plain values."""
    return {name: _plain(value) for name, value in context.params.items() if name not in UNRECORDED}


def command_line(context: typer.Context) -> str:
    """The command as one shell line: only what was given, with long option names."""
    program = context.find_root().command_path
    recorded = [str(parameter.name) for parameter in context.command.params if parameter.name not in UNRECORDED]
    words = ["posbias", *context.command_path.removeprefix(program).split()]
    return " ".join(map(_quoted, sum(given(context, recorded).values(), words)))


def _quoted(word: str) -> str:
    """A word for a shell, printable even where the word is not."""
    if word.isprintable():
        return shlex.quote(word)
    escaped = word.replace("\\", "\\\\").replace("'", "\\'")
    # Such an escape is a character for bash and zsh, where \x.. is a byte.
    letters = [letter if letter.isprintable() else f"\\U{ord(letter):08x}" for letter in escaped]
    return f"$'{''.join(letters)}'"


def _plain(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return str(value) if isinstance(value, Path) else value


def parse_template_options(text: str, *, rendered: bool, by: str) -> dict[str, Any]:
    """Parse `--template-options`; refused unless a conversation is rendered, which `by` would ask for."""
    from posbias.registry import parse_literal_call

    _, positional, named = parse_literal_call(f"template({text})", "template options")
    if positional:
        raise UsageError(f"--template-options {text!r}: allowed: NAME=VALUE, such as enable_thinking=False")
    if named and not rendered:
        raise UsageError(f"--template-options are for conversations; ask for them by {by}")
    return named


def check_resume(resume: bool, out: Path | None) -> None:
    """Refuse to continue a run whose directory was not named."""
    if resume and out is None:
        raise UsageError("--resume needs --out: the directory of the run that is continued")


def check_apart(out: Path | None, runs: Sequence[Path], *, verb: str) -> None:
    """Refuse to write over a run that is read."""
    if out is not None and out.resolve() in [run.resolve() for run in runs]:
        raise UsageError(f"--out {str(out)!r} is one of the runs {verb}, and would be replaced; choose another --out")


def literal(text: str) -> Any:
    """An option's value: a list is read as a Python literal (never evaluated), a number as such, the rest as text."""
    from posbias.registry import UNREADABLE

    if text.strip().startswith("["):
        try:
            return ast.literal_eval(text.strip())
        except UNREADABLE:
            raise UsageError(f"{text!r} is not a list of numbers or quoted names") from None
    try:
        return float(text)
    except ValueError:
        return text


def several(name: str, text: str) -> list[Any]:
    """Parse values separated by commas outside brackets: at least one, and none twice."""
    from posbias.registry import split_literals

    return _distinct(name, text, [literal(part) for part in split_literals(text)])


def whole_numbers(name: str, text: str) -> list[int]:
    """Parse whole numbers from 1, separated by commas: at least one, and none twice."""
    from posbias.registry import split_literals

    try:
        values = [int(part) for part in split_literals(text)]
    except ValueError:
        values = [0]
    if min(values, default=1) < 1:
        raise UsageError(f"--{name} {text}: allowed are whole numbers from 1, separated by commas")
    return _distinct(name, text, values)


def _distinct(name: str, text: str, values: list[Any]) -> list[Any]:
    if not values:
        raise UsageError(f"--{name} {text!r} holds no value")
    twice = [value for place, value in enumerate(values) if value in values[:place]]
    if twice:
        raise UsageError(f"--{name} {text}: {twice[0]} is given twice")
    return values
