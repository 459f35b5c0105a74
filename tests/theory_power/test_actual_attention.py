"""Rollouts of a model's own attention equal products of its dense attention matrices, weighted as they say."""

from typing import Any

import numpy as np
import pytest
import torch

from posbias import RunError, UsageError
from posbias.measurement.prompt import measure_prompt
from posbias.models.hugging_face import HuggingFaceModel
from posbias.prompts.prompts import Prompts
from posbias.theory.power_rollout import ROLLOUTS, attention_rollout_prompt, attention_rollouts
from posbias.theory.power_rollout.actual_attention import sum_lengths
from tiny_families import VOCABULARY, shaken_model

N_POSITIONS, COUNT = 17, 3
TOLERANCE = 1e-6
"""float64 models, but transformers takes the softmax in float32."""
KINDS = ("bloom", "falcon-new", "gemma3_text", "gpt2", "llama-biases", "mpt", "olmo2", "opt", "phi", "qwen3-window")


def _prompts(count: int = COUNT) -> Prompts:
    return Prompts(np.random.default_rng(4).integers(3, VOCABULARY, (count, N_POSITIONS)))


def _model(kind: str) -> HuggingFaceModel:
    return shaken_model(kind, implementation="eager")


@torch.no_grad()
def _forward(model: HuggingFaceModel, ids: np.ndarray) -> dict[str, Any]:
    """The model's own attention [layer head query key], and what each module read."""
    read: list[np.ndarray] = []

    def catch(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        read.append((args[0] if args else kwargs["hidden_states"])[0].numpy())

    blocks = model.family.blocks(model.network)
    handles = [block.attention.register_forward_pre_hook(catch, with_kwargs=True) for block in blocks]
    attentions = model.network(torch.as_tensor(ids)[None], output_attentions=True).attentions
    for handle in handles:
        handle.remove()
    return {"attention": torch.cat(attentions).numpy(), "read": read}


def _transitions(model: HuggingFaceModel, seen: dict[str, Any]) -> list[np.ndarray]:
    """Norm-weighted transitions of every layer, from vectors and matrices written out."""
    found = []
    for layer, block in enumerate(model.family.blocks(model.network)):
        parts = model.family.attention_parts(block, model.config)
        value = seen["read"][layer] @ parts.value.weight.numpy().T
        value = value if parts.value.bias is None else value + parts.value.bias.numpy()
        output, post_norm = parts.output.weight.numpy(), block.attention_post_norm
        output = output if post_norm is None else output * model.family.norm(post_norm).gain.numpy()[:, None]
        vectors = np.zeros((N_POSITIONS, N_POSITIONS, len(output)))
        for head, weights in enumerate(seen["attention"][layer]):
            size = parts.head_dim
            group = head * parts.key_heads // parts.heads
            own, shared = slice(head * size, (head + 1) * size), slice(group * size, (group + 1) * size)
            vectors += weights[:, :, None] * (value[:, shared] @ output[:, own].T)
        lengths = np.linalg.norm(vectors, axis=-1)
        found.append(lengths / lengths.sum(-1, keepdims=True))
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_every_rollout_is_the_last_row_of_a_product(kind: str) -> None:
    model, prompts = _model(kind), _prompts(2)
    found, left_out = attention_rollouts(model, prompts)
    assert not left_out
    assert list(found) == list(ROLLOUTS)
    identity = np.eye(N_POSITIONS)
    for index, ids in enumerate(prompts.token_ids):
        seen = _forward(model, ids)
        mixing = measure_prompt(model, ids, kinds=[], key=(0, index)).mixing["token_mean"]
        mean = list(seen["attention"].mean(1))
        weighted = _transitions(model, seen)
        transitions = {
            "rollout": [(1 - m) * identity + m * a for m, a in zip(mixing, mean, strict=True)],
            "attention_only": mean,
            "norm_weighted": [(1 - m) * identity + m * a for m, a in zip(mixing, weighted, strict=True)],
        }
        for name, layers in transitions.items():
            row = np.linalg.multi_dot(layers[::-1])[-1]
            np.testing.assert_allclose(found[name][index], row / row.sum(), atol=TOLERANCE, err_msg=name)


def test_lengths_of_sums_over_heads_come_from_inner_products() -> None:
    generator = torch.Generator().manual_seed(0)
    weights = torch.rand(5, 7, 11, generator=generator)
    vectors = torch.randn(5, 11, 3, generator=generator)
    products = torch.einsum("hjc,gjc->hgj", vectors, vectors)
    expected = torch.einsum("hij,hjc->ijc", weights, vectors).norm(dim=-1)
    torch.testing.assert_close(sum_lengths(weights, products), expected)


@pytest.mark.parametrize("kind", ["bloom", "gpt2"])
def test_given_mixing_works_for_families_without_a_power_rollout(kind: str) -> None:
    model, ids = _model(kind), _prompts(1).token_ids[0]
    measured, _ = attention_rollouts(model, _prompts(1))
    row = attention_rollout_prompt(
        model, ids, measure_prompt(model, ids, kinds=[], key=(0, 0)).mixing["token_mean"].tolist()
    )
    np.testing.assert_allclose(row, measured["rollout"][0])
    alone = attention_rollout_prompt(model, ids, 1.0)
    np.testing.assert_allclose(alone, measured["attention_only"][0])


def test_one_token_is_all_there_is() -> None:
    found, _ = attention_rollouts(_model("gpt2"), Prompts(np.array([[5]])))
    assert all(rows.tolist() == [[1.0]] for rows in found.values())


def test_wrong_input_and_broken_weights_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    model = _model("llama")
    with pytest.raises(UsageError, match=r"mixing has shape \[1\]; give a number, 3 values"):
        attention_rollout_prompt(model, _prompts().token_ids[0], [0.5])
    with pytest.raises(UsageError, match=r"\[0, 1\], got 1.5"):
        attention_rollout_prompt(model, _prompts().token_ids[0], 1.5)
    model.family.blocks(model.network)[1].attention.v_proj.weight[0, 0] = torch.nan
    with pytest.raises(RunError, match="not finite in layer 1"):
        attention_rollouts(model, _prompts(1))
