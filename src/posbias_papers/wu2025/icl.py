"""Experiment on in-context retrieval (Wu et al., arXiv 2502.01951): attention-only networks must look up a label.

Their statements on depth, encodings, residual connections, training data and sinks with verdicts from intervals over
seeds. Figures show gaps by depth; accuracy by place and sinks are in the record. The sink score of a key is that of Gu
et al. 2025 as used there, appendix K.4.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float, Float64
from torch import Tensor

from posbias.display.figures import BLUE, FAINT, GREEN, VERMILION, Curve, Figure, Stroke
from posbias.errors import UsageError
from posbias.models.reference.config import constants_of, shape_of, stacked
from posbias.models.reference.forward import attention_maps
from posbias.report.tables import Table
from posbias.statistics import mean_ends, mean_of
from posbias.tasks.synthetic import stack_tasks
from posbias.training import TrainedMember, TrainingSchedule
from posbias.training.trainer import group
from posbias_papers.findings import Outcome, Outcomes, finding_rows, findings_tables, said_of
from posbias_papers.reproduction import PAPERS, Reproduction, StudyExperiment, StudySettings
from posbias_papers.wu2025.icl_statements import (
    ENCODINGS,
    GAPS,
    RELATIVE,
    Cells,
    Figures,
    retrieval_findings,
    sink_findings,
)
from posbias_papers.wu2025.retrieval import InContextRetrieval

SOURCE = "arXiv 2502.01951, On the Emergence of Position Bias in Transformers (ICML 2025)"
VARIANTS = {"mixture": "mixture", "fixed-vocabulary": "fixed"}
"""Items of the task by the name of its variant."""
PUBLISHED_STEPS, PUBLISHED_BATCH = 100_000, 128
LABELS = 32
CLASSES_PER_CONTEXT = 2


@PAPERS.register("icl-2502.01951")
class RetrievalExperiment(StudyExperiment):
    """The paper's networks trained again, and its statements put to the test."""

    paper = SOURCE
    folder = "wu2025"

    def judge(
        self, members: Sequence[TrainedMember], options: TrainingSchedule, settings: StudySettings
    ) -> Reproduction:
        """Statements, tables and figures from trained members."""
        outcomes = icl_outcomes(members)
        return icl_reproduction(outcomes, steps=options.steps, batch=options.batch, settings=settings)


def icl_reproduction(outcomes: Outcomes, *, steps: int, batch: int, settings: StudySettings) -> Reproduction:
    """Statements, tables and figures from trained members."""
    cells = {name: Cells(outcomes, {"items": items}) for name, items in VARIANTS.items()}
    findings = [
        finding
        for name, items in VARIANTS.items()
        for judged in (retrieval_findings, sink_findings)
        for finding in judged(cells[name], Figures(items))
    ]
    gaps = [gaps_table(name, cells[name]) for name in cells]
    seeds = max((len(outcomes.seeds(**member.factors)) for member in outcomes.members), default=0)
    facts = {"steps": steps, "batch": batch, "accuracy": _accuracy(outcomes), **outcomes.facts()}
    return Reproduction(
        experiment=RetrievalExperiment.name,
        title=f"In-context retrieval: {len(outcomes.members)} members, {seeds} seeds, {steps} steps of {batch}",
        rows=finding_rows(findings),
        statements=[reached(facts), *said_of(findings, facts)],
        numbers=facts,
        tables=[*findings_tables(findings), *[table for table in gaps if table.cells]],
        figures=[figure for name in cells for figure in retrieval_figures(name, cells[name])],
        arrays=_arrays(outcomes),
        settings={**settings.describe(), "steps": steps, "batch": batch},
        seeds={"seed": settings.seed},
    )


def _accuracy(outcomes: Outcomes) -> dict[str, float] | None:
    """Accuracy on novel classes over members, and how many are above what needs no retrieval."""
    accuracy = [float(member.arrays["novel"]) for member in outcomes.members if "novel" in member.arrays]
    if not accuracy:
        return None
    above, mean = sum(value > 1 / CLASSES_PER_CONTEXT for value in accuracy), float(np.mean(accuracy))
    return {"least": min(accuracy), "mean": mean, "most": max(accuracy), "members": len(accuracy), "above": above}


