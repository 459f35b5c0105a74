"""Small models of every sort that measurement must be right on."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from posbias import load_model
from posbias.models.model import BranchNorms, Model, Outputs
from posbias.prompts import Prompts


class KernelModel(Model):
    """h = T_{L-1} ... T_0 x with given attention matrices, T = (1 - m) I + m A, and a random unembedding; float64."""

    def __init__(self, attention: np.ndarray, mixing: np.ndarray, *, width: int = 5, vocabulary: int = 11) -> None:
        generator = torch.Generator().manual_seed(0)
        self.network = nn.Module()
        self.attention = torch.as_tensor(attention, dtype=torch.float64)
        self.mixing = torch.as_tensor(mixing, dtype=torch.float64)
        self.table = torch.randn(vocabulary, width, generator=generator, dtype=torch.float64)
        self.unembedding = torch.randn(vocabulary, width, generator=generator, dtype=torch.float64)
        self.tokenizer = None
        self.width, self.vocabulary_size, self.max_positions = width, vocabulary, attention.shape[-1]
        self.dtype, self.device = torch.float64, torch.device("cpu")

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        return self.table[token_ids]

    def outputs(self, embeddings: torch.Tensor, positions: Sequence[int]) -> Outputs:
        stream = embeddings
        for share, matrix in zip(self.mixing, self.attention, strict=True):
            stream = (1 - share) * stream + share * (matrix @ stream)
        hidden = stream[:, list(positions)]
        return Outputs(hidden=hidden, logits=hidden @ self.unembedding.T)

    def branch_norms(self, token_ids: torch.Tensor) -> BranchNorms:
        stream = self.embed(token_ids)
        norms: list[tuple[torch.Tensor, torch.Tensor]] = []
        for share, matrix in zip(self.mixing, self.attention, strict=True):
            branch = share * (matrix @ stream)
            norms.append((stream.norm(dim=-1), branch.norm(dim=-1)))
            stream = (1 - share) * stream + branch
        return BranchNorms(*(torch.stack(side) for side in zip(*norms, strict=True)))

    def architecture_traits(self) -> dict[str, Any]:
        return {"depth": len(self.mixing), "heads": 1, "mask": "causal", "encoding": "none"}

    def describe(self) -> dict[str, Any]:
        return {"source": "kernels"}


@pytest.fixture(autouse=True)
def _one_thread():
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def kernel_model():
    attention = np.tril(np.random.default_rng(1).random((3, 7, 7)) + 0.05)
    return KernelModel(attention / attention.sum(axis=2, keepdims=True), np.array([0.3, 0.5, 0.2]))


@pytest.fixture
def build_llama():
    """A fresh tiny Llama, to be changed by the test."""
    return _llama


@pytest.fixture(scope="session")
def llama():
    return _llama()


def _llama():
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=61,
        hidden_size=24,
        intermediate_size=40,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=32,
        initializer_range=0.2,
    )
    return load_model(LlamaForCausalLM(config))


@pytest.fixture(scope="session")
def gpt2_64():
    """A GPT-2 in float64 with weights large enough to be nonlinear (Llama's norms compute in float32 whatever)."""
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=29, n_positions=32, n_embd=12, n_layer=2, n_head=3, initializer_range=0.3)
    network = GPT2LMHeadModel(config).double()
    norm = network.get_submodule("transformer.ln_f")
    # Unequal gains, or the all-ones covector would be blind.
    norm.get_parameter("weight").data += 0.3 * torch.randn(12, dtype=torch.float64)
    return load_model(network)


@pytest.fixture
def make_prompts():
    def make(model, count, n_positions):
        generator = np.random.default_rng(5)
        return Prompts(generator.integers(0, model.vocabulary_size, (count, n_positions)))

    return make
