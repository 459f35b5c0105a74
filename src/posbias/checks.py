"""What options, parameters and arguments may be: declared in annotations, checked by pydantic, refused in one line.

`checked` reads the annotations of a function or dataclass, and `Registry.register` those of every variant. A bound
stands in the annotation (`Annotated[int, Ge(2)]`), the usual ones have names here. What spans several fields is
refused by a `__post_init__`. The command line makes its flags from the same fields (`cli/options.py`), before anything
heavy is imported: pydantic and numpy are when something is checked, as are classes that stand there as `Later`.
"""

import inspect
import re
import reprlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial, wraps
from pathlib import Path
from pkgutil import resolve_name
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, TypeVar, Union, cast, get_args, get_origin, get_type_hints

from annotated_types import Ge, Gt, Interval, MinLen

from posbias.errors import UsageError

AUTO = "auto"
"""Device and precision where none is given."""
RESIDUAL_MIXING = 0.1
"""The default mixing, that of a residual network: attention carries a tenth of each layer's update, the
stream nine tenths. Five published models have .06 to .14 on average (arXiv 2602.16837)."""
KEY_NAME = re.compile(r"(\w+_)?(API_?)?(KEY|TOKEN|SECRET)(_\w+)?", re.IGNORECASE)
"""Names of variables that hold keys."""
MACHINE_INTEGERS = 2**63
"""Bound of whole numbers on either side of 0: arrays and records hold no larger ones."""
CELLS = 5 * 10**7
"""Numbers that one array holds at most, 0.4 GB in double precision; several stand beside each other."""

Count = Annotated[int, Interval(ge=1, le=10**6)]
"""How many things are drawn, made, requested or run together: more is a slip of the keyboard."""
CountOrZero = Annotated[int, Interval(ge=0, le=10**6)]
Steps = Annotated[int, Interval(ge=1, le=10**7)]
"""Updates of a training, tokens of a text: a training published here has 100,000."""
StepsOrZero = Annotated[int, Interval(ge=0, le=10**7)]
Natural = Annotated[int, Ge(0)]
"""A seed, or an index from the start."""
Positive = Annotated[float, Gt(0)]
NonNegative = Annotated[float, Ge(0)]
Share = Annotated[float, Interval(gt=0, lt=1)]
FileName = Annotated[str, MinLen(1)]

CHECKED = "arguments_are_checked"
"""Attribute of functions that check their arguments."""
Public = TypeVar("Public", bound=Callable[..., Any])
SEE = {
    "Model": "load_model",
    "HuggingFaceModel": "load_model",
    "TokenModel": "load_model",
    "Prompts": "load_prompts, which takes token ids too",
    "Record": "load_record",
    "Profile": "Profile.normalised",
    "Responder": "LocalResponder, posbias.ServerResponder",
    "Evaluation": "evaluate",
}
"""The function of posbias that makes an object, by class, for objects that no user makes by calling their class."""
PLAIN: dict[Any, str] = {
    int: "a whole number",
    float: "a finite number",
    bool: "True or False",
    str: "a text",
    Path: "a path",
    NoneType: "None",
}
"""Words for plain annotations."""


class OneOf:
    """In an annotation: the words that a text may be."""

    def __init__(self, *words: str) -> None:
        self.words = words


@dataclass(frozen=True)
class Flag:
    """In an annotation of an option: how the command line has it."""

    name: str | None = ""
    """Name of the flag; empty: the field's; None: there is none."""
    default: str | None = None
    """How the default is spelled, where the field makes it when it is needed."""


@dataclass(frozen=True)
class Later:
    """In an annotation: a class that is imported when a value is held against it."""

    place: str
    """Its module and its name, `posbias.runs.engines:Engine`."""


