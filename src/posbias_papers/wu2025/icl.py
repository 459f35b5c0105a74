"""Experiment on in-context retrieval (Wu et al., arXiv 2502.01951): attention-only networks must look up a label.

Their statements on depth, encodings, residual connections, training data and sinks with verdicts from intervals over
seeds. A gap is accuracy where place a holds the right label and place b a copy of its item, minus the same with the
labels' roles exchanged: positive means a bias towards the earlier place. Figures show gaps by depth; accuracy by place
and sinks are in the record. The sink score of a key is that of Gu et al. 2025 as used there, appendix K.4.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float, Float64
from torch import Tensor

from posbias.models.reference.config import constants_of, stacked
from posbias.models.reference.forward import attention_maps
from posbias.results.figures import BLUE, FAINT, GREEN, VERMILION, Curve, Figure, Stroke
from posbias.results.tables import Table
from posbias.statistics import mean_ends, mean_of
from posbias.tasks.synthetic import stack_tasks
from posbias.training.members import TrainedMember, TrainingSchedule
from posbias.training.trainer import group
from posbias_papers.findings import (
    IN_PART,
    NOT_REPRODUCED,
    REPRODUCED,
    UNDECIDED,
    Difference,
    Finding,
    Outcome,
    Outcomes,
    Rule,
    Tests,
    difference,
    finding_rows,
    findings_tables,
    said_of,
    weighed,
)
from posbias_papers.reproduction import PAPERS, Reproduction, StudyExperiment, StudySettings
from posbias_papers.wu2025.retrieval import InContextRetrieval

SOURCE = "arXiv 2502.01951, On the Emergence of Position Bias in Transformers (ICML 2025)"
VARIANTS = {"mixture": "mixture", "fixed-vocabulary": "fixed"}
"""Items of the task by the name of its variant."""
PUBLISHED_STEPS, PUBLISHED_BATCH = 100_000, 128
LABELS = 32
CLASSES_PER_CONTEXT = 2
GAPS = ("first vs middle", "first vs last", "middle vs last")
FIRST_MIDDLE, FIRST_LAST, MIDDLE_LAST = range(3)
PLAIN: dict[str, Any] = {
    "mask": "causal",
    "encoding": "none",
    "depth": 2,
    "residual": False,
    "answers": "any",
    "items": "mixture",
}
"""What a cell is unless it says otherwise."""
ENCODINGS = {"none": "none", "decay": "decay", "rope": "RoPE", "sinusoidal": "sin"}
"""Encodings as figures name them."""
RELATIVE = ("none", "decay", "rope")
"""Encodings of the study of depth."""
ABSOLUTE = ("sinusoidal", "rope")
"""Encodings that, by the source, can place a bias anywhere."""
NAMED = ("first", "middle", "last")
ABOVE = 0.1
"""Gap in accuracy from which an end counts as above the middle; training on both ends gives .1 to .3."""
SINK_WINDOWS = (5, 9, 13)
FIGURES = {
    "mixture": {
        "depth": "Figures 2 and 4",
        "residual": "Figures 2 and 5",
        "ends": "Figure 3",
        "places": "Figure 6",
        "sinks": "Figure 8",
    },
    "fixed": {
        "depth": "Figure 9",
        "residual": "Figure 10",
        "ends": "Figure 11a",
        "places": "Figures 11b-d",
        "sinks": "Figure 13",
    },
}
"""The source's figures by items of the task."""

PerSeed = Float64[np.ndarray, "n_seeds"]
PerSeedGaps = Float64[np.ndarray, "n_seeds 3"]
Quantity = Callable[[PerSeedGaps], PerSeed]
Cell = Mapping[str, Any]
"""Factors in which a cell differs from `PLAIN`."""


