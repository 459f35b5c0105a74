"""Theories of architectures take a model: its mask and logits, with the residual share it has."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from posbias import Architecture, RunError, UsageError, load_model, load_prompts, measure, predict
from posbias.models.hugging_face import HuggingFaceModel
from posbias.models.reference.config import ReferenceConfig
from posbias.models.reference.network import ReferenceTransformer
from published_networks import copy_network, retrieval_network

N = 12
THEORIES = ["attention_only", "rollout", "continuous", "closed_form"]


def prompts_of(model: ReferenceTransformer | HuggingFaceModel, n_positions: int = N):
    return load_prompts("synthetic", model, n_positions=n_positions, count=3)


@pytest.mark.parametrize("theory", THEORIES)
@pytest.mark.parametrize("residual", ["none", "mixed"])
def test_where_the_configuration_fixes_mixing_it_is_taken(theory: str, residual: str) -> None:
    architecture = Architecture(3, mixing=[0.2, 0.5, 0.9])
    model = ReferenceTransformer(ReferenceConfig(architecture, residual=residual))
    declared = replace(architecture, mixing=1.0) if residual == "none" else architecture
    found = predict(model, N, theory=theory)
    np.testing.assert_array_equal(found.profile.influence, predict(declared, N, theory=theory).profile.influence)
    assert found.architecture is not None


def test_an_added_residual_has_the_mixing_that_measure_finds(tiny_llama: Path) -> None:
    for model in (ReferenceTransformer(copy_network(Architecture(2), residual=True)), load_model(tiny_llama)):
        prompts = prompts_of(model)
        mixing = measure(model, prompts, kinds=["jacobian"]).mixing
        found = predict(model, N, prompts=prompts).architecture
        assert found is not None
        np.testing.assert_allclose(found.layer_mixing, mixing, rtol=1e-6)
        with pytest.raises(UsageError, match="theory rollout of a model measures its residual share: give prompts"):
            predict(model, N)
        assert predict(model, N, theory="attention_only").profile.influence[0] > 0.1


def test_encodings_that_enter_by_content_add_no_logit() -> None:
    """As for Hugging Face models; where attention has no content they do."""
    turned = ReferenceTransformer(retrieval_network(Architecture(2, encoding="rope"), width=8))
    added = ReferenceTransformer(retrieval_network(Architecture(2, encoding="sinusoidal(width=8)"), width=8))
    decayed = ReferenceTransformer(retrieval_network(Architecture(2, encoding="decay(rate=0.8)"), width=8))
    constant = ReferenceTransformer(Architecture(2, encoding="rope", mixing=1))
    plain = predict(Architecture(2, mixing=1), N).profile.influence
    for model in (turned, added):
        np.testing.assert_array_equal(predict(model, N).profile.influence, plain)
    for model in (decayed, constant):
        assert np.abs(predict(model, N).profile.influence - plain).max() > 0.01
    mixed = Architecture(2, 2, encoding=[["rope", "alibi"], ["none", "none"]])
    traits = ReferenceTransformer(ReferenceConfig(mixed, attention="content")).architecture_traits()
    assert [[str(item) for item in layer] for layer in traits["encoding"]] == [["none", "alibi"], ["none", "none"]]


def test_streams_that_vanish_are_a_run_error() -> None:
    model = ReferenceTransformer(copy_network(Architecture(2), residual=True))
    model.network.embedding.data.zero_()
    with pytest.raises(RunError, match="zero or not finite in layer 0"):
        predict(model, N, prompts=prompts_of(model, 10))
