"""Logits and input gradients of every tiny family as a user would load it, and what `evaluate` makes of eight of them.

`POSBIAS_GOLDEN=keep` writes them anew; see `test_golden.py`.
"""

import json
import os
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from safetensors.numpy import load_file, save_file

import posbias as pb
from conftest import save_byte_tokenizer
from tiny_families import CLAMPED, DESCRIBED, UNLISTED, shaken_model

HERE = Path(__file__).parent
NETWORKS, EVALUATIONS = HERE / "tiny_networks.safetensors", HERE / "tiny_evaluations.json"
KEEP = os.environ.get("POSBIAS_GOLDEN") == "keep"
TOKENS = [[3, 14, 15, 9, 26, 5, 35, 8, 9, 7, 9, 32]]
NEAR = 2e-3
"""Relative to the largest entry: float32 on other processors and kernels."""
EVALUATED = {
    "llama": "grouped keys, padding",
    "gemma2": "windows and soft caps",
    "gpt2": "learned positions",
    "bloom": "ALiBi",
    "gpt_oss": "learned sinks, experts",
    "mistral": "a window everywhere",
    "qwen3_next": "a hybrid",
    "mpt": "ALiBi of another library",
}


def saved(name: str, directory: Path) -> Path:
    """A tiny family's random model as `save_pretrained` leaves it, with a tokenizer that knows every byte."""
    model = shaken_model(name, dtype=torch.float32)
    model.network.save_pretrained(directory)
    save_byte_tokenizer(directory)
    return directory


@pytest.mark.slow
def test_logits_and_gradients_are_those_that_are_kept(tmp_path: Path) -> None:
    found: dict[str, np.ndarray] = {}
    for name in sorted(DESCRIBED | UNLISTED | CLAMPED):
        model = pb.load_model(saved(name, tmp_path / name))
        inputs = model.embed(model.token_tensor(TOKENS)).detach().requires_grad_()
        logits = model.last(inputs).logits
        gradient = torch.autograd.grad(logits.square().sum(), inputs)[0]
        found[f"{name}/logits"] = logits[0].detach().double().numpy()
        found[f"{name}/gradient"] = gradient[0].double().norm(dim=-1).numpy()
    if KEEP:
        save_file(found, NETWORKS)
    kept = load_file(NETWORKS)
    assert set(kept) == set(found)
    for name, array in kept.items():
        assert np.allclose(array, found[name], rtol=0, atol=NEAR * np.abs(array).max()), name


@pytest.mark.slow
def test_answers_and_scores_are_those_that_are_kept(tmp_path: Path) -> None:
    found = {}
    for name in EVALUATED:
        path = saved_for_text(name, tmp_path / name)
        run = pb.evaluate(path, "key_value(pairs=3)", options=pb.EvaluateOptions(count=3, max_tokens=6))
        found[name] = {
            "texts": [row["text"] for row in run.outputs],
            "logprob": np.round(run.tables["logprob"], 6).tolist(),
        }
    if KEEP:
        EVALUATIONS.write_text(json.dumps(found, indent=1, sort_keys=True) + "\n")
    kept = json.loads(EVALUATIONS.read_text())
    for name, expected in kept.items():
        assert expected["texts"] == found[name]["texts"], name
        assert np.allclose(expected["logprob"], found[name]["logprob"], rtol=1e-4, atol=1e-4), name


def saved_for_text(name: str, directory: Path) -> Path:
    """A tiny family with a vocabulary of bytes and room for a prompt."""
    config = (DESCRIBED | UNLISTED)[name]()
    for entry in ("max_position_embeddings", "n_positions", "max_seq_len"):
        if hasattr(config, entry):
            setattr(config, entry, 512)
    config.vocab_size = 300
    config._experts_implementation = "eager"
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        network = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        for parameter in network.parameters():
            parameter.data.add_(0.1 * torch.randn(parameter.shape))
    network.save_pretrained(directory)
    save_byte_tokenizer(directory)
    return directory