@dataclass(frozen=True, eq=False)
class Cells:
    """The outcomes of one variant of the task (mixture or fixed vocabulary)."""

    outcomes: Outcomes
    base: Mapping[str, Any]
    """Factors that all its cells share, over those of `PLAIN`."""

    def values(self, name: str, *cells: Cell) -> list[Float64[np.ndarray, "n_seeds ..."]]:
        """An array of every cell over the seeds for which all have finished; none without such seeds."""
        chosen = [{**PLAIN, **self.base, **cell} for cell in cells]
        seeds = self.outcomes.common_seeds(*chosen)
        return [self.outcomes.values(name, cell, seeds) for cell in chosen] if seeds else []

    def depths(self, **changed: Any) -> list[int]:
        """Depths that were trained for a cell, in order."""
        factors = {**PLAIN, **self.base, **changed}
        del factors["depth"]
        levels = self.outcomes.levels("depth", **factors)
        return sorted(depth for depth in levels if self.values("gaps", {**changed, "depth": depth}))

    def by_depth(self, encoding: str, *, residual: bool) -> tuple[list[int], list[PerSeedGaps]]:
        """Depths that were trained with an encoding, and the three gaps at each."""
        depths = self.depths(encoding=encoding, residual=residual)
        cells = ({"encoding": encoding, "residual": residual, "depth": depth} for depth in depths)
        return depths, self.values("gaps", *cells)

    def each(self, named: Mapping[str, Cell], quantity: Quantity) -> dict[str, Difference]:
        """A quantity of the gaps of every cell that was trained."""
        trained = {name: self.values("gaps", cell) for name, cell in named.items()}
        return {name: difference(quantity(gaps)) for name, found in trained.items() for gaps in found}


@dataclass(frozen=True)
class Statement:
    """A statement of the source: that quantities are positive."""

    figure: str
    """A name in `FIGURES`."""
    reported: str
    tests: Callable[[Cells], Tests]
    """The quantities by case."""
    quantity: str = ""
    rule: Rule | None = None
    items: Sequence[str] = tuple(FIGURES)
    """The variants of the task that it is about."""


def icl_findings(cells: Cells, items: str) -> list[Finding]:
    """Every statement, for one variant of the task."""
    return [
        weighed(FIGURES[items][each.figure], each.reported, each.tests(cells), quantity=each.quantity, rule=each.rule)
        for each in STATEMENTS
        if items in each.items
    ]


def slope(rows: Sequence[PerSeed], at: Sequence[int]) -> Difference:
    """Least-squares slope per unit of `at`, seed by seed."""
    centred = np.asarray(at, dtype=np.float64) - np.mean(at)
    return difference(centred @ np.stack(rows) / np.sum(centred**2))


def _slopes(cells: Cells, *, residual: bool = False) -> dict[str, Difference]:
    """Change of the gap first vs last per layer, by encoding."""
    trained = {encoding: cells.by_depth(encoding, residual=residual) for encoding in RELATIVE}
    return {
        ENCODINGS[encoding]: slope([row[:, FIRST_LAST] for row in rows], depths)
        for encoding, (depths, rows) in trained.items()
        if len(depths) > 1
    }


def _end_gap(cells: Cells) -> dict[str, Difference]:
    """Mean size of the gaps with the first place minus that of middle vs last, at the largest depth."""
    deepest = {
        f"{ENCODINGS[encoding]}, {depth} layers": {"encoding": encoding, "depth": depth}
        for encoding in RELATIVE
        for depth in cells.depths(encoding=encoding)[-1:]
    }
    return cells.each(deepest, lambda gaps: np.abs(gaps[:, :2]).mean(axis=1) - np.abs(gaps[:, MIDDLE_LAST]))


def _less(cells: Cells, more: str, less: str, name: str) -> dict[str, Difference]:
    """Gap first vs last of one encoding minus that of another, seed by seed, by depth."""
    by_depth = {}
    for depth in cells.depths(encoding=less):
        pair: tuple[Cell, Cell] = ({"encoding": more, "depth": depth}, {"encoding": less, "depth": depth})
        if gaps := [found[:, FIRST_LAST] for found in cells.values("gaps", *pair)]:
            by_depth[f"{name}{depth} layers"] = difference(gaps[0] - gaps[1])
    return by_depth


def _steps(cells: Cells) -> dict[str, Difference]:
    """Change of the gap first vs last from each depth to the next, with residual connections."""
    steps = {}
    for encoding in RELATIVE:
        depths, rows = cells.by_depth(encoding, residual=True)
        for before, after, low, high in zip(rows, rows[1:], depths, depths[1:], strict=False):
            name = f"{ENCODINGS[encoding]}, {low} to {high} layers"
            steps[name] = difference(after[:, FIRST_LAST] - before[:, FIRST_LAST])
    return steps


