"""Attention statistics equal those of the model's own attention matrices, and keep none of them."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from posbias.errors import RunError, UsageError
from posbias.measurement import AttentionStatistics, attention_statistics
from posbias.measurement.attention import prefix_monotonicity
from posbias.models import attention
from posbias.models.attention import RECOMPUTABLE
from posbias.models.hugging_face import HuggingFaceModel
from posbias.prompts.prompts import Prompts

N_POSITIONS, COUNT, DEPTH, HEADS = 19, 3, 3, 4
THRESHOLDS = (0.1, 0.3)
TOLERANCE = 1e-5
"""float32 on both sides."""
SIZES: dict[str, Any] = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": DEPTH,
    "num_attention_heads": HEADS,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
SPECIAL: dict[str, dict[str, Any]] = {
    "llama": {"attention_bias": True},
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


def _tiny(kind: str, implementation: str = "eager") -> HuggingFaceModel:
    """Random weights, norm gains and biases."""
    config = AutoConfig.for_model(kind, **SIZES, **SPECIAL.get(kind, {}))
    network = AutoModelForCausalLM.from_config(config, attn_implementation=implementation)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in network.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(parameter + 0.3 * noise if parameter.ndim == 1 else 0.25 * noise)
    return HuggingFaceModel(network)


def _prompts(n_positions: int = N_POSITIONS, count: int = COUNT) -> Prompts:
    return Prompts(np.random.default_rng(2).integers(3, 61, (count, n_positions)))


@torch.no_grad()
def _dense(model: HuggingFaceModel, prompts: Prompts) -> np.ndarray:
    """The model's own attention, [prompt layer head query key]."""
    rows = []
    for ids in prompts.token_ids:
        given = model.network(torch.as_tensor(ids)[None], output_attentions=True).attentions
        assert len(given) == DEPTH
        rows.append(torch.cat(given).double().numpy())
    return np.stack(rows)


def _visible(model: HuggingFaceModel) -> np.ndarray:
    """[layer query key], from the configuration."""
    query, key = np.indices((N_POSITIONS, N_POSITIONS))
    windows = [model.family.mask(model.config, layer).reach(N_POSITIONS) for layer in range(DEPTH)]
    return np.stack([(key <= query) & (key > query - window) for window in windows])


@pytest.mark.parametrize("kind", RECOMPUTABLE)
def test_statistics_are_those_of_the_models_own_attention(kind: str) -> None:
    model, prompts = _tiny(kind), _prompts()
    dense, visible = _dense(model, prompts), _visible(model)
    found = attention_statistics(model, prompts, sink_thresholds=THRESHOLDS, block=4)

    assert not dense[:, :, :, ~np.tril(np.ones((N_POSITIONS, N_POSITIONS), bool))].any()
    assert not (dense * ~visible[:, None]).any()
    query, key = np.indices((N_POSITIONS, N_POSITIONS))
    distance = (dense * (query - key)).sum(-1).mean(-1)
    np.testing.assert_allclose(found.distance.per_prompt, distance, atol=TOLERANCE)

    surprise = -(dense * np.log(np.where(dense > 0, dense, 1))).sum(-1)[..., 1:]
    entropy = (surprise / np.log(visible.sum(-1)[:, None, 1:])).mean(-1)
    np.testing.assert_allclose(found.entropy.per_prompt, entropy, atol=TOLERANCE)

    for index, threshold in enumerate(THRESHOLDS):
        share = (dense > threshold).sum(-2).mean((0, 2)) / visible.sum(-2)
        assert share.max() > 0.1  # the thresholds are met
        np.testing.assert_allclose(found.sinks_by_layer[index], share, atol=TOLERANCE)
        np.testing.assert_allclose(found.sinks[index], share.mean(0), atol=TOLERANCE)
    assert found.row_error < 1e-6
    assert found.left_out == ()


