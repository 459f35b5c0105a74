"""Attention statistics equal those of the model's own attention matrices, and keep none of them."""

from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from operations import Operations
from posbias import AttentionOptions, RunError, UsageError, attention
from posbias.measurement.attention.layer_statistics import (
    KernelSums,
    prefix_monotonicity,
    reduce_content,
    reduce_layer,
)
from posbias.measurement.attention.result import AttentionStatistics
from posbias.measurement.prompt import mixing_of_layers
from posbias.models.attention_blocks import AttentionState, blocks_of
from posbias.models.hugging_face import HuggingFaceModel
from posbias.prompts.prompts import Prompts
from tiny_families import VOCABULARY, shaken_model

N_POSITIONS, COUNT, DEPTH, HEADS = 19, 3, 3, 4
THRESHOLDS = (0.1, 0.3)
TOLERANCE = 1e-6
"""float64 models, but transformers takes the softmax in float32."""
LLAMA_LIKE = ("gemma3_text", "gpt_oss", "llama-biases", "olmo2", "qwen3-window")
OTHERS = ("bloom", "falcon", "gpt2-layer-scale", "gpt_neo", "mpt")
"""Families unlike each other; that attention is recomputed rightly is tested of all (tests/contracts)."""


def _prompts(n_positions: int = N_POSITIONS, count: int = COUNT) -> Prompts:
    return Prompts(np.random.default_rng(2).integers(3, VOCABULARY, (count, n_positions)))


@cache
def _model(kind: str) -> HuggingFaceModel:
    """A model that the tests share and leave as it is."""
    return _own_model(kind)


def _own_model(kind: str) -> HuggingFaceModel:
    return shaken_model(kind, implementation="eager")


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
    masks = [model.family.mask(model.config, layer) for layer in range(DEPTH)]
    return np.stack([(key <= query) & (key > query - mask.reach(N_POSITIONS)) for mask in masks])


@pytest.mark.parametrize("kind", LLAMA_LIKE + OTHERS)
def test_statistics_are_those_of_the_models_own_attention(kind: str) -> None:
    model, prompts = _model(kind), _prompts()
    dense, visible = _dense(model, prompts), _visible(model)
    found = attention(model, prompts, options=AttentionOptions(THRESHOLDS, block=4))

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

    np.testing.assert_allclose(found.kernels.mean, dense.mean((0, 2)), atol=TOLERANCE)
    np.testing.assert_allclose(found.kernels.squared, (dense**2).mean((0, 2)), atol=TOLERANCE)
    assert found.kernels.complete
    assert found.row_error < TOLERANCE
    assert (found.learned_sink is None) == (kind != "gpt_oss")
    if found.learned_sink is not None:
        np.testing.assert_allclose(found.learned_sink.per_prompt, 1 - kept[..., 0].mean(-1), atol=TOLERANCE)
        assert found.learned_sink.per_prompt.max() > 0.2
    assert found.left_out == ()
    assert (found.count, found.n_positions) == (COUNT, N_POSITIONS)


@pytest.mark.parametrize("kind", ["gemma3_text", "bloom"])
def test_monotonicity_is_that_of_the_models_own_attention(kind: str) -> None:
    model, prompts = _model(kind), _prompts()
    dense = _dense(model, prompts).mean(2)
    found = attention(model, prompts, options=AttentionOptions(block=4)).monotonicity
    assert found.of_mean is not None
    for layer in range(DEPTH):
        violated, gap = _violations(dense.mean(0)[layer])
        assert found.of_mean.violated[layer] == pytest.approx(violated)
        assert found.of_mean.gap[layer] == pytest.approx(gap)
        for prompt in range(COUNT):
            violated, gap = _violations(dense[prompt, layer])
            assert found.violated.per_prompt[prompt, layer] == pytest.approx(violated)
            assert found.gap.per_prompt[prompt, layer] == pytest.approx(gap)
    assert found.violated.per_prompt.any(axis=0).all()


