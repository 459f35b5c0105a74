"""One forward pass per prompt, reduced to attention statistics layer by layer while it runs.

Large quantities are summed over prompts, small ones kept for each, and mean kernels lie in cells; there is never an
array of layers x heads x positions x positions unless it is asked for or small (`AttentionOptions`).
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import fields
from functools import partial

import numpy as np
import torch
from jaxtyping import Float, Int64
from torch import Tensor

from posbias.errors import RunError, UsageError
from posbias.measurement.attention.layer_statistics import (
    KernelSums,
    LayerContent,
    LayerStatistics,
    prefix_monotonicity,
    reduce_content,
    reduce_layer,
    reduce_mean_content,
    similarity_of,
)
from posbias.measurement.attention.options import FEWEST_POSITIONS, AttentionOptions
from posbias.measurement.attention.result import AttentionStatistics
from posbias.measurement.attention.statistics import (
    ContentLogits,
    HeadStatistic,
    MeanKernels,
    MeanSimilarity,
    MixingStatistics,
    Monotonicity,
    PrefixMonotonicity,
    PromptMean,
    Similarity,
)
from posbias.measurement.prompt import Mixing, check_prompts, mixing_from_norms
from posbias.models.attention import watch_branches
from posbias.models.attention_blocks import AttentionLayer, reach_of, seen_layers, watch_attention
from posbias.models.devices import float64_device
from posbias.models.hugging_face import HuggingFaceModel
from posbias.models.model import Model
from posbias.progress import track
from posbias.prompts.prompts import Prompts

PER_LAYER = ("distance", "entropy", "violated", "gap")
"""Fields of `LayerStatistics` that hold one number of every layer, or one of each of its heads."""


class Accumulators:
    """Sums over prompts of large quantities, on the model's device, and a row per prompt of small ones.

    Kernels and content logits are in the working precision, the rest in float64; all on the CPU for a device without.
    """

    def __init__(self, model: Model, layers: Sequence[int], options: AttentionOptions, *, n_positions: int) -> None:
        depth, heads, dtype = len(layers), model.sizes["heads"], working_precision(model)
        size = dtype.itemsize
        options.check_memory(layers=depth, heads=heads, n_positions=n_positions, number_bytes=size)
        cells = options.cells(n_positions)
        self.layers, self.options, self.n_positions, self.heads = layers, options, n_positions, heads
        self.device = float64_device(model.device)
        zeros = partial(torch.zeros, dtype=dtype, device=self.device)
        self.bounds = -(-torch.arange(cells + 1, device=self.device) * n_positions // cells)
        self.mean, self.squared = zeros(depth, cells, cells), zeros(depth, cells, cells)
        keeps_content = options.keeps_content(depth * heads, n_positions, number_bytes=size)
        self.content_sum = zeros(depth, heads, n_positions, n_positions) if keeps_content else None
        self.diagonal = torch.zeros(depth, heads, n_positions, dtype=torch.float64, device=self.device)
        """Of the content logits, summed if these are kept."""
        self.first = torch.zeros(depth, n_positions, dtype=torch.int64)
        """The oldest key that each query sees, by layer."""
        self.scale = np.zeros(depth)
        self.sinks_by_layer = np.zeros((len(options.sink_thresholds), depth, n_positions))
        self.mixing_by_position = np.zeros((depth, n_positions))
        self.no_mixing = ""
        """Why the branches cannot be set beside the stream; empty if they can."""
        self.rows: dict[str, list[np.ndarray]] = defaultdict(list)
        self.row_error = 0.0

    def add(self, layers: Sequence[LayerStatistics], content: Sequence[LayerContent], mixing: Mixing | None) -> None:
        """Add a prompt's numbers, which are read from the device here, all at once."""
        similarity, edges = similarity_of(content)

        def stacked(values: Iterable[Tensor]) -> Tensor:
            return torch.stack([value.to(self.device) for value in values])

        new = {name: stacked(getattr(layer, name) for layer in layers) for name in PER_LAYER}
        new |= {f"similarity/{name}": values for name, values in similarity.items()}
        new |= {"diagonal": stacked(layer.diagonal.mean(1) for layer in content), "edges": edges}
        new |= {"off_diagonal": stacked(layer.off_diagonal for layer in content)}
        if any(layer.learned_sink is not None for layer in layers):
            none = torch.zeros_like(layers[0].distance)
            shares = (layer.learned_sink for layer in layers)
            new["learned_sink"] = stacked(none if share is None else share for share in shares)
        sinks = stacked(layer.sinks for layer in layers).transpose(0, 1).numpy(force=True)
        if self.content_sum is not None:
            self.diagonal += stacked(layer.diagonal for layer in content)
        self.sinks_by_layer += sinks
        self.row_error = max(self.row_error, float(stacked(layer.row_error for layer in layers).max()))
        rows = {name: values.numpy(force=True) for name, values in new.items()}
        rows["sinks"] = sinks.mean(axis=1)
        if mixing is not None:
            rows |= {"tokens": mixing.tokens, "frobenius": mixing.frobenius}
            self.mixing_by_position += mixing.by_position
        for name, row in rows.items():
            self.rows[name].append(row)

    def average(self, name: str) -> PromptMean:
        """Mean over prompts of the rows of a name, with its interval."""
        return PromptMean.of(np.stack(self.rows[name]))

    def by_heads(self, name: str) -> HeadStatistic:
        """Mean over prompts of the rows of a name that have a number for every head."""
        return HeadStatistic.of(np.stack(self.rows[name]))


