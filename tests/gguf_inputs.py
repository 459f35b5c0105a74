"""Networks of transformers written to GGUF files as llama.cpp's converter writes them, and the entries it would add.

`save_gguf` writes the keys of real files, and undoes what the loader does to the weights: rotary pairs of a Llama lie
side by side, norms of Gemma hold 1 + weight, maps of GPT-2 are transposed.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from gguf import (
    GGML_QUANT_SIZES,
    MODEL_ARCH_NAMES,
    GGMLQuantizationType,
    GGUFValueType,
    GGUFWriter,
    get_tensor_name_map,
    quants,
)

SIZES = {
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "block_count": "num_hidden_layers",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
}
EPSILONS = {
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    "layer_norm_epsilon": "attention.layer_norm_epsilon",
}
MODEL_TYPES = {"gemma3_text": "gemma3"}
"""Architectures that are called otherwise in GGUF files."""


def metadata(network: Any) -> dict[str, Any]:
    """Keys of the network's architecture, without its name in front, as real files have them."""
    config = network.config
    keys = {key: getattr(config, name, None) for key, name in SIZES.items()}
    keys |= {key: getattr(config, name) for name, key in EPSILONS.items() if hasattr(config, name)}
    keys["vocab_size"] = config.vocab_size
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    rope = getattr(config, "rope_parameters", None) or {}
    rope = rope.get("full_attention", rope)
    if rope and config.model_type != "gemma2":
        keys["rope.freq_base"] = float(rope["rope_theta"])
    if config.model_type == "llama":
        keys["rope.dimension_count"] = head_dim
    if config.model_type in ("qwen3", "gemma2", "gemma3_text"):
        keys |= {"attention.key_length": head_dim, "attention.value_length": head_dim}
    if config.model_type in ("gemma2", "gemma3_text"):
        keys["attention.sliding_window"] = config.sliding_window
    if config.model_type == "gemma2":
        keys |= {cap: getattr(config, cap) for cap in ("attn_logit_softcapping", "final_logit_softcapping")}
    if config.model_type == "gemma3_text" and config.num_hidden_layers < 6:  # unlike the published ones
        keys["attention.sliding_window_pattern"] = [kind == "sliding_attention" for kind in config.layer_types]
    if config.model_type == "gpt2":
        keys["feed_forward_length"] = 4 * config.hidden_size
    return {key: value for key, value in keys.items() if value is not None}


def stored_tensors(network: Any) -> dict[str, np.ndarray]:
    """The weights by their names in the file, as it holds them."""
    config = network.config
    architecture = MODEL_TYPES.get(config.model_type, config.model_type)
    kind = next(key for key, name in MODEL_ARCH_NAMES.items() if name == architecture)
    names = get_tensor_name_map(kind, config.num_hidden_layers)
    found = {}
    for weight, value in network.state_dict().items():
        stem, _, suffix = weight.rpartition(".")
        name = f"{names.get_name(stem) or names.get_name(stem.partition('.')[2])}.{suffix}"
        if weight == "lm_head.weight" and config.tie_word_embeddings:
            continue
        array = value.float().numpy()
        if architecture == "llama" and (".attn_q." in name or ".attn_k." in name):
            heads = config.num_attention_heads if ".attn_q." in name else config.num_key_value_heads
            halves = array.reshape(heads, 2, -1, *array.shape[1:])
            array = halves.swapaxes(1, 2).reshape(array.shape)
        if architecture.startswith("gemma") and name.endswith("norm.weight"):
            array = array + 1
        if architecture == "gpt2" and name.startswith("blk") and array.ndim == 2:
            array = array.T
        found[name] = np.ascontiguousarray(array)
    return found


def save_gguf(
    path: Path,
    network: Any,
    *,
    keys: Mapping[str, Any] | None = None,
    others: Mapping[str, Any] | None = None,
    tensors: Mapping[str, Any] | None = None,
    kind: GGMLQuantizationType = GGMLQuantizationType.F32,
) -> Path:
    """Write a network to a file, with keys of its architecture, other entries and tensors changed.

    What is None is left out; matrices whose rows do not divide into blocks of the kind stay in float32.
    """
    model_type = network.config.model_type
    writer = GGUFWriter(path, MODEL_TYPES.get(model_type, model_type))
    vocabulary = network.config.vocab_size
    told = {f"{writer.arch}.{key}": value for key, value in (metadata(network) | dict(keys or {})).items()}
    general = {"general.type": "model", "general.name": "tiny", "general.file_type": 0}
    general |= {"general.size_label": "1K", "general.quantization_version": 2}
    tokens = {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "default", "tokenizer.ggml.merges": ["t 1", "t 2"]}
    tokens |= {"tokenizer.ggml.tokens": [f"t{index}" for index in range(vocabulary)]}
    tokens |= {"tokenizer.ggml.token_type": [1] * vocabulary, "tokenizer.ggml.add_bos_token": False}
    tokens |= {"tokenizer.ggml.bos_token_id": 1, "tokenizer.ggml.eos_token_id": 2}
    for key, value in (general | told | tokens | dict(others or {})).items():
        if value is not None:
            kind_of_value = GGUFValueType.UINT32 if type(value) is int else GGUFValueType.get_type(value)
            writer.add_key_value(key, value, kind_of_value)
    for name, array in (stored_tensors(network) | dict(tensors or {})).items():
        stored = np.zeros(0) if array is None else np.asarray(array, np.float32)
        if stored.ndim == 2 and stored.shape[1] % GGML_QUANT_SIZES[kind][0] == 0:
            writer.add_tensor(name, quants.quantize(stored, kind), raw_dtype=kind)
        elif stored.size:
            writer.add_tensor(name, stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