def _violations(kernel: np.ndarray) -> tuple[float, float]:
    """Share and mean of the rises of prefix masses, triple by triple."""
    prefix = kernel.cumsum(-1)
    rises = [prefix[i + 1, k] - prefix[i, k] for i in range(N_POSITIONS - 1) for k in range(i)]
    broken = [rise for rise in rises if rise > 1e-6]
    return len(broken) / len(rises), float(np.mean(broken)) if broken else 0.0


def test_where_a_model_breaks_its_promise_is_said() -> None:
    caveats = attention(_model("falcon-alibi"), _prompts()).caveats
    assert any("ALiBi" in caveat for caveat in caveats)
    assert attention(_model("bloom"), _prompts()).caveats == ()


def test_one_prompt_has_the_monotonicity_of_its_own_kernel_however_long() -> None:
    model = _model("llama")
    coarse = attention(model, _prompts(count=1), options=AttentionOptions(kernel_cells=5))
    whole = attention(model, _prompts(count=1))
    assert coarse.monotonicity.of_mean is not None
    np.testing.assert_array_equal(coarse.monotonicity.of_mean.violated, whole.monotonicity.violated.value)
    several = attention(model, _prompts(), options=AttentionOptions(kernel_cells=5, mean_content=False))
    assert several.monotonicity.of_mean is None
    assert several.similarity.of_mean is None
    assert [reason.split(":")[0] for reason in several.left_out] == [
        "monotonicity of the mean kernel",
        "similarity of the mean content logits",
    ]


@pytest.mark.parametrize("cells", [1, 5])
def test_cells_are_sums_over_keys_and_means_over_queries(cells: int) -> None:
    model, prompts = _model("gemma3_text"), _prompts()
    dense = _dense(model, prompts)
    found = attention(model, prompts, options=AttentionOptions(kernel_cells=cells, block=3)).kernels
    cell = np.arange(N_POSITIONS) * cells // N_POSITIONS
    member = np.arange(cells)[:, None] == cell  # [cell position]
    for kernel, values in ((found.mean, dense), (found.squared, dense**2)):
        expected = member @ values.mean((0, 2)) @ member.T / member.sum(1)[:, None]
        np.testing.assert_allclose(kernel, expected, atol=TOLERANCE)
    np.testing.assert_allclose(found.mean.sum(-1), 1)
    assert not found.complete
    whole = attention(model, prompts).kernels.coarser(cells)
    np.testing.assert_allclose(whole.mean, found.mean, atol=TOLERANCE)
    np.testing.assert_allclose(whole.squared, found.squared, atol=TOLERANCE)


@pytest.mark.parametrize(("kept", "cells"), [(17, 6), (N_POSITIONS, 8)])
def test_cells_merged_unevenly_are_sums_over_keys_and_means_over_queries_all_the_same(kept: int, cells: int) -> None:
    model, prompts = _model("llama"), _prompts()
    dense = _dense(model, prompts)
    options = AttentionOptions(kernel_cells=kept)
    found = attention(model, prompts, options=options).kernels.coarser(cells)
    assert (found.bounds[0], found.bounds[-1], found.n_positions) == (0, N_POSITIONS, N_POSITIONS)
    cell = np.arange(N_POSITIONS) * kept // N_POSITIONS * cells // kept
    np.testing.assert_array_equal(np.searchsorted(found.bounds, np.arange(N_POSITIONS), side="right") - 1, cell)
    member = np.arange(cells)[:, None] == cell  # [cell position]
    for kernel, values in (
        (found.mean, dense.mean((0, 2))),
        (found.squared, (dense**2).mean((0, 2))),
    ):
        np.testing.assert_allclose(kernel, member @ values @ member.T / member.sum(1)[:, None], atol=TOLERANCE)
    np.testing.assert_allclose(found.mean.sum(-1), 1)
    # Axes tell positions as if all cells were equally large: less than a cell from where these begin.
    assert np.abs(found.bounds - np.arange(cells + 1) * N_POSITIONS / cells).max() < N_POSITIONS / cells


