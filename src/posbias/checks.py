"""Refusals that several packages share: numbers out of range, and arguments of a wrong class."""

import inspect
import math
import os
import re
import reprlib
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial, wraps
from numbers import Integral, Real
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, TypeVar, Union, cast, get_args, get_origin, get_type_hints

import numpy as np

from posbias.errors import UsageError
from posbias.limits import Limit

KEY_NAME = re.compile(r"(\w+_)?(API_?)?(KEY|TOKEN|SECRET)(_\w+)?", re.IGNORECASE)
"""Names of variables that hold keys."""
MACHINE_INTEGERS = 2**63
"""Bound of whole numbers on either side of 0: arrays and records hold no larger ones."""

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
PLAIN: dict[Any, tuple[tuple[type, ...], str]] = {
    int: ((Integral,), "a whole number"),
    float: ((Real,), "a number"),
    bool: ((bool, np.bool_), "True or False"),
    str: ((str,), "a text"),
    Path: ((str, os.PathLike), "a path"),
    NoneType: ((NoneType,), "None"),
}
"""Classes that a plain annotation accepts, and their name in a message."""


def check_whole(
    name: str, value: object, *, least: int | None = None, below: int | None = None, numpy: bool = False
) -> None:
    """Refuse anything but a whole number in [least, below); True and False are no numbers.

    `name` is the user's name of the value; `numpy` allows numpy's whole numbers too, for values that no record keeps.
    """
    allowed = (int, np.integer) if numpy else (int,)
    above = MACHINE_INTEGERS if below is None else below
    bounded, text = below is not None, repr(value)[:120]
    if isinstance(value, allowed) and not isinstance(value, bool):
        number = int(value)
        if (-above if least is None else least) <= number < above:
            return
        if abs(number) >= MACHINE_INTEGERS:
            bounded, text = True, f"a number of {number.bit_length()} bits"
    bounds = "" if least is None else f" >= {least}"
    if bounded:
        bounds = f" in [{'-2^63' if least is None else least}, {_power(above)})"
    raise UsageError(f"{name} must be a whole number{bounds}, got {text}")


def check_size(name: str, value: object, limit: Limit, *, least: int = 1, numpy: bool = False) -> None:
    """Refuse anything but a whole number >= `least` within a limit; `numpy` as in `check_whole`."""
    check_whole(name, value, least=least, numpy=numpy)
    limit.check(name, int(value))  # type: ignore[call-overload]


