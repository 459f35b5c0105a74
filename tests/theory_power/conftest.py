"""Tiny random models of every supported family, with every feature of the family switched on and no special values."""

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import numpy as np
import pytest
import torch

from posbias.models.hugging_face import HuggingFaceModel

N_POSITIONS = 21
VOCABULARY = 64
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
SPECIAL: dict[str, dict[str, Any]] = {
    "llama": {"attention_bias": True, "mlp_bias": True},
    "mistral": {"sliding_window": 6},
    "qwen3": {"head_dim": 12},
    "gemma3_text": {
        "head_dim": 12,
        "query_pre_attn_scalar": 20,
        "sliding_window": 5,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    },
    "smollm3": {"no_rope_layers": [1, 0, 1]},
}


@cache
def build_tiny_model(kind: str, dtype: torch.dtype = torch.float64, attention: str = "sdpa") -> HuggingFaceModel:
    """A random model of a family; norm gains and biases are random too."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(kind, **SIZES, **SPECIAL.get(kind, {}))
    network = AutoModelForCausalLM.from_config(config, attn_implementation=attention, dtype=dtype)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in network.parameters():
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64).to(dtype)
            parameter.copy_(parameter + 0.3 * noise if parameter.ndim == 1 else 0.25 * noise)
    keep_precision_in_norms(network)
    return HuggingFaceModel(network)


def keep_precision_in_norms(network: torch.nn.Module) -> None:
    """transformers' RMS norms compute in float32 whatever the model's type; here they keep it, so 1e-8 means it."""

    def forward(norm: Any, values: torch.Tensor) -> torch.Tensor:
        epsilon = norm.eps if hasattr(norm, "eps") else norm.variance_epsilon
        gain = 1 + norm.weight if type(norm).__name__.startswith("Gemma") else norm.weight
        return gain * values * (values.square().mean(-1, keepdim=True) + epsilon).rsqrt()

    for module in network.modules():
        if type(module).__name__.endswith("RMSNorm"):
            module.forward = partial(forward, module)


def draw_ids(seed: int = 0, n_positions: int = N_POSITIONS) -> np.ndarray:
    """One prompt of random token ids, special tokens left out."""
    return np.random.default_rng(seed).integers(3, VOCABULARY, n_positions)


@pytest.fixture
def tiny_model() -> Callable[..., HuggingFaceModel]:
    """tiny_model(kind, dtype=torch.float64, attention="sdpa"), built once per session."""
    return build_tiny_model


@pytest.fixture
def random_ids() -> Callable[..., np.ndarray]:
    """random_ids(seed=0, n_positions=21)."""
    return draw_ids
