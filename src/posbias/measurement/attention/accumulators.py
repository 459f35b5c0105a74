"""What is kept while prompts stream by: sums over prompts of what is large, a row per prompt of what is small."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from jaxtyping import Float, Float64, Int64
from torch import Tensor

from posbias.measurement.attention.content import LayerContent, Pairs
from posbias.measurement.attention.layer import KernelSums, LayerStatistics
from posbias.measurement.attention.options import AttentionOptions
from posbias.measurement.attention.similarity import SimilarityNumbers
from posbias.measurement.attention.statistics import HeadStatistic, PromptMean
from posbias.measurement.mixing import Mixing
from posbias.models.attention import AttentionLayer, rows_at_once
from posbias.models.model import Model
from posbias.prompts.prompts import Prompts


@dataclass(frozen=True, eq=False)
class PromptNumbers:
    """What one prompt leaves behind beside the sums."""

    layers: list[LayerStatistics]
    content: list[LayerContent]
    mixing: Mixing
    similarity: SimilarityNumbers


@dataclass(eq=False)
class Accumulators:
    """All that is kept while prompts stream by."""

    layers: Sequence[AttentionLayer]
    options: AttentionOptions
    bounds: Int64[Tensor, "edges"]
    mean: Float[Tensor, "layers cells cells"]
    squared: Float[Tensor, "layers cells cells"]
    by_head: Float[Tensor, "layers heads cells cells"] | None
    content_sum: Float[Tensor, "layers heads n_positions n_positions"] | None
    sinks_by_layer: Float64[np.ndarray, "thresholds layers n_positions"]
    """Summed over prompts, as the three below."""
    diagonal: Float64[np.ndarray, "layers heads n_positions"]
    mixing_by_position: Float64[np.ndarray, "layers n_positions"]
    rows: dict[str, list[np.ndarray]] = field(default_factory=dict)
    """Small arrays, one per prompt."""
    row_error: float = 0.0

    @classmethod
    def empty(
        cls, model: Model, prompts: Prompts, layers: Sequence[AttentionLayer], options: AttentionOptions
    ) -> "Accumulators":
        """Nothing yet; refused where it would not fit."""
        depth, heads, n_positions = len(layers), layers[0].parts.heads, prompts.n_positions
        dtype = working_precision(model)
        size = dtype.itemsize
        options.check_memory(layers=depth, heads=heads, n_positions=n_positions, number_bytes=size)
        cells = options.cells(n_positions)

        def zeros(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=model.device)

        return cls(
            layers=layers,
            options=options,
            bounds=-(-torch.arange(cells + 1, device=model.device) * n_positions // cells),
            mean=zeros(depth, cells, cells),
            squared=zeros(depth, cells, cells),
            by_head=zeros(depth, heads, cells, cells) if options.by_head else None,
            content_sum=zeros(depth, heads, n_positions, n_positions)
            if options.keeps_content(depth * heads, n_positions, number_bytes=size)
            else None,
            sinks_by_layer=np.zeros((len(options.sink_thresholds), depth, n_positions)),
            diagonal=np.zeros((depth, heads, n_positions)),
            mixing_by_position=np.zeros((depth, n_positions)),
        )

    def kernels(self, layer: int) -> KernelSums:
        """Where a layer adds its kernels."""
        by_head = None if self.by_head is None else self.by_head[layer]
        return KernelSums(self.bounds, self.mean[layer], self.squared[layer], by_head)

    def pairs(self, layer: AttentionLayer, n_positions: int) -> Pairs:
        """Which content logits of a layer count."""
        rows = rows_at_once(layer.parts.heads, n_positions, self.options.block)
        return Pairs(reach=layer.reach or n_positions, rows=rows)

    def add(self, prompt: PromptNumbers) -> None:
        """Put a prompt's numbers beside the others'."""
        layers, content, similarity = prompt.layers, prompt.content, prompt.similarity
        sinks = np.stack([layer.sinks for layer in layers], axis=1)
        diagonal = np.stack([layer.diagonal for layer in content])
        self.sinks_by_layer += sinks
        self.diagonal += diagonal
        self.mixing_by_position += prompt.mixing.by_position
        self.row_error = max(self.row_error, *(layer.row_error for layer in layers))
        new = {
            "distance": np.stack([layer.distance for layer in layers]),
            "entropy": np.stack([layer.entropy for layer in layers]),
            "violated": np.array([layer.violated for layer in layers]),
            "gap": np.array([layer.gap for layer in layers]),
            "sinks": sinks.mean(axis=1),
            "diagonal": diagonal.mean(axis=2),
            "off_diagonal": np.stack([layer.off_diagonal for layer in content]),
            "similarity": similarity.similarity,
            "outside": similarity.outside,
            "edges": similarity.edges,
            "tokens": prompt.mixing.tokens,
            "frobenius": prompt.mixing.frobenius,
        }
        taken = [layer.learned_sink for layer in layers if layer.learned_sink is not None]
        if taken:
            new["learned_sink"] = np.stack(taken)
        for name, row in new.items():
            self.rows.setdefault(name, []).append(row)

    def stacked(self, name: str) -> Float64[np.ndarray, "count *axes"]:
        """One kind of small array, all prompts."""
        return np.stack(self.rows[name])

    def average(self, name: str) -> PromptMean:
        """The same with its interval."""
        return PromptMean.of(self.stacked(name))

    def by_heads(self, per_prompt: Float64[np.ndarray, "count layers heads"]) -> HeadStatistic:
        """A statistic of heads with its interval."""
        return HeadStatistic.of(per_prompt)


def working_precision(model: Model) -> torch.dtype:
    """What attention is recomputed in: float64 for float64 models, float32 otherwise."""
    return torch.float64 if model.dtype == torch.float64 else torch.float32
