"""`attention_statistics`: one forward pass per prompt, reduced layer by layer while it runs.

Kept are numbers per prompt, layer and head, counts per position, and mean kernels in cells; never an array of
layers x heads x positions x positions unless it is asked for or small (`AttentionOptions`).
"""

from collections.abc import Sequence

import numpy as np
import torch
from jaxtyping import Float, Float64, Int64
from torch import Tensor

from posbias.checks import checked
from posbias.errors import RunError, UsageError
from posbias.measurement.attention.accumulators import Accumulators, PromptNumbers, working_precision
from posbias.measurement.attention.content import LayerContent, reduce_content, reduce_mean_content
from posbias.measurement.attention.layer import LayerStatistics, reduce_layer
from posbias.measurement.attention.monotonicity import prefix_monotonicity
from posbias.measurement.attention.options import FEWEST_POSITIONS, AttentionOptions
from posbias.measurement.attention.similarity import similarity_of
from posbias.measurement.attention.statistics import (
    AttentionStatistics,
    ContentLogits,
    MeanKernels,
    MeanSimilarity,
    MixingStatistics,
    Monotonicity,
    PrefixMonotonicity,
    Similarity,
)
from posbias.measurement.mixing import mixing_from_norms
from posbias.measurement.prompt import check_prompts
from posbias.models.attention import (
    AttentionInput,
    AttentionLayer,
    describe_attention,
    project_attention,
    rotated,
    watch_attention,
)
from posbias.models.hugging_face import HuggingFaceModel, watch_branches
from posbias.models.model import Model
from posbias.progress import track
from posbias.prompts.prompts import Prompts


@checked
def attention_statistics(
    model: Model, prompts: Prompts, *, options: AttentionOptions | None = None
) -> AttentionStatistics:
    """Distance, entropy, sinks, content logits, similarity, monotonicity, mean kernels and mixing of a model.

    Attention is recomputed from what each attention module reads while the model runs, whatever implementation it
    runs, in float32 (float64 for float64 models): in half precision it is that of the same inputs without further
    rounding. Pairs a window hides do not count.

    Cost beyond the forward pass: 4 N^2 d flops per layer and prompt and some passes over the N^2 / 2 weights of every
    head. Memory: blocks of weights (heads x queries x N), fine histograms (layers x heads x 8192 numbers), and the
    kept matrices, which `options.memory_limit` bounds.

    Args:
        model: A model of a described family (`posbias.models.families`).
        prompts: Equally long prompts of at least 3 tokens.
        options: What is kept.

    Returns:
        Means with intervals over prompts, and per prompt what is small.

    Raises:
        UsageError: another family, an argument outside its range, or matrices that exceed the memory limit.
        RunError: attention that is not finite.
    """
    options = options or AttentionOptions()
    if prompts.n_positions < FEWEST_POSITIONS:
        raise UsageError(
            f"attention statistics need prompts of at least {FEWEST_POSITIONS} positions, got {prompts.n_positions}"
        )
    check_prompts(model, prompts)
    layers = describe_attention(model, n_positions=prompts.n_positions)
    if any(layer.reach == 1 for layer in layers):
        raise UsageError("a window of 1 position leaves attention nothing to choose from; at least 2 is allowed")
    kept = Accumulators.empty(model, prompts, layers, options)
    for index, token_ids in enumerate(track(prompts.token_ids, "attention statistics")):
        kept.add(_reduce_prompt(kept, model, token_ids, prompt=index))
    return _finish(kept, model)


@torch.no_grad()
def _reduce_prompt(
    kept: Accumulators, model: Model, token_ids: Int64[np.ndarray, "n_positions"], *, prompt: int
) -> PromptNumbers:
    """One forward pass; every layer is reduced where the pass reaches it."""
    options = kept.options
    layers: list[LayerStatistics] = []
    content: list[LayerContent] = []

    def receive(layer: AttentionLayer, given: AttentionInput) -> None:
        unrotated = project_attention(layer.parts, given.read)
        into = None if kept.content_sum is None else kept.content_sum[layer.index]
        own = reduce_content(unrotated, scale=layer.parts.scale, pairs=kept.pairs(layer, len(token_ids)), into=into)
        state = rotated(unrotated, given.cosine, given.sine)
        result = reduce_layer(
            layer, state, thresholds=options.sink_thresholds, block=options.block, kernels=kept.kernels(layer.index)
        )
        numbers = np.concatenate([result.distance, result.entropy, own.off_diagonal, own.diagonal.mean(axis=1)])
        if not np.all(np.isfinite(numbers)):
            raise RunError(f"attention on prompt {prompt} is not finite, first in layer {layer.index}")
        layers.append(result)
        content.append(own)

    blocks = _hugging_face(model).family.blocks(model.network)
    with watch_branches(blocks) as branches, watch_attention(kept.layers, receive, dtype=working_precision(model)):
        model.last(model.embed(model.token_tensor([token_ids.tolist()])))
    return PromptNumbers(layers, content, mixing_from_norms(branches.norms(), prompt=prompt), similarity_of(content))


