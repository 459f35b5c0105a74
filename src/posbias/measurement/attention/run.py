"""`attention`: what a model's attention looks like over prompts, and what its rollouts say."""

from dataclasses import replace
from pathlib import Path

from torch import nn

from posbias.checks import checked
from posbias.measurement.attention.options import AttentionOptions
from posbias.measurement.attention.result import AttentionStatistics
from posbias.measurement.attention.streaming import statistics_of
from posbias.models.loading import as_model, named
from posbias.models.model import Model
from posbias.prompts.prompts import Prompts
from posbias.runs.running import run_directory
from posbias.theory.power_rollout import attention_rollouts


@checked
def attention(
    model: Model | str | Path | nn.Module, prompts: Prompts, *, options: AttentionOptions | None = None
) -> AttentionStatistics:
    """Measure a model's attention: distance, entropy, sinks, content logits, kernels, mixing and rollouts.

    Attention is formed in float32 (float64 for float64 models) from the queries and keys that each layer's kernel gets,
    whatever its implementation, and of families with eager attention alone from its matrices. Pairs that a mask hides
    do not count.

    Cost beyond the forward pass: 4 N^2 d flops per layer and prompt and some passes over the N^2 / 2 weights of every
    head, and about as much again for the rollouts. Memory: blocks of weights (heads x queries x N), fine histograms
    (layers x heads x 8192 numbers), and the kept matrices, which `options.memory_limit` bounds.

    Args:
        model: A decoder, loaded; or a hub id, a path, "demo" or a model of transformers.
        prompts: Equally long prompts of at least 3 tokens.
        options: Settings, among them what is kept, and the directory of the record.

    Raises:
        UsageError: no attention that can be seen, an argument outside its range, or matrices beyond the memory limit.
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
        statistics = statistics_of(loaded, prompts, options)
        if options.rollouts:
            rollouts, left_out = attention_rollouts(loaded, prompts)
            statistics = replace(statistics, rollouts=rollouts, left_out=(*statistics.left_out, *left_out))
        described = loaded.describe()
        about = {
            "title": str(described["source"]),
            "command": "",
            "model": described,
            "prompts": prompts.describe(),
            "options": options.describe(),
        }
        statistics = replace(statistics, about=about)
        run.finish(statistics.record)
    return statistics
