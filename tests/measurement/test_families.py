"""Measurement, by depth too, runs on every described family, and checkpointing leaves it as it is."""

import numpy as np
import pytest
import torch

from posbias import MeasureOptions, measure
from posbias.models.families.base import FAMILIES
from posbias.prompts.prompts import Prompts
from tiny_families import VOCABULARY, shaken_model

TOLERANCE = 1e-4
"""float32: recomputed activations are the same numbers, but kernels may split sums differently."""


@pytest.mark.parametrize("model_type", sorted(FAMILIES))
def test_every_family_is_measured(model_type: str) -> None:
    model = shaken_model(model_type, dtype=torch.float32)
    prompts = Prompts(np.random.default_rng(0).integers(3, VOCABULARY, (1, 12)))
    kinds = ["jacobian(probes=2)", "probability"]
    plain = measure(model, prompts, kinds=kinds, options=MeasureOptions(layers="all"))
    assert plain.left_out == ()
    assert plain.depth is not None
    assert plain.depth.per_prompt.shape == (1, 3, 12)
    assert np.all(plain.depth.per_prompt[..., -1] > 0)
    assert plain.mixing is not None
    assert plain.mixing.shape == (3,)
    mixes = [bool(block.mixers) for block in model.family.blocks(model.network)]
    assert np.all((plain.mixing > 0) == mixes)
    assert np.all(plain.mixing < 1)
    changed = MeasureOptions(layers="all", checkpointing=True, rows=2)
    checkpointed = measure(model, prompts, kinds=kinds, options=changed)
    assert checkpointed.depth is not None
    np.testing.assert_allclose(checkpointed.depth.per_prompt, plain.depth.per_prompt, rtol=TOLERANCE)
    for kind, profile in plain.profiles.items():
        assert np.all(profile.influence > 0)
        np.testing.assert_allclose(checkpointed.per_prompt[kind], plain.per_prompt[kind], rtol=TOLERANCE)
