"""Small models of real families: theory against measurement, and the three wrong turns, which must be clearly worse."""

from dataclasses import replace

import numpy as np
import pytest

from posbias.theory.mean_field import mean_field, network_profiles, spec_of
from posbias.theory.mean_field.prediction import resolve_level, scatter
from posbias.theory.mean_field.spec import LayerSpec, MeanFieldSpec

N = 64
SEEDS = 12
CLOSE = 0.02
"""Distance allowed at 12 seeds of width 128; halves of the seeds differ by about 0.01."""
WRONG = 0.05
"""A wrong turn is at least this far off."""
FEW = "sampled(heads=400)"
"""Heads enough for distances to two digits; `auto` draws 2000 at this length."""


def changed(spec: MeanFieldSpec, change) -> MeanFieldSpec:
    return replace(spec, layers=tuple(change(layer) for layer in spec.layers))


def without_epsilon(layer: LayerSpec) -> LayerSpec:
    def bare(norm):
        return None if norm is None else replace(norm, epsilon=0.0)

    attention, mlp = layer.attention, layer.mlp
    attention = replace(
        attention,
        pre_norm=bare(attention.pre_norm),
        post_norm=bare(attention.post_norm),
        query_norm=bare(attention.query_norm),
        key_norm=bare(attention.key_norm),
    )
    return replace(
        layer, attention=attention, mlp=replace(mlp, pre_norm=bare(mlp.pre_norm), post_norm=bare(mlp.post_norm))
    )


@pytest.mark.parametrize(
    ("model_type", "level", "settings"),
    [
        ("llama", "first", {}),
        ("gpt2", "first", {"n_embd": 128, "n_head": 4, "n_layer": 4}),
        ("mistral", "first", {"sliding_window": 24}),
        ("gemma3_text", "sampled", {"head_dim": 32, "query_pre_attn_scalar": 32, "sliding_window": 32}),
    ],
)
def test_theory_meets_measurement(model_type, level, settings, fresh, jacobians, profile_distance):
    measured = jacobians(lambda seed: fresh(model_type, seed, **settings), N, SEEDS)
    spec = spec_of(fresh(model_type, **settings))
    assert resolve_level(spec, "auto", N).name == level
    theory = mean_field(spec, N, level=FEW if level == "sampled" else level)
    assert profile_distance(theory.jacobian_norm, measured.norm) < CLOSE
    assert theory.jacobian_norm.sum() == pytest.approx(measured.norm.sum(), rel=0.15)


@pytest.mark.slow
def test_logits_as_large_as_heads_are_met_within_the_scatter_of_networks(fresh, jacobians, profile_distance):
    """Gemma 4 normalises queries and keys and does not scale them down; one map makes keys and values."""
    settings = {
        "num_hidden_layers": 3,
        "initializer_range": 0.06,
        "head_dim": 32,
        "global_head_dim": 64,
        "num_global_key_value_heads": 1,
        "attention_k_eq_v": True,
        "hidden_size_per_layer_input": 0,
        "sliding_window": 8,
        "layer_types": ["full_attention", "sliding_attention", "full_attention"],
    }
    seeds = 48
    measured = jacobians(lambda seed: fresh("gemma4_text", seed, **settings), 24, seeds)
    spec = spec_of(fresh("gemma4_text", **settings))
    theory = mean_field(spec, 24)
    assert 32 - 1 < theory.logit_variance.max() < 64 + 1
    of_one = scatter(network_profiles(spec, 24))
    assert profile_distance(theory.jacobian_norm, measured.norm) < 2 * of_one / seeds**0.5
    assert profile_distance(np.ones(24), measured.norm) > 4 * of_one / seeds**0.5


def test_parallel_residual_is_not_sequential(fresh, jacobians, profile_distance):
    measured = jacobians(lambda seed: fresh("gpt_neox", seed), N, SEEDS)
    spec = spec_of(fresh("gpt_neox"))
    sequential = changed(spec, lambda layer: replace(layer, parallel=False))
    theory = mean_field(spec, N)
    assert theory.level.name == "first"
    assert theory.jacobian_norm.sum() == pytest.approx(measured.norm.sum(), rel=0.15)
    right = profile_distance(theory.jacobian_norm, measured.norm)
    wrong = profile_distance(mean_field(sequential, N).jacobian_norm, measured.norm)
    assert right < CLOSE
    assert wrong > max(WRONG, 3 * right)


