"""The reference transformer computes what Hugging Face's GPT-2, Llama and BLOOM compute, from the same weights."""

import sys
from typing import Any

import pytest
import torch
from tests.hugging_face_reference import reference_from_hugging_face
from tests.tiny_families import CONFIGS

from posbias import UsageError
from posbias.models.hugging_face import HuggingFaceModel
from posbias.models.networks import random_network

SINGLE = 1e-5
DOUBLE = 1e-10
FITTING = ["gpt2", "gpt2-layer-scale", "llama", "llama-biases", "bloom", "bloom-6-heads", "mistral", "qwen2", "opt"]


def tiny(name: str, dtype: torch.dtype) -> HuggingFaceModel:
    """A random model whose biases and gains are not at their neutral values."""
    network = random_network(CONFIGS[name](), seed=1).to(dtype)
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in network.parameters():
            parameter += 0.05 * torch.randn(parameter.shape, generator=generator, dtype=dtype)
    return HuggingFaceModel(network)


def difference(model: HuggingFaceModel) -> float:
    """The largest between all logits of two prompts."""
    reference = reference_from_hugging_face(model)
    token_ids = torch.randint(0, model.vocabulary_size, (2, 13), generator=torch.Generator().manual_seed(3))
    theirs = model.outputs(model.embed(token_ids), list(range(13))).logits
    ours = reference.outputs(reference.embed(token_ids), list(range(13))).logits
    return float((ours - theirs).abs().max())


@pytest.mark.parametrize("name", FITTING)
def test_logits_agree_in_single_precision(name: str) -> None:
    assert difference(tiny(name, torch.float32)) < SINGLE


class DoubleTorch:
    """PyTorch, but whoever asks for single precision gets double."""

    float32 = torch.float64

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


def in_double(monkeypatch: pytest.MonkeyPatch, model: HuggingFaceModel) -> None:
    """Lift what transformers keeps in single precision whatever the weights: norms, softmax, rotary angles, a tanh."""
    network: Any = model.network
    monkeypatch.setattr(sys.modules[type(network).__module__], "torch", DoubleTorch())
    if model.model_type == "llama":
        half = model.config.head_dim // 2
        base = model.config.rope_parameters["rope_theta"]

        def angles(x: torch.Tensor, position_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            frequency = base ** (-torch.arange(half, dtype=torch.float64) / half)
            turn = (position_ids[..., None] * frequency).repeat(1, 1, 2)
            return turn.cos(), turn.sin()

        monkeypatch.setattr(network.model.rotary_emb, "forward", angles)
    if model.model_type == "bloom":
        for block in network.transformer.h:
            block.mlp.gelu_impl = torch.nn.GELU(approximate="tanh")


@pytest.mark.parametrize("name", ["gpt2", "llama", "llama-biases", "bloom"])
def test_logits_agree_in_double_precision(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny(name, torch.float64)
    in_double(monkeypatch, model)
    assert difference(model) < DOUBLE


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("phi", "phi has attention and MLP in parallel"),
        ("qwen3", "qwen3 has norms on queries and keys"),
        ("gemma2", "gemma2 has norms after its branches"),
        ("stablelm", "stablelm has rotary positions of part of a head"),
    ],
)
def test_what_no_reference_layer_has_is_refused(name: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        reference_from_hugging_face(tiny(name, torch.float32))
