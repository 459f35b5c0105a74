"""Shapes of arrays are checked while tests run (`shape_checks.py`)."""

import numpy as np
import pytest
from jaxtyping import TypeCheckError

from posbias.statistics import holm


def test_an_array_of_another_shape_or_sort_is_refused() -> None:
    assert holm(np.ones(2)).tolist() == [1.0, 1.0]
    for wrong in (np.ones((2, 2)), np.ones(2, dtype=int)):
        with pytest.raises(TypeCheckError, match="parameters"):
            holm(wrong)
