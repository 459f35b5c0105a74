"""What every function and options class refuses in the same words, and what it reads as the value that is meant."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import pytest
from annotated_types import Ge, Lt
from jaxtyping import TypeCheckError

from posbias import RunError, UsageError
from posbias.checks import Count, Natural, OneOf, Positive, checked, checked_value
from posbias.registry import Registry, Spelled, split_numbers
from posbias.statistics import holm


@pytest.mark.parametrize(("value", "read"), [(2, 2), (2**63 - 1, 2**63 - 1), (np.int64(2), 2)])
def test_whole_numbers_pass_and_those_of_numpy_become_python_s(value: object, read: int) -> None:
    number = checked_value("count", value, Annotated[int, Ge(2)])
    assert number == read
    assert type(number) is int


@pytest.mark.parametrize("value", [1, -5, True, 2.0, "2", None, float("nan")])
def test_what_is_none_is_named(value: object) -> None:
    with pytest.raises(UsageError) as refused:
        checked_value("count", value, Annotated[int, Ge(2)])
    told = str(refused.value)
    assert told == f"count must be a whole number >= 2, got {value!r}"


@pytest.mark.parametrize("value", [0, -1.5, float("nan"), float("inf"), True, "1", 10**400, [1.0]])
def test_numbers_out_of_range_are_named(value: object) -> None:
    with pytest.raises(UsageError, match="rate must be a finite number > 0, got "):
        checked_value("rate", value, Positive)


def test_bounds_are_told_and_huge_numbers_not_written_out() -> None:
    for value, hint, told in (
        (2**20, Annotated[Natural, Lt(2**20)], "must be a whole number >= 0 and < 1,048,576, got 1048576"),
        (0, Annotated[Count, Ge(2)], "must be a whole number >= 2 and <= 1,000,000, got 0"),
        (2**63, Natural, "must be a whole number >= 0, got a number of 64 bits"),
        (-(10**4400), int, "must be a whole number, got a number of 14617 bits"),
        ("z", Annotated[str, OneOf("x", "y")], "must be one of x, y, got 'z'"),
        ("ab", Sequence[str], "must be a list, each a text, got 'ab'"),
        ([1, True], Sequence[int], "must be a list, each a whole number, got [1, True]"),
    ):
        with pytest.raises(UsageError) as refused:
            checked_value("it", value, hint)
        assert str(refused.value) == f"it {told}"


@checked
def opened(directory: Path | None, named: str | Path = "x", *, cache: Path = Path("c")) -> tuple[object, ...]:
    return directory, named, cache


@checked
@dataclass(frozen=True)
class Kept:
    directory: Path | None = None
    lengths: Annotated[tuple[Count, ...], split_numbers] = ()


def test_a_text_becomes_what_it_spells() -> None:
    arguments: Any = {"directory": "runs/own", "named": "y", "cache": "z"}
    assert opened(**arguments) == (Path("runs/own"), "y", Path("z"))
    assert opened(None) == (None, "x", Path("c"))
    kept: Any = Kept
    assert kept("runs/own", "512,1024") == Kept(Path("runs/own"), (512, 1024))
    assert kept(lengths=np.array([3, 4])) == kept(lengths=[3, 4]) == kept(lengths=range(3, 5)) == Kept(lengths=(3, 4))
    for wrong, told in (
        ({"directory": 3}, "Kept: directory must be a path or None, got 3"),
        ({"lengths": "1,x"}, "Kept: lengths: '1,x': allowed are whole numbers, such as 512,1024"),
        ({"lengths": [0]}, "Kept: lengths must be a list, each a whole number >= 1 and <= 1,000,000 or its spelling"),
        ({"length": 1}, "Kept: unknown argument 'length'; allowed: directory, lengths"),
    ):
        with pytest.raises(UsageError) as refused:
            kept(**wrong)
        assert str(refused.value).startswith(told)


def test_variants_are_held_to_their_annotations_and_named() -> None:
    registry: Registry[Any] = Registry("toy")

    @registry.register("small")
    @dataclass(frozen=True)
    class Small(Spelled):
        width: Annotated[int, Ge(1)] = 1

    for made in (lambda: Small(width=0), lambda: registry.parse("small(width=0)")):
        with pytest.raises(UsageError, match=r"^small: width must be a whole number >= 1, got 0$"):
            made()
    assert str(registry.parse("small(width=7)")) == "small(width=7)"


@pytest.mark.parametrize("error", [UsageError, RunError])
def test_a_long_message_is_cut(error: type[Exception]) -> None:
    numbers = [[0.5, 0.25] for _ in range(2500)]
    told = str(error(f"key_bias(values={numbers}): got [1, 2]; allowed are {[3, 4]}"))
    assert told.startswith("key_bias(values=[[0.5, 0.25], [0.5, 0.25], ")
    assert " ... " in told
    assert told.endswith("]]): got [1, 2]; allowed are [3, 4]")
    assert len(told) == 600
    assert str(error(600 * "x")) == 600 * "x"


def test_an_array_of_another_shape_or_sort_is_refused() -> None:
    """Shapes of arrays are checked while tests run (`shape_checks.py`)."""
    assert holm(np.ones(2)).tolist() == [1.0, 1.0]
    for wrong in (np.ones((2, 2)), np.ones(2, dtype=int)):
        with pytest.raises(TypeCheckError, match="parameters"):
            holm(wrong)
