"""Every family is measured, by depth too, alone and in batches (checkpointing changes nothing: tests/contracts)."""

import numpy as np
import pytest
import torch

from posbias import MeasureOptions, UsageError, measure, predict
from posbias.models.hugging_face import HuggingFaceModel, Origin
from posbias.models.networks import random_network
from posbias.prompts import Prompts
from tiny_families import DESCRIBED, UNLISTED, VOCABULARY, shaken_model

KINDS = ("jacobian(probes=2)", "probability")
EQUAL = {torch.float64: 1e-10, torch.float32: 1e-5}
PROMPTS = Prompts(np.random.default_rng(0).integers(3, VOCABULARY, (5, 12)))


def passes_of(model, kinds=KINDS, **options):
    """Forward passes of the network that a measurement took, and every prompt's numbers."""
    counted = []
    handle = model.network.register_forward_hook(lambda *_: counted.append(1))
    try:
        measured = measure(model, PROMPTS, kinds=kinds, options=MeasureOptions(**options))
    finally:
        handle.remove()
    assert measured.left_out == ()
    rows = {**measured.per_prompt, **{f"errors of {kind}": rows for kind, rows in measured.standard_errors.items()}}
    if measured.depth is not None:
        rows["depth"] = measured.depth.influence
    return len(counted), rows | {name: mixing.value for name, mixing in measured.mixings.items()}


@pytest.mark.parametrize("name", sorted(DESCRIBED))
def test_every_family_is_measured_and_the_same_in_batches(name):
    model = shaken_model(name)
    alone, expected = passes_of(model, together=1, layers="all")
    batched, found = passes_of(model, together=3, layers="all")
    assert (alone, batched) == (5, 2)
    assert expected["depth"].shape == (3, 12)
    assert all(np.all((expected[mixing] > 0) & (expected[mixing] < 1)) for mixing in ("token_mean", "frobenius"))
    within = EQUAL[model.dtype]
    for what, values in expected.items():
        assert np.all(values[..., -1] > 0 if what == "depth" else values > 0), what
        np.testing.assert_allclose(found[what], values, rtol=within, atol=0, err_msg=what)


@pytest.mark.parametrize(
    ("name", "kinds", "options"),
    [
        ("gemma3_text", KINDS, {"checkpointing": True}),
        ("gemma3_text", KINDS, {"output": "mean(last=3)"}),
        ("gemma3_text", KINDS, {"output": "at(position=-4)"}),
        ("bloom", "probability", {"output": "target(tokens=[5, 6])"}),
        ("llama", "logprob", {}),
        ("llama", "logit", {}),
        ("llama", "perturbation(draws=1)", {}),
    ],
    ids=str,
)
def test_batches_go_with_every_kind_and_every_setting_of_the_passes(name, kinds, options):
    model = shaken_model(name)
    (_, expected), (_, found) = (passes_of(model, kinds, together=size, **options) for size in (1, 4))
    for what, values in expected.items():
        np.testing.assert_allclose(found[what], values, rtol=EQUAL[model.dtype], err_msg=what)


@pytest.mark.parametrize("name", sorted(set(UNLISTED) - {"gemma4_text"}))
def test_models_without_a_row_are_measured_and_refused_by_theories_of_weights(name):
    model = HuggingFaceModel(random_network(UNLISTED[name](), seed=0), origin=Origin("tiny", init_seed=0))
    model.compare_inputs()
    prompts = Prompts(PROMPTS.token_ids[:1])
    found = measure(model, prompts, kinds=KINDS)
    assert (found.mixing is None) == name.startswith(("mamba2", "nemotron_h", "opt-350m"))
    assert all(np.all(profile.influence > 0) for profile in found.profiles.values())
    refused = r"layout of \w+ models is not in the table|do_layer_norm_before = False is set"
    for theory in ("power_rollout", "mean_field"):
        with pytest.raises(UsageError, match=refused):
            predict(model, theory=theory, prompts=prompts)
