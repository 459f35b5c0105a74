"""Attention statistics equal those of the model's own attention matrices, and keep none of them."""

from contextlib import contextmanager
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from posbias import AttentionOptions, RunError, UsageError, attention
from posbias.measurement.attention import reduce_content, reduce_layer
from posbias.measurement.prompt import measure_prompt
from posbias.models.attention import attention_modules
from posbias.models.attention_blocks import AttentionState
from posbias.prompts import Prompts
from tiny_families import VOCABULARY, shaken_model

N_POSITIONS, COUNT, DEPTH, HEADS = 19, 3, 3, 4
THRESHOLDS = (0.1, 0.3)
TOLERANCE = 1e-6
"""float64 models, but transformers takes the softmax in float32."""
LLAMA_LIKE = ("gemma3_text", "gpt_oss", "llama-biases", "olmo2", "qwen3-window")
OTHERS = ("bloom", "falcon", "gpt2-layer-scale", "mpt")
"""Families unlike each other; that attention is recomputed rightly is tested of all (tests/contracts)."""


def _prompts(n_positions=N_POSITIONS, count=COUNT):
    return Prompts(np.random.default_rng(2).integers(3, VOCABULARY, (count, n_positions)))


@cache
def _model(kind):
    """A model that the tests share and leave as it is."""
    return _own_model(kind)


def _own_model(kind):
    return shaken_model(kind, implementation="eager")


@torch.no_grad()
def _dense(model, prompts):
    """The model's own attention, [prompt layer head query key]."""
    rows = []
    for ids in prompts.token_ids:
        given = model.network(torch.as_tensor(ids)[None], output_attentions=True).attentions
        assert len(given) == DEPTH
        rows.append(torch.cat(given).double().numpy())
    return np.stack(rows)


