"""Rollouts of a model's own attention equal products of its dense attention matrices."""

import numpy as np
import pytest
import torch

from posbias import RunError, UsageError
from posbias.measurement.prompt import mixing_of_layers
from posbias.models.hugging_face import HuggingFaceModel
from posbias.prompts.prompts import Prompts
from posbias.theory.power_rollout import ROLLOUTS, attention_rollout_prompt, attention_rollouts
from tiny_families import VOCABULARY, shaken_model

N_POSITIONS, COUNT = 17, 3
TOLERANCE = 1e-6
"""float64 models, but transformers takes the softmax in float32."""
KINDS = ("bloom", "falcon-new", "gemma3_text", "gpt2", "llama-biases", "mpt", "olmo2", "opt", "phi", "qwen3-window")


def _prompts(count: int = COUNT) -> Prompts:
    return Prompts(np.random.default_rng(4).integers(3, VOCABULARY, (count, N_POSITIONS)))


def _model(kind: str) -> HuggingFaceModel:
    return shaken_model(kind, implementation="eager")


@pytest.mark.parametrize("kind", KINDS)
def test_every_rollout_is_the_last_row_of_a_product(kind: str) -> None:
    model, prompts = _model(kind), _prompts(2)
    found, left_out = attention_rollouts(model, prompts)
    assert not left_out
    assert list(found) == list(ROLLOUTS)
    identity = np.eye(N_POSITIONS)
    for index, ids in enumerate(prompts.token_ids):
        with torch.no_grad():
            attention = model.network(torch.as_tensor(ids)[None], output_attentions=True).attentions
        mean = list(torch.cat(attention).numpy().mean(1))
        mixing = mixing_of_layers(model, ids, prompt=index)["token_mean"]
        transitions = {
            "rollout": [(1 - m) * identity + m * a for m, a in zip(mixing, mean, strict=True)],
            "attention_only": mean,
        }
        for name, layers in transitions.items():
            row = np.linalg.multi_dot(layers[::-1])[-1]
            np.testing.assert_allclose(found[name][index], row / row.sum(), atol=TOLERANCE, err_msg=name)


@pytest.mark.parametrize("kind", ["bloom", "gpt2"])
def test_given_mixing_works_for_families_without_a_power_rollout(kind: str) -> None:
    model, ids = _model(kind), _prompts(1).token_ids[0]
    measured, _ = attention_rollouts(model, _prompts(1))
    row = attention_rollout_prompt(model, ids, mixing_of_layers(model, ids, prompt=0)["token_mean"].tolist())
    np.testing.assert_allclose(row, measured["rollout"][0])
    alone = attention_rollout_prompt(model, ids, 1.0)
    np.testing.assert_allclose(alone, measured["attention_only"][0])


def test_one_token_is_all_there_is() -> None:
    found, _ = attention_rollouts(_model("gpt2"), Prompts(np.array([[5]])))
    assert all(rows.tolist() == [[1.0]] for rows in found.values())


def test_wrong_input_and_broken_weights_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    model = _model("llama")
    with pytest.raises(UsageError, match="1 values given for 3 layers; give one number or one per layer"):
        attention_rollout_prompt(model, _prompts().token_ids[0], [0.5])
    with pytest.raises(UsageError, match=r"\[0, 1\], got 1.5"):
        attention_rollout_prompt(model, _prompts().token_ids[0], 1.5)
    model.family.blocks(model.network)[1].attention.v_proj.weight[0, 0] = torch.nan
    with pytest.raises(RunError, match="not finite in layer 1"):
        attention_rollouts(model, _prompts(1))