def checked(function: Public) -> Public:
    """Decorator of public functions and dataclasses: refuse a wrong argument before anything else is done.

    The annotations decide; those that name no class (`Any`, callables) allow everything. A text becomes what it
    spells, as on a command line: a path, an object whose class has `parse`, or what a function in the annotation makes
    of it (`Annotated[Sequence[int], split_numbers]`). Numbers and lists of numpy become Python's.
    """
    if isinstance(function, type):
        if not hasattr(function.__init__, CHECKED):  # type: ignore[misc]
            function.__init__ = checked(function.__init__)  # type: ignore[misc]
        return function
    signature = inspect.signature(function)

    @cache
    def reader(parameter: str) -> Callable[[str, object], Any]:
        """Made at the first call, when all names are defined."""
        return _reader(get_type_hints(function, include_extras=True).get(parameter, Any))

    @wraps(function)
    def with_checked_arguments(*arguments: Any, **keywords: Any) -> Any:
        try:
            bound = signature.bind(*arguments, **keywords)
        except TypeError as error:  # an unknown argument, one too many or too few
            unknown = [keyword for keyword in keywords if keyword not in signature.parameters]
            fault = f"unknown argument {unknown[0]!r}" if unknown else str(error)
            allowed = [parameter for parameter in signature.parameters if parameter != "self"]
            called = type(arguments[0]).__name__ if function.__name__ == "__init__" else function.__qualname__
            raise UsageError(f"{called}: {fault}; allowed: {', '.join(allowed)}") from None
        for parameter, given in bound.arguments.items():
            bound.arguments[parameter] = reader(parameter)(f"{_owner(function, arguments)}: {parameter}", given)
        return function(*bound.args, **bound.kwargs)

    setattr(with_checked_arguments, CHECKED, True)
    return cast(Public, with_checked_arguments)


def checked_value(name: str, value: object, hint: Any) -> Any:
    """A single value as its annotation reads it, for what no function or dataclass takes as an argument."""
    return _reader(hint)(name, value)


def _reader(hint: Any) -> Callable[[str, object], Any]:
    """What reads a value as an annotation allows, by its name for the one line that refuses it.

    The line has the name, what is allowed and the value; or what a reader of texts says itself.
    """
    from pydantic import ConfigDict, TypeAdapter, ValidationError

    if hint is Any:
        return lambda _, value: value
    declared, words = _declared(hint)
    adapter: TypeAdapter[Any] = TypeAdapter(declared, config=ConfigDict(strict=True, allow_inf_nan=False))

    def read(name: str, value: object) -> Any:
        try:
            return adapter.validate_python(_python(value))
        except ValidationError as error:
            faults = error.errors(include_url=False, include_input=False)
        told = [cause for fault in faults if isinstance(cause := fault.get("ctx", {}).get("error"), UsageError)]
        raise UsageError(f"{name}: {told[0]}" if told else f"{name} must be {words}, got {_shown(value)}")

    return read


def _owner(function: Callable[..., Any], arguments: tuple[Any, ...]) -> str:
    """The user's name of what is called: a variant's, a verb's for its options, or a function's."""
    if function.__name__ != "__init__":
        return function.__qualname__
    of_class = type(arguments[0])
    if of_class.__name__.endswith("Options"):
        return of_class.__name__.removesuffix("Options").lower()
    return str(getattr(of_class, "name", of_class.__name__))


def described(hint: Any) -> str:
    """Words for the values that an annotation allows, bounds included."""
    return _declared(hint)[1]


def _declared(hint: Any, *, reads: bool = True) -> tuple[Any, str]:
    """An annotation for pydantic, and words for the values that it allows, bounds included.

    Our classes are recognised, not taken apart; texts become what they spell.
    """
    from pydantic import BeforeValidator, Field, PlainValidator, WrapValidator

    origin, members = get_origin(hint), get_args(hint)
    if origin is Annotated:
        if one_of := [mark.words for mark in members[1:] if isinstance(mark, OneOf)]:
            return Literal[one_of[0]], f"one of {', '.join(one_of[0])}"
        if isinstance(later := members[1], Later):
            return Annotated[Any, PlainValidator(partial(_recognised, later, reads))], later.place.partition(":")[2]
        marks = [BeforeValidator(partial(_spelled, mark)) if callable(mark) else mark for mark in members[1:]]
        inner, said = _declared(members[0])
        if any(isinstance(mark, MinLen) for mark in marks):
            said = re.sub("^a (list|text)", r"a \1 that is not empty", said)
        spelled, bounds = " or its spelling" if any(map(callable, members[1:])) else "", _bounds(members[1:])
        finite = "" if "<" in bounds or any(getattr(mark, "allow_inf_nan", False) for mark in members) else "finite "
        return Annotated[inner, *marks], said.replace("finite ", finite) + bounds + spelled
    if origin in (Union, UnionType):
        kinds, told = zip(*(_declared(member, reads=str not in members) for member in members), strict=True)
        return Union[kinds], " or ".join(dict.fromkeys(told))  # noqa: UP007
    if origin in (Sequence, list, tuple) and (origin is not tuple or members[-1] is Ellipsis):
        member, said = _declared(members[0])
        words = "a list" if members[0] is Any else f"a list, each {said}"
        listed = list[member]  # type: ignore[valid-type]
        return Annotated[listed, Field(fail_fast=True), WrapValidator(partial(_listed, origin))], words
    if origin in (Mapping, dict, tuple):
        kinds, told = zip(*map(_declared, members), strict=True)
        return origin[kinds], f"a list, each {told[0]}" if origin is tuple else "a mapping"
    if hint is int:
        return Annotated[int, Interval(ge=-MACHINE_INTEGERS, lt=MACHINE_INTEGERS)], PLAIN[int]
    if hint is Path:
        return Annotated[Path, BeforeValidator(partial(_spelled, Path))], PLAIN[Path]
    if hint in PLAIN or hint is Any:
        return hint, PLAIN.get(hint, "anything")
    if origin is Literal:
        return hint, f"one of {', '.join(map(str, members))}"
    owner = origin or hint
    if not hasattr(hint, "array_type") and not isinstance(owner, type):
        return Any, str(hint)
    return Annotated[Any, PlainValidator(partial(_recognised, owner, reads))], _named(owner)


