"""Named variants and their literal spelling.

A variant (mask, encoding, schedule, family, metric, kind ...) is registered once, by a decorator at its definition,
and found by name ever after. On the command line it is spelled as a literal call such as
`sliding_window(width=64)`; the text is parsed, never evaluated.
"""

import ast
import dataclasses
import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from importlib import import_module
from typing import Any, ClassVar, Generic, TypeVar

from posbias.checks import checked
from posbias.errors import UsageError

UNREADABLE = (ValueError, TypeError, SyntaxError, RecursionError, MemoryError)
"""Errors of `ast.literal_eval`: no literal, an unhashable key, no Python, brackets nested too deep."""

Variant = TypeVar("Variant")
_Registered = TypeVar("_Registered")


class Registry(Generic[Variant]):
    """Variants of one sort by name; unknown names list the known ones."""

    def __init__(
        self,
        sort: str,
        *,
        left: Mapping[str, str] | None = None,
        homes: Mapping[str, str] | None = None,
        made_by_users: bool = True,
    ) -> None:
        self.sort = sort
        """Singular name of the variants, for messages: "mask", "encoding" ..."""
        self._homes = homes or {}
        """Modules by the names that they register, of a registry whose modules are imported when one is asked for."""
        self._left = left or {}
        """Names of variants or parameters ("items(repeats=)") that version 0.1 had, each with what to do instead."""
        self._checked = made_by_users
        self._variants: dict[str, Any] = {}

    def register(self, name: str) -> Callable[[_Registered], _Registered]:
        """Decorator that registers a class or function under `name`.

        A class gets it as `.name`, and its parameters are held to their annotations if it is a dataclass (`checked`).
        """

        def add(variant: _Registered) -> _Registered:
            if name in self._variants:
                raise RuntimeError(f"{self.sort} {name!r} is registered twice")
            self._variants[name] = variant
            if isinstance(variant, type):
                variant.name = name  # type: ignore[attr-defined]
            if self._checked and dataclasses.is_dataclass(variant):
                checked(variant)  # type: ignore[type-var]  # a class
            return variant

        return add

    def __getitem__(self, name: str) -> Any:
        """The class or function registered under `name`; an unknown one is refused with a list of the known ones."""
        if isinstance(name, str) and name in self._homes and name not in self._variants:
            import_module(self._homes[name])
        if isinstance(name, str) and name in self._left and name not in self._variants:
            raise UsageError(f"{self.sort} {name} left posbias after 0.1.0: {self._left[name]}")
        if not isinstance(name, str) or name not in self._variants:
            raise UsageError(f"unknown {self.sort} {name!r}; known: {', '.join(self)}")
        return self._variants[name]

    def __iter__(self) -> Iterator[str]:
        return iter(sorted({*self._variants, *self._homes}))

    def parse(self, text: str) -> Variant:
        """Build a variant from its literal spelling, e.g. `causal` or `sliding_window(width=64)`.

        Raises:
            UsageError: not a literal call, unknown variant or parameter, or a value the variant refuses.
        """
        name, positional, keywords = parse_literal_call(text, self.sort)
        return self.build(name, *positional, **keywords)

    def build(self, name: str, /, *positional: Any, **keywords: Any) -> Variant:
        """Build a variant from the values of its parameters.

        Raises:
            UsageError: unknown variant or parameter, or a value the variant refuses.
        """
        variant = self[name]
        for keyword in keywords:
            if why := self._left.get(f"{name}({keyword}=)"):
                raise UsageError(f"{self.sort} {name}: {keyword} left posbias after 0.1.0: {why}")
        try:
            inspect.signature(variant).bind(*positional, **keywords)  # whose errors do not speak of `__init__`
            built: Variant = variant(*positional, **keywords)
            return built
        except UsageError:
            raise
        except (TypeError, ValueError, ArithmeticError, AttributeError) as error:
            shown = vars(variant).get("__dataclass_fields__", {})
            names = [each for each in inspect.signature(variant).parameters if each not in shown or shown[each].repr]
            fields = ", ".join(names) or "none"
            raise UsageError(f"{self.sort} {name}: {error}; parameters of {name}: {fields}") from None


