"""Options of the command line, made from what declares them: dataclasses of options, and the parameters of a verb.

A verb is a function. `spread` makes a command of it: a parameter that is a dataclass (`settings: EvaluateOptions`)
becomes one flag for each field, whose name, type, bounds and default are the flag's and whose docstring is its help; a
verb may leave fields out and have defaults of its own (`Take`), and what is an option of a dataclass that another has
as its field is that one's. Keyword parameters become flags and others arguments, with the help that stands in the
verb's docstring. Dataclasses check what they are given.
"""

import ast
import inspect
import re
import shlex
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields, is_dataclass, replace
from functools import cache, wraps
from itertools import pairwise
from pathlib import Path
from types import NoneType, UnionType
from typing import TYPE_CHECKING, Annotated, Any, Union, get_args, get_origin

import typer
from annotated_types import Ge

from posbias.checks import Flag
from posbias.errors import UsageError
from posbias.measurement.options import Loading

if TYPE_CHECKING:
    from posbias.models.model import Model
    from posbias.prompts.prompts import Prompts, PromptSource
    from posbias.runs.engines import Engine

UNRECORDED = {"json", "resume", "overwrite"}
"""Options that change no result."""


@dataclass(frozen=True)
class PromptFlags:
    """Source, number and length of the prompts."""

    prompts: str | None = "default"
    """'default', 'synthetic', or a .txt or .jsonl file ('file.jsonl#field')."""
    shuffle: bool = False
    """Put each prompt's tokens in random order, as a control."""
    length: Annotated[int, Ge(1)] = 512
    """Context length N in positions."""
    count: Annotated[int, Ge(1)] = 16
    """How many prompts."""
    seed: Annotated[int, Ge(0)] = 0
    """Seed of everything that is drawn."""

    @property
    def source(self) -> "PromptSource":
        """The source as an object."""
        from posbias.prompts.prompts import PromptSource

        return PromptSource("default" if self.prompts is None else self.prompts, self.shuffle)

    def drawn(self, model: "Model") -> "Prompts":
        """The prompts in a model's tokens."""
        from posbias.prompts.loading import load_prompts

        return load_prompts(self.source, model, n_positions=self.length, count=self.count, seed=self.seed)

    def opened(self, model: str, loading: Loading) -> "tuple[Model, Prompts]":
        """A model, loaded, and the prompts in its tokens."""
        loaded = loading.load(model)
        return loaded, self.drawn(loaded)


@dataclass(frozen=True)
class EngineFlags:
    """Numbers of an engine that have flags of their own."""

    workers: Annotated[int, Ge(1)] | None = None
    """Processes in parallel, each with one prompt (in training: one stack); by default 1, with ray all."""
    threads: Annotated[int, Ge(1)] | None = None
    """Threads per prompt or stack, by default all cores; the same number gives bit-identical results."""
    ray_address: str | None = None
    """host:port of a Ray cluster, or auto; by default one is started on this machine."""

    def of(self, engine: "Engine") -> "Engine":
        """The engine with these numbers."""
        given = {"workers": self.workers, "threads": self.threads, "address": self.ray_address}
        added: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
        if "address" in added and not hasattr(engine, "address"):
            raise UsageError(f"--ray-address goes with --engine ray, got --engine {engine.name}")
        return replace(engine, **added)


@dataclass(frozen=True)
class RunFlags:
    """Where a run leaves its result, and the command that makes it."""

    context: Annotated[typer.Context, Flag(None)]
    """Knows what stands on the command line."""
    out: Path | None = None
    """Directory for record and report."""
    overwrite: bool = False
    """Replace finished work in --out, which is refused otherwise."""
    json: bool = False
    """Print one JSON document on stdout and nothing else."""

    def given(self, name: str) -> bool:
        """True if an option or argument stands on the command line."""
        return getattr(self.context.get_parameter_source(name), "name", "") == "COMMANDLINE"

    def refuse(self, names: Iterable[str], reason: str) -> None:
        """Refuse options that would do nothing here; `reason` follows the option's name."""
        for parameter in self.context.command.params:
            if parameter.name in names and self.given(parameter.name):
                raise UsageError(f"{parameter.opts[0]} {reason}")


