"""Tiny random configurations of every described family, with their variants: one table for all tests.

A name is the family's own, or the family's with a hyphen and what is special.
"""

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import torch
import transformers

from posbias.mitigation.methods.adapter import Adapter, target_projections, tensors_hash
from posbias.mitigation.methods.base import MITIGATIONS
from posbias.models.hugging_face import HuggingFaceModel, Origin
from posbias.models.networks import random_network

VOCABULARY = 50
COMMON = {"vocab_size": VOCABULARY, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
LLAMA = {
    **COMMON,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
_WINDOW = {"use_sliding_window": True, "sliding_window": 5}
_ALTERNATING = ["sliding_attention", "full_attention", "sliding_attention"]
_SLIDING = {"sliding_window": 5, "layer_types": _ALTERNATING}
_LOCAL_EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
_GRANITE = {
    "embedding_multiplier": 3.0,
    "attention_multiplier": 0.2,
    "residual_multiplier": 0.4,
    "logits_scaling": 2.5,
}
_GPT2 = {**COMMON, "n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 64}
_NEOX = {key: value for key, value in LLAMA.items() if key != "num_key_value_heads"}
_OPT = {**COMMON, "hidden_size": 32, "ffn_dim": 48, "num_hidden_layers": 3, "num_attention_heads": 4}
_OPT = {**_OPT, "word_embed_proj_dim": 32, "max_position_embeddings": 64}
BLOOM = {**COMMON, "hidden_size": 32, "n_layer": 3, "n_head": 4}
_FALCON = {**COMMON, "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "max_position_embeddings": 64}
_GPTJ = {**_GPT2, "rotary_dim": 4}
_MPT = {**COMMON, "d_model": 32, "n_layers": 3, "n_heads": 4, "max_seq_len": 64}


def _of(name: str, *shared: dict[str, Any], **own: Any) -> Callable[[], Any]:
    """A configuration of transformers, made anew at every call, of shared settings and, which go before, its own."""
    settings = {key: value for entry in (*shared, own) for key, value in entry.items()}
    return lambda: getattr(transformers, f"{name}Config")(**copy.deepcopy(settings))


CONFIGS: dict[str, Callable[[], Any]] = {
    "arcee": _of("Arcee", LLAMA, mlp_bias=True),
    "bloom": _of("Bloom", BLOOM),
    "bloom-6-heads": _of("Bloom", BLOOM, hidden_size=48, n_head=6),
    "cwm": _of("Cwm", LLAMA, _SLIDING, head_dim=16),
    "exaone4": _of("Exaone4", LLAMA, _SLIDING),
    "exaone4-full": _of("Exaone4", LLAMA, sliding_window=None, layer_types=["full_attention"] * 3),
    "falcon": _of("Falcon", _FALCON),
    "falcon-alibi": _of("Falcon", _FALCON, alibi=True),
    "falcon-alibi-6-heads": _of(
        "Falcon", _FALCON, hidden_size=48, num_attention_heads=6, alibi=True, bias=True, parallel_attn=False
    ),
    "falcon-heads": _of("Falcon", _FALCON, multi_query=False, parallel_attn=False, bias=True),
    "falcon-new": _of("Falcon", _FALCON, new_decoder_architecture=True, num_kv_heads=2),
    "falcon-new-one-norm": _of(
        "Falcon", _FALCON, new_decoder_architecture=True, num_kv_heads=2, num_ln_in_parallel_attn=1
    ),
    "gemma": _of("Gemma", LLAMA, head_dim=16),
    "gemma2": _of("Gemma2", LLAMA, _SLIDING, head_dim=16, query_pre_attn_scalar=7, attn_logit_softcapping=1.5),
    "gemma2-uncapped": _of("Gemma2", LLAMA, head_dim=16, attn_logit_softcapping=None, final_logit_softcapping=None),
    "gemma3_text": _of("Gemma3Text", LLAMA, _SLIDING, head_dim=16, query_pre_attn_scalar=7),
    "gpt2": _of("GPT2", _GPT2),
    "gpt2-layer-scale": _of("GPT2", _GPT2, scale_attn_by_inverse_layer_idx=True),
    "gpt_neox": _of("GPTNeoX", _NEOX),
    "gpt_neox-sequential": _of("GPTNeoX", _NEOX, use_parallel_residual=False),
    "granite": _of("Granite", LLAMA, _GRANITE),
    "llama": _of("Llama", LLAMA),
    "llama-biases": _of("Llama", LLAMA, attention_bias=True, mlp_bias=True, head_dim=16),
    "ministral": _of("Ministral", LLAMA, _SLIDING, head_dim=8),
    "mistral": _of("Mistral", LLAMA, sliding_window=5),
    "mistral-full": _of("Mistral", LLAMA, sliding_window=None),
    "mpt": _of("Mpt", _MPT),
    "mpt-6-heads": _of("Mpt", _MPT, d_model=48, n_heads=6),
    "nemotron": _of("Nemotron", LLAMA, mlp_bias=True),
    "olmo": _of("Olmo", LLAMA),
    "olmo3": _of("Olmo3", LLAMA, _SLIDING),
    "olmo2": _of("Olmo2", LLAMA),
    "opt": _of("OPT", _OPT),
    "phi": _of("Phi", LLAMA),
    "phi-norms": _of("Phi", LLAMA, qk_layernorm=True),
    "phi3": _of("Phi3", LLAMA, partial_rotary_factor=0.5),
    "phi3-window": _of("Phi3", LLAMA, sliding_window=5),
    "qwen2": _of("Qwen2", LLAMA),
    "qwen2-window": _of("Qwen2", LLAMA, _WINDOW, max_window_layers=1),
    "qwen3": _of("Qwen3", LLAMA, head_dim=16),
    "qwen3-window": _of("Qwen3", LLAMA, _WINDOW, head_dim=16, layer_types=_ALTERNATING),
    "seed_oss": _of("SeedOss", LLAMA, head_dim=16),
    "smollm3": _of("SmolLM3", LLAMA, no_rope_layers=[1, 0, 1]),
    "smollm3-window": _of("SmolLM3", LLAMA, _WINDOW, no_rope_layers=[1, 0, 1]),
    "starcoder2": _of("Starcoder2", LLAMA),
    "starcoder2-window": _of("Starcoder2", LLAMA, sliding_window=5),
}

MIXTURES: dict[str, Callable[[], Any]] = {
    "gpt_oss": _of(
        "GptOss",
        LLAMA,
        _SLIDING,
        _LOCAL_EXPERTS,
        head_dim=16,
        swiglu_limit=0.8,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
    ),
    "mixtral": _of("Mixtral", LLAMA, _LOCAL_EXPERTS, sliding_window=5),
    "olmoe": _of("Olmoe", LLAMA, num_experts=4, num_experts_per_tok=2),
    "qwen3_moe": _of("Qwen3Moe", LLAMA, _EXPERTS, head_dim=16, mlp_only_layers=[1]),
}
"""Families with experts for MLPs: everything about their attention is described."""

_DELTA = {
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
}
_MAMBA2 = {"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 8, "mamba_n_groups": 1}
_ROUTED = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "first_k_dense_replace": 1}
_LATENT = {
    **LLAMA,
    **_ROUTED,
    "num_key_value_heads": 4,
    "kv_lora_rank": 10,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 8,
    "v_head_dim": 6,
    "n_group": 1,
    "topk_group": 1,
}

_NEMOTRON_H = {
    **LLAMA,
    "head_dim": 12,
    "mamba_num_heads": 4,
    "mamba_head_dim": 16,
    "ssm_state_size": 8,
    "n_groups": 1,
}
_NEMOTRON_H_EXPERTS = {
    **_NEMOTRON_H,
    "layers_block_type": ["linear_attention", "moe", "full_attention"],
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "moe_shared_expert_intermediate_size": 40,
}

UNLISTED: dict[str, Callable[[], Any]] = {
    "cohere": _of("Cohere", LLAMA),
    "cohere-norms": _of("Cohere", LLAMA, use_qk_norm=True),
    "cohere2": _of("Cohere2", LLAMA, _SLIDING, head_dim=16),
    "glm": _of("Glm", LLAMA, head_dim=16, attention_bias=True),
    "gpt_neo": _of(
        "GPTNeo",
        COMMON,
        hidden_size=32,
        num_layers=3,
        num_heads=4,
        max_position_embeddings=64,
        window_size=5,
        attention_types=[[["global", "local"], 1], [["local"], 1]],
    ),
    "stablelm-parallel": _of("StableLm", LLAMA, use_parallel_residual=True),
    "apertus": _of("Apertus", LLAMA, head_dim=16),
    "codegen": _of("CodeGen", _GPTJ),
    "gemma4_text": _of(
        "Gemma4Text",
        LLAMA,
        head_dim=8,
        global_head_dim=16,
        num_global_key_value_heads=1,
        attention_k_eq_v=True,
        hidden_size_per_layer_input=0,
        sliding_window=5,
        layer_types=["full_attention", "sliding_attention", "full_attention"],
        use_bidirectional_attention="vision",
    ),
    "gptj": _of("GPTJ", _GPTJ),
    "granite_swa": _of("GraniteSWA", LLAMA, _SLIDING, _GRANITE, layer_rope_theta=[10000.0, 0.0, 500.0]),
    "deepseek_v3": _of("DeepseekV3", _LATENT, q_lora_rank=12),
    "llama4_text": _of(
        "Llama4Text",
        LLAMA,
        head_dim=8,
        intermediate_size_mlp=48,
        num_local_experts=4,
        attention_chunk_size=5,
        no_rope_layers=[1, 0, 1],
        moe_layers=[0, 2],
        floor_scale=4,
        attn_scale=0.5,
    ),
    "mimo_v2_flash": _of(
        "MiMoV2Flash",
        LLAMA,
        _SLIDING,
        num_key_value_heads=1,
        head_dim=16,
        v_head_dim=8,
        attention_value_scale=0.7,
        **{key: value for key, value in _ROUTED.items() if key != "first_k_dense_replace"},
    ),
    "falcon_h1": _of(
        "FalconH1",
        LLAMA,
        _MAMBA2,
        mamba_d_head=8,
        mamba_d_ssm=32,
        embedding_multiplier=3.0,
        key_multiplier=0.6,
        attention_out_multiplier=0.8,
        ssm_in_multiplier=1.3,
        ssm_out_multiplier=0.7,
        ssm_multipliers=[0.9, 1.2, 0.8, 1.1, 0.7],
        mlp_multipliers=[1.4, 0.6],
        lm_head_multiplier=0.5,
    ),
    "nemotron_h": _of("NemotronH", _NEMOTRON_H, layers_block_type=["linear_attention", "mlp", "full_attention"]),
    "nemotron_h-experts": _of("NemotronH", _NEMOTRON_H_EXPERTS, routed_scaling_factor=2.5),
    "olmo_hybrid": _of("OlmoHybrid", LLAMA, _DELTA),
    "recurrent_gemma": _of(
        "RecurrentGemma",
        LLAMA,
        num_key_value_heads=1,
        lru_width=32,
        attention_window_size=5,
        block_types=["recurrent", "attention", "recurrent"],
    ),
    "opt-350m": _of("OPT", _OPT, word_embed_proj_dim=16, do_layer_norm_before=False, tie_word_embeddings=True),
    "mamba2": _of(
        "Mamba2", COMMON, hidden_size=32, num_hidden_layers=3, num_heads=4, head_dim=16, state_size=8, n_groups=1
    ),
}
"""Models whose layout is not in the table: they run, are measured without mixing, and take adapters by name."""

HYBRIDS: dict[str, Callable[[], Any]] = {
    "bamba": _of("Bamba", LLAMA, _MAMBA2, attn_layer_indices=[1]),
    "jamba": _of(
        "Jamba",
        LLAMA,
        num_experts=4,
        num_experts_per_tok=2,
        attn_layer_period=2,
        attn_layer_offset=1,
        expert_layer_period=2,
        expert_layer_offset=1,
        mamba_d_state=8,
        mamba_dt_rank=4,
    ),
    "lfm2": _of("Lfm2", LLAMA, layer_types=["conv", "full_attention", "conv"], block_auto_adjust_ff_dim=False),
    "qwen3_5_text": _of("Qwen3_5Text", LLAMA, _DELTA, head_dim=16),
    "qwen3_next": _of("Qwen3Next", LLAMA, _DELTA, _EXPERTS, head_dim=16, shared_expert_intermediate_size=24),
}
"""Families with linear layers, and attention in the middle one of three."""

CLAMPED: dict[str, Callable[[], Any]] = {
    "mpt-clip": _of("Mpt", _MPT, attn_config={"clip_qkv": 0.5, "alibi": False}),
    "olmo-clip": _of("Olmo", LLAMA, clip_qkv=0.4),
}
"""Models whose maps of attention are not read, since queries, keys and values are clamped."""


_WIDTHS = ("hidden_size", "n_embd", "d_model", "intermediate_size", "ffn_dim", "word_embed_proj_dim")
_HEADS = ("num_attention_heads", "num_key_value_heads", "n_head", "n_heads", "num_heads", "num_kv_heads")

UNLISTED |= HYBRIDS | MIXTURES
DESCRIBED = CONFIGS


def born_model(name: str, seed: int, *, times_wider: int) -> HuggingFaceModel:
    """A family's own initialisation of its tiny configuration, so many times wider, with so many times more heads.

    Norms are moved off their identity: gains grow by about a half, biases scatter. Weights are large enough for the
    branches to outweigh the embeddings, and small enough for a first order in the logits.

    Args:
        name: Of `CONFIGS`.
        seed: Of the initialiser, and of the norms.
        times_wider: Factor on widths and on numbers of heads.
    """
    tiny = CONFIGS[name]()
    values = tiny.to_dict()
    one_key = getattr(tiny, "multi_query", False) and not tiny.new_decoder_architecture
    wider = _WIDTHS if one_key else _WIDTHS + _HEADS  # a single key and value head has to grow itself
    values.update({key: values[key] * times_wider for key in wider if values.get(key)})
    values["initializer_range"] = 0.45 / (32 * times_wider) ** 0.5
    network = random_network(type(tiny)(**values), seed=seed)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for path, parameter in network.named_parameters():
            if parameter.dim() == 1 or "norm" in path:
                shift = 0.5 if path.endswith("weight") else 0.0
                parameter.add_(shift + 0.25 * torch.randn(parameter.shape, generator=generator))
    return HuggingFaceModel(network, origin=Origin(name, init_seed=seed))


def shaken_model(
    name: str, *, implementation: str | None = None, dtype: torch.dtype = torch.float64
) -> HuggingFaceModel:
    """A random model whose every weight, norms and biases included, has been moved away from its initial value.

    Args:
        name: Of any table here.
        implementation: Attention implementation; by default what the library itself asks for.
        dtype: Of the weights.
    """
    config = (DESCRIBED | UNLISTED | CLAMPED | READS_TOKENS | LONGROPE)[name]()
    config._experts_implementation = "eager"  # the others have no float64
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        network = transformers.AutoModelForCausalLM.from_config(
            config, dtype=torch.float32, attn_implementation=implementation
        ).to(dtype)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.add_(0.25 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
        for path, buffer in network.named_buffers():
            if path.endswith("layer_scalar"):
                buffer.mul_(0.7)
    return HuggingFaceModel(network)


def random_adapter(model: HuggingFaceModel, spelling: str = "adapter(rank=2)", *, seed: int = 2) -> Adapter:
    """An adapter that changes the model visibly, and no row that is no target."""
    template, generator = MITIGATIONS.parse(spelling), np.random.default_rng(seed)
    tensors = {}
    for one in target_projections(model, template):
        made, read = one.shape
        rows = torch.cat(list(one.rows.values())).numpy()
        up = np.zeros((made, template.rank), dtype=np.float32)
        up[rows] = 0.3 * generator.standard_normal((len(rows), template.rank))
        down = 0.3 * generator.standard_normal((template.rank, read))
        tensors |= {f"{one.path}.down": down.astype(np.float32), f"{one.path}.up": up}
    return replace(template, weights=tensors_hash(tensors), updates=tensors)


SCALES = [[2.0, 0.5, 1.0, 0.1]] * 3
SPELLED = {
    "key_bias": f"key_bias(biases='gamma_key(alpha=3.0)', scales={SCALES})",
    "context_bias": f"context_bias(values={[[2.0, -1.0, 1.0, -3.0]] * 3}, scales={SCALES})",
    "temperature": "temperature(scale=0.6)",
    "attention_calibration": "attention_calibration(dummy=[7, 4])",
    "positional_channel": "positional_channel(channel=5)",
}
"""Of methods whose parameters have no defaults that would change a short prompt, in three layers of four heads."""


def spelled(name, model=None):
    """A method for a tiny model by its name: spelled with parameters, or an adapter of that model."""
    if name.startswith("adapter") and model is not None:
        return random_adapter(model, "adapter(rank=2)" if name == "adapter" else name)
    return SPELLED.get(name, name)


_PER_LAYER = {
    **LLAMA,
    "num_hidden_layers": 2,
    "head_dim": 8,
    "vocab_size_per_layer_input": VOCABULARY,
    "hidden_size_per_layer_input": 8,
    "num_kv_shared_layers": 0,
    "layer_types": ["sliding_attention", "full_attention"],
    "sliding_window": 5,
}
READS_TOKENS: dict[str, Callable[[], Any]] = {
    "gemma3n_text": _of(
        "Gemma3nText", _PER_LAYER, altup_num_inputs=2, laurel_rank=4, activation_sparsity_pattern=[0.0] * 2
    ),
    "gemma4_text-tokens": _of("Gemma4Text", _PER_LAYER, global_head_dim=8),
}
"""Models that are not described and read token ids in their layers, too."""


_SWITCHES = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "short_factor": [1.0] * 4,
    "long_factor": [1.0, 4.0, 16.0, 64.0],
    "original_max_position_embeddings": 24,
}
LONGROPE: dict[str, Callable[[], Any]] = {
    "phi3-longrope": _of("Phi3", LLAMA, rope_parameters=_SWITCHES, original_max_position_embeddings=24),
    "phimoe-longrope": _of(
        "Phimoe",
        LLAMA,
        num_local_experts=4,
        rope_parameters={**_SWITCHES, "short_mscale": 1.0, "long_mscale": 1.4},
        original_max_position_embeddings=24,
    ),
}
"""Rotary angles, or a factor on them, that change for all positions where a pass is longer than 24."""