class Spelled:
    """A variant, a dataclass whose text is its literal spelling."""

    name: ClassVar[str]
    """As which it is registered."""

    def __str__(self) -> str:
        """The inverse of `Registry.parse`, but for fields that are not shown."""
        values = {
            field.name: getattr(self, field.name)
            for field in dataclasses.fields(self)  # type: ignore[arg-type]
            if field.repr and getattr(self, field.name) != field.default
        }
        if not values:
            return self.name
        return f"{self.name}({', '.join(f'{key}={_plain(value)!r}' for key, value in values.items())})"


def parse_literal_call(text: str, sort: str) -> tuple[str, list[Any], dict[str, Any]]:
    """Split `name(1, key=[2, 3])` into its name, positional and keyword literals, without evaluating anything."""
    complaint = UsageError(
        f"{sort} {text!r} is not a name or a literal call such as name(number=1.5, flag=True, file='own.jsonl')"
    )
    try:
        node = ast.parse(text.strip(), mode="eval").body
    except UNREADABLE:
        raise complaint from None
    if isinstance(node, ast.Name):
        return node.id, [], {}
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name):
        raise complaint
    try:
        positional = [ast.literal_eval(argument) for argument in node.args]
        keywords = {str(pair.arg): ast.literal_eval(pair.value) for pair in node.keywords if pair.arg}
    except UNREADABLE:
        raise complaint from None
    if len(keywords) != len(node.keywords):
        raise complaint
    return node.func.id, positional, keywords


def split_literals(text: str) -> list[str]:
    """Split a comma-separated list of literal calls at the commas outside brackets: "a,b(x=1,y=2)" is two.

    Raises:
        UsageError: nothing stands before, between or after commas, which is a slip more often than a wish.
    """
    parts, depth, current = [], 0, ""
    for character in text:
        depth += (character in "([") - (character in ")]")
        if character == "," and depth == 0:
            parts.append(current)
            current = ""
        else:
            current += character
    items = [part.strip() for part in [*parts, current]]
    if "" in items and items != [""]:
        raise UsageError(f"{text!r} has an empty item at place {items.index('') + 1}; allowed: one between two commas")
    return [] if items == [""] else items


def split_numbers(text: str, sort: type[int] | type[float] = int) -> list[float]:
    """Read numbers separated by commas, whole ones by default: "512,1024" is two.

    Raises:
        UsageError: something else stands there, or nothing.
    """
    try:
        return [sort(part) for part in split_literals(text)]
    except ValueError:
        numbers = "whole numbers, such as 512,1024" if sort is int else "numbers, such as 0.2,0.3"
        raise UsageError(f"{text!r}: allowed are {numbers}") from None


def split_settings(text: str, example: str = "enable_thinking=False") -> dict[str, Any]:
    """Read settings separated by commas: "steps=600, rate=0.02" is two; what is refused is told an example.

    Raises:
        UsageError: something else stands there.
    """
    with suppress(UsageError):
        _, positional, named = parse_literal_call(f"settings({text})", "settings")
        if not positional:
            return named
    raise UsageError(f"{text!r}: allowed: NAME=VALUE, such as {example}, texts in quotes")


def read_literal(text: str) -> Any:
    """An option's value: a list is read as a Python literal (never evaluated), a number as such, the rest as text."""
    if text.strip().startswith("["):
        try:
            return ast.literal_eval(text.strip())
        except UNREADABLE:
            raise UsageError(f"{text!r} is not a list of numbers or quoted names") from None
    try:
        return float(text)
    except ValueError:
        return text


def _plain(value: Any) -> Any:
    """A value as a user would type it: tuples become lists, and NumPy's numbers Python's."""
    if isinstance(value, tuple | list):
        return [_plain(item) for item in value]
    return value.tolist() if hasattr(value, "tolist") else value