class Take:
    """In the annotation of a verb's dataclass: fields that are no options of the verb, and defaults of its own."""

    def __init__(self, *left_out: str, **defaults: Any) -> None:
        self.left_out, self.defaults = left_out, defaults


Printed = Annotated[RunFlags, Take("out", "overwrite")]
"""Of a verb that prints what it finds, and makes no run."""
Loaded = Annotated[Loading, Take("template_options")]
"""A model that no conversations are put to."""


def directory(text: str) -> Path:
    """Parse the name of a directory; an empty one (often a shell variable that is not set) is refused."""
    if not text.strip():
        raise typer.BadParameter("allowed: the name of a directory, '.' for this one")
    return Path(text)


def spread(verb: Callable[..., None]) -> Callable[..., None]:
    """The command of a verb, for typer."""
    _, meanings, _ = told(verb)
    taken: dict[str, Any] = {}
    options: dict[str, dict[str, inspect.Parameter]] = {}
    spelled: dict[str, inspect.Parameter] = {}
    for name, parameter in inspect.signature(verb).parameters.items():
        kind, marks = _bare(parameter.annotation)
        if isinstance(kind, type) and is_dataclass(kind):
            taken[name] = kind, next((mark for mark in marks if isinstance(mark, Take)), Take())
            options[name] = options_of(kind, taken[name][1])
            for option in options[name].values():
                spelled.setdefault(option.name, option)  # they may share one, such as the seed
        else:
            default = MISSING if parameter.default is parameter.empty else parameter.default
            argument = parameter.kind is not parameter.KEYWORD_ONLY
            spelled[name] = _parameter(name, kind, marks, default, meanings[name], argument=argument)

    @wraps(verb)
    def command(context: typer.Context, **values: Any) -> None:
        given = {name: value for name, value in values.items() if RunFlags(context).given(name)}
        made: dict[Any, Any] = {typer.Context: context}
        for name, (kind, take) in reversed(taken.items()):  # one may hold another behind it
            held = {entry.name: made[part] for entry in fields(kind) if (part := _bare(entry.type)[0]) in made}
            values[name] = made[kind] = _made(kind, {**take.defaults, **held}, options[name], given)
        verb(**{name: values[name] for name in inspect.signature(verb).parameters})

    context = inspect.Parameter("context", inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation=typer.Context)
    command.__signature__ = inspect.Signature([context, *spelled.values()])  # type: ignore[attr-defined]
    return command


def told(verb: Callable[..., None]) -> tuple[str, dict[str, str], str]:
    """A verb's docstring: what it does, its parameters' meanings, and examples."""
    text, _, examples = (inspect.getdoc(verb) or "").partition("\n\nExample")
    text, _, listed = text.partition("\n\nArgs:\n")
    meanings = re.findall(r"^    (\w+): (.*?)(?=^    \w|\Z)", listed, re.MULTILINE | re.DOTALL)
    return text, {name: " ".join(meaning.split()) for name, meaning in meanings}, "Example" + " ".join(examples.split())


def options_of(kind: type[Any], take: Take) -> dict[str, inspect.Parameter]:
    """What typer reads for every field of a dataclass that is an option."""
    meanings, found = meanings_of(kind), {}
    for entry in fields(kind):
        hint, marks = _bare(entry.type)
        flag = next((mark for mark in marks if isinstance(mark, Flag)), Flag())
        if flag.name is not None and entry.name not in take.left_out:
            default = take.defaults.get(entry.name, flag.default if entry.default is MISSING else entry.default)
            found[entry.name] = _parameter(flag.name or entry.name, hint, marks, default, meanings.get(entry.name, ""))
    return found


def _made(
    kind: type[Any], defaults: Mapping[str, Any], options: Mapping[str, inspect.Parameter], given: Mapping[str, Any]
) -> Any:
    """The dataclass with what was given; the rest is as it declares, or as the verb does."""
    values = {name: given[option.name] for name, option in options.items() if option.name in given}
    try:
        return kind(**{**defaults, **values})
    except UsageError as error:  # which begins with the verb and the name of a field
        named = re.match(r"\w+: (\w+)", str(error))
        if named is None or named[1] not in options:
            raise
        flag = options[named[1]].name.replace("_", "-")
        raise UsageError(f"--{flag}{str(error)[named.end() :]}") from None


