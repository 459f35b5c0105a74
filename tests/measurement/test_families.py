"""Measurement, by depth too, runs on every described family (that checkpointing changes nothing: tests/contracts)."""

import numpy as np
import pytest
import torch

from posbias import MeasureOptions, UsageError, measure, predict
from posbias.models.families import FAMILIES
from posbias.models.hugging_face import HuggingFaceModel, Origin
from posbias.models.networks import random_network
from posbias.prompts.prompts import Prompts
from tiny_families import UNLISTED, VOCABULARY, shaken_model


@pytest.mark.parametrize("model_type", sorted(FAMILIES))
def test_every_family_is_measured(model_type: str) -> None:
    model = shaken_model(model_type, dtype=torch.float32)
    prompts = Prompts(np.random.default_rng(0).integers(3, VOCABULARY, (1, 12)))
    kinds = ["jacobian(probes=2)", "probability"]
    plain = measure(model, prompts, kinds=kinds, options=MeasureOptions(layers="all"))
    assert plain.left_out == ()
    assert plain.depth is not None
    assert plain.depth.influence.shape == (3, 12)
    assert np.all(plain.depth.influence[:, -1] > 0)
    assert plain.mixing is not None
    assert plain.mixing.shape == (3,)
    assert np.all(plain.mixing > 0)
    assert np.all(plain.mixing < 1)
    assert all(np.all(profile.influence > 0) for profile in plain.profiles.values())


@pytest.mark.parametrize("name", sorted(set(UNLISTED) - {"gemma4_text"}))
def test_models_without_a_row_are_measured_and_refused_by_theories_of_weights(name: str) -> None:
    model = HuggingFaceModel(random_network(UNLISTED[name](), seed=0), origin=Origin("tiny", init_seed=0))
    model.compare_inputs()
    prompts = Prompts(np.random.default_rng(0).integers(3, VOCABULARY, (1, 12)))
    found = measure(model, prompts, kinds=["jacobian(probes=2)", "probability"])
    assert (found.mixing is None) == name.startswith(("mamba2", "nemotron_h", "opt-350m"))
    assert all(np.all(profile.influence > 0) for profile in found.profiles.values())
    refused = r"evaluated and mitigated by adapters; allowed: |do_layer_norm_before = False is set"
    for theory in ("power_rollout", "mean_field"):
        with pytest.raises(UsageError, match=refused):
            predict(model, theory=theory, prompts=prompts)