@pytest.mark.parametrize("kind", LLAMA_LIKE)
def test_content_logits_are_the_projections_own_before_rotation(kind: str) -> None:
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


def _content(model: HuggingFaceModel, prompts: Prompts) -> np.ndarray:
    """scale * q.k before rotation, [prompt layer head query key], from the projections' or the q/k norms' outputs."""
    rows = []
    for ids in prompts.token_ids:
        for block in model.family.blocks(model.network):
            caught: dict[nn.Module, torch.Tensor] = {}

            def keep(
                module: nn.Module, _: object, output: torch.Tensor, into: dict[nn.Module, torch.Tensor] = caught
            ) -> None:
                into[module] = output.detach()

            modules = [
                getattr(block.attention, f"{name}_norm", getattr(block.attention, f"{name}_proj")) for name in "qk"
            ]
            handles = [module.register_forward_hook(keep) for module in modules]
            model.last(model.embed(torch.as_tensor(ids)[None]))
            for handle in handles:
                handle.remove()
            query, key = (_heads(caught[module], block.attention.head_dim) for module in modules)
            rows.append(np.einsum("hid,hjd->hij", query, np.repeat(key, 2, axis=0)) * block.attention.scaling)
    return np.stack(rows).reshape(prompts.count, DEPTH, HEADS, N_POSITIONS, N_POSITIONS)


def _heads(values: torch.Tensor, size: int) -> np.ndarray:
    """[head position feature] from [1 position features], [1 position head feature] or [1 head position feature]."""
    if values.ndim == 4 and values.shape[2] == N_POSITIONS:
        return values[0].double().numpy()
    return values[0].reshape(N_POSITIONS, -1, size).transpose(0, 1).double().numpy()


@pytest.mark.parametrize("kind", ["llama-biases", "qwen3-window"])
def test_similarity_is_that_of_exact_quantiles_and_histograms(kind: str) -> None:
    model, prompts = _model(kind), _prompts()
    below = _visible(model) & ~np.eye(N_POSITIONS, dtype=bool)
    found = attention(model, prompts).similarity
    content = _content(model, prompts)
    for prompt, logits in enumerate(content):
        off, own = _regions(logits, below)
        exact = np.quantile(np.concatenate([part.ravel() for part in off + own]), [0.005, 0.995])
        np.testing.assert_allclose(found.edges[prompt], exact, atol=np.ptp(exact) / 100)
        for name, region in (("diagonal", own), ("off_diagonal", off)):
            similarity, outside = _similarity(region, found.edges[prompt])
            # A fine cell across an edge is divided: of the off-diagonal histogram a few entries are off by one bin.
            tolerance = 1e-9 if name == "diagonal" else 0.01
            np.testing.assert_allclose(getattr(found, name).per_prompt[prompt], similarity, atol=tolerance)
            np.testing.assert_allclose(
                getattr(found, f"{name}_outside").per_prompt[prompt], outside, atol=tolerance, err_msg=name
            )
    assert found.of_mean is not None
    off, own = _regions(content.mean(0), below)
    edges = np.quantile(np.concatenate([part.ravel() for part in off + own]), [0.005, 0.995])
    np.testing.assert_allclose(found.of_mean.off_diagonal, _similarity(off, edges)[0], atol=0.03)
    np.testing.assert_allclose(found.of_mean.diagonal.mean(), _similarity(own, edges)[0].mean(), atol=0.03)