def _bare(hint: Any) -> tuple[Any, tuple[Any, ...]]:
    """An annotation without None, and its marks; a text for what the command line does not read itself."""
    origin, members = get_origin(hint), get_args(hint)
    if origin is Annotated:
        bare, marks = _bare(members[0])
        return bare, (*marks, *members[1:])
    if origin in (Union, UnionType):
        kinds = [member for member in members if member is not NoneType]
        return _bare(kinds[0]) if len(kinds) == 1 else (str, ())
    return hint, ()


def _parameter(
    name: str, hint: Any, marks: Iterable[Any], default: Any, meaning: str, *, argument: bool = False
) -> inspect.Parameter:
    """What typer reads for one option or argument; default: MISSING if it must be given."""
    spelled, flag = default, f"--{name.replace('_', '-')}"
    settings: dict[str, Any] = {"help": meaning, "show_default": default not in (None, "", (), MISSING)}
    listed = get_origin(hint) is list
    if listed and argument:
        settings["metavar"] = f"{name.upper().removesuffix('S')}..."
    elif hint is bool:
        flag = f"{flag}/--no-{flag[2:]}" if default else flag
    elif hint in (int, float):
        for bound, side, tightest in (("ge", "min", max), ("le", "max", min)):
            ends = [end for mark in marks if (end := getattr(mark, bound, None)) is not None]
            settings[side] = tightest(ends, default=None)
    elif hint is Path and not argument:
        settings |= {"parser": directory, "metavar": "<path>"}
    elif not listed and hint is not Path:
        hint = str
        spelled = ",".join(map(str, default)) if isinstance(default, list | tuple) else default
        spelled = spelled if spelled in (None, MISSING) else str(spelled)
    declared: Any = typer.Argument(**settings) if argument else typer.Option(flag, **settings)
    read: Any = hint | None if default is None else hint
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD if argument else inspect.Parameter.KEYWORD_ONLY
    given = inspect.Parameter.empty if default is MISSING else spelled
    return inspect.Parameter(name, kind, default=given, annotation=Annotated[read, declared])


def meanings_of(owner: type) -> dict[str, str]:
    """The docstring behind each field of a dataclass, those that it inherits among them, in one line each."""
    kinds = [kind for kind in reversed(owner.__mro__) if is_dataclass(kind)]
    return {name: text for kind in kinds for name, text in _documented(kind.__module__)[kind.__name__].items()}


@cache
def _documented(module: str) -> dict[str, dict[str, str]]:
    """The docstrings behind the fields of every class of a module."""
    documented: dict[str, dict[str, str]] = {}
    for owner in ast.parse(inspect.getsource(sys.modules[module])).body:
        if not isinstance(owner, ast.ClassDef):
            continue
        meanings = documented.setdefault(owner.name, {})
        for entry, behind in pairwise(owner.body):
            match entry, behind:
                case ast.AnnAssign(target=ast.Name(name)), ast.Expr(ast.Constant(str(text))):
                    meanings[name] = " ".join(text.split())
    return documented


def names_of(group: type[Any], *, without: Sequence[str] = ()) -> list[str]:
    """The names of a dataclass's options."""
    return [option.name for option in options_of(group, Take(*without)).values()]


def command_line() -> str:
    """The command as one shell line, but for options that change no result."""
    return " ".join(["posbias", *(_quoted(word) for word in sys.argv[1:] if word.removeprefix("--") not in UNRECORDED)])


def _quoted(word: str) -> str:
    """A word for a shell, printable even where the word is not."""
    if word.isprintable():
        return shlex.quote(word)
    escaped = word.replace("\\", "\\\\").replace("'", "\\'")
    # Such an escape is a character for bash and zsh, where \x.. is a byte.
    letters = [letter if letter.isprintable() else f"\\U{ord(letter):08x}" for letter in escaped]
    return f"$'{''.join(letters)}'"


def check_rendered(template_options: Mapping[str, Any], *, rendered: bool) -> None:
    """Refuse options of a chat template where no task is rendered as conversations."""
    if template_options and not rendered:
        raise UsageError("--template-options are for conversations; ask for them by chat=True in the task")