def test_learned_sinks_take_their_share(fresh, jacobians, profile_distance):
    factors = {"embedding_multiplier": 3.0, "attention_multiplier": 0.2, "residual_multiplier": 0.4}
    layers = {"layer_types": ["sliding_attention", "full_attention"] * 2, "layer_rope_theta": [1e4, 0.0] * 2}
    settings = {**factors, **layers, "sliding_window": 8, "initializer_range": 0.06}
    measured = jacobians(lambda seed: fresh("granite_swa", seed, **settings), 24, SEEDS)
    spec = spec_of(fresh("granite_swa", **settings))

    def bare(layer: LayerSpec) -> LayerSpec:
        groups = tuple(replace(group, sinks=np.full_like(group.sinks, -np.inf)) for group in layer.attention.groups)
        return replace(layer, attention=replace(layer.attention, groups=groups))

    right, wrong = (
        profile_distance(mean_field(chosen, 24, level=FEW).jacobian_norm, measured.norm)
        for chosen in (spec, changed(spec, bare))
    )
    assert right < CLOSE
    assert wrong > 2 * right


def test_post_norms_need_their_epsilon(fresh, jacobians, profile_distance):
    measured = jacobians(lambda seed: fresh("olmo2", seed), N, SEEDS)
    spec = spec_of(fresh("olmo2"))
    right, wrong = (
        profile_distance(mean_field(chosen, N, level=FEW).jacobian_norm, measured.norm)
        for chosen in (spec, changed(spec, without_epsilon))
    )
    assert right < CLOSE
    assert wrong > max(WRONG, 3 * right)


def test_query_key_norms_need_the_score_path(fresh, jacobians, profile_distance):
    measured = jacobians(lambda seed: fresh("qwen3", seed, head_dim=32), N, SEEDS)
    spec = spec_of(fresh("qwen3", head_dim=32))
    assert resolve_level(spec, "auto", N).name == "sampled"
    sampled, first, value = (
        profile_distance(mean_field(spec, N, level=level).jacobian_norm, measured.norm)
        for level in (FEW, "first", "value")
    )
    assert sampled < CLOSE
    assert sampled < first < value
    assert value > max(WRONG, 3 * sampled)


@pytest.mark.parametrize(
    ("model_type", "settings"),
    [
        ("gpt2", {"n_embd": 128, "n_head": 4, "n_layer": 4}),
        ("qwen2", {}),
        ("qwen3", {"head_dim": 32}),
        ("gemma3_text", {"head_dim": 32}),
        ("smollm3", {"no_rope_layers": [1, 0, 1, 0]}),
        ("opt", {"ffn_dim": 512, "word_embed_proj_dim": 128, "pad_token_id": 1}),
        ("opt", {"ffn_dim": 512, "word_embed_proj_dim": 128, "pad_token_id": 1, "do_layer_norm_before": False}),
        ("phi", {"num_key_value_heads": 4}),
        ("olmo2", {}),
        ("bloom", {"n_head": 4, "n_layer": 4}),
        ("mpt", {"d_model": 128, "n_heads": 4, "n_layers": 4, "max_seq_len": 64}),
    ],
)
def test_every_family_is_read(model_type, settings, fresh):
    spec = spec_of(fresh(model_type, **settings))
    assert spec.width == 128
    assert len(spec.layers) == 4
    assert (spec.final_norm is None) == (not settings.get("do_layer_norm_before", True))
    theory = mean_field(spec, 16, level="value")
    assert np.all(np.isfinite(theory.jacobian_norm))
    assert theory.jacobian_norm.min() > 0
    assert theory.profile.influence.sum() == pytest.approx(1)


def test_rotary_layers_are_told_apart(fresh):
    spec = spec_of(fresh("smollm3", no_rope_layers=[1, 0, 1, 0]))
    assert [layer.attention.rotation is not None for layer in spec.layers] == [True, False, True, False]
    spec = spec_of(fresh("gpt_neox", num_attention_heads=4))
    assert spec.layers[0].attention.rotation.shape == (4, 4)  # a quarter of 32 features, in pairs
    layers = ["sliding_attention", "full_attention"] * 2
    spec = spec_of(fresh("gemma3_text", head_dim=32, layer_types=layers))
    slowest = [layer.attention.rotation.min() for layer in spec.layers]
    assert slowest[0] == slowest[2] > slowest[1] == slowest[3]


def test_a_custom_initialiser_is_followed(fresh):
    model = fresh("llama")
    before = spec_of(model)
    for block in model.network.model.layers:
        block.self_attn.o_proj.weight.data *= 3
        block.input_layernorm.weight.data *= 2
    after = spec_of(model)
    for old, new in zip(before.layers, after.layers, strict=True):
        assert new.attention.output.variance == pytest.approx(9 * old.attention.output.variance)
        assert new.attention.pre_norm.gain == pytest.approx(4)


def test_gpt2_scales_its_output_projections_by_depth(fresh):
    first = spec_of(fresh("gpt2", n_embd=128, n_head=4, n_layer=4)).layers[0]
    assert first.attention.output.variance * 8 == pytest.approx(first.attention.value.variance, rel=0.05)
    assert first.mlp.down.variance * 8 == pytest.approx(first.mlp.up.variance, rel=0.05)