def check_number(
    name: str, value: object, *, least: float = 0.0, above: float | None = None, below: float | None = math.inf
) -> None:
    """Refuse anything but a number >= `least`, or > `above`, and < `below` (None: may be infinite); True is none."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        enough = value >= least if above is None else value > above
        if enough and (below is None or value < below):
            return
    sort = "finite number" if below == math.inf else "number"
    bounds = f">= {least:g}" if above is None else f"> {above:g}"
    bounds += "" if below in (None, math.inf) else f" and < {below:g}"
    raise UsageError(f"{name} must be a {sort} {bounds}, got {value!r}")


def check_choice(name: str, value: object, allowed: Sequence[str]) -> None:
    """Refuse anything but one of the allowed words, which the message lists."""
    if not isinstance(value, str) or value not in allowed:
        raise UsageError(f"{name} must be one of {', '.join(allowed)}, got {value!r}")


def checked(function: Public) -> Public:
    """Decorator of public functions and classes: refuse a wrong argument before anything else is done.

    The annotations decide; if they name no class (`Any`, callables), the function itself decides. A text
    becomes what it spells, as on a command line (`_read`). A dataclass checks the arguments that it is made from.
    """
    if isinstance(function, type):
        function.__init__ = checked(function.__init__)  # type: ignore[misc]
        return function
    signature = inspect.signature(function)
    name = function.__qualname__.removesuffix(".__init__")
    # At the first call, when all names are defined.
    hints = cache(partial(get_type_hints, function, include_extras=True))

    @wraps(function)
    def with_checked_arguments(*arguments: Any, **keywords: Any) -> Any:
        try:
            bound = signature.bind(*arguments, **keywords)
        except TypeError as error:  # an unknown argument, one too many or too few
            unknown = [keyword for keyword in keywords if keyword not in signature.parameters]
            fault = f"unknown argument {unknown[0]!r}" if unknown else str(error)
            allowed = [parameter for parameter in signature.parameters if parameter != "self"]
            raise UsageError(f"{name}: {fault}; allowed: {', '.join(allowed)}") from None
        for parameter, given in bound.arguments.items():
            hint = hints().get(parameter, Any)
            value = bound.arguments[parameter] = _read(parameter, given, hint) if isinstance(given, str) else given
            if not _fits(value, hint):
                raise UsageError(f"{name}: {parameter} must be {_described(hint)}, got {_shown(value)}")
        return function(*bound.args, **bound.kwargs)

    return cast(Public, with_checked_arguments)


def check_seed(seed: object) -> None:
    """Refuse any seed but a whole number >= 0."""
    check_whole("seed", seed, least=0, numpy=True)


def _power(number: int) -> str:
    """A large power of 2 as such, `2^62`; any other number in digits."""
    exponent = number.bit_length() - 1
    return f"2^{exponent}" if exponent >= 16 and number == 1 << exponent else str(number)


def _read(parameter: str, text: str, hint: Any) -> Any:
    """What a text stands for if an annotation takes no texts: a path, or an object that its class, or a function in an
    annotation such as `Annotated[int, parse_bytes]`, reads from its spelling."""
    members = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
    for member in () if str in members else members:
        if member is Path:
            return Path(text)
        if get_origin(member) is Annotated:
            try:
                return member.__metadata__[0](text)
            except UsageError as error:
                raise UsageError(f"{parameter}: {error}") from None
        if (parse := getattr(member, "parse", None)) is not None:
            return parse(text)
    return text


def _fits(value: object, hint: Any) -> bool:
    """True if an annotation allows a value's class."""
    origin = get_origin(hint)
    if origin is Annotated:
        return _fits(value, get_args(hint)[0])
    if origin in (Union, UnionType):
        return any(_fits(value, member) for member in get_args(hint))
    if hasattr(hint, "array_type"):  # jaxtyping; whole numbers are numbers too
        allowed = {"whole numbers", _numbers(hint.dtypes[0])}
        return isinstance(value, hint.array_type) and _numbers(value.dtype) in allowed
    if hint in PLAIN:
        return isinstance(value, PLAIN[hint][0])
    if origin in (Sequence, list, tuple):
        return _fits_list(value, get_args(hint)[0], arrays=origin is Sequence)
    owner = origin or hint
    return owner is Any or not isinstance(owner, type) or isinstance(value, owner)


def _fits_list(value: object, member: Any, *, arrays: bool) -> bool:
    """True if a value is a list whose members an annotation allows; `arrays` allows a vector of numbers as well."""
    if isinstance(value, np.ndarray):
        return arrays and (member is Any or (member in (int, float) and value.ndim == 1))
    return isinstance(value, Sequence) and not isinstance(value, str) and all(_fits(entry, member) for entry in value)


def _numbers(dtype: object) -> str:
    """Sort of number behind an array's dtype, be it numpy's, torch's or jaxtyping's."""
    name = str(dtype).removeprefix("torch.")
    return "whole numbers" if name.startswith(("int", "uint")) else "numbers" if "float" in name else name


def _described(hint: Any) -> str:
    """Words for the values that an annotation allows."""
    origin, members = get_origin(hint), get_args(hint)
    if origin is Annotated:
        return f"{_described(members[0])} or its spelling"
    if origin in (Union, UnionType):
        return " or ".join(dict.fromkeys(_described(member) for member in members))
    if hasattr(hint, "array_type"):
        return f"an array of {_numbers(hint.dtypes[0])} ({hint.array_type.__module__}.{hint.array_type.__name__})"
    if hint in PLAIN:
        return PLAIN[hint][1]
    if origin in (Sequence, list, tuple):
        return f"a list, each {_described(members[0])}"
    if origin in (Mapping, dict):
        return "a mapping"
    name = getattr(origin or hint, "__name__", str(hint))
    if name == "Module":
        return "a model of transformers"
    return f"{name} (see posbias.{SEE[name]})" if name in SEE else name


def _shown(value: object) -> str:
    """A value in a few words: written out if short, otherwise its class."""
    if value is None or isinstance(value, str | int | float | list | tuple | dict):
        return " ".join(reprlib.repr(value).split())
    shape, dtype = getattr(value, "shape", None), getattr(value, "dtype", None)
    return f"{type(value).__name__}{f' of {dtype}, shape {tuple(shape)}' if isinstance(shape, tuple) else ''}"
