"""What the user typed, for the record: the arguments given and the command that repeats them."""

import shlex
from pathlib import Path
from typing import Any

import typer

UNRECORDED = {"json", "resume"}
"""Flags that change no result."""


def passed_arguments(context: typer.Context) -> dict[str, Any]:
    """The command's parameters as passed, defaults included, as plain values."""
    return {name: _plain(value) for name, value in context.params.items() if name not in UNRECORDED}


def command_line(context: typer.Context) -> str:
    """The command as one shell line: only what was given, with long flag names."""
    program = context.find_root().command_path
    words = ["posbias", *context.command_path.removeprefix(program).split()]
    for parameter in context.command.params:
        name = parameter.name
        if name is None or name in UNRECORDED or not was_given(context, name):
            continue
        value = _plain(context.params[name])
        values = [str(item) for item in value] if isinstance(value, list) else [str(value)]
        if parameter.param_type_name == "argument":
            words += values
        elif isinstance(value, bool):
            words.append(parameter.opts[0] if value else parameter.secondary_opts[0])
        else:
            words += [word for item in values for word in (parameter.opts[0], item)]
    return shlex.join(words)


def was_given(context: typer.Context, name: str) -> bool:
    """Whether the user gave this parameter, be it with its default value."""
    source = context.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"


def _plain(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return str(value) if isinstance(value, Path) else value