@pytest.mark.parametrize("kind", RECOMPUTABLE)
def test_monotonicity_is_that_of_the_mean_of_the_models_own_attention(kind: str) -> None:
    model, prompts = _tiny(kind), _prompts()
    mass = _dense(model, prompts).mean((0, 2)).cumsum(-1)
    monotonicity = attention_statistics(model, prompts).monotonicity
    assert monotonicity is not None
    for layer, prefix in enumerate(mass):
        rises = [prefix[i + 1, k] - prefix[i, k] for i in range(N_POSITIONS - 1) for k in range(i)]
        broken = [rise for rise in rises if rise > 1e-6]
        assert monotonicity.violated[layer] == pytest.approx(len(broken) / len(rises), abs=TOLERANCE)
        assert monotonicity.gap[layer] == pytest.approx(np.mean(broken) if broken else 0, abs=TOLERANCE)
    assert monotonicity.violated.any()


@pytest.mark.parametrize("kind", RECOMPUTABLE)
def test_content_logits_are_the_projections_own_before_rotation(kind: str) -> None:
    model, prompts = _tiny(kind), _prompts(count=1)
    visible = _visible(model)
    found = attention_statistics(model, prompts).content.per_prompt[0]
    for layer, block in enumerate(model.family.blocks(model.network)):
        caught: dict[nn.Module, torch.Tensor] = {}

        def keep(
            module: nn.Module, _: object, output: torch.Tensor, into: dict[nn.Module, torch.Tensor] = caught
        ) -> None:
            into[module] = output.detach()

        # The norm's output where there is one, the projection's otherwise.
        modules = [getattr(block.attention, f"{name}_norm", getattr(block.attention, f"{name}_proj")) for name in "qk"]
        handles = [module.register_forward_hook(keep) for module in modules]
        model.last(model.embed(torch.as_tensor(prompts.token_ids)))
        for handle in handles:
            handle.remove()
        size = block.attention.head_dim
        query, key = (_heads(caught[module], size) for module in modules)
        logits = np.einsum("hid,hjd->hij", query, np.repeat(key, 2, axis=0)) * block.attention.scaling
        own = np.trace(logits, axis1=1, axis2=2) / N_POSITIONS
        below = visible[layer] & ~np.eye(N_POSITIONS, dtype=bool)
        np.testing.assert_allclose(found[layer], own - logits[:, below].mean(-1), atol=TOLERANCE, rtol=TOLERANCE)


def _heads(values: torch.Tensor, size: int) -> np.ndarray:
    """[head position feature] from [1 position features], [1 position head feature] or [1 head position feature]."""
    if values.ndim == 4 and values.shape[2] == N_POSITIONS:
        return values[0].double().numpy()
    return values[0].reshape(N_POSITIONS, -1, size).transpose(0, 1).double().numpy()


def test_neither_blocks_nor_the_models_implementation_matter() -> None:
    prompts = _prompts()
    fine = attention_statistics(_tiny("gemma3_text"), prompts, block=1)
    coarse = attention_statistics(_tiny("gemma3_text", "sdpa"), prompts, block=128)
    for name in ("distance", "entropy", "content"):
        one, other = getattr(fine, name), getattr(coarse, name)
        np.testing.assert_allclose(one.per_prompt, other.per_prompt, atol=TOLERANCE)
        np.testing.assert_allclose(one.low, other.low, atol=TOLERANCE)
    np.testing.assert_allclose(fine.sinks, coarse.sinks, atol=TOLERANCE)


def test_watching_leaves_the_model_as_it_was() -> None:
    model, prompts = _tiny("qwen3"), _prompts()
    embeddings = model.embed(torch.as_tensor(prompts.token_ids))
    before = model.last(embeddings).logits
    with attention.watch_attention(
        attention.describe_attention(model, n_positions=N_POSITIONS), lambda *_: None, dtype=torch.float32
    ):
        within = model.last(embeddings).logits
    assert torch.equal(before, within)
    attention_statistics(model, prompts)
    assert torch.equal(before, model.last(embeddings).logits)
    assert not any(module._forward_pre_hooks for module in model.network.modules())


def test_intervals_hold_the_means_and_are_infinite_for_one_prompt() -> None:
    model = _tiny("llama")
    many, one = attention_statistics(model, _prompts(count=6)), attention_statistics(model, _prompts(count=1))
    for name in ("distance", "entropy", "content"):
        statistic = getattr(many, name)
        assert statistic.per_prompt.shape == (6, DEPTH, HEADS)
        assert np.all((statistic.low < statistic.by_layer) & (statistic.by_layer < statistic.high))
        np.testing.assert_allclose(statistic.by_head.mean(1), statistic.by_layer)
        assert np.all(np.isinf(getattr(one, name).high))


