"""`attention`: what a model's attention looks like over prompts, and what its rollouts say (docs/theory, section 6).

One forward pass per prompt, reduced layer by layer while it runs, in blocks of queries: large quantities are summed
over prompts, small ones kept for each, and mean kernels lie in cells. Nothing of layers x heads x positions x positions
is kept unless it is small or asked for. Sums are float64 whatever the weights' precision.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Float, Float64, Int64
from torch import Tensor, nn

from posbias.checks import checked
from posbias.errors import RunError, UsageError
from posbias.measurement.attention_statistics import (
    AttentionStatistics,
    ContentLogits,
    HeadShare,
    HeadStatistic,
    MixingStatistics,
    PromptMean,
)
from posbias.measurement.options import AttentionOptions
from posbias.measurement.prompt import check_prompts, mixing_from_norms
from posbias.models.attention import BranchWatch, KernelCall, watch_attention, watch_branches
from posbias.models.attention_blocks import (
    AttentionState,
    before_rotation,
    query_blocks,
    seen_layers,
    state_of,
)
from posbias.models.devices import float64_device
from posbias.models.hugging_face import HuggingFaceModel
from posbias.models.loading import as_model, named
from posbias.models.model import Model
from posbias.progress import track
from posbias.prompts import Prompts
from posbias.runs.running import run_directory
from posbias.theory.power_rollout import attention_rollouts

CELLS = 128
"""Side of the mean kernels, in cells of neighbouring positions: as many as a picture shows."""


@checked
def attention(
    model: Model | str | Path | nn.Module, prompts: Prompts, *, options: AttentionOptions | None = None
) -> AttentionStatistics:
    """Measure a model's attention: distance, entropy, sinks, content logits, kernels, mixing and rollouts.

    Attention is formed in float32 (float64 for float64 models) from the queries and keys that each layer's kernel gets,
    whatever its implementation, and of families with eager attention alone from its matrices. Pairs that a mask hides
    do not count.

    Cost beyond the forward pass: 4 N^2 d flops per layer and prompt and some passes over the N^2 / 2 weights of every
    head, and about as much again for the rollouts. Memory: blocks of weights (heads x queries x N).

    Args:
        model: A decoder, loaded; or a hub id, a path, "demo" or a model of transformers.
        prompts: Equally long prompts of at least 3 tokens.
        options: Settings, and the directory of the record.

    Raises:
        UsageError: no attention that can be seen, or an argument outside its range.
        RunError: attention that is not finite.
    """
    options = options or AttentionOptions()
    with run_directory(
        options.directory,
        verb="attention",
        arguments={"model": named(model)},
        resume=None,
        overwrite=options.overwrite,
    ) as run:
        loaded = as_model(model)
        if prompts.n_positions < 3:  # the content of fewer says nothing
            raise UsageError(f"attention statistics need prompts of at least 3 positions, got {prompts.n_positions}")
        check_prompts(loaded, prompts)
        if not isinstance(loaded, HuggingFaceModel):
            raise UsageError(f"attention of {type(loaded).__name__!r} cannot be seen; a Hugging Face model is needed")
        sums, network = _Sums(loaded, options, n_positions=prompts.n_positions), loaded.network
        for index, token_ids in enumerate(track(prompts.token_ids, "attention statistics")):
            with torch.no_grad(), watch_branches(network) as watch, watch_attention(network, sums.receive):
                loaded.logits(loaded.token_tensor([token_ids.tolist()]), [len(token_ids) - 1])
            sums.add(watch, prompt=index)
        rollouts, left_out = attention_rollouts(loaded, prompts) if options.rollouts else ({}, [])
        described = loaded.describe()
        about = {
            "title": str(described["source"]),
            "command": "",
            "model": described,
            "prompts": prompts.describe(),
            "options": {"sink_thresholds": options.sink_thresholds, "rollouts": options.rollouts},
        }
        statistics = sums.statistics(loaded, prompts.count)
        statistics = replace(statistics, rollouts=rollouts, left_out=(*statistics.left_out, *left_out), about=about)
        run.finish(statistics.record)
    return statistics


class _Sums:
    """Sums over prompts of large quantities, on the model's device, and a row per prompt of small ones.

    Kernels are in the working precision, the rest in float64; all on the CPU for a device without.
    """

    def __init__(self, model: HuggingFaceModel, options: AttentionOptions, *, n_positions: int) -> None:
        self.layers = seen_layers(model, n_positions=n_positions)
        depth, cells = len(self.layers), min(n_positions, CELLS)
        self.options, self.heads, self.device = options, model.sizes["heads"], float64_device(model.device)
        self.dtype = torch.float64 if model.dtype == torch.float64 else torch.float32
        self.kernels = torch.zeros(depth, cells, cells, dtype=self.dtype, device=self.device)
        self.first = torch.zeros(depth, n_positions, dtype=torch.int64)
        """The oldest key that each query sees, by layer."""
        self.scale = np.zeros(depth)
        self.sinks_by_layer = np.zeros((len(options.sink_thresholds), depth, n_positions))
        self.no_mixing = ""
        """Why the branches cannot be set beside the stream; empty if they can."""
        self.found: list[dict[str, Tensor]] = []
        """Of the prompt that is read, by layer."""
        self.rows: dict[str, list[np.ndarray]] = defaultdict(list)

    def receive(self, call: KernelCall) -> None:
        """Reduce a layer when the pass reaches it."""
        row, state = self.layers.index(call.layer), state_of(call, self.dtype)
        if state.heads != self.heads:
            raise UsageError(
                f"layer {call.layer} has {state.heads} heads, others {self.heads}; equally many are allowed"
            )
        if state.reach == 1:
            raise UsageError("a window of 1 position leaves attention nothing to choose from; at least 2 is allowed")
        self.first[row], self.scale[row] = state.first, state.scale
        place = float64_device(state.query.device)
        content, thresholds = reduce_content(before_rotation(call, state).on(place)), self.options.sink_thresholds
        self.found.append(reduce_layer(state.on(place), thresholds=thresholds, kernels=self.kernels[row]) | content)

    def add(self, watch: BranchWatch, *, prompt: int) -> None:
        """Add the numbers of the prompt that was read, which leave the device here, all at once."""
        names = dict.fromkeys(name for layer in self.found for name in layer)
        none = torch.zeros_like(self.found[0]["distance"])  # of learned sinks, where other layers have them
        new = {
            name: torch.stack([layer.get(name, none).to(self.device) for layer in self.found]).numpy(force=True)
            for name in names
        }
        self.found = []
        numbers = [new[name] for name in ("distance", "entropy", "off_diagonal", "diagonal")]
        finite = np.isfinite(numbers).all(axis=(0, 2))
        if not finite.all():
            layer = self.layers[int(np.argmin(finite))]
            raise RunError(f"attention on prompt {prompt} is not finite, first in layer {layer}")
        sinks = new.pop("sinks").swapaxes(0, 1)
        self.sinks_by_layer += sinks
        new["sinks"] = sinks.mean(axis=1)
        try:
            norms = watch.norms(self.layers)
        except UsageError as error:
            self.no_mixing = str(error)
        else:
            new |= mixing_from_norms(norms, prompt=prompt)
        for name, row in new.items():
            self.rows[name].append(row)

    def statistics(self, model: HuggingFaceModel, count: int) -> AttentionStatistics:
        """The sums of `count` prompts as statistics."""
        cells, n_positions = self.kernels.shape[-1], self.first.shape[1]
        depth, listed, counted = model.sizes["layers"], ", ".join(map(str, self.layers)), []
        if len(self.layers) < depth:
            counted = [
                f"layers stand here for those with attention, in order: {listed} (from 0) of {depth}; linear layers in "
                "its place, and layers that mix no positions are not counted"
            ]
        rows = {name: np.stack(values) for name, values in self.rows.items()}
        queries = cell_bounds(cells, n_positions).diff()[:, None].to(self.kernels)
        seen_before = torch.arange(n_positions) - self.first
        return AttentionStatistics(
            distance=HeadStatistic.of(rows["distance"]),
            even_distance=(seen_before.double().mean(1) / 2).numpy(),
            entropy=HeadShare.of(rows["entropy"]),
            learned_sink=HeadShare.of(rows["learned_sink"]) if "learned_sink" in rows else None,
            content=ContentLogits(
                HeadStatistic.of(rows["diagonal"]), HeadStatistic.of(rows["off_diagonal"]), self.scale
            ),
            sink_thresholds=tuple(self.options.sink_thresholds),
            sinks=PromptMean.of(rows["sinks"]),
            sinks_by_layer=self.sinks_by_layer / count,
            kernels=(self.kernels / (count * queries)).numpy(force=True),
            mixing=None
            if self.no_mixing
            else MixingStatistics(PromptMean.of(rows["token_mean"]), PromptMean.of(rows["frobenius"])),
            left_out=(self.no_mixing,) if self.no_mixing else (),
            caveats=(*model.caveats(), *counted),
        )


def cell_bounds(cells: int, n_positions: int) -> Int64[Tensor, "edges"]:
    """First position of each cell, and N: position p lies in cell p * cells // N."""
    return -(-torch.arange(cells + 1) * n_positions // cells)


def reduce_layer(
    state: AttentionState, *, thresholds: Sequence[float], kernels: Float[Tensor, "cells cells"]
) -> dict[str, Tensor]:
    """Form one layer's attention on one prompt, add it to the kernels, and give its sums by name.

    Every query but the first must see at least 2 keys; `thresholds` are those of the sink score. Nothing is read back
    from an accelerator.

    Returns:
        distance, entropy and, of families that have them, learned_sink, [heads]; sinks [thresholds n_positions], mean
        over heads. `AttentionStatistics` has the definitions.
    """
    n_positions, device = state.key.shape[1], state.key.device
    position, first = torch.arange(n_positions, device=device), state.first.to(device)
    bounds = cell_bounds(len(kernels), n_positions).to(device)
    visible = (position - first).double() + 1
    # The first query sees itself alone: its entropy is 0 of log 1 = 0 and it is left out.
    entropy_weights = torch.where(visible > 1, 1 / visible.log(), 0.0)
    distance = torch.zeros(state.query.shape[:2], dtype=torch.float64, device=device)
    entropy = torch.zeros_like(distance)
    counts = torch.zeros(len(thresholds), n_positions, dtype=torch.float64, device=device)
    sink_mass = None if state.sinks is None else torch.zeros_like(distance)
    for part in query_blocks(state):
        weights, start, rows = part.weights, part.queries.start, part.queries.stop - part.queries.start
        # sum_j A_ij (i - j), with distances counted from the block's first query so that small ones stay precise.
        back = start - torch.arange(part.keys.start, part.keys.stop, dtype=weights.dtype, device=device)
        moment, total = (weights @ torch.stack([back, torch.ones_like(back)], 1)).unbind(-1)
        if part.sink is not None and sink_mass is not None:
            sink_mass += part.sink.sum(-1, dtype=torch.float64)
            moment = moment / total.clamp_min(torch.finfo(total.dtype).tiny)
        distance += moment.sum(-1, dtype=torch.float64) + rows * (rows - 1) / 2
        entropy += (_row_entropy(part.among_keys()).double() * entropy_weights[part.queries]).sum(-1)
        for row, threshold in zip(counts, thresholds, strict=True):
            for heads in torch.split((weights > threshold).view(torch.uint8).flatten(0, 1), 255):  # as a byte counts
                row[part.keys] += heads.sum(0, dtype=torch.uint8).sum(0)
        mean = weights.mean((0, 1))
        mass = mean.double().cumsum(-1)
        mass = mass / mass[..., -1:]
        if part.sink is not None:  # summed, not 1 less the sink: a small rest keeps its digits
            mass = mass * mean.double().sum(-1, keepdim=True)
        cell_of_query = torch.searchsorted(bounds, position[part.queries], right=True) - 1
        edges = bounds.clamp(part.keys.start, part.keys.stop) - part.keys.start
        in_cells = torch.nn.functional.pad(mass, (1, 0))[..., edges].diff(dim=-1)
        kernels.index_add_(0, cell_of_query.to(kernels.device), in_cells.to(kernels))  # a layer may lie elsewhere
    queries_of_key = torch.searchsorted(first, position, right=True) - position
    found = {
        "distance": (distance / n_positions).flatten(),
        "entropy": (entropy / (visible > 1).sum()).flatten(),
        "sinks": counts / (state.heads * queries_of_key),
    }
    return found if sink_mass is None else {**found, "learned_sink": (sink_mass / n_positions).flatten()}


def _row_entropy(weights: Float[Tensor, "*rows key"]) -> Float[Tensor, "*rows"]:
    """-sum_j A_ij log A_ij; zeros add nothing."""
    if weights.is_cpu:  # there `entr` takes four times as long
        logarithms = weights.clamp_min(torch.finfo(weights.dtype).tiny).log_()
        return -logarithms.mul_(weights).sum(-1)
    entropy: Tensor = torch.special.entr(weights).sum(-1)
    return entropy


def reduce_content(state: AttentionState) -> dict[str, Float64[Tensor, "heads"]]:
    """Means of scale * q_i.k_j before rotation at j = i and at visible j < i.

    sum_{j < i} q_i.k_j = q_i . (K_{i-1} - K_{f-1}), K the cumulative sum, f the first visible key: order N d, no pair
    is formed. Some query sees a key before its own.
    """
    query, key = state.query.double(), state.key.double()
    before = torch.nn.functional.pad(key.cumsum(1), (0, 0, 1, 0))  # before[i] = k_0 + ... + k_(i-1)
    earlier = before[:, :-1]
    if bool(state.first.any()):
        earlier = earlier - before[:, state.first.to(before.device)]
    pairs = int((np.arange(key.shape[1]) - state.first.numpy()).sum())
    return {
        "diagonal": ((query * key[:, None]).sum(-1).flatten(0, 1) * state.scale).mean(1),
        "off_diagonal": torch.einsum("kgic,kic->kg", query, earlier).flatten() * (state.scale / pairs),
    }