def _finish(kept: Accumulators, model: Model) -> AttentionStatistics:
    """Means over prompts, with intervals."""
    count, n_positions = len(kept.rows["distance"]), kept.diagonal.shape[-1]
    complete = kept.mean.shape[-1] == n_positions
    left_out = []
    if not complete and count > 1:
        left_out.append(f"monotonicity of the mean kernel: it needs kernel_cells={n_positions}")
    if kept.content_sum is None:
        left_out.append("similarity of the mean content logits: they are kept up to a size, or with mean_content=True")
    family = _hugging_face(model).family
    return AttentionStatistics(
        distance=kept.by_heads(kept.stacked("distance")),
        even_distance=_even_distance(kept.layers, n_positions),
        entropy=kept.by_heads(kept.stacked("entropy")),
        learned_sink=kept.by_heads(kept.stacked("learned_sink")) if "learned_sink" in kept.rows else None,
        content=ContentLogits(
            diagonal=kept.by_heads(kept.stacked("diagonal")),
            off_diagonal=kept.by_heads(kept.stacked("off_diagonal")),
            scale=np.array([layer.parts.scale for layer in kept.layers]),
        ),
        similarity=_similarity(kept, count),
        sink_thresholds=kept.options.sink_thresholds,
        sinks=kept.average("sinks"),
        sinks_by_layer=kept.sinks_by_layer / count,
        monotonicity=Monotonicity(kept.average("violated"), kept.average("gap"), _mean_monotonicity(kept, count)),
        kernels=_kernels(kept, count),
        mixing=MixingStatistics(kept.average("tokens"), kept.average("frobenius"), kept.mixing_by_position / count),
        row_error=kept.row_error,
        left_out=tuple(left_out),
        caveats=family.caveats(_hugging_face(model).config, model.dtype),
    )


def _even_distance(layers: Sequence[AttentionLayer], n_positions: int) -> Float64[np.ndarray, "layers"]:
    visible = [np.minimum(np.arange(1, n_positions + 1), layer.reach or n_positions) for layer in layers]
    return np.array([float((keys - 1).mean()) / 2 for keys in visible])


def _similarity(kept: Accumulators, count: int) -> Similarity:
    similarity, outside = kept.stacked("similarity"), kept.stacked("outside")
    of_mean = None
    if kept.content_sum is not None:
        mean = [
            reduce_mean_content(total / count, pairs=kept.pairs(layer, total.shape[-1]), diagonal=diagonal / count)
            for layer, total, diagonal in zip(kept.layers, kept.content_sum, kept.diagonal, strict=True)
        ]
        found = similarity_of(mean)
        of_mean = MeanSimilarity(*found.similarity, *found.outside)
    return Similarity(
        diagonal=kept.by_heads(similarity[:, 0]),
        off_diagonal=kept.by_heads(similarity[:, 1]),
        diagonal_outside=kept.by_heads(outside[:, 0]),
        off_diagonal_outside=kept.by_heads(outside[:, 1]),
        edges=kept.stacked("edges"),
        of_mean=of_mean,
    )


def _mean_monotonicity(kept: Accumulators, count: int) -> PrefixMonotonicity | None:
    """Of the mean kernel over prompts, which with a single prompt is that prompt's own."""
    if count == 1:
        return PrefixMonotonicity(kept.rows["violated"][0], kept.rows["gap"][0])
    return prefix_monotonicity(kept.mean) if kept.mean.shape[-1] == kept.diagonal.shape[-1] else None


def _kernels(kept: Accumulators, count: int) -> MeanKernels:
    """Sums over prompts and the queries of a cell, divided by how many they are."""
    share = 1 / (count * kept.bounds.diff()[:, None].to(kept.mean))

    def averaged(sums: Float[Tensor, "*layers cells cells"]) -> Float[np.ndarray, "*layers cells cells"]:
        return np.asarray(sums.mul_(share).cpu().numpy())

    return MeanKernels(
        mean=averaged(kept.mean),
        squared=averaged(kept.squared),
        by_head=None if kept.by_head is None else averaged(kept.by_head),
        bounds=np.asarray(kept.bounds.cpu().numpy()),
    )


def _hugging_face(model: Model) -> HuggingFaceModel:
    """The model as `describe_attention` has found it to be."""
    if not isinstance(model, HuggingFaceModel):
        raise UsageError(f"attention of {type(model).__name__!r} cannot be recomputed; a Hugging Face model is needed")
    return model
