"""Measurement runs on every described family, and checkpointing leaves it as it is (dropout stays off)."""

import numpy as np
import pytest
import torch

from posbias.measurement.measurement import MeasureOptions, measure
from posbias.models.families.base import FAMILIES
from posbias.prompts.prompts import Prompts
from tiny_families import VOCABULARY, shaken_model

TOLERANCE = 1e-4
"""float32: recomputed activations are the same numbers, but kernels may split sums differently."""


@pytest.mark.parametrize("model_type", sorted(FAMILIES))
def test_every_family_is_measured(model_type: str) -> None:
    model = shaken_model(model_type, dtype=torch.float32)
    prompts = Prompts(np.random.default_rng(0).integers(3, VOCABULARY, (2, 12)))
    plain = measure(model, prompts)
    assert plain.left_out == ()
    assert plain.mixing is not None
    assert plain.mixing.shape == (3,)
    assert np.all((plain.mixing > 0) & (plain.mixing < 1))
    checkpointed = measure(model, prompts, options=MeasureOptions(checkpointing=True, rows=2))
    for kind, profile in plain.profiles.items():
        assert np.all(profile.influence > 0)
        np.testing.assert_allclose(checkpointed.per_prompt[kind], plain.per_prompt[kind], rtol=TOLERANCE)