def _not_monotone(steps: Tests) -> str:
    """Verdict on depth: reproduced if it raises and lowers the gap for one encoding, in part if for different ones.

    Some step is claimed to have a sign, not every: all steps hold together.
    """
    signs: dict[str, set[str]] = {}
    for name, step in steps.items():
        signs.setdefault(name.partition(",")[0], set()).add(step.supports(quantities=len(steps)))
    up_and_down = {REPRODUCED, NOT_REPRODUCED}
    if any(up_and_down <= supported for supported in signs.values()):
        return REPRODUCED
    if up_and_down <= set().union(*signs.values()):
        return IN_PART
    several = len(steps) > len(signs)
    return NOT_REPRODUCED if several and UNDECIDED not in set().union(*signs.values()) else UNDECIDED


def _u_shape(cells: Cells, named: Mapping[str, Cell]) -> dict[str, Difference]:
    """A U: first above middle, last above middle."""
    tests: dict[str, Difference] = {}
    for name, cell in named.items():
        tests |= cells.each({f"{name}: first vs middle": cell}, lambda gaps: gaps[:, FIRST_MIDDLE])
        tests |= cells.each({f"{name}: last vs middle": cell}, lambda gaps: -gaps[:, MIDDLE_LAST])
    return tests


def _deep_rope(cells: Cells) -> dict[str, Difference]:
    depths = cells.depths(encoding="rope", residual=True)[-1:]
    named = {f"{depth} layers": {"encoding": "rope", "depth": depth, "residual": True} for depth in depths}
    return _u_shape(cells, named)


def _biased(mask: str, encoding: str, answers: str = "first_and_last") -> Cell:
    """A cell of the studies of biased data: two layers with residual connections."""
    return {"answers": answers, "mask": mask, "encoding": encoding, "residual": True}


BOTH_ENDS = _biased("causal", "none")


def _favoured(cells: Cells) -> dict[str, Difference]:
    """Gap first vs last with the mask alone, and beside that without it."""
    found = [gaps[:, FIRST_LAST] for gaps in cells.values("gaps", BOTH_ENDS, _biased("full", "none"))]
    return {"causal": difference(found[0]), "causal minus no mask": difference(found[0] - found[1])} if found else {}


def _last_missed(cells: Cells) -> dict[str, Difference]:
    first = cells.each({"first vs middle": BOTH_ENDS}, lambda gaps: gaps[:, FIRST_MIDDLE])
    return first | cells.each({"middle vs last": BOTH_ENDS}, lambda gaps: gaps[:, MIDDLE_LAST])


def _either_mask(cells: Cells) -> dict[str, Difference]:
    pairs = [(mask, encoding) for mask in ("full", "causal") for encoding in ABSOLUTE]
    return _u_shape(cells, {f"{ENCODINGS[encoding]}, {mask}": _biased(mask, encoding) for mask, encoding in pairs})


def _by_trained_place(cells: Cells, quantities: Mapping[str, Quantity]) -> dict[str, Difference]:
    """A quantity of its own for each trained place, with sin and RoPE."""
    tests: dict[str, Difference] = {}
    for answers, quantity in quantities.items():
        named = {f"{ENCODINGS[encoding]}, {answers}": _biased("causal", encoding, answers) for encoding in ABSOLUTE}
        tests |= cells.each(named, quantity)
    return tests


ABOVE_OTHERS: dict[str, Quantity] = {
    "first": lambda gaps: (gaps[:, FIRST_MIDDLE] + gaps[:, FIRST_LAST]) / 2,
    "middle": lambda gaps: (gaps[:, MIDDLE_LAST] - gaps[:, FIRST_MIDDLE]) / 2,
    "last": lambda gaps: (-gaps[:, FIRST_LAST] - gaps[:, MIDDLE_LAST]) / 2,
}
NO_U: dict[str, Quantity] = {
    "first": lambda gaps: ABOVE + gaps[:, MIDDLE_LAST],
    "middle": lambda gaps: ABOVE - (gaps[:, FIRST_MIDDLE] - gaps[:, MIDDLE_LAST]) / 2,
    "last": lambda gaps: ABOVE - gaps[:, FIRST_MIDDLE],
}
"""A U needs the end that was not trained above the middle; the lower of both ends would be low by noise alone."""