def working_precision(model: Model) -> torch.dtype:
    """The precision in which attention is formed: float64 for float64 models, float32 otherwise."""
    return torch.float64 if model.dtype == torch.float64 else torch.float32


def statistics_of(model: Model, prompts: Prompts, options: AttentionOptions) -> AttentionStatistics:
    """The statistics alone, without rollouts and without a description of the model: its fingerprint takes a second
    per gigabyte."""
    if prompts.n_positions < FEWEST_POSITIONS:
        raise UsageError(
            f"attention statistics need prompts of at least {FEWEST_POSITIONS} positions, got {prompts.n_positions}"
        )
    check_prompts(model, prompts)
    if not isinstance(model, HuggingFaceModel):
        raise UsageError(f"attention of {type(model).__name__!r} cannot be seen; a Hugging Face model is needed")
    layers = seen_layers(model, n_positions=prompts.n_positions)
    sums = Accumulators(model, layers, options, n_positions=prompts.n_positions)
    for index, token_ids in enumerate(track(prompts.token_ids, "attention statistics")):
        _reduce_prompt(sums, model, token_ids, prompt=index)
    return _finish(sums, model)


@torch.no_grad()
def _reduce_prompt(
    sums: Accumulators, model: HuggingFaceModel, token_ids: Int64[np.ndarray, "n_positions"], *, prompt: int
) -> None:
    """Run one forward pass and reduce every layer when the pass reaches it."""
    options, dtype = sums.options, working_precision(model)
    layers: list[LayerStatistics] = []
    content: list[LayerContent] = []
    finite: list[Tensor] = []

    def receive(layer: AttentionLayer) -> None:
        row, state = sums.layers.index(layer.index), layer.state(dtype)
        if state.heads != sums.heads:
            raise UsageError(
                f"layer {layer.index} has {state.heads} heads, others {sums.heads}; equally many are allowed"
            )
        if reach_of(state.first) == 1:
            raise UsageError("a window of 1 position leaves attention nothing to choose from; at least 2 is allowed")
        sums.first[row], sums.scale[row] = state.first, state.scale
        place = float64_device(state.query.device)
        into = None if sums.content_sum is None else sums.content_sum[row]
        logits = reduce_content(layer.before_rotation(state).on(place), block=options.block, into=into)
        kernels = KernelSums(sums.bounds, sums.mean[row], sums.squared[row])
        result = reduce_layer(state.on(place), thresholds=options.sink_thresholds, block=options.block, kernels=kernels)
        numbers = (result.distance, result.entropy, logits.off_diagonal, logits.diagonal.mean(1), logits.bound)
        finite.append(torch.cat(numbers).isfinite().all().to(sums.device))
        layers.append(result)
        content.append(logits)

    with watch_branches(model.network) as watch, watch_attention(model.network, receive):
        model.logits(model.token_tensor([token_ids.tolist()]), [len(token_ids) - 1])
    flags = torch.stack(finite).tolist()
    if not all(flags):
        raise RunError(f"attention on prompt {prompt} is not finite, first in layer {sums.layers[flags.index(False)]}")
    try:
        norms = watch.norms(sums.layers)
    except UsageError as error:
        sums.no_mixing = str(error)
    sums.add(layers, content, None if sums.no_mixing else mixing_from_norms(norms, prompt=prompt))