@contextmanager
def blocks_of(elements):
    """Within the context, so many attention weights are held at once."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("posbias.models.attention_blocks.elements_at_once", lambda _device: elements)
        yield


def _visible(model):
    """[layer query key], from the configuration."""
    query, key = np.indices((N_POSITIONS, N_POSITIONS))
    sorts = getattr(model.config, "layer_types", None) or ["full_attention"] * DEPTH
    windows = [model.config.sliding_window if sort == "sliding_attention" else N_POSITIONS for sort in sorts]
    return np.stack([(key <= query) & (key > query - window) for window in windows])


@pytest.mark.parametrize("kind", LLAMA_LIKE + OTHERS)
def test_statistics_are_those_of_the_models_own_attention(kind):
    model, prompts = _model(kind), _prompts()
    dense, visible = _dense(model, prompts), _visible(model)
    with blocks_of(HEADS * 4 * N_POSITIONS):
        found = attention(model, prompts, options=AttentionOptions(THRESHOLDS))

    assert not dense[:, :, :, ~np.tril(np.ones((N_POSITIONS, N_POSITIONS), bool))].any()
    assert not (dense * ~visible[:, None]).any()
    query, key = np.indices((N_POSITIONS, N_POSITIONS))
    kept = dense.sum(-1, keepdims=True)
    among_keys = dense / kept  # 1 but for learned sinks
    distance = (among_keys * (query - key)).sum(-1).mean(-1)
    np.testing.assert_allclose(found.distance.per_prompt, distance, atol=TOLERANCE)
    even = visible / visible.sum(-1, keepdims=True)
    np.testing.assert_allclose(found.even_distance, (even * (query - key)).sum(-1).mean(-1))

    surprise = -(among_keys * np.log(np.where(dense > 0, among_keys, 1))).sum(-1)
    keys = visible.sum(-1)[:, None]
    entropy = (surprise / np.log(np.maximum(keys, 2))).sum(-1) / (keys > 1).sum(-1)
    np.testing.assert_allclose(found.entropy.per_prompt, entropy, atol=TOLERANCE)

    for index, threshold in enumerate(THRESHOLDS):
        share = (dense > threshold).sum(-2).mean(2) / visible.sum(-2)
        assert share.max() > 0.1  # the thresholds are met
        np.testing.assert_allclose(found.sinks_by_layer[index], share.mean(0), atol=TOLERANCE)
        np.testing.assert_allclose(found.sinks.per_prompt[:, index], share.mean(1), atol=TOLERANCE)

    np.testing.assert_allclose(found.kernels, dense.mean((0, 2)), atol=TOLERANCE)
    assert (found.learned_sink is None) == (kind != "gpt_oss")
    if found.learned_sink is not None:
        np.testing.assert_allclose(found.learned_sink.per_prompt, 1 - kept[..., 0].mean(-1), atol=TOLERANCE)
        assert found.learned_sink.per_prompt.max() > 0.2
    assert [reason for reason in found.left_out if kind != "gpt_oss" or "norm_weighted" not in reason] == []
    assert (found.count, found.n_positions) == (COUNT, N_POSITIONS)


def test_where_a_model_breaks_its_promise_is_said():
    caveats = attention(_model("falcon-alibi"), _prompts()).caveats
    assert any("ALiBi" in caveat for caveat in caveats)
    assert attention(_model("gpt_neo"), _prompts()).caveats == ()


@pytest.mark.parametrize("cells", [1, 5, 8])
def test_cells_are_sums_over_keys_and_means_over_queries(cells, monkeypatch):
    monkeypatch.setattr("posbias.measurement.attention.CELLS", cells)
    model, prompts = _model("gemma3_text"), _prompts()
    dense = _dense(model, prompts).mean((0, 2))
    with blocks_of(HEADS * 3 * N_POSITIONS):
        found = attention(model, prompts).kernels
    member = np.arange(cells)[:, None] == np.arange(N_POSITIONS) * cells // N_POSITIONS  # [cell position]
    np.testing.assert_allclose(found, member @ dense @ member.T / member.sum(1)[:, None], atol=TOLERANCE)
    np.testing.assert_allclose(found.sum(-1), 1)


@pytest.mark.parametrize("kind", LLAMA_LIKE)
def test_content_logits_are_the_projections_own_before_rotation(kind):
    model, prompts = _model(kind), _prompts(count=2)
    visible = _visible(model) & ~np.eye(N_POSITIONS, dtype=bool)
    found = attention(model, prompts).content
    for prompt, logits in enumerate(_content(model, prompts)):
        own, scale = np.trace(logits, axis1=2, axis2=3) / N_POSITIONS, found.scale[:, None]
        off = np.stack([layer[:, mask].mean(-1) for layer, mask in zip(logits, visible, strict=True)])
        np.testing.assert_allclose(found.diagonal.per_prompt[prompt], own, atol=TOLERANCE)
        np.testing.assert_allclose(found.off_diagonal.per_prompt[prompt], off, atol=TOLERANCE)
        np.testing.assert_allclose(found.difference.per_prompt[prompt], own - off, atol=TOLERANCE)
        np.testing.assert_allclose(found.published.per_prompt[prompt], (own - off) / scale, atol=TOLERANCE)
    assert np.all(found.scale < 1)


def _content(model, prompts):
    """scale * q.k before rotation, [prompt layer head query key], from the projections' or the q/k norms' outputs."""
    rows = []
    for ids in prompts.token_ids:
        for attention_module in attention_modules(model.network).values():
            caught = {}

            def keep(module, _, output, into=caught):
                into[module] = output.detach()

            modules = [
                getattr(attention_module, f"{name}_norm", getattr(attention_module, f"{name}_proj")) for name in "qk"
            ]
            handles = [module.register_forward_hook(keep) for module in modules]
            model.last(model.embed(torch.as_tensor(ids)[None]))
            for handle in handles:
                handle.remove()
            query, key = (_heads(caught[module], attention_module.head_dim) for module in modules)
            rows.append(np.einsum("hid,hjd->hij", query, np.repeat(key, 2, axis=0)) * attention_module.scaling)
    return np.stack(rows).reshape(prompts.count, DEPTH, HEADS, N_POSITIONS, N_POSITIONS)


def _heads(values, size):
    """[head position feature] from [1 position features], [1 position head feature] or [1 head position feature]."""
    if values.ndim == 4 and values.shape[2] == N_POSITIONS:
        return values[0].double().numpy()
    return values[0].reshape(N_POSITIONS, -1, size).transpose(0, 1).double().numpy()


@pytest.mark.parametrize("kind", ["gemma3_text", "bloom"])
def test_mixing_is_that_of_the_models_branches(kind):
    model, prompts = _model(kind), _prompts()
    found = attention(model, prompts).mixing
    each = [measure_prompt(model, ids, kinds=[], key=(0, 0)).mixing for ids in prompts.token_ids]
    np.testing.assert_allclose(found.tokens.per_prompt, [one["token_mean"] for one in each])
    np.testing.assert_allclose(found.frobenius.per_prompt, [one["frobenius"] for one in each])


def test_neither_blocks_nor_the_models_implementation_matter():
    prompts = _prompts()
    with blocks_of(1):
        fine = attention(_model("gemma3_text"), prompts)
    coarse = attention(shaken_model("gemma3_text", implementation="sdpa"), prompts)
    for name in ("distance", "entropy"):
        one, other = getattr(fine, name), getattr(coarse, name)
        np.testing.assert_allclose(one.per_prompt, other.per_prompt, atol=TOLERANCE)
        np.testing.assert_allclose(one.low, other.low, atol=TOLERANCE)
    np.testing.assert_allclose(fine.sinks.per_prompt, coarse.sinks.per_prompt, atol=TOLERANCE)


def test_half_precision_is_measured_in_single_precision():
    prompts = _prompts()
    half = attention(shaken_model("llama", dtype=torch.bfloat16), prompts)
    single = attention(shaken_model("llama", dtype=torch.float32), prompts)
    assert half.kernels.dtype == np.float32
    np.testing.assert_allclose(half.kernels.sum(-1), 1, atol=1e-5)
    np.testing.assert_allclose(half.entropy.value, single.entropy.value, atol=0.05)


def test_intervals_hold_the_means_and_are_infinite_for_one_prompt():
    found = [attention(_model("llama"), _prompts(count=count)) for count in (6, 1)]
    for many, one in zip(*(_statistics(each) for each in found), strict=True):
        assert len(many.per_prompt) == 6
        assert np.all((many.low <= many.value) & (many.value <= many.high))
        assert np.any(many.low < many.high)
        assert np.all(np.isinf(one.high))
    np.testing.assert_allclose(found[0].distance.by_head.mean(1), found[0].distance.value)


def _statistics(found):
    content, mixing = found.content, found.mixing
    yield from (found.distance, found.entropy, content.diagonal, content.difference)
    yield from (found.sinks, mixing.tokens, mixing.frobenius)


@pytest.mark.parametrize("kind", ["lfm2", "jamba"])
def test_what_mixes_positions_beside_attention_or_in_its_place_is_named_and_counts_in_the_mixing(kind):
    model, prompts = _model(kind), _prompts()
    found = attention(model, prompts)
    (caveat,) = found.caveats
    assert caveat.startswith(f"layers stand here for those with attention, in order: 1 (from 0) of {DEPTH};")
    whole = [measure_prompt(model, ids, kinds=[], key=(0, 0)).mixing["token_mean"] for ids in prompts.token_ids]
    np.testing.assert_allclose(found.mixing.tokens.per_prompt, np.array(whole)[:, [1]])


BEYOND_THE_TABLE = "apertus codegen deepseek_v3 gemma4_text gptj llama4_text mimo_v2_flash olmo-clip"


@pytest.mark.parametrize("kind", BEYOND_THE_TABLE.split())
def test_families_without_a_layout_have_all_statistics_and_the_rollouts_that_read_no_weights(kind):
    model, prompts = _model(kind), _prompts()
    found = attention(model, prompts)
    np.testing.assert_allclose(found.kernels, _dense(model, prompts).mean((0, 2)), atol=TOLERANCE)
    assert found.mixing is not None
    assert list(found.rollouts) == ["rollout", "attention_only"]
    (left_out,) = found.left_out
    assert left_out.startswith("norm_weighted: it reads weights")


def test_blocks_that_add_no_two_branches_have_no_mixing():
    found = attention(_model("nemotron_h"), _prompts())
    assert found.mixing is None
    assert found.left_out[0].startswith("mixing needs blocks that add branches of attention and of an MLP")


def test_equal_keys_attend_evenly():
    """With the query projection zero, attention is uniform: everything has a closed form."""
    model = _own_model("smollm3")
    for block in model.family.blocks(model.network):
        block.attention.q_proj.weight.zero_()
    found = attention(model, _prompts())
    np.testing.assert_allclose(found.distance.per_prompt, (N_POSITIONS - 1) / 4)
    np.testing.assert_allclose(found.entropy.per_prompt, 1)
    np.testing.assert_allclose(found.content.difference.per_prompt, 0, atol=TOLERANCE)


class Operations(TorchDispatchMode):
    """Operations that would start work on an accelerator (views start none), and the largest result, in elements.

    On the device "meta" whatever would read a value back is refused, so what runs there waits for none.
    """

    count = largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if not func.is_view and isinstance(result, Tensor):
            self.count += 1
            self.largest = max(self.largest, result.numel())
        return result


def reduced_without_values(n_positions):
    """One layer reduced on a device that holds no values."""
    heads, size = 32, 16
    with torch.device("meta"):
        shared, alone = torch.randn(heads, 1, n_positions, size), torch.randn(heads, n_positions, size)
        with torch.device("cpu"):
            first = torch.zeros(n_positions, dtype=torch.int64)
        state = AttentionState(shared, alone, alone, 0.25, first)
        with Operations() as operations:
            found = reduce_layer(state, thresholds=THRESHOLDS, kernels=torch.zeros(8, 8))
            content = reduce_content(state)
    assert found["distance"].is_meta
    assert content["off_diagonal"].is_meta
    return operations


@pytest.mark.parametrize(("n_positions", "launches"), [(64, 150), (2048, 720)])
def test_a_layer_on_an_accelerator_is_reduced_in_few_launches_that_wait_for_none(n_positions, launches):
    assert reduced_without_values(n_positions).count <= launches


def test_only_accumulators_are_kept():
    """No tensor of a layer exceeds heads x block x positions, and long prompts take shorter blocks."""
    largest = 32 * 40 * 3000
    with blocks_of(largest):
        assert largest // 2 < reduced_without_values(3000).largest <= largest
    model, prompts = _model("llama"), _prompts()
    with blocks_of(HEADS * 4 * N_POSITIONS):
        found = attention(model, prompts)
    np.testing.assert_allclose(found.entropy.per_prompt, attention(model, prompts).entropy.per_prompt)


def test_bad_input_is_named(kernel_model):
    model = _model("llama")
    with pytest.raises(UsageError, match="'KernelModel'"):
        attention(kernel_model, Prompts(np.ones((1, 5), dtype=np.int64)))
    for thresholds in ((), (0.0,), (0.2, 1.0), (float("nan"),)):
        with pytest.raises(UsageError, match="sink_thresholds"):
            AttentionOptions(sink_thresholds=thresholds)
    with pytest.raises(UsageError, match="at least 3"):
        attention(model, _prompts(2))


@pytest.mark.parametrize("n_positions", [3, 4])
def test_the_shortest_prompts(n_positions):
    assert np.all(np.isfinite(attention(_model("bloom"), _prompts(n_positions, 1)).entropy.per_prompt))


def test_attention_that_is_not_finite_is_refused_with_its_layer():
    model = _own_model("llama")
    model.family.blocks(model.network)[1].attention.q_proj.weight[0, 0] = torch.nan
    with pytest.raises(RunError, match="prompt 0 is not finite, first in layer 1"):
        attention(model, _prompts())
