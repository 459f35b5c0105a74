"""Models of real shapes with random weights, made where they are measured: memory depends on shapes alone."""

import json
from pathlib import Path

import numpy as np

SCALE = 0.02
BLOCK = 1 << 24
"""Random numbers drawn; larger weights repeat them."""
QWEN = {"layers": 28, "width": 1536, "heads": 12, "key_heads": 2, "inner": 8960, "vocabulary": 151936}
"""Of Qwen2 1.5B."""
CONFIGS = {
    "gpt2": {"model_type": "gpt2"},
    "gemma2": {
        "model_type": "gemma2",
        "hidden_size": 1024,
        "intermediate_size": 4096,
        "num_hidden_layers": 12,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "vocab_size": 128000,
    },
}
"""By name: a configuration of transformers; what is not named has the class's own default (GPT-2: the small one)."""


def write_config(name: str, directory: Path) -> str:
    """A random model by its configuration, as posbias is given it."""
    path = directory / f"{name}.json"
    path.write_text(json.dumps(CONFIGS[name]))
    return f"config:{path}"


def write_gguf(path: Path, *, layers: int, width: int, heads: int, key_heads: int, inner: int, vocabulary: int) -> Path:
    """A random Qwen2 in 8-bit GGUF with a tokenizer of bytes, padded to the vocabulary."""
    from gguf import GGUFWriter

    writer = GGUFWriter(path, "qwen2")
    writer.add_block_count(layers)
    writer.add_context_length(32768)
    writer.add_embedding_length(width)
    writer.add_feed_forward_length(inner)
    writer.add_head_count(heads)
    writer.add_head_count_kv(key_heads)
    writer.add_layer_norm_rms_eps(1e-6)
    _add_tokenizer(writer, vocabulary)
    keys = width // heads * key_heads
    matrices = {
        "attn_q": (width, width), "attn_k": (keys, width), "attn_v": (keys, width), "attn_output": (width, width),
        "ffn_gate": (inner, width), "ffn_up": (inner, width), "ffn_down": (width, inner),
    }  # fmt: skip
    numbers = np.random.default_rng(0).standard_normal(BLOCK, dtype=np.float32) * SCALE
    _add_matrix(writer, "token_embd.weight", numbers, (vocabulary, width))
    for layer in range(layers):
        for name, shape in matrices.items():
            _add_matrix(writer, f"blk.{layer}.{name}.weight", numbers, shape)
            if name in ("attn_q", "attn_k", "attn_v"):
                writer.add_tensor(f"blk.{layer}.{name}.bias", np.zeros(shape[0], dtype=np.float32))
        for name in ("attn_norm", "ffn_norm"):
            writer.add_tensor(f"blk.{layer}.{name}.weight", np.ones(width, dtype=np.float32))
    writer.add_tensor("output_norm.weight", np.ones(width, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add_tokenizer(writer, vocabulary: int) -> None:
    from tokenizers import pre_tokenizers

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = ["Ġ t", "h e", "i n"]
    known = [*letters, *(merge.replace(" ", "") for merge in merges)]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list([*known, *(f"<|unused{index}|>" for index in range(vocabulary - len(known)))])
    writer.add_token_merges(merges)
    writer.add_eos_token_id(vocabulary - 1)


def _add_matrix(writer, name: str, numbers: np.ndarray, shape: tuple[int, int]) -> None:
    from gguf import GGMLQuantizationType
    from gguf.quants import quantize

    packed = quantize(np.resize(numbers, shape), GGMLQuantizationType.Q8_0)
    writer.add_tensor(name, packed, raw_dtype=GGMLQuantizationType.Q8_0)
