"""GGUF files: read by transformers, and refused where it would leave out what changes the network.

transformers skips, without a word, metadata that it has no entry for and tensors that its network has no place for. So
every key of the architecture must be one that it reads, or one that holds what the network computes by anyway; and
every tensor must have its place. The files of the architectures below give the logits of the network that was written
into them (`tests/models/test_gguf.py`).
"""

import math
from pathlib import Path
from typing import Any

from torch import nn

from posbias.errors import RunError, UsageError, one_line

ARCHITECTURES = ("llama", "qwen2", "qwen3", "gpt2", "gemma2", "gemma3")
"""Those whose networks transformers builds right, as the tests hold it to."""
BESIDE = ("general", "tokenizer", "quantize", "mradermacher", "split")
"""First parts of keys that say who made a file, and how, and nothing of the network."""
ALSO = {
    "attention.key_length": ("head_dim",),
    "attention.value_length": ("head_dim",),
    "rope.dimension_count": ("head_dim",),
    "rope.freq_base": ("rope_theta",),
    "rope.scaling.original_context_length": ("original_max_position_embeddings",),
    "attention.layer_norm_epsilon": ("layer_norm_epsilon",),
}
"""Keys that transformers may not read, and the entries of a configuration one of which has to hold their value."""
NEUTRAL = {
    "attention.causal": True,
    "expert_count": 0,
    "expert_used_count": 0,
    "pooling_type": 0,
    "rope.scaling.type": "none",
    "rope.scaling.factor": 1.0,
    "rope.scaling.attn_factor": 1.0,
    "rope.scaling.finetuned": None,
    "tensor_data_layout": "Meta AI original pth",
    "mm.tokens_per_image": None,
}
"""Keys that transformers does not read, and the value at which they change nothing; None: any."""
TRY = "load the safetensors of this model"


def gguf_configuration(path: Path, name: str) -> Any:
    """The configuration that transformers makes of a file's metadata.

    Raises:
        UsageError: an architecture that is not held to its logits, a part of several files, or a key of the network
            that transformers does not read.
    """
    from transformers import AutoConfig

    fields = _fields(path, name)
    architecture = str(fields.get("general.architecture"))
    if architecture not in ARCHITECTURES:
        raise UsageError(
            f"model {name!r} is a GGUF file of architecture {architecture!r:.80}; allowed: {', '.join(ARCHITECTURES)}, "
            f"or {TRY}"
        )
    if fields.get("general.type", "model") != "model" or fields.get("split.count", 0) > 1:
        raise UsageError(f"model {name!r} is no whole model (general.type, split.count); allowed: one file")
    if "mistral" in str(fields.get("general.name")) and architecture == "llama":
        raise UsageError(f"model {name!r}: transformers would give it a sliding window that the file lacks; {TRY}")
    config = AutoConfig.from_pretrained(path.parent, gguf_file=path.name, trust_remote_code=False)
    for key, value in fields.items():
        first, _, rest = key.partition(".")
        if first not in BESIDE and (first != architecture or not _is_read(rest, value, architecture, config)):
            raise UsageError(f"model {name!r}: transformers does not read {key[:80]} = {value!r:.80} of it; {TRY}")
    _check_scale(config, name)
    return config


def check_places(path: Path, network: nn.Module, name: str) -> None:
    """Refuse a file with tensors that the network has no place for, such as factors of RoPE or biases."""
    from gguf import GGUFReader
    from transformers.modeling_gguf_pytorch_utils import TENSOR_PROCESSORS, TensorProcessor, get_gguf_hf_weights_map

    config: Any = network.config
    processor = TENSOR_PROCESSORS.get(config.model_type.removesuffix("_text"), TensorProcessor)(config=config.to_dict())
    places = get_gguf_hf_weights_map(network, processor)
    unplaced = sorted({tensor.name for tensor in GGUFReader(path).tensors} - set(places))
    if unplaced:
        raise RunError(
            f"model {name!r}: transformers does not read {len(unplaced)} tensors of it, first {unplaced[0][:80]!r}; "
            f"{TRY}"
        )


def _fields(path: Path, name: str) -> dict[str, Any]:
    """The metadata of a file without its long lists."""
    from gguf import GGUFReader

    try:
        return {
            field.name: field.contents() if len(field.data) < 1000 else "..."
            for field in GGUFReader(path).fields.values()
            if not field.name.startswith("GGUF.")
        }
    except Exception as error:  # the reader trusts the numbers of a file
        raise UsageError(f"model {name!r}: no readable GGUF file: {one_line(error)[:200]}") from None


def _is_read(key: str, value: Any, architecture: str, config: Any) -> bool:
    """Tell whether transformers reads a key of the architecture, or would compute the same anyway."""
    from transformers.integrations.ggml import GGUF_CONFIG_MAPPING

    if (GGUF_CONFIG_MAPPING[architecture].get(key) or -1) != -1:
        return True
    if key in NEUTRAL and NEUTRAL[key] in (None, value):
        return True
    rope = getattr(config, "rope_parameters", None) or {}
    known = {"head_dim": config.hidden_size // config.num_attention_heads}
    known |= {**rope, **rope.get("full_attention", {}), **vars(config)}
    held = next((known[entry] for entry in ALSO.get(key, (key,)) if known.get(entry) is not None), None)
    if isinstance(held, float) and isinstance(value, float):
        return math.isclose(held, value, rel_tol=1e-6)  # files hold 32 bits
    return held is not None and bool(held == value)


def _check_scale(config: Any, name: str) -> None:
    """Refuse the 27B models of Gemma 2 and 3: their logit scale is in no file, and transformers takes the others'."""
    scalar = getattr(config, "query_pre_attn_scalar", None)
    if (config.model_type, config.num_hidden_layers) in (("gemma2", 46), ("gemma3_text", 62)):
        right = config.hidden_size // config.num_attention_heads
        raise UsageError(f"model {name!r}: its logit scale is 1 / sqrt({right}), transformers takes {scalar}; {TRY}")