def _first_sink(cells: Cells) -> dict[str, Difference]:
    return {f"{PLAIN['mask']}": difference(_lead(sinks, 1)) for sinks in cells.values("sinks", {})}


def _window_sinks(cells: Cells) -> dict[str, Difference]:
    windows: list[Cell] = [{"mask": f"sliding_window(width={width})"} for width in SINK_WINDOWS]
    leads = [_lead(values, 1) for values in cells.values("sinks", *windows)]
    return {"per token of window": slope(leads, SINK_WINDOWS)} if leads else {}


def _prefix_sinks(cells: Cells) -> dict[str, Difference]:
    return {
        f"K = {length}": difference(_lead(sinks, length))
        for length in (2, 4, 6)
        for sinks in cells.values("sinks", {"mask": f"prefix(length={length})"})
    }


def _lead(sinks: np.ndarray, count: int) -> np.ndarray:
    """Least score of the first `count` tokens minus the largest of the others."""
    return np.asarray(sinks[:, :count].min(axis=1) - sinks[:, count:].max(axis=1))


STATEMENTS = (
    Statement(
        "depth",
        "without residual connections more layers mean more bias to the first place, whatever the encoding.",
        _slopes,
        "Change of the gap first vs last per layer:",
    ),
    Statement(
        "depth",
        "the gap between middle and last is notably smaller than those with the first place.",
        _end_gap,
        "Mean size of the gaps with the first place minus it:",
    ),
    Statement(
        "depth",
        "decay and RoPE reduce the bias to the first place that the causal mask brings.",
        lambda cells: {**_less(cells, "none", "decay", "decay, "), **_less(cells, "none", "rope", "RoPE, ")},
        "Gap first vs last without encoding minus with it:",
    ),
    Statement(
        "depth",
        "decay does so more than RoPE.",
        lambda cells: _less(cells, "rope", "decay", ""),
        "Gap first vs last with RoPE minus with decay:",
    ),
    Statement(
        "residual",
        "even with residual connections more layers mean more bias to the first place.",
        lambda cells: _slopes(cells, residual=True),
        "Change of the gap first vs last per layer:",
        items=("fixed",),
    ),
    Statement(
        "residual",
        "with residual connections the effect of depth is not monotone and depends on the encoding.",
        _steps,
        "Change of the gap first vs last:",
        _not_monotone,
        items=("mixture",),
    ),
    Statement(
        "residual",
        "deep RoPE with residual connections is lost in the middle without any bias in the data.",
        _deep_rope,
        items=("mixture",),
    ),
    Statement(
        "ends",
        "trained on first and last, the causal mask without encoding favours the first place, no mask does not.",
        _favoured,
        "Gap first vs last:",
    ),
    Statement(
        "ends",
        "the causal mask without encoding captures the bias at the first place and not at the last.",
        _last_missed,
    ),
    Statement("ends", "sin and RoPE capture both ends under either mask: lost in the middle.", _either_mask),
    Statement(
        "ends",
        "and the first place does slightly better than the last.",
        lambda cells: cells.each(
            {ENCODINGS[encoding]: _biased("causal", encoding) for encoding in ABSOLUTE},
            lambda gaps: gaps[:, FIRST_LAST],
        ),
        "Gap first vs last, causal:",
    ),
    Statement(
        "places",
        "the causal mask without encoding favours the beginning wherever the answers stood in training.",
        lambda cells: cells.each(
            {f"trained on {answers}": _biased("causal", "none", answers) for answers in NAMED},
            lambda gaps: gaps[:, FIRST_LAST],
        ),
        "Gap first vs last:",
    ),
    Statement(
        "places",
        "sin and RoPE let the model favour the trained place, wherever it is.",
        lambda cells: _by_trained_place(cells, ABOVE_OTHERS),
        "Mean gap of the trained place against the two others:",
    ),
    Statement(
        "places",
        "no lost-in-the-middle from data biased to one place only.",
        lambda cells: _by_trained_place(cells, NO_U),
        f"Gap of the end that was not trained (trained on middle: of both) against the middle, below {ABOVE} by:",
    ),
    Statement(
        "sinks",
        "under the causal mask the attention sink is the first token.",
        _first_sink,
        "Sink score of the first token minus the largest other:",
    ),
    Statement(
        "sinks",
        "the larger the window, the more the first token is the sink.",
        _window_sinks,
        "Change of its lead over the largest other score:",
    ),
    Statement(
        "sinks",
        "under a prefix mask all K prefix tokens are sinks, not the first alone.",
        _prefix_sinks,
        "Least sink score of the prefix minus the largest other:",
    ),
)


