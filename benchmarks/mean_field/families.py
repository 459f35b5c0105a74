"""Random models of every family at one size (width 256, 8 heads, 8 or 12 layers), and two larger ones."""

import hashlib
import json
from dataclasses import dataclass
from typing import Any

from transformers import AutoConfig

VOCABULARY = 2048


@dataclass(frozen=True)
class Case:
    """One row of the table."""

    name: str
    model_type: str
    n_positions: int
    seeds: int
    levels: tuple[str, ...]
    settings: dict[str, Any]
    """What differs from the family's default configuration."""

    @property
    def digest(self) -> str:
        """Eight letters that change with anything that changes the measurement."""
        text = json.dumps([self.model_type, self.n_positions, self.settings], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:8]

    def config(self) -> Any:
        """The configuration object, a new one each time."""
        return AutoConfig.for_model(self.model_type, **self.settings)


def llama_like(**extra: Any) -> dict[str, Any]:
    """Names most families use."""
    return {
        "hidden_size": 256,
        "num_attention_heads": 8,
        "num_key_value_heads": 8,
        "num_hidden_layers": 8,
        "intermediate_size": 1024,
        "vocab_size": VOCABULARY,
        "max_position_embeddings": 512,
        "pad_token_id": None,
        "bos_token_id": 1,
        "eos_token_id": 2,
        **extra,
    }


def gpt2_like(**extra: Any) -> dict[str, Any]:
    """GPT-2's names."""
    return {
        "n_embd": 256,
        "n_head": 8,
        "n_layer": 8,
        "vocab_size": VOCABULARY,
        "n_positions": 512,
        "bos_token_id": 1,
        "eos_token_id": 2,
        **extra,
    }


FIRST = ("first",)
ALL = ("value", "first", "sampled")

CASES: dict[str, Case] = {
    case.name: case
    for case in (
        Case("llama", "llama", 128, 48, FIRST, llama_like()),
        Case("gpt_neox", "gpt_neox", 128, 48, FIRST, llama_like()),
        Case("phi", "phi", 128, 48, FIRST, llama_like()),
        Case("opt", "opt", 128, 48, FIRST, llama_like(ffn_dim=1024, word_embed_proj_dim=256, pad_token_id=1)),
        Case("qwen2", "qwen2", 128, 48, FIRST, llama_like(num_key_value_heads=2)),
        Case(
            "mistral",
            "mistral",
            256,
            48,
            FIRST,
            llama_like(num_hidden_layers=12, num_key_value_heads=2, sliding_window=32),
        ),
        Case(
            "mpt",
            "mpt",
            256,
            48,
            FIRST,
            {"d_model": 256, "n_heads": 8, "n_layers": 12, "vocab_size": VOCABULARY, "max_seq_len": 512},
        ),
        Case("smollm3", "smollm3", 256, 48, FIRST, llama_like(num_hidden_layers=12, num_key_value_heads=2)),
        Case("gpt2", "gpt2", 256, 48, FIRST, gpt2_like(n_layer=12)),
        Case(
            "bloom", "bloom", 256, 48, FIRST, {"hidden_size": 256, "n_head": 8, "n_layer": 12, "vocab_size": VOCABULARY}
        ),
        Case("qwen3", "qwen3", 128, 48, ALL, llama_like(head_dim=32, num_key_value_heads=4)),
        Case(
            "gemma3",
            "gemma3_text",
            128,
            48,
            ALL,
            llama_like(
                num_hidden_layers=12, head_dim=32, num_key_value_heads=4, query_pre_attn_scalar=32, sliding_window=512
            ),
        ),
        Case("olmo2", "olmo2", 128, 48, ALL, llama_like()),
        Case(
            "llama_1024",
            "llama",
            128,
            16,
            FIRST,
            llama_like(hidden_size=1024, num_attention_heads=16, num_key_value_heads=16, intermediate_size=4096),
        ),
        Case(
            "gpt2_small",
            "gpt2",
            256,
            16,
            FIRST,
            gpt2_like(n_embd=768, n_head=12, n_layer=12, n_positions=1024, vocab_size=50257),
        ),
    )
}
