"""Outcomes of every member trained on in-context retrieval: gaps, accuracy by place, sinks, influence by place.

The sink score of a key is that of Gu et al. 2025 as used by Wu et al., arXiv 2502.01951, appendix K.4.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch
from jaxtyping import Bool, Float, Float64
from torch import Tensor

from posbias.errors import UsageError
from posbias.models.reference.config import shape_of
from posbias.models.reference.forward import attention_maps
from posbias.models.reference.parameters import constants_of, stacked
from posbias.tasks.synthetic import InContextRetrieval, stack_tasks
from posbias.training import TrainedMember
from posbias.training.trainer import group
from posbias_papers.findings import Outcome, Outcomes
from posbias_papers.influence_profiles import Profiled, initial, profiles_by_moment

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
    "unconfounded": "unconfounded_gaps",
}


def icl_outcomes(members: Sequence[TrainedMember], *, seed: int) -> Outcomes:
    """Everything that statements, figures and the loop need.

    Args:
        members: Of the studies of in-context retrieval.
        seed: Of the sequences that influence is measured on.
    """
    finished = [trained for trained in members if trained.parameters is not None]
    profiles = profiles_by_moment(finished, seed=seed)
    sinks = member_sinks([Profiled(trained.member, trained.parameters or {}) for trained in finished])
    sinks_before = member_sinks([initial(trained.member) for trained in finished])
    by_member = {
        id(trained): {
            **{name: by_place(profile) for name, profile in by_kind.items()},
            "sinks": after,
            "sinks/initial": first,
        }
        for trained, by_kind, after, first in zip(finished, profiles, sinks, sinks_before, strict=True)
    }
    return Outcomes([_outcome(trained, by_member.get(id(trained), {})) for trained in members])


def by_place(profile: Float64[np.ndarray, "n_positions"]) -> Float64[np.ndarray, "pairs"]:
    """Influence of every pair of item and label; the query, last, has no place."""
    pairs: np.ndarray = profile[:-1].reshape(-1, 2).sum(axis=1)
    return pairs


def _outcome(trained: TrainedMember, profiles: Mapping[str, np.ndarray]) -> Outcome:
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
        "scale": task.scale,
    }
    arrays: dict[str, np.ndarray] = dict(profiles)
    for name, quantity in EVALUATED.items():
        if quantity in trained.evaluations:
            arrays[name] = trained.evaluations[quantity][-1]
    accuracy = trained.evaluations.get("accuracy_by_place", np.empty(0))
    if len(accuracy) > 1:  # evaluated at the end alone, a member has no other
        arrays["course"] = accuracy[1:].mean(axis=0)
    return Outcome(factors, trained.member.seed, trained.status, arrays)


@torch.no_grad()
def member_sinks(members: Sequence[Profiled]) -> list[Float64[np.ndarray, "n_positions"]]:
    """Sink score of every token: how often a query that sees it gives it more than tau = .2, layers averaged.

    Measured on sequences without bias whatever the member was trained on.
    """
    scores: dict[int, np.ndarray] = {}
    for indices in group([profiled.member for profiled in members], stack_size=TOGETHER):
        chosen = [members[index] for index in indices]
        first = chosen[0].member
        shape = shape_of(first.config, first.task.n_positions)
        weights = stacked([profiled.parameters for profiled in chosen])
        constants = stacked([constants_of(profiled.member.config, first.task.n_positions) for profiled in chosen])
        tasks = [replace(_retrieval(profiled.member.task), answers="any") for profiled in chosen]
        seeds = [profiled.member.seed for profiled in chosen]
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
