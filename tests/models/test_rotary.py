"""Rotary angles that depend on the length of a pass."""

from typing import Any

import numpy as np
import pytest
import torch
import transformers

import posbias as pb
from posbias import UsageError
from posbias.models.hugging_face import HuggingFaceModel
from posbias.models.layout import AngleLengths, stretched_positions
from posbias.prompts import Prompts
from tiny_families import CONFIGS, LLAMA, LONGROPE, shaken_model

BY_TYPE = {"sliding_attention": {"rope_type": "default", "rope_theta": 1e4}}


def llama(**rope: Any) -> Any:
    return transformers.LlamaConfig(**{**LLAMA, "rope_parameters": {"rope_theta": 1e4, **rope}})


def network(config: Any) -> Any:
    return transformers.AutoModelForCausalLM.from_config(config).eval()


def test_dynamic_angles_are_their_own_at_every_length_beyond_the_configured_one() -> None:
    lengths = AngleLengths.of(llama(rope_type="dynamic", factor=2.0))
    assert lengths == AngleLengths(moving_from=64)
    assert lengths.angles(64) == lengths.angles(1) != lengths.angles(65) != lengths.angles(66)


def test_a_sort_of_layers_may_switch_alone() -> None:
    long = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 4, "long_factor": [8.0] * 4,
            "original_max_position_embeddings": 24}  # fmt: skip
    config = transformers.Olmo3Config(
        **{**CONFIGS["olmo3"]().to_dict(), "rope_parameters": {**BY_TYPE, "full_attention": long}}
    )
    assert AngleLengths.of(config).switches == (24,)


@pytest.mark.parametrize("n_positions", [20, 40])
def test_seen_attention_has_the_angles_of_its_own_length(n_positions: int) -> None:
    model = shaken_model("phi3-longrope", implementation="eager")
    tokens = torch.arange(3, 3 + n_positions)[None]
    for length in (40, n_positions):  # what ran before leaves nothing behind
        with torch.no_grad():
            weights = model.network(tokens[:, :length], output_attentions=True, use_cache=False).attentions
    expected = torch.stack([layer[0].mean(0) for layer in weights])
    np.testing.assert_allclose(pb.attention(model, Prompts(tokens.numpy())).kernels, expected, atol=1e-6)


def test_frequencies_that_the_last_pass_chose_are_not_read() -> None:
    config = LONGROPE["phi3-longrope"]()
    config.rope_parameters["attention_factor"] = 1.0
    model = HuggingFaceModel(network(config))
    with pytest.raises(UsageError, match="longrope depend on the prompt's length"):
        model.family.rotary_frequencies(model.network, model.family.blocks(model.network)[0], config=config, layer=0)


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}


def test_yarn_allows_factor_times_the_original_with_a_caveat() -> None:
    """As Qwen 2.5 says to use it: `max_position_embeddings` stays at the original length."""
    model = pb.load_model(network(llama(**YARN)))
    assert model.max_positions == 256
    assert model.describe()["caveats"] == [
        "the configuration names 64 positions; YaRN stretches them to 256 (factor times original length), which are "
        "allowed"
    ]
    assert pb.load_prompts("synthetic", model, n_positions=200, count=1).n_positions == 200
    with pytest.raises(UsageError, match="at most the model's 256 positions, got 257"):
        pb.load_prompts("synthetic", model, n_positions=257, count=1)


@pytest.mark.parametrize(
    ("rope", "most"),
    [
        ({**YARN, "original_max_position_embeddings": 16}, 64),  # DeepSeek-V3 names the stretched length itself
        ({**YARN, "original_max_position_embeddings": 8}, 64),
        ({"rope_type": "linear", "factor": 4.0}, 64),
        ({"rope_type": "dynamic", "factor": 4.0}, 64),
        ({"rope_type": "default"}, 64),
    ],
)
def test_other_lengths_are_as_configured_without_a_caveat(rope: dict[str, Any], most: int) -> None:
    model = HuggingFaceModel(network(llama(**rope)))
    assert model.max_positions == most
    assert model.describe()["caveats"] == []


def test_every_sort_of_layer_with_a_full_context_has_to_be_stretched() -> None:
    yarn = {**YARN, "rope_theta": 1e4}
    config = transformers.Olmo3Config(
        **{**CONFIGS["olmo3"]().to_dict(), "rope_parameters": {**BY_TYPE, "full_attention": yarn}}
    )
    assert stretched_positions(config) == 256
    config.rope_parameters["full_attention"] = BY_TYPE["sliding_attention"]
    assert stretched_positions(config) is None


def test_a_scaling_that_is_not_counted_is_named_where_a_prompt_is_too_long() -> None:
    model = HuggingFaceModel(network(llama(rope_type="linear", factor=2.0)))
    with pytest.raises(
        UsageError, match=r"the model's 64 positions \(its RoPE scaling 'linear' is not counted\), got 100"
    ):
        pb.load_prompts("synthetic", model, n_positions=100, count=1)
