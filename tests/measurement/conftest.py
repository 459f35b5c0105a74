"""Small models of every sort that measurement must be right on."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from posbias.models.hugging_face import HuggingFaceModel
from posbias.models.model import BranchNorms, Model, Outputs
from posbias.prompts.prompts import Prompts


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


class UndescribedModel(KernelModel):
    """The same without a family description."""

    described = False


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def kernel_model() -> KernelModel:
    attention = np.tril(np.random.default_rng(1).random((3, 7, 7)) + 0.05)
    return KernelModel(attention / attention.sum(axis=2, keepdims=True), np.array([0.3, 0.5, 0.2]))


@pytest.fixture(scope="session")
def undescribed_model(kernel_model: KernelModel) -> UndescribedModel:
    return UndescribedModel(kernel_model.attention.numpy(), kernel_model.mixing.numpy())


def _llama() -> HuggingFaceModel:
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
    return HuggingFaceModel(LlamaForCausalLM(config))


@pytest.fixture
def build_llama() -> Callable[[], HuggingFaceModel]:
    """A fresh tiny Llama, to be changed by the test."""
    return _llama


@pytest.fixture(scope="session")
def llama() -> HuggingFaceModel:
    return _llama()


@pytest.fixture(scope="session")
def gpt2_64() -> HuggingFaceModel:
    """A GPT-2 in float64 with weights large enough to be nonlinear (Llama's norms compute in float32 whatever)."""
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=29, n_positions=32, n_embd=12, n_layer=2, n_head=3, initializer_range=0.3)
    network = GPT2LMHeadModel(config).double()
    norm = network.get_submodule("transformer.ln_f")
    # Unequal gains, or the all-ones covector would be blind.
    norm.get_parameter("weight").data += 0.3 * torch.randn(12, dtype=torch.float64)
    return HuggingFaceModel(network)


@pytest.fixture(scope="session")
def untrained_gpt2() -> HuggingFaceModel:
    """LayerNorm weights 1 and biases 0, as GPT-2 is born."""
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=97, n_positions=32, n_embd=64, n_layer=4, n_head=4)
    return HuggingFaceModel(GPT2LMHeadModel(config))


@pytest.fixture
def make_prompts() -> Callable[[Model, int, int], Prompts]:
    def make(model: Model, count: int, n_positions: int) -> Prompts:
        generator = np.random.default_rng(5)
        return Prompts(generator.integers(0, model.vocabulary_size, (count, n_positions)))

    return make