def _regions(logits: np.ndarray, below: np.ndarray) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Visible entries j < i and entries j = i, each [layer][head entry], from [layer head query key]."""
    off = [layer[:, mask] for layer, mask in zip(logits, below, strict=True)]
    return off, list(np.diagonal(logits, axis1=2, axis2=3))


def _similarity(region: list[np.ndarray], edges: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """1 - entropy / log(199), and the share outside, [layer head]."""
    counts = np.array([[np.histogram(head, np.linspace(*edges, 200))[0] for head in layer] for layer in region])
    share = counts / counts.sum(-1, keepdims=True)
    entropy = -(share * np.log(np.where(share > 0, share, 1))).sum(-1)
    sizes = np.array([[layer.shape[1]] for layer in region])
    return 1 - entropy / np.log(199), 1 - counts.sum(-1) / sizes


def test_a_narrow_head_is_more_similar_than_a_wide_one() -> None:
    model = _own_model("llama")
    block_attention = model.family.blocks(model.network)[0].attention
    block_attention.q_proj.weight[:8] *= 0.01  # head 0
    found = attention(model, _prompts()).similarity.off_diagonal.by_head
    assert found[0, 0] > 0.8 > found[1:].max()


@pytest.mark.parametrize("kind", ["gemma3_text", "bloom"])
def test_mixing_is_that_of_the_models_branches(kind: str) -> None:
    model, prompts = _model(kind), _prompts()
    found = attention(model, prompts).mixing
    each = [mixing_of_layers(model, ids, prompt=0) for ids in prompts.token_ids]
    np.testing.assert_allclose(found.tokens.per_prompt, [one.tokens for one in each])
    np.testing.assert_allclose(found.frobenius.per_prompt, [one.frobenius for one in each])
    np.testing.assert_allclose(found.by_position, np.mean([one.by_position for one in each], axis=0))
    np.testing.assert_allclose(found.by_position.mean(1), found.tokens.value)


def test_neither_blocks_nor_the_models_implementation_matter() -> None:
    prompts = _prompts()
    fine = attention(_model("gemma3_text"), prompts, options=AttentionOptions(block=1))
    coarse = attention(shaken_model("gemma3_text", implementation="sdpa"), prompts)
    for name in ("distance", "entropy"):
        one, other = getattr(fine, name), getattr(coarse, name)
        np.testing.assert_allclose(one.per_prompt, other.per_prompt, atol=TOLERANCE)
        np.testing.assert_allclose(one.low, other.low, atol=TOLERANCE)
    np.testing.assert_allclose(fine.sinks.per_prompt, coarse.sinks.per_prompt, atol=TOLERANCE)
    np.testing.assert_allclose(fine.similarity.edges, coarse.similarity.edges, atol=TOLERANCE)
    np.testing.assert_allclose(fine.monotonicity.gap.value, coarse.monotonicity.gap.value, atol=TOLERANCE)


def test_half_precision_is_measured_in_single_precision() -> None:
    prompts = _prompts()
    half = attention(shaken_model("llama", dtype=torch.bfloat16), prompts)
    single = attention(shaken_model("llama", dtype=torch.float32), prompts)
    assert half.kernels.mean.dtype == np.float32
    assert half.row_error < 1e-5
    np.testing.assert_allclose(half.entropy.by_layer, single.entropy.by_layer, atol=0.05)


def test_intervals_hold_the_means_and_are_infinite_for_one_prompt() -> None:
    model = _model("llama")
    many, one = attention(model, _prompts(count=6)), attention(model, _prompts(count=1))

    def statistics(found: AttentionStatistics) -> dict[str, Any]:
        return {
            "distance": found.distance,
            "entropy": found.entropy,
            "diagonal": found.content.diagonal,
            "difference": found.content.difference,
            "similarity": found.similarity.off_diagonal,
            "violated": found.monotonicity.violated,
            "sinks": found.sinks,
            "tokens": found.mixing.tokens,
            "frobenius": found.mixing.frobenius,
        }

    for name, statistic in statistics(many).items():
        assert len(statistic.per_prompt) == 6
        mean = statistic.by_layer if hasattr(statistic, "by_layer") else statistic.value
        assert np.all((statistic.low <= mean) & (mean <= statistic.high)), name
        assert np.any(statistic.low < statistic.high), name
        assert np.all(np.isinf(statistics(one)[name].high)), name
    np.testing.assert_allclose(many.distance.by_head.mean(1), many.distance.by_layer)


def test_monotone_kernels_have_no_violation_and_one_swapped_row_shows() -> None:
    uniform = torch.tril(torch.ones(6, 6)) / torch.arange(1, 7)[:, None]
    assert prefix_monotonicity(uniform[None]).violated.tolist() == [0]
    assert prefix_monotonicity(uniform[None] * 5).gap.tolist() == [0]
    uniform[3] = torch.tensor([0, 0, 0, 1, 0, 0])  # row 4 then gives 1/5 to each key: three prefixes rise
    found = prefix_monotonicity(uniform[None])
    assert found.violated[0] == pytest.approx(3 / 10)
    assert found.gap[0] == pytest.approx((0.2 + 0.4 + 0.6) / 3)


@pytest.mark.parametrize(("kind", "counted"), [("lfm2", "1"), ("jamba", "1")])
def test_what_mixes_positions_beside_attention_or_in_its_place_is_named_and_counts_in_the_mixing(
    kind: str, counted: str
) -> None:
    model, prompts = _model(kind), _prompts()
    found = attention(model, prompts)
    (caveat,) = found.caveats
    assert caveat.startswith(f"layers stand here for those with attention, in order: {counted} (from 0) of {DEPTH};")
    whole = [mixing_of_layers(model, ids, prompt=index).tokens for index, ids in enumerate(prompts.token_ids)]
    attending = [int(layer) for layer in counted.split(", ")]
    np.testing.assert_allclose(found.mixing.tokens.per_prompt, np.array(whole)[:, attending])


BEYOND_THE_TABLE = (
    "apertus",
    "codegen",
    "deepseek_v3",
    "gemma4_text",
    "gptj",
    "llama4_text",
    "mimo_v2_flash",
    "olmo-clip",
)


@pytest.mark.parametrize("kind", BEYOND_THE_TABLE)
def test_families_without_a_layout_have_all_statistics_and_the_rollouts_that_read_no_weights(kind: str) -> None:
    model, prompts = _model(kind), _prompts()
    found = attention(model, prompts)
    np.testing.assert_allclose(found.kernels.mean, _dense(model, prompts).mean((0, 2)), atol=TOLERANCE)
    assert found.mixing is not None
    assert list(found.rollouts) == ["rollout", "attention_only"]
    (left_out,) = found.left_out
    assert left_out.startswith("norm_weighted: it reads weights")


def test_blocks_that_add_no_two_branches_have_no_mixing() -> None:
    found = attention(_model("nemotron_h"), _prompts())
    assert found.mixing is None
    assert found.left_out[0].startswith("mixing needs blocks that add branches of attention and of an MLP")


def test_equal_keys_attend_evenly() -> None:
    """With the query projection zero, attention is uniform: everything has a closed form."""
    model = _own_model("smollm3")
    for block in model.family.blocks(model.network):
        block.attention.q_proj.weight.zero_()
    found = attention(model, _prompts(), options=AttentionOptions(kernel_cells=1))
    np.testing.assert_allclose(found.distance.per_prompt, (N_POSITIONS - 1) / 4)
    np.testing.assert_allclose(found.entropy.per_prompt, 1)
    np.testing.assert_allclose(found.content.difference.per_prompt, 0, atol=TOLERANCE)
    np.testing.assert_allclose(found.kernels.squared, np.mean(1 / np.arange(1, N_POSITIONS + 1)))
    assert np.all(found.similarity.diagonal.per_prompt == 1)
    assert not found.similarity.off_diagonal_outside.per_prompt.any()
    assert not found.monotonicity.violated.per_prompt.any()


def reduced_without_values(n_positions: int, *, block: int | None = None) -> Operations:
    """One layer reduced on a device that holds no values."""
    heads, size = 32, 16
    with torch.device("meta"):
        shared, alone = torch.randn(heads, 1, n_positions, size), torch.randn(heads, n_positions, size)
        with torch.device("cpu"):
            first = torch.zeros(n_positions, dtype=torch.int64)
        state = AttentionState(shared, alone, alone, 0.25, first)
        kernels = KernelSums(torch.arange(9) * n_positions // 8, torch.zeros(8, 8), torch.zeros(8, 8))
        with Operations() as operations:
            content = reduce_content(state, block=block, into=None)
            found = reduce_layer(state, thresholds=THRESHOLDS, block=block, kernels=kernels)
    assert found.distance.is_meta
    assert content.counts.is_meta
    return operations


@pytest.mark.parametrize(("n_positions", "launches"), [(64, 150), (2048, 720)])
def test_a_layer_on_an_accelerator_is_reduced_in_few_launches_that_wait_for_none(
    n_positions: int, launches: int
) -> None:
    assert reduced_without_values(n_positions).count <= launches


def test_only_accumulators_are_kept() -> None:
    """No tensor of a layer exceeds heads x block x positions, and long prompts take shorter blocks."""
    largest = 32 * 40 * 3000
    assert largest // 2 < reduced_without_values(3000, block=40).largest <= largest
    with blocks_of(largest):
        assert largest // 2 < reduced_without_values(3000).largest <= largest
    model, prompts = _model("llama"), _prompts()
    with blocks_of(HEADS * 4 * N_POSITIONS):
        found = attention(model, prompts, options=AttentionOptions(kernel_cells=7))
    assert found.kernels.mean.shape == (DEPTH, 7, 7)
    np.testing.assert_allclose(found.entropy.per_prompt, attention(model, prompts).entropy.per_prompt)


def test_kept_matrices_are_counted_before_the_run_and_refused_when_too_large() -> None:
    options = AttentionOptions(kernel_cells=8192)
    with pytest.raises(UsageError, match=r"16\.1 GB \(30 layers, 9 heads, kernels of 8192 x 8192\).*allowed are 4 GB"):
        options.check_memory(layers=30, heads=9, n_positions=8192)
    assert AttentionOptions().check_memory(layers=30, heads=9, n_positions=8192) == 30 * 2 * 256**2 * 4
    assert AttentionOptions().check_memory(layers=30, heads=9, n_positions=256) == 30 * 11 * 256**2 * 4
    with pytest.raises(UsageError, match="memory_limit"):
        attention(_model("llama"), _prompts(), options=AttentionOptions(memory_limit=1000))


def test_bad_input_is_named(kernel_model: Any) -> None:
    model, prompts = _model("llama"), _prompts()
    with pytest.raises(UsageError, match="'KernelModel'"):
        attention(kernel_model, Prompts(np.ones((1, 5), dtype=np.int64)))
    wrong: list[tuple[float, ...]] = [(), (0.0,), (0.2, 1.0), (float("nan"),)]
    for thresholds in wrong:
        with pytest.raises(UsageError, match="sink_thresholds"):
            AttentionOptions(sink_thresholds=thresholds)
    for name, value in [("block", 0), ("kernel_cells", 0), ("memory_limit", True)]:
        with pytest.raises(UsageError, match=name):
            AttentionOptions(**{name: value})
    with pytest.raises(UsageError, match="kernel_cells must be 1 to 19"):
        attention(model, prompts, options=AttentionOptions(kernel_cells=20))
    with pytest.raises(UsageError, match="at least 3"):
        attention(model, _prompts(2))


@pytest.mark.parametrize("n_positions", [3, 4])
def test_the_shortest_prompts(n_positions: int) -> None:
    found = attention(_model("bloom"), _prompts(n_positions, 1))
    assert np.all(np.isfinite(found.entropy.per_prompt))
    assert np.all((found.similarity.off_diagonal.per_prompt >= 0) & (found.similarity.diagonal.per_prompt <= 1))


def test_attention_that_is_not_finite_is_refused_with_its_layer() -> None:
    model = _own_model("llama")
    model.family.blocks(model.network)[1].attention.q_proj.weight[0, 0] = torch.nan
    with pytest.raises(RunError, match="prompt 0 is not finite, first in layer 1"):
        attention(model, _prompts())
