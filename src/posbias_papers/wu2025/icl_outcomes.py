"""Outcomes of every member trained on in-context retrieval: gaps, accuracy by place, sinks.

The sink score of a key is that of Gu et al. 2025 as used by Wu et al., arXiv 2502.01951, appendix K.4.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from jaxtyping import Bool, Float, Float64
from torch import Tensor

from posbias.errors import UsageError
from posbias.models.reference.config import shape_of
from posbias.models.reference.forward import attention_maps
from posbias.models.reference.parameters import constants_of, stacked
from posbias.tasks.synthetic import stack_tasks
from posbias.training import TrainedMember
from posbias.training.trainer import group
from posbias_papers.findings import Outcome, Outcomes
from posbias_papers.wu2025.retrieval import InContextRetrieval

THRESHOLD = 0.2
"""tau of the published figures: attention above it counts."""

Maps = Float[Tensor, "layer member batch head query key"]


def sink_scores(
    maps: Maps, visible: Bool[np.ndarray, "mask_query mask_key"], *, threshold: float = THRESHOLD
) -> Float64[np.ndarray, "member key"]:
    """Share of the queries that see a key whose attention to it exceeds the threshold.

    score_j = mean over layers, heads and sequences of (1 / sum_i M_ij) sum_i 1{A_ij > tau}.

    Args:
        maps: Attention of every member; rows sum to 1 over the visible keys.
        visible: The mask M, query by key, as `Mask.visible` gives it; every key is seen by some query.
        threshold: tau in [0, 1).

    Returns:
        In [0, 1]; NaN for a member whose attention is not finite.

    Raises:
        UsageError: the threshold is outside [0, 1), the mask has another size, or a key is seen by no query.
    """
    if not 0 <= threshold < 1:
        raise UsageError(f"the sink threshold must lie in [0, 1), got {threshold}")
    if visible.shape != tuple(maps.shape[-2:]):
        raise UsageError(f"the mask is {visible.shape}, the attention maps {tuple(maps.shape[-2:])}; they must agree")
    queries_per_key = visible.sum(0)
    if not queries_per_key.all():
        raise UsageError(f"no query sees key {int(np.argmin(queries_per_key))}, so it has no sink score")
    share = (maps > threshold).double().mean(dim=(0, 2, 3)).sum(1).cpu().numpy() / queries_per_key
    finite = maps.isfinite().all(0).flatten(1).all(1).cpu().numpy()
    return np.where(finite[:, None], share, np.nan)


SINK_SEQUENCES = 200
"""Sequences behind a sink score (10,000 in the source); each gives 17 rows of attention per layer."""
SINK_STEP = 2**29
"""Step whose batch they are: none that training reaches."""
TOGETHER = 16
"""Members whose attention maps are held at once."""
EVALUATED = {
    "accuracy": "accuracy_by_place",
    "novel": "accuracy_novel_classes",
    "trained_classes": "accuracy_trained_classes",
    "gaps": "gaps",
}


def icl_outcomes(members: Sequence[TrainedMember]) -> Outcomes:
    """Everything that statements and figures need of the members of the studies of in-context retrieval."""
    finished = [trained for trained in members if trained.parameters is not None]
    sinks = {id(trained): scores for trained, scores in zip(finished, member_sinks(finished), strict=True)}
    return Outcomes([_outcome(trained, sinks.get(id(trained))) for trained in members])


def _outcome(trained: TrainedMember, sinks: Float64[np.ndarray, "n_positions"] | None) -> Outcome:
    config, task = trained.member.config, trained.member.task
    assert isinstance(task, InContextRetrieval)
    architecture = config.architecture
    group_of_heads = architecture.head_groups[0][0]
    factors = {
        "mask": str(group_of_heads.mask),
        "encoding": group_of_heads.encoding.name,
        "depth": architecture.depth,
        "residual": config.residual == "added",
        "answers": task.answers,
        "items": task.items,
    }
    arrays = {} if sinks is None else {"sinks": sinks}
    for name, quantity in EVALUATED.items():
        if quantity in trained.evaluations:
            arrays[name] = trained.evaluations[quantity][-1]
    return Outcome(factors, trained.member.seed, trained.status, arrays)


@torch.no_grad()
def member_sinks(members: Sequence[TrainedMember]) -> list[Float64[np.ndarray, "n_positions"]]:
    """Sink score of every token: how often a query that sees it gives it more than tau = .2, layers averaged.

    Measured on sequences without bias whatever the member was trained on.
    """
    scores: dict[int, np.ndarray] = {}
    for indices in group([trained.member for trained in members], stack_size=TOGETHER):
        chosen = [members[index] for index in indices]
        first = chosen[0].member
        shape = shape_of(first.config, first.task.n_positions)
        weights = stacked([trained.parameters or {} for trained in chosen])
        constants = stacked([constants_of(trained.member.config, first.task.n_positions) for trained in chosen])
        tasks = [replace(_retrieval(trained.member.task), answers="any") for trained in chosen]
        seeds = [trained.member.seed for trained in chosen]
        inputs = stack_tasks(tasks, seeds).batch(SINK_STEP, SINK_SEQUENCES).inputs
        maps = attention_maps(shape, weights, constants, inputs)
        for place, index in enumerate(indices):
            mask = chosen[place].member.config.architecture.head_groups[0][0].mask
            visible = mask.visible(first.task.n_positions)
            scores[index] = sink_scores(maps[:, place : place + 1], visible)[0]
    return [scores[index] for index in range(len(members))]


def _retrieval(task: object) -> InContextRetrieval:
    assert isinstance(task, InContextRetrieval)  # the only task of these studies
    return task