def reached(facts: Mapping[str, Any]) -> str:
    """How far training came: steps, sequences, and accuracy against what needs no retrieval."""
    steps, batch, accuracy = (facts[name] for name in ("steps", "batch", "accuracy"))
    share = steps * batch / (PUBLISHED_STEPS * PUBLISHED_BATCH)
    text = (
        f"Training: {steps} steps of {batch} sequences where the source has {PUBLISHED_STEPS} of {PUBLISHED_BATCH}, "
        f"{100 * share:.2g} % of its sequences."
    )
    if accuracy is None:
        return text
    return (
        f"{text} Accuracy on novel classes is {accuracy['least']:.2f} to {accuracy['most']:.2f} (mean "
        f"{accuracy['mean']:.2f}) over {accuracy['members']} members; chance is {1 / LABELS:.3f}, naming any label of "
        f"the context {1 / CLASSES_PER_CONTEXT:.2f}, and {accuracy['above']} members are above that."
    )


def cell_name(factors: dict[str, object]) -> str:
    """A cell in a few words."""
    words = [str(factors["mask"]), ENCODINGS[str(factors["encoding"])], f"{factors['depth']} layers"]
    words += ["residual"] * bool(factors["residual"])
    words += ["fixed"] * (factors["items"] == "fixed")
    return ", ".join(words)


def _arrays(outcomes: Outcomes) -> dict[str, np.ndarray]:
    """Accuracy by place, gaps and sinks of every cell, [seed, ...]."""
    arrays: dict[str, np.ndarray] = {}
    for factors in {tuple(m.factors.items()): dict(m.factors) for m in outcomes.members}.values():
        seeds = outcomes.seeds(**factors)
        name = f"{cell_name(factors)}, {factors['answers']}"
        if seeds:
            arrays |= {
                f"{name}/{quantity}": outcomes.values(quantity, factors, seeds)
                for quantity in ("accuracy", "gaps", "sinks")
            }
    return arrays


_COLOURS = {"none": BLUE, "decay": VERMILION, "rope": GREEN}
NOTHING = "no bias"


def retrieval_figures(name: str, cells: Cells) -> list[Figure]:
    """The source's figures for one variant, as far as its members were trained.

    Args:
        name: Of the variant, for titles and file names: letters, digits, hyphens.
        cells: Its members.
    """
    return [
        figure
        for residual, word in ((False, "plain"), (True, "residual"))
        for number in range(len(GAPS))
        for figure in _depth_figure(f"icl-{name}-{word}-{number}", name, cells, number, residual=residual)
    ]


def _depth_figure(slug: str, name: str, cells: Cells, gap: int, *, residual: bool) -> list[Figure]:
    """One gap by depth, a curve per encoding; nothing if none was trained."""
    curves = []
    for encoding in RELATIVE:
        depths = cells.depths(encoding=encoding, residual=residual)
        if depths:
            rows = cells.gaps(*({"encoding": encoding, "residual": residual, "depth": depth} for depth in depths))
            by_depth = np.stack([row[:, gap] for row in rows], axis=1)
            curves.append(
                Curve(
                    ENCODINGS[encoding],
                    np.array(depths, dtype=np.float64),
                    by_depth.mean(axis=0),
                    Stroke(_COLOURS[encoding], "solid"),
                    *mean_ends(by_depth),
                )
            )
    if not curves:
        return []
    ends = np.array([curves[0].x.min(), curves[0].x.max()])
    curves.append(Curve(NOTHING, ends, np.zeros(2), Stroke(FAINT, "dot")))
    title = f"{name}: gap {GAPS[gap]} by depth, {'with' if residual else 'without'} residual connections"
    return [Figure(slug, title, "layers", "accuracy gap (earlier minus later)", tuple(curves), markers=True)]


def gaps_table(name: str, cells: Cells) -> Table:
    """Every trained cell of a variant: accuracy, and the three gaps with intervals over seeds."""
    header = ["mask", "encoding", "layers", "residual", "trained on", "seeds", "accuracy", *GAPS]
    rows: list[Sequence[str]] = []
    listed: set[tuple[Any, ...]] = set()
    for member in cells.outcomes.members:
        factors = dict(member.factors)
        key = tuple(factors.values())
        if key in listed or not member.has(cells.base) or not cells.outcomes.seeds(**factors):
            continue
        listed.add(key)
        seeds = cells.outcomes.seeds(**factors)
        accuracy = cells.outcomes.values("accuracy", factors, seeds).mean(axis=1)
        gaps = cells.outcomes.values("gaps", factors, seeds)
        texts = [mean_of(column).interval().text("+.3f") for column in gaps.T]
        words = [factors["mask"], ENCODINGS[factors["encoding"]], str(factors["depth"])]
        words += ["yes" if factors["residual"] else "no", str(factors["answers"])]
        rows.append([*words, str(len(seeds)), f"{accuracy.mean():.3f}", *texts])
    return Table(f"Gaps, {name}", header, rows)


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
