"""What is measured: one random Llama, distinct prompts of random tokens, and the bare passes every method needs."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from posbias.models.hugging_face import HuggingFaceModel, Origin
from posbias.models.networks import random_network
from posbias.prompts import Prompts

SPECIAL = ("<pad>", "<s>", "</s>")
VOCABULARY = 32_000


@dataclass(frozen=True)
class Size:
    """A Llama's size."""

    layers: int = 12
    width: int = 384
    heads: int = 6


def random_llama(size: Size, *, attention: str = "sdpa") -> HuggingFaceModel:
    """The model at birth, seed 0, in float32."""
    from transformers import LlamaConfig

    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=size.width,
        intermediate_size=8 * size.width // 3,
        num_hidden_layers=size.layers,
        num_attention_heads=size.heads,
        num_key_value_heads=size.heads,
        max_position_embeddings=131_072,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    network: Any = random_network(config, seed=0)
    network.set_attn_implementation(attention)
    return HuggingFaceModel(network, origin=Origin("config:llama", init_seed=0))


def random_prompts(count: int, n_positions: int) -> Prompts:
    """Random tokens, no special ones."""
    return Prompts(np.random.default_rng(0).integers(len(SPECIAL), VOCABULARY, size=(count, n_positions)))


def tokens_of(prompts: Prompts, index: int = 0) -> Tensor:
    """One prompt as a batch of one."""
    return torch.from_numpy(prompts.token_ids[index : index + 1])


def tokenizer() -> object:
    """Words t3, t4 ... for token ids 3, 4 ..., for peers that take text."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {SPECIAL[index] if index < len(SPECIAL) else f"t{index}": index for index in range(VOCABULARY)}
    inner = Tokenizer(models.WordLevel(words, unk_token=SPECIAL[0]))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    pad, start, end = SPECIAL
    return PreTrainedTokenizerFast(tokenizer_object=inner, pad_token=pad, bos_token=start, eos_token=end, unk_token=pad)


def text_of(token_ids: np.ndarray) -> str:
    """The prompt as the tokenizer's words."""
    return " ".join(f"t{index}" for index in token_ids.tolist())
