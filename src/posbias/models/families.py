"""The table of layouts: every family whose blocks are read, as what differs from Llama's, and what runs on which.

ALiBi stands here as BLOOM, MPT and, where configured, Falcon run it in transformers: their slopes as our encoding, with
the factors and roundings of their code.
"""

from dataclasses import replace
from typing import Any

import torch

from posbias.architecture import Alibi, Encoding, NoEncoding, published_alibi_slopes
from posbias.models.layout import Layout


def _falcon_encoding(config: Any, layer: int) -> Encoding:
    """The slopes as they are applied, each rounded to bfloat16; the staircase they climb is left out."""
    if not config.alibi:
        return NoEncoding()
    times = 1 if config._attn_implementation == "sdpa" else 2  # by attention itself, too
    root = (config.hidden_size // config.num_attention_heads) ** 0.5
    published = torch.tensor(published_alibi_slopes(int(config.num_attention_heads)), dtype=torch.float32)
    return Alibi(slopes=tuple((published.bfloat16().double().numpy() * times / root).tolist()))


_LLAMA = Layout()
_PLAIN = Layout(key_heads=lambda config: int(config.num_attention_heads))
"""Of families without groups of heads, whatever else a configuration holds."""
_GPT2 = replace(
    _PLAIN,
    final_norm="transformer.ln_f",
    position_table="transformer.wpe",
    attention="attn",
    attention_output="attn.c_proj",
    mlp_norm=("ln_2",),
    query_key_value=("c_attn",),
    up_and_down=("c_fc", "c_proj"),
    refused=("add_cross_attention",),  # it would be a branch of its own
)
_NEOX = replace(
    _PLAIN,
    final_norm="gpt_neox.final_layer_norm",
    parallel=lambda config: config.use_parallel_residual,
    attention="attention",
    attention_output="attention.dense",
    query_key_value=("query_key_value",),
    fusion="interleaved",
    up_and_down=("dense_h_to_4h", "dense_4h_to_h"),
)
_BLOOM = replace(
    _NEOX,
    final_norm="transformer.ln_f",
    attention="self_attention",
    attention_output="self_attention.dense",
)
_OLMO2 = replace(
    _LLAMA,
    attention_post_norm=("post_attention_layernorm",),
    mlp_norm=(),
    mlp_post_norm=("post_feedforward_layernorm",),
)
_GEMMA2 = replace(
    _LLAMA,
    attention_post_norm=("post_attention_layernorm",),
    mlp_norm=("pre_feedforward_layernorm",),
    mlp_post_norm=("post_feedforward_layernorm",),
)
_ONE_WINDOW = replace(_LLAMA, one_window=True)


_ROWS = {
    "llama": _LLAMA,
    "qwen2": _LLAMA,
    "seed_oss": _LLAMA,
    "cwm": _LLAMA,
    "ministral": _LLAMA,
    "arcee": _LLAMA,
    "nemotron": _LLAMA,
    "gemma": _LLAMA,
    "olmo": _LLAMA,
    "mistral": _ONE_WINDOW,
    "starcoder2": replace(_ONE_WINDOW, up_and_down=("c_fc", "c_proj")),
    "smollm3": replace(_LLAMA, rotates=lambda attention, config: bool(attention.use_rope)),
    "granite": _LLAMA,
    "phi3": replace(
        _ONE_WINDOW,
        query_key_value=("qkv_proj",),
        up_and_down=("gate_up_proj", "down_proj"),
        gate_in_up=True,
    ),
    "qwen3": _LLAMA,
    "olmo2": _OLMO2,
    "olmo3": _OLMO2,
    "exaone4": replace(_OLMO2, rotates=lambda attention, _: attention.sliding_window is None or attention.is_sliding),
    "gemma2": _GEMMA2,
    "gemma3_text": _GEMMA2,
    "gpt2": _GPT2,
    "gpt_neox": _NEOX,
    "phi": Layout(
        final_norm="model.final_layernorm",
        parallel=lambda config: True,
        attention_output="self_attn.dense",
        mlp_norm=("input_layernorm",),
        up_and_down=("fc1", "fc2"),
    ),
    "opt": replace(
        _PLAIN,
        final_norm="model.decoder.final_layer_norm",
        position_table="model.decoder.embed_positions",
        attention_output="self_attn.out_proj",
        mlp="fc2",
        mlp_norm=("final_layer_norm",),
        up_and_down=("fc1", "fc2"),
        refused=("no do_layer_norm_before",),  # OPT-350M normalises the stream itself
    ),
    "bloom": replace(
        _BLOOM,
        embedding_norm="transformer.word_embeddings_layernorm",
        parallel=lambda config: False,
        refused=("apply_residual_connection_post_layernorm",),  # the stream itself would be replaced by its norm
        encoding=lambda config, layer: Alibi(),
        caveat="in half precision BLOOM rounds its biases, and the logits they are added to, to whole steps: past "
        "position 256 in bfloat16, 2048 in float16",
    ),
    "mpt": replace(
        _PLAIN,
        final_norm="transformer.norm_f",
        attention="attn",
        attention_output="attn.out_proj",
        mlp="ffn",
        mlp_norm=("norm_2",),
        query_key_value=("Wqkv",),
        encoding=lambda config, layer: Alibi(),
        caveat="transformers runs every MPT with causal layers and ALiBi of maximum 8, whatever its configuration says "
        "of alibi, alibi_bias_max, learned_pos_emb, prefix_lm, qk_ln and logit_scale",
    ),
    "falcon": replace(
        _BLOOM,
        parallel=lambda config: config.new_decoder_architecture or config.parallel_attn,
        rotates=lambda attention, config: not config.alibi,
        mlp_norm=("ln_mlp", "post_attention_layernorm", "ln_attn", "input_layernorm"),
        key_heads=lambda config: (
            config.num_kv_heads
            if config.new_decoder_architecture
            else 1
            if config.multi_query
            else config.num_attention_heads
        ),
        unbounded=lambda config: config.alibi,
        encoding=_falcon_encoding,
        caveat="Falcon divides its ALiBi slopes by sqrt(head_dim), adds them twice in eager attention, and builds them "
        "in bfloat16: slopes keep 8 bits, and past position 256 the bias is a staircase",
    ),
}
FAMILIES: dict[str, Layout] = {name: replace(row, name=name) for name, row in sorted(_ROWS.items())}


def families() -> dict[str, str]:
    """What runs on every family of the table, in a line each."""
    but = "every verb; its attention is not replaced, so that of methods adapters and changed prompts alone run"
    kept = ("bloom", "falcon", "gemma2", "mpt")  # beside transformers' attention interface, or with a cap on logits
    return {name: but if name in kept else "every verb" for name in FAMILIES}