@PAPERS.register("icl-2502.01951")
class RetrievalExperiment(StudyExperiment):
    """The paper's networks trained again, and its statements put to the test."""

    paper = SOURCE
    folder = "wu2025"

    def judge(
        self, members: Sequence[TrainedMember], options: TrainingSchedule, settings: StudySettings
    ) -> Reproduction:
        """Statements, tables and figures from trained members."""
        finished = [trained for trained in members if trained.parameters is not None]
        sinks = {id(trained): scores for trained, scores in zip(finished, member_sinks(finished), strict=True)}
        outcomes = Outcomes([_outcome(trained, sinks.get(id(trained))) for trained in members])
        return icl_reproduction(outcomes, steps=options.steps, batch=options.batch, settings=settings)


def icl_reproduction(outcomes: Outcomes, *, steps: int, batch: int, settings: StudySettings) -> Reproduction:
    """Statements, tables and figures from trained members."""
    cells = {name: Cells(outcomes, {"items": items}) for name, items in VARIANTS.items()}
    findings = [finding for name, items in VARIANTS.items() for finding in icl_findings(cells[name], items)]
    gaps = [gaps_table(name, cells[name]) for name in cells]
    seeds = max((len(outcomes.seeds(**factors)) for factors in outcomes.cells()), default=0)
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


def _arrays(outcomes: Outcomes) -> dict[str, np.ndarray]:
    """Accuracy by place, gaps and sinks of every cell, [seed, ...]."""
    arrays: dict[str, np.ndarray] = {}
    for factors in outcomes.cells():
        words = [factors["mask"], ENCODINGS[factors["encoding"]], f"{factors['depth']} layers"]
        words += ["residual"] * factors["residual"] + ["fixed"] * (factors["items"] == "fixed") + [factors["answers"]]
        for quantity in ("accuracy", "gaps", "sinks"):
            values = outcomes.values(quantity, factors, outcomes.seeds(**factors))
            arrays[f"{', '.join(words)}/{quantity}"] = values
    return arrays


_COLOURS = {"none": BLUE, "decay": VERMILION, "rope": GREEN}


def retrieval_figures(name: str, cells: Cells) -> list[Figure]:
    """The source's figures for one variant, as far as its members were trained: a gap by depth, a curve per encoding.

    Args:
        name: Of the variant, for titles and file names: letters, digits, hyphens.
        cells: Its members.
    """
    figures = []
    for residual, slug, word in ((False, "plain", "without"), (True, "residual", "with")):
        trained = {encoding: cells.by_depth(encoding, residual=residual) for encoding in RELATIVE}
        shown = {encoding: trained[encoding] for encoding in RELATIVE if trained[encoding][0]}
        for number, gap in enumerate(GAPS if shown else ()):
            curves = []
            for encoding, (depths, rows) in shown.items():
                at, stroke = np.stack([row[:, number] for row in rows], axis=1), Stroke(_COLOURS[encoding], "solid")
                x = np.array(depths, dtype=np.float64)
                curves.append(Curve(ENCODINGS[encoding], x, at.mean(axis=0), stroke, *mean_ends(at)))
            ends = np.array([curves[0].x.min(), curves[0].x.max()])
            curves.append(Curve("no bias", ends, np.zeros(2), Stroke(FAINT, "dot")))
            title = f"{name}: gap {gap} by depth, {word} residual connections"
            labels = ("layers", "accuracy gap (earlier minus later)")
            figures.append(Figure(f"icl-{name}-{slug}-{number}", title, *labels, tuple(curves), markers=True))
    return figures


