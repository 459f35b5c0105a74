"""The checks of shapes that run in every test: each jaxtyping annotation is checked by beartype.

Imported by `conftest.py`, which is executed again wherever a test imports it: here the hook is installed once.
"""

import sys
import types
from dataclasses import is_dataclass
from functools import partial, wraps
from pkgutil import resolve_name
from typing import Any, get_args, get_type_hints

import jaxtyping
from beartype import BeartypeConf, beartype
from jaxtyping import install_import_hook

# Before the hook: typer hands its commands contexts of a class that only it knows, which the checker would refuse.
from posbias.cli.app import VERBS

for function in VERBS.values():
    resolve_name(function)

# Whole numbers are welcome where floats are asked for (PEP 484's numeric tower), as they are without the checker.
check = beartype(conf=BeartypeConf(is_pep484_tower=True, violation_type=TypeError))
typecheck = types.ModuleType("posbias_typecheck")
typecheck.check = check  # type: ignore[attr-defined]
sys.modules[typecheck.__name__] = typecheck


def names_arrays(annotation: object) -> bool:
    """Whether a type is one of jaxtyping's, or contains one."""
    if isinstance(annotation, list | tuple):
        return any(map(names_arrays, annotation))
    is_array = isinstance(annotation, type) and issubclass(annotation, jaxtyping.AbstractArray)
    return is_array or names_arrays(get_args(annotation))


def jaxtyped(function: Any = None, *, typechecker: Any = None, whole: Any = jaxtyping.jaxtyped) -> Any:
    """jaxtyping's decorator, on the first calls in each test, where arrays are named; elsewhere beartype alone.

    Binding shapes costs more than most functions do: in loops it was a third of the suite's time.
    """
    if function is None:
        return partial(jaxtyped, typechecker=typechecker)
    if isinstance(function, type):
        # `checks.checked` refuses wrong values itself, and makes paths of texts before the fields see them.
        if is_dataclass(function) and "__init__" in vars(function) and not hasattr(function.__init__, "__wrapped__"):
            function.__init__ = jaxtyped(function.__init__, typechecker=typechecker)
        return function
    if "<locals>" in function.__qualname__ and not hasattr(function, "__wrapped__"):
        return function  # made anew at every call, and a checker takes a millisecond; the outer one is checked
    try:
        arrays = names_arrays(list(get_type_hints(function).values()))
    except NameError:  # a class that does not exist yet
        arrays = True
    return first_calls(function, whole(function, typechecker=typechecker)) if arrays else typechecker(function)


def first_calls(function: Any, checked: Any) -> Any:
    """The function, checked on its first calls in each test."""
    calls, test = 0, ""

    @wraps(function)
    def first_calls_checked(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls, test
        if test is not RUNNING[0]:
            calls, test = 0, RUNNING[0]
        calls += 1
        return (checked if calls <= CHECKED_CALLS else function)(*args, **kwargs)

    return first_calls_checked


RUNNING = [""]
"""The test that runs."""
CHECKED_CALLS = 5
"""Of each function in each test."""

jaxtyping.jaxtyped = jaxtyped
install_import_hook(["posbias", "posbias_papers"], "posbias_typecheck.check")
