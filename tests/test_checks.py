"""What every package refuses in the same words: whole numbers and seeds."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from posbias import RunError, UsageError
from posbias.checks import check_seed, check_whole, checked


@pytest.mark.parametrize("value", [2, 2**63 - 1])
def test_whole_numbers_pass(value: int) -> None:
    check_whole("count", value, least=2)


@pytest.mark.parametrize("value", [1, -5, True, 2.0, "2", None, np.int64(2), float("nan")])
def test_what_is_none_is_named(value: object) -> None:
    with pytest.raises(UsageError) as refused:
        check_whole("count", value, least=2)
    assert str(refused.value) == f"count must be a whole number >= 2, got {value!r}"


@checked
def opened(directory: Path | None, named: str | Path = "x", *, cache: Path = Path("c")) -> tuple[object, ...]:
    return directory, named, cache


@checked
@dataclass(frozen=True)
class Kept:
    directory: Path | None = None


def test_a_text_where_a_path_is_meant_becomes_one() -> None:
    assert opened("runs/own", "y", cache="z") == (Path("runs/own"), "y", Path("z"))  # type: ignore[arg-type]
    assert opened(None) == (None, "x", Path("c"))
    assert Kept("runs/own") == Kept(Path("runs/own"))  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="Kept: directory must be a path or None, got 3"):
        Kept(3)  # type: ignore[arg-type]


@pytest.mark.parametrize("error", [UsageError, RunError])
def test_a_long_list_in_a_message_is_cut(error: type[Exception]) -> None:
    numbers = [[0.5, 0.25] for _ in range(2500)]
    told = str(error(f"key_bias(values={numbers}): got [1, 2]; allowed are {[3, 4]}"))
    assert told.startswith("key_bias(values=[[0.5, 0.25], [0.5, 0.25], ")
    assert told.endswith(" ... 5000 entries]): got [1, 2]; allowed are [3, 4]")
    assert len(told) < 200
    assert str(error("an open [bracket, " + 200 * "x")) == "an open [bracket, " + 200 * "x"


def test_bounds_above() -> None:
    check_whole("seed", 2**62 - 1, least=0, below=2**62)
    with pytest.raises(UsageError, match=r"seed must be a whole number in \[0, 2\^62\), got 4611686018427387904"):
        check_whole("seed", 2**62, least=0, below=2**62)
    with pytest.raises(UsageError, match=r"count must be a whole number in \[1, 2\^63\), got a number of 64 bits"):
        check_whole("count", 2**63, least=1)
    with pytest.raises(UsageError, match=r"position must be a whole number in \[-2\^63, 2\^63\), got a number of 1329"):
        check_whole("position", -(10**400))
    with pytest.raises(UsageError, match=r"place must be a whole number in \[0, 8\), got 8"):
        check_whole("place", 8, least=0, below=8)


def test_seeds_may_be_numpy_s() -> None:
    check_seed(np.int64(3))
    for seed in (-1, True, 0.5, np.bool_(True)):
        with pytest.raises(UsageError, match="seed must be a whole number >= 0"):
            check_seed(seed)