def gaps_table(name: str, cells: Cells) -> Table:
    """Every trained cell of a variant: accuracy, and the three gaps with intervals over seeds."""
    header = ["mask", "encoding", "layers", "residual", "trained on", "seeds", "accuracy", *GAPS]
    rows: list[Sequence[str]] = []
    for factors in cells.outcomes.cells(**cells.base):
        seeds = cells.outcomes.seeds(**factors)
        accuracy = cells.outcomes.values("accuracy", factors, seeds).mean(axis=1)
        gaps = cells.outcomes.values("gaps", factors, seeds)
        texts = [mean_of(column).interval().text("+.3f") for column in gaps.T]
        words = [factors["mask"], ENCODINGS[factors["encoding"]], str(factors["depth"])]
        words += ["yes" if factors["residual"] else "no", str(factors["answers"])]
        rows.append([*words, str(len(seeds)), f"{accuracy.mean():.3f}", *texts])
    return Table(f"Gaps, {name}", header, rows)


EVALUATED = {"accuracy": "accuracy_by_place", "novel": "accuracy_novel_classes", "gaps": "gaps"}


def sink_scores(
    maps: Float[Tensor, "layer member batch head query key"], visible: Bool[np.ndarray, "query key"]
) -> Float64[np.ndarray, "member key"]:
    """Share of the queries that see a key whose attention to it exceeds tau = .2.

    score_j = mean over layers, heads and sequences of (1 / sum_i M_ij) sum_i 1{A_ij > tau}.

    Args:
        maps: Attention of every member; rows sum to 1 over the visible keys.
        visible: The mask M as `Mask.visible` gives it; every key is seen by some query.

    Returns:
        In [0, 1]; NaN for a member whose attention is not finite.
    """
    share = (maps > 0.2).double().mean(dim=(0, 2, 3)).sum(1).cpu().numpy() / visible.sum(0)
    finite = maps.isfinite().all(0).flatten(1).all(1).cpu().numpy()
    return np.where(finite[:, None], share, np.nan)


def _outcome(trained: TrainedMember, sinks: Float64[np.ndarray, "n_positions"] | None) -> Outcome:
    config, task = trained.member.config, _retrieval(trained.member.task)
    heads = config.architecture.head_groups[0][0]
    factors = {
        "mask": str(heads.mask),
        "encoding": heads.encoding.name,
        "depth": config.architecture.depth,
        "residual": config.residual == "added",
        "answers": task.answers,
        "items": task.items,
    }
    evaluations = trained.evaluations
    arrays = {name: evaluations[held][-1] for name, held in EVALUATED.items() if held in evaluations}
    return Outcome(factors, trained.member.seed, trained.status, arrays | ({} if sinks is None else {"sinks": sinks}))


@torch.no_grad()
def member_sinks(members: Sequence[TrainedMember]) -> list[Float64[np.ndarray, "n_positions"]]:
    """Sink score of every token: how often a query that sees it gives it more than tau = .2, layers averaged.

    Measured on sequences without bias whatever the member was trained on.
    """
    scores: dict[int, np.ndarray] = {}
    for indices in group([trained.member for trained in members], stack_size=16):
        chosen = [members[index] for index in indices]
        first = chosen[0].member
        weights = stacked([trained.parameters or {} for trained in chosen])
        constants = stacked([constants_of(trained.member.config, first.task.n_positions) for trained in chosen])
        tasks = [replace(_retrieval(trained.member.task), answers="any") for trained in chosen]
        seeds = [trained.member.seed for trained in chosen]
        # 200 sequences (the source has 10,000) of 17 rows of attention per layer, at a step that no training reaches.
        inputs = stack_tasks(tasks, seeds).batch(2**29, 200).inputs
        maps = attention_maps(first.config, weights, constants, inputs)
        for place, index in enumerate(indices):
            mask = chosen[place].member.config.architecture.head_groups[0][0].mask
            visible = mask.visible(first.task.n_positions)
            scores[index] = sink_scores(maps[:, place : place + 1], visible)[0]
    return [scores[index] for index in range(len(members))]


def _retrieval(task: object) -> InContextRetrieval:
    assert isinstance(task, InContextRetrieval)  # the only task of these studies
    return task
