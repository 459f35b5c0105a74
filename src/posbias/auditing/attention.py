"""A model's attention statistics and the rollouts of its attention as one record, in the layout report/attention reads.

Arrays, `/per_prompt`, `/low`, `/high` below each name where they exist:

    distance, entropy, content/{diagonal,off_diagonal,difference,published}           [count layers heads], [layers]
    learned_sink (families that have them)                                            [count layers heads], [layers]
    similarity/{diagonal,off_diagonal,diagonal_outside,off_diagonal_outside}          [count layers heads], [layers]
    similarity/edges [count 2], similarity/of_mean/{diagonal,...} [layers heads], content/scale [layers]
    distance/even [layers]; sinks [count thresholds n_positions], sinks/by_layer [thresholds layers n_positions]
    monotonicity/{violated,gap} [count layers], monotonicity/of_mean/{violated,gap} [layers]
    mixing/{tokens,frobenius} [count layers], mixing/by_position [layers n_positions]
    kernels/{mean,squared} [layers cells cells], kernels/by_head [layers heads cells cells], kernels/bounds [cells + 1]
    rollouts/NAME [count n_positions], rollouts/NAME/influence, rollouts/mixing [count layers]
"""

from collections.abc import Mapping
from typing import Any

import numpy as np

from posbias.comparison import Sample, compare_with_prompts, summarise
from posbias.measurement.attention import AttentionStatistics, HeadStatistic, MeanKernels, PromptMean
from posbias.models.model import Model
from posbias.profiles import uniform_profile
from posbias.prompts import Prompts
from posbias.records import Record
from posbias.theory.power_rollout import AttentionRollout, AttentionRollouts

MAP_CELLS = 128
"""Side of the kernels in a record unless the kept ones are asked for."""


def attention_record(
    statistics: AttentionStatistics,
    rollouts: AttentionRollouts,
    *,
    described: tuple[Model, Prompts],
    arguments: Mapping[str, Any],
    resolved: Mapping[str, Any],
) -> Record:
    """Everything that was measured, with intervals and every prompt's own numbers.

    Args:
        statistics: Of the model on the prompts.
        rollouts: Of the same model and prompts.
        described: The model and the prompts, for their descriptions.
        arguments: As the user passed them; where `kernels` is true, the mean kernels are saved as they were kept,
            otherwise in at most MAP_CELLS cells.
        resolved: What is known beside model and prompts: the command, the options.
    """
    model, prompts = described
    about = model.describe()
    record = Record(
        verb="attention",
        arguments=dict(arguments),
        resolved={
            "title": str(about.get("source", "model")),
            "model": about,
            "prompts": prompts.describe(),
            **resolved,
        },
        arrays=_arrays(statistics, rollouts, whole=bool(arguments.get("kernels"))),
    )
    record.scalars = {
        "sink_thresholds": list(statistics.sink_thresholds),
        "row_error": statistics.row_error,
        "left_out": [*statistics.left_out, *rollouts.left_out],
        "caveats": list(statistics.caveats),
        "rollouts": {name: _summary(rollout) for name, rollout in rollouts.rollouts.items()},
    }
    return record


def _summary(rollout: AttentionRollout) -> dict[str, Any]:
    """Shares of the profile, and its distance to the flat line, with intervals over prompts."""
    sample = Sample.of(rollout.per_prompt)
    shares = summarise(sample, generator=np.random.default_rng(0))
    flat = compare_with_prompts(
        uniform_profile(rollout.profile.n_positions), sample, generator=np.random.default_rng(0)
    )
    return {**{name: share.as_record() for name, share in shares.items()}, "flat": flat.distance.as_record()}


def _arrays(statistics: AttentionStatistics, rollouts: AttentionRollouts, *, whole: bool) -> dict[str, np.ndarray]:
    content, similarity, monotonicity = statistics.content, statistics.similarity, statistics.monotonicity
    averaged: dict[str, HeadStatistic | PromptMean] = {
        "distance": statistics.distance,
        "entropy": statistics.entropy,
        "sinks": statistics.sinks,
        **{f"content/{name}": getattr(content, name) for name in ("diagonal", "off_diagonal", "difference")},
        "content/published": content.published,
        **{f"similarity/{name}": getattr(similarity, name) for name in _SIMILARITY},
        "monotonicity/violated": monotonicity.violated,
        "monotonicity/gap": monotonicity.gap,
        "mixing/tokens": statistics.mixing.tokens,
        "mixing/frobenius": statistics.mixing.frobenius,
    }
    if statistics.learned_sink is not None:
        averaged["learned_sink"] = statistics.learned_sink
    arrays = {
        f"{name}/{part}": getattr(entry, part)
        for name, entry in averaged.items()
        for part in ("per_prompt", "low", "high")
    }
    arrays |= {
        "distance/even": statistics.even_distance,
        "content/scale": content.scale,
        "similarity/edges": similarity.edges,
        "sinks/by_layer": statistics.sinks_by_layer,
        "mixing/by_position": statistics.mixing.by_position,
        "rollouts/mixing": rollouts.mixing,
    }
    for stem, single in (("similarity/of_mean", similarity.of_mean), ("monotonicity/of_mean", monotonicity.of_mean)):
        if single is not None:
            arrays |= {f"{stem}/{name}": values for name, values in vars(single).items()}
    for name, rollout in rollouts.rollouts.items():
        parts = {**vars(rollout.profile), "per_prompt": rollout.per_prompt}
        arrays |= {f"rollouts/{name}/{part}": values for part, values in parts.items() if values is not None}
    kernels = statistics.kernels if whole else _map(statistics.kernels)
    arrays |= {f"kernels/{name}": getattr(kernels, name) for name in ("mean", "squared", "bounds")}
    return arrays if kernels.by_head is None else {**arrays, "kernels/by_head": kernels.by_head}


_SIMILARITY = ("diagonal", "off_diagonal", "diagonal_outside", "off_diagonal_outside")


def _map(kernels: MeanKernels) -> MeanKernels:
    """In at most MAP_CELLS cells; cells that are kept are merged in runs as equal as can be, or the map has stripes."""
    kept = kernels.mean.shape[-1]
    run = -(-kept // MAP_CELLS)
    return kernels.coarser(min(kept, MAP_CELLS) if kernels.complete else -(-kept // run))
