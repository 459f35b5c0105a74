"""Measurement runs on every described family, and checkpointing leaves it as it is (dropout stays off)."""

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from posbias.measurement import MeasureOptions, PassOptions, measure
from posbias.models.families import FAMILIES
from posbias.models.hugging_face import HuggingFaceModel
from posbias.prompts.prompts import Prompts

SIZES = {
    "vocab_size": 53,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
}
WIDTHS = {"hidden_size": 32, "intermediate_size": 48, "head_dim": 8, "ffn_dim": 48, "word_embed_proj_dim": 32}
TOLERANCE = 1e-4
"""float32: recomputed activations are the same numbers, but kernels may split sums differently."""


def _tiny(model_type: str) -> HuggingFaceModel:
    config = AutoConfig.for_model(model_type)
    names = {**SIZES, **WIDTHS, "sliding_window": 8, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    for name, value in names.items():
        target = config.attribute_map.get(name, name)
        if hasattr(config, target):
            setattr(config, target, value)
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[:2]
    torch.manual_seed(0)
    return HuggingFaceModel(AutoModelForCausalLM.from_config(config))


@pytest.mark.parametrize("model_type", sorted(FAMILIES))
def test_every_family_is_measured(model_type: str) -> None:
    model = _tiny(model_type)
    prompts = Prompts(np.random.default_rng(0).integers(3, 53, (2, 12)))
    plain = measure(model, prompts)
    assert plain.left_out == ()
    assert plain.mixing is not None
    assert plain.mixing.shape == (2,)
    assert np.all((plain.mixing > 0) & (plain.mixing < 1))
    checkpointed = measure(model, prompts, options=MeasureOptions(passes=PassOptions(checkpointing=True, rows=2)))
    for kind, profile in plain.profiles.items():
        assert np.all(profile.influence > 0)
        np.testing.assert_allclose(checkpointed.per_prompt[kind], plain.per_prompt[kind], rtol=TOLERANCE)