def _finish(sums: Accumulators, model: HuggingFaceModel) -> AttentionStatistics:
    count, n_positions = len(sums.rows["distance"]), sums.n_positions
    complete = sums.mean.shape[-1] == n_positions
    monotonicity = prefix_monotonicity(sums.mean) if complete and count > 1 else None
    if count == 1:  # the mean kernel is that prompt's own
        monotonicity = PrefixMonotonicity(sums.rows["violated"][0], sums.rows["gap"][0])
    left_out: list[str] = []
    if not complete and count > 1:
        left_out.append(f"monotonicity of the mean kernel: it needs kernel_cells={n_positions}")
    if sums.content_sum is None:
        left_out.append("similarity of the mean content logits: they are kept up to a size, or with mean_content=True")
    if sums.no_mixing:
        left_out.append(sums.no_mixing)
    seen_before = torch.arange(n_positions) - sums.first
    return AttentionStatistics(
        distance=sums.by_heads("distance"),
        even_distance=(seen_before.double().mean(1) / 2).numpy(),
        entropy=sums.by_heads("entropy"),
        learned_sink=sums.by_heads("learned_sink") if "learned_sink" in sums.rows else None,
        content=ContentLogits(
            diagonal=sums.by_heads("diagonal"),
            off_diagonal=sums.by_heads("off_diagonal"),
            scale=sums.scale,
        ),
        similarity=_similarity(sums, count),
        sink_thresholds=tuple(sums.options.sink_thresholds),
        sinks=sums.average("sinks"),
        sinks_by_layer=sums.sinks_by_layer / count,
        monotonicity=Monotonicity(sums.average("violated"), sums.average("gap"), monotonicity),
        kernels=_kernels(sums, count),
        mixing=None
        if sums.no_mixing
        else MixingStatistics(sums.average("tokens"), sums.average("frobenius"), sums.mixing_by_position / count),
        row_error=sums.row_error,
        left_out=tuple(left_out),
        caveats=(*model.caveats(), *_rows_of(sums.layers, model)),
    )


def _rows_of(layers: Sequence[int], model: HuggingFaceModel) -> tuple[str, ...]:
    """The layers that are counted, if some have no attention, or something beside it."""
    depth = model.sizes["layers"]
    if len(layers) == depth:
        return ()
    counted = ", ".join(map(str, layers))
    return (
        f"layers stand here for those with attention, in order: {counted} (from 0) of {depth}; linear layers in its "
        "place, and layers that mix no positions are not counted",
    )


def _similarity(sums: Accumulators, count: int) -> Similarity:
    of_mean = None
    if sums.content_sum is not None:
        mean = [
            reduce_mean_content(total / count, first=first, block=sums.options.block, diagonal=diagonal / count)
            for first, total, diagonal in zip(sums.first, sums.content_sum, sums.diagonal, strict=True)
        ]
        of_mean = MeanSimilarity(*(values.numpy(force=True) for values in similarity_of(mean)[0].values()))
    parts = {part.name: sums.by_heads(f"similarity/{part.name}") for part in fields(MeanSimilarity)}
    return Similarity(**parts, edges=np.stack(sums.rows["edges"]), of_mean=of_mean)


def _kernels(sums: Accumulators, count: int) -> MeanKernels:
    """Mean kernels: the sums over prompts and the queries of a cell, divided by their number."""
    share = 1 / (count * sums.bounds.diff()[:, None].to(sums.mean))

    def averaged(sums: Float[Tensor, "*layers cells cells"]) -> Float[np.ndarray, "*layers cells cells"]:
        return np.asarray(sums.mul_(share).cpu().numpy())

    return MeanKernels(
        mean=averaged(sums.mean),
        squared=averaged(sums.squared),
        bounds=np.asarray(sums.bounds.cpu().numpy()),
    )