def test_monotone_kernels_have_no_violation_and_one_swapped_row_shows() -> None:
    uniform = torch.tril(torch.ones(6, 6)) / torch.arange(1, 7)[:, None]
    assert prefix_monotonicity(uniform[None]).violated.tolist() == [0]
    assert prefix_monotonicity(uniform[None] * 5).gap.tolist() == [0]
    uniform[3] = torch.tensor([0, 0, 0, 1, 0, 0])  # row 4 then gives 1/5 to each key: three prefixes rise
    found = prefix_monotonicity(uniform[None])
    assert found.violated[0] == pytest.approx(3 / 10)
    assert found.gap[0] == pytest.approx((0.2 + 0.4 + 0.6) / 3)


def test_equal_keys_attend_evenly() -> None:
    """With the query projection zero, attention is uniform: distance, entropy and content have closed forms."""
    model = _tiny("smollm3")
    for block in model.family.blocks(model.network):
        block.attention.q_proj.weight.zero_()
    found = attention_statistics(model, _prompts())
    np.testing.assert_allclose(found.distance.per_prompt, (N_POSITIONS - 1) / 4, atol=TOLERANCE)
    np.testing.assert_allclose(found.entropy.per_prompt, 1, atol=TOLERANCE)
    np.testing.assert_allclose(found.content.per_prompt, 0, atol=TOLERANCE)
    assert found.monotonicity is not None
    assert not found.monotonicity.violated.any()


def test_only_accumulators_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """No tensor made by the recomputation exceeds heads x block x positions, and long prompts take shorter blocks."""
    model, prompts, largest = _tiny("llama"), _prompts(60, 2), 0
    original = attention.query_blocks

    def watched(*args: Any, **kwargs: Any) -> Any:
        nonlocal largest
        for block in original(*args, **kwargs):
            largest = max(largest, block.weights.numel())
            yield block

    monkeypatch.setattr("posbias.measurement.layer_attention.query_blocks", watched)
    found = attention_statistics(model, prompts, block=8, monotonicity=False)
    assert largest <= HEADS * 8 * 60
    kept = [value for value in vars(found).values() if isinstance(value, np.ndarray)]
    assert max(value.size for value in kept) <= len(found.sink_thresholds) * DEPTH * 60
    assert found.monotonicity is None
    assert "monotonicity" in found.left_out[0]
    monkeypatch.setattr(attention, "BLOCK_ELEMENTS", HEADS * 60 * 2)
    largest = 0
    again = attention_statistics(model, prompts, monotonicity=False)
    assert largest <= HEADS * 2 * 60
    np.testing.assert_allclose(again.entropy.per_prompt, found.entropy.per_prompt, atol=TOLERANCE)


def test_bad_input_is_named(gpt2_64: HuggingFaceModel, kernel_model: Any) -> None:
    model, prompts = _tiny("llama"), _prompts()
    with pytest.raises(UsageError, match=r"'gpt2'.*supported: gemma3_text, llama"):
        attention_statistics(gpt2_64, Prompts(np.ones((1, 5), dtype=np.int64)))
    with pytest.raises(UsageError, match="'KernelModel'"):
        attention_statistics(kernel_model, Prompts(np.ones((1, 5), dtype=np.int64)))
    for thresholds in [(), (0.0,), (0.2, 1.0), (float("nan"),)]:
        with pytest.raises(UsageError, match="sink_thresholds"):
            attention_statistics(model, prompts, sink_thresholds=thresholds)
    with pytest.raises(UsageError, match="block"):
        attention_statistics(model, prompts, block=0)
    with pytest.raises(UsageError, match="at least 3"):
        attention_statistics(model, _prompts(2))


def test_attention_that_is_not_finite_is_refused_with_its_layer() -> None:
    model = _tiny("llama")
    model.family.blocks(model.network)[1].attention.q_proj.weight[0, 0] = torch.nan
    with pytest.raises(RunError, match="prompt 0 is not finite, first in layer 1"):
        attention_statistics(model, _prompts())


def test_public_names() -> None:
    import posbias

    assert posbias.attention_statistics is attention_statistics
    assert posbias.AttentionStatistics is AttentionStatistics
