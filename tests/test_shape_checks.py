"""Checks of shapes: functions inside functions have one checker for all (`shape_checks.py`)."""

import sys
from collections.abc import Callable

import jaxtyping
import numpy as np
import pytest
from jaxtyping import Float64, TypeCheckError

Vector = Float64[np.ndarray, "n"]


def scaled_by(scale: float, after: Callable[[Vector], Vector] = np.asarray) -> Callable[[Vector], Vector]:
    @jaxtyping.jaxtyped(typechecker=sys.modules["posbias_typecheck"].check)
    def scaled(values: Vector) -> Vector:
        return after(scale * values) * (1 if scale > 0 else np.ones((2, 1)))

    return scaled


def test_every_definition_is_called_itself_and_checked() -> None:
    for scale in (2.0, 3.0):
        np.testing.assert_array_equal(scaled_by(scale)(np.ones(2)), [scale, scale])
        with pytest.raises(TypeCheckError, match="parameters"):
            scaled_by(scale)(np.ones((2, 2)))
    with pytest.raises(TypeCheckError, match="return value"):
        scaled_by(-1.0)(np.ones(2))


def test_definitions_call_each_other() -> None:
    np.testing.assert_array_equal(scaled_by(2.0, after=scaled_by(5.0, after=scaled_by(7.0)))(np.ones(1)), [70.0])
    with pytest.raises(TypeCheckError, match="return value"):
        scaled_by(2.0, after=scaled_by(-5.0))(np.ones(2))
