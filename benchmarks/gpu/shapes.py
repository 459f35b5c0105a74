"""Random models of real shapes on any device, and what they read: texts of bytes, token ids."""

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from subject import VOCABULARY

from posbias.models.hugging_face import HuggingFaceModel, Origin

END = VOCABULARY - 1
"""The token that ends an answer and pads a batch."""


@dataclass(frozen=True)
class Shape:
    """Sizes of a decoder; a BLOOM has an inner width of 4 and as many key heads as heads."""

    layers: int
    width: int
    heads: int
    key_heads: int
    inner: int
    vocabulary: int = VOCABULARY


SHAPES = {
    "tiny": Shape(2, 32, 4, 2, 48),
    "small": Shape(4, 128, 4, 2, 256),
    "narrow": Shape(32, 64, 4, 2, 128),
    "135M": Shape(30, 576, 9, 3, 1536, 49_152),
    "1.5B": Shape(28, 1536, 12, 2, 8960, 151_936),
    "7B": Shape(32, 4096, 32, 32, 11_008),
}
"""Of SmolLM2, Qwen2 1.5B and Llama 2, two for a processor, and one whose passes take as long as launching them does."""


def configuration(family: str, shape: Shape) -> Any:
    """Configuration of a family, any length allowed."""
    import transformers

    ends = {"vocab_size": shape.vocabulary, "eos_token_id": END, "bos_token_id": None, "pad_token_id": None}
    if family == "bloom":
        return transformers.BloomConfig(**ends, hidden_size=shape.width, n_layer=shape.layers, n_head=shape.heads)
    sizes = {
        "hidden_size": shape.width,
        "intermediate_size": shape.inner,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.key_heads,
        "head_dim": shape.width // shape.heads,
        "max_position_embeddings": 131_072,
    }
    if family == "gemma3":
        return transformers.Gemma3TextConfig(**ends, **sizes, query_pre_attn_scalar=sizes["head_dim"])
    return {"llama": transformers.LlamaConfig, "qwen3": transformers.Qwen3Config}[family](**ends, **sizes)


def random_model(family: str, size: str, *, device: torch.device, dtype: torch.dtype) -> HuggingFaceModel:
    """A model with weights drawn on its device: times depend on shapes alone."""
    from transformers import AutoModelForCausalLM

    config = configuration(family, SHAPES[size])
    torch.manual_seed(0)
    with device:
        network = AutoModelForCausalLM.from_config(config, dtype=dtype)
    model = HuggingFaceModel(network, byte_tokenizer(), origin=Origin(f"{family}-{size}"))
    described = model.describe()  # fingerprints are taken once per run of a user's, and left out of the times
    model.describe = lambda: dict(described)
    return model


@cache
def byte_tokenizer() -> Any:
    """A token for every byte, and a word for every other id, so that each answer has a text of its own."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = [*letters, *(f"<{index}>" for index in range(len(letters), VOCABULARY))]
    inner = Tokenizer(models.BPE({word: index for index, word in enumerate(words)}, []))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=inner, eos_token=words[END], pad_token=words[END], padding_side="left"
    )
