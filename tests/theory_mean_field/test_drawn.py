"""Linear layers and mixtures: their own modules on drawn vectors, against exact kernels and measured Jacobians."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from posbias import DesignOptions, UsageError, design
from posbias.theory.mean_field import mean_field, spec_of
from posbias.theory.mean_field.bins import Kernel, smooth
from posbias.theory.mean_field.drawn import Modules

N = 24
HYBRID = {"num_hidden_layers": 3, "initializer_range": 0.06}
MIXED = ["linear_attention", "full_attention", "linear_attention"]
DELTA = {
    "layer_types": MIXED,
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 32,
}
MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 32, "mamba_d_state": 16, "mamba_n_groups": 1, "mamba_chunk_size": 32}
GRANITE = {"embedding_multiplier": 3.0, "attention_multiplier": 0.2, "residual_multiplier": 0.4}
LOCAL = {"num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 128}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 128}
ROUTED = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 128}
SHARED = {**EXPERTS, "shared_expert_intermediate_size": 128}
FAMILIES = {
    "lfm2": {"layer_types": ["conv", "full_attention", "conv"], "block_auto_adjust_ff_dim": False},
    "qwen3_5_text": {**DELTA, "head_dim": 32},
    "bamba": {**MAMBA, "attn_layer_indices": [1]},
    "falcon_h1": {
        **MAMBA,
        "mamba_d_ssm": 256,
        "embedding_multiplier": 3.0,
        "attention_out_multiplier": 0.8,
        "ssm_out_multiplier": 0.7,
        "key_multiplier": 0.6,
        "mlp_multipliers": [1.4, 0.6],
    },
    "nemotron_h": {
        "layers_block_type": ["linear_attention", "moe", "full_attention", "mlp"],
        "head_dim": 32,
        "mamba_num_heads": 8,
        "mamba_head_dim": 32,
        "ssm_state_size": 16,
        "n_groups": 1,
        "chunk_size": 32,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 128,
        "moe_shared_expert_intermediate_size": 128,
    },
    "recurrent_gemma": {"num_key_value_heads": 1, "lru_width": 128, "attention_window_size": 32},
    "olmo_hybrid": DELTA,
    "mixtral": LOCAL,
    "olmoe": EXPERTS,
    "qwen3_moe": {**EXPERTS, "head_dim": 32},
    "qwen2_moe": SHARED,
    "phimoe": {**LOCAL, "router_jitter_noise": 0.2},
    "granitemoe": {**LOCAL, **GRANITE},
    "glm4_moe": {**ROUTED, "first_k_dense_replace": 1, "head_dim": 32, "use_qk_norm": True},
    "granitemoehybrid": {**LOCAL, **GRANITE, **MAMBA, "shared_intermediate_size": 128, "layers_block_type": MIXED},
    "gpt_oss": {
        **LOCAL,
        "head_dim": 32,
        "sliding_window": 8,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
    },
    "mimo_v2_flash": {
        **ROUTED,
        "head_dim": 32,
        "v_head_dim": 16,
        "sliding_window": 8,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "attention_value_scale": 0.7,
    },
    "qwen3_next": {  # twice as wide: at 128 features its scale is a fifth too small, at 512 no more
        **SHARED,
        **DELTA,
        "head_dim": 32,
        "hidden_size": 256,
        "num_attention_heads": 8,
        "linear_num_value_heads": 8,
        "linear_num_key_heads": 8,
        "initializer_range": 0.06 / 2**0.5,
    },
    "jamba": {
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
        "expert_layer_period": 2,
        "expert_layer_offset": 1,
        "mamba_d_state": 8,
        "mamba_dt_rank": 4,
    },
}
QUICK = "lfm2"
FAST = (QUICK, "granitemoe")
FEW = "sampled(heads=400)"
"""Heads enough for distances to two digits."""


class Echo(nn.Module):
    """A random map, and 0.7 of the position before."""

    def __init__(self, width: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.weight = nn.Parameter(torch.randn(width, width, generator=generator, dtype=torch.float64) / width**0.5)

    def forward(self, read: Tensor) -> Tensor:
        mapped = read @ self.weight
        return mapped + 0.7 * nn.functional.pad(mapped, (0, 0, 1, 0))[:, :-1]


def test_a_module_has_the_kernels_of_its_matrix() -> None:
    """y = E x W with E lower bidiagonal: forward E K E', backward E' G E, tiny gradients with relative accuracy."""
    echo = np.eye(5) + 0.7 * np.eye(5, k=-1)
    factors = np.random.default_rng(0).normal(size=(2, 5, 5))
    sizes = np.array([1e-9, 1e-6, 1e-3, 0.0, 1.0])
    x = smooth(factors[0] @ factors[0].T)
    gradient = smooth(np.diag(sizes) @ factors[1] @ factors[1].T @ np.diag(sizes))
    modules = Modules(((Echo(64),),), 64, lambda _n_positions, _device: {})
    for above, expected in ((None, echo @ x.block @ echo.T), (gradient, echo.T @ gradient.block @ echo)):
        found = modules.through(x, above, draws=60, generator=np.random.default_rng(1))
        deviations = np.sqrt(np.diagonal(expected))
        assert isinstance(found, Kernel)
        np.testing.assert_allclose(
            found.block / np.outer(deviations, deviations),
            expected / np.outer(deviations, deviations),
            atol=5 / np.sqrt(60 * 64),
        )


@pytest.mark.parametrize(
    "name", [*FAST, *(pytest.param(name, marks=pytest.mark.slow) for name in FAMILIES if name not in FAST)]
)
def test_branches_without_formulas_meet_measurement(name, fresh, jacobians, profile_distance):
    settings = HYBRID | FAMILIES[name]
    measured = jacobians(lambda seed: fresh(name, seed, **settings), N, 12)
    theory = mean_field(spec_of(fresh(name, **settings)), N, level=FEW)
    flat = profile_distance(np.ones(N), measured.norm)
    assert profile_distance(theory.jacobian_norm, measured.norm) < max(0.02, 1.5 * measured.noise) < flat
    assert theory.jacobian_norm.sum() == pytest.approx(measured.norm.sum(), rel=0.15)


def test_gates_of_attention_outputs_count(fresh, jacobians, profile_distance):
    """Without them branches were twice as large."""
    settings = FAMILIES["qwen3_5_text"] | HYBRID | {"layer_types": ["full_attention"] * 3}
    measured = jacobians(lambda seed: fresh("qwen3_5_text", seed, **settings), N, 12)
    spec = spec_of(fresh("qwen3_5_text", **settings))
    ungated = replace(
        spec,
        layers=tuple(replace(layer, attention=replace(layer.attention, gate=None)) for layer in spec.layers),
    )
    right, wrong = (
        profile_distance(mean_field(given, N, level=FEW).jacobian_norm, measured.norm) for given in (spec, ungated)
    )
    assert right < 0.02
    assert wrong > 2 * right


def test_draws_follow_the_seed(fresh):
    spec = spec_of(fresh(QUICK, **FAMILIES[QUICK] | HYBRID))
    first, again, other = (mean_field(spec, 8, level="sampled(heads=8)", seed=seed).jacobian_norm for seed in (0, 0, 1))
    np.testing.assert_array_equal(first, again)
    assert np.abs(first / other - 1).max() > 1e-4


def test_designs_at_initialisation_refuse_layers_without_formulas(fresh):
    model = fresh(QUICK, **FAMILIES[QUICK] | HYBRID)
    with pytest.raises(UsageError, match="linear layers and mixtures of experts have none"):
        design("flat", model=model, options=DesignOptions(theory="mean_field", n_positions=8))
