"""What several packages refuse in the same words."""

import numpy as np

from posbias.errors import UsageError
from posbias.limits import Limit

MACHINE_INTEGERS = 2**63
"""Whole numbers lie below it, on either side of 0: arrays and records hold no larger ones."""


def check_whole(
    name: str, value: object, *, least: int | None = None, below: int | None = None, numpy: bool = False
) -> None:
    """Refuse what is not a whole number, or one out of bounds.

    Args:
        name: What the user calls the value.
        value: What was given; True and False are no numbers.
        least: The smallest value allowed, where there is one.
        below: The smallest value above `least` that is not allowed any more, where there is one.
        numpy: Whether numpy's whole numbers are allowed too, for values that no record keeps.

    Raises:
        UsageError: it is not.
    """
    allowed = (int, np.integer) if numpy else (int,)
    above = MACHINE_INTEGERS if below is None else below
    bounded, shown = below is not None, repr(value)
    if isinstance(value, allowed) and not isinstance(value, bool):
        number = int(value)
        if (-above if least is None else least) <= number < above:
            return
        if abs(number) >= MACHINE_INTEGERS:
            bounded, shown = True, f"a number of {number.bit_length()} bits"
    bounds = "" if least is None else f" >= {least}"
    if bounded:
        bounds = f" in [{'-2^63' if least is None else least}, {_power(above)})"
    raise UsageError(f"{name} must be a whole number{bounds}, got {shown}")


def check_size(name: str, value: object, limit: Limit, *, least: int = 1) -> None:
    """Refuse what is no whole number >= `least`, or more than a limit allows.

    Raises:
        UsageError: it is not, or it is more.
    """
    check_whole(name, value, least=least, numpy=True)
    limit.check(name, int(value))  # type: ignore[call-overload]


def check_seed(seed: object) -> None:
    """Refuse a seed that is not a whole number >= 0.

    Raises:
        UsageError: it is not.
    """
    check_whole("seed", seed, least=0, numpy=True)


def _power(number: int) -> str:
    """2^62 for that number, the digits for one that is no large power of 2."""
    exponent = number.bit_length() - 1
    return f"2^{exponent}" if exponent >= 16 and number == 1 << exponent else str(number)