def _named(owner: Any) -> str:
    """Words for an array, or for an object of a class."""
    if hasattr(owner, "array_type"):
        return f"an array of {_numbers(owner.dtypes[0])} ({owner.array_type.__module__}.{owner.array_type.__name__})"
    name = owner.__name__
    if name == "Module":
        return "a model of transformers"
    return f"{name} (see posbias.{SEE[name]})" if name in SEE else str(name)


def _spelled(read: Callable[[str], Any], value: Any) -> Any:
    return read(value) if isinstance(value, str) else value


def _listed(kind: Any, value: Any, read: Callable[[Any], Any]) -> Any:
    """A list, or a tuple where that is meant or given: any sequence but a text, and arrays."""
    if hasattr(value, "__array_interface__"):
        value = value.tolist()
    if not isinstance(value, Sequence) or isinstance(value, str | bytes):
        return read(value)  # which refuses it
    members = read(list(value))
    return tuple(members) if kind is tuple or (kind is Sequence and isinstance(value, tuple)) else members


def _recognised(owner: Any, reads: bool, value: Any) -> Any:
    """An object of a class, as it is or read from its spelling; arrays by the sort of their numbers."""
    if hasattr(owner, "array_type"):  # jaxtyping; whole numbers are numbers too
        allowed = {"whole numbers", _numbers(owner.dtypes[0])}
        fits = isinstance(value, owner.array_type) and _numbers(value.dtype) in allowed
    else:
        owner = resolve_name(owner.place) if isinstance(owner, Later) else owner
        if reads and isinstance(value, str) and hasattr(owner, "parse"):
            value = owner.parse(value)
        fits = isinstance(value, owner)
    if not fits:
        raise ValueError
    return value


def _python(value: Any) -> Any:
    """Numbers of numpy, in lists too, as Python's: a record holds no others."""
    import numpy as np

    if isinstance(value, np.generic):
        return value.item()
    return type(value)(map(_python, value)) if type(value) in (list, tuple) else value


def _numbers(dtype: object) -> str:
    """Sort of number behind an array's dtype, be it numpy's, torch's or jaxtyping's."""
    name = str(dtype).removeprefix("torch.")
    return "whole numbers" if name.startswith(("int", "uint")) else "numbers" if "float" in name else name


def _bounds(marks: Sequence[Any]) -> str:
    """The tightest bounds among the marks of an annotation, such as " >= 1 and <= 1,000,000"."""
    bounds = []
    for name, sign, tightest in (("ge", ">=", max), ("gt", ">", max), ("le", "<=", min), ("lt", "<", min)):
        values = [value for mark in marks if (value := getattr(mark, name, None)) is not None]
        if values:
            number = tightest(values)
            bounds.append(f" {sign} {number if isinstance(number, float) else format(number, ',')}")
    return " and".join(bounds)


def _shown(value: object) -> str:
    """A value in a few words: written out if short, otherwise its class."""
    if isinstance(value, int) and abs(value) >= MACHINE_INTEGERS:
        return f"a number of {value.bit_length()} bits"
    if value is None or isinstance(value, str | int | float | list | tuple | dict):
        return " ".join(reprlib.repr(value).split())
    shape, dtype = getattr(value, "shape", None), getattr(value, "dtype", None)
    return f"{type(value).__name__}{f' of {dtype}, shape {tuple(shape)}' if isinstance(shape, tuple) else ''}"
