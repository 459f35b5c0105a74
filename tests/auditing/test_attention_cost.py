"""What measuring attention will take, held against bytes counted at lengths that the short runs do not reach."""

import numpy as np
import pytest
import torch

import posbias as pb
from posbias import AttentionOptions, RunError, UsageError
from posbias.measurement.attention import cost as attention_module
from posbias.measurement.attention.cost import estimate_attention, preflight_attention
from posbias.measurement.cost_estimate import HEADROOM
from posbias.measurement.work import peak_tensor_bytes
from posbias.prompts.prompts import Prompts


@pytest.fixture(autouse=True)
def tensors_alone(monkeypatch):
    """The process of the tests holds hundreds of megabytes beside models of kilobytes, and not always the same."""
    monkeypatch.setattr("posbias.measurement.work.beside_weights", lambda weights: 0)


def settings_of(**changed):
    from transformers import LlamaConfig

    shape = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4}
    return LlamaConfig(**shape, num_attention_heads=4, max_position_embeddings=4096, eos_token_id=0, **changed)


def model_of(**changed):
    from transformers import LlamaForCausalLM

    torch.manual_seed(0)
    return pb.models.hugging_face.HuggingFaceModel(LlamaForCausalLM(settings_of(**changed)))


def allowing(max_memory, **settings):
    return AttentionOptions(preflight=True, max_memory=max_memory, **settings)


def tensors_of(estimate):
    """Bytes of tensors that an estimate is made of, without what the allocator holds back."""
    kept = estimate.kept(estimate.n_positions)
    return (estimate.passes_bytes - kept) / HEADROOM + kept


@pytest.mark.parametrize("options", [{}, {"mean_content": False, "kernel_cells": 16}])
def test_bytes_of_long_prompts_follow_from_short_ones(options):
    model, options = model_of(), AttentionOptions(**options)
    n_positions = 500
    prompts = Prompts(np.resize(np.arange(1, 64), n_positions)[None])
    counted = peak_tensor_bytes(lambda: pb.attention(model, prompts, options=options), model.device)
    # Blocks are taken as large as they may become, which in a model this small is much of the whole.
    assert 0.9 * counted < tensors_of(estimate_attention(model, n_positions, options=options)) < 2 * counted


def test_where_nothing_can_be_estimated_the_weights_count_all_the_same(monkeypatch):
    def fail(*_, **__):
        raise RunError("no")

    model = model_of()
    prompts = Prompts(np.arange(1, 25)[None])
    monkeypatch.setattr(attention_module, "statistics_of", fail)
    assert preflight_attention(model, prompts, options=allowing(10**9)) == {}
    assert preflight_attention(model, prompts) == {}
    with pytest.raises(UsageError, match=r"24 positions need up to .* 10 KB are allowed; try a smaller model"):
        preflight_attention(model, prompts, options=allowing(10_000))


def test_what_does_not_fit_is_refused_with_what_would():
    model, prompts = model_of(), Prompts(np.resize(np.arange(1, 64), 900)[None])
    with pytest.raises(UsageError, match=r"try --length \d+$") as no:
        preflight_attention(model, prompts, options=allowing(100_000_000))
    length = int(str(no.value).split("--length ")[1].split()[0])
    assert 300 < length < 900
    shorter = Prompts(prompts.token_ids[:, :length])
    preflight_attention(model, shorter, options=allowing(100_000_000))
    fewer = allowing(100_000_000, kernel_cells=16, mean_content=False)
    preflight_attention(model, prompts, options=fewer)


@pytest.mark.slow
def test_a_long_prompt_of_the_demo_model_is_let_through():
    model = pb.load_model("demo")
    prompts = Prompts(np.resize(np.arange(100, 1000), 8192)[None])
    assert 1e9 < preflight_attention(model, prompts, options=allowing(6 * 10**9))["peak_bytes"] < 4e9


@pytest.mark.slow
def test_a_prompt_of_the_demo_model_takes_what_was_estimated():
    model, options = pb.load_model("demo"), AttentionOptions()
    prompts = pb.load_prompts("default", model, n_positions=2048, count=1)
    estimate = estimate_attention(model, 2048, options=options)
    counted = peak_tensor_bytes(lambda: pb.attention(model, prompts, options=options), model.device)
    assert counted == pytest.approx(tensors_of(estimate), rel=0.25)
    assert counted < 30 * 9 * 2048**2 * 4 / 20  # all attention matrices: 4.5 GB
