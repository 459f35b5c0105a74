"""Position copy (Liu 2026) run again: one small network per target position, over seeds.

Final losses beside those read off the post's figures and the baselines, and its statements with verdicts from signs
over seeds. The source prints no numbers, optimiser or steps; the values are read off its figures to +-0.03, those
written there as a plateau are filled in between.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Float64
from scipy.stats import binom

from posbias.comparison.distances import UNITS_FOR_CLAIM
from posbias.results.figures import BLUE, FAINT, GREEN, ORANGE, PURPLE, SKY, VERMILION, Curve, Figure, Stroke
from posbias.results.tables import Table
from posbias.statistics import mean_ends
from posbias.training.members import TrainedMember, TrainingSchedule
from posbias_papers.findings import (
    IN_PART,
    NOT_REPRODUCED,
    NOT_RUN,
    REPRODUCED,
    UNDECIDED,
    UNTRAINED,
    Difference,
    Finding,
    Outcome,
    Outcomes,
    Seeded,
    difference,
    finding_rows,
    findings_tables,
    said_of,
    weighed,
)
from posbias_papers.reproduction import PAPERS, Reproduction, StudyExperiment, StudySettings

SOURCE = (
    "Liu 2026, Sparse attention 7: Stack of causal attention creates implicit positional embedding, and explaining "
    '"Loss in the middle" (blog post, 31 January 2026)'
)
VOCABULARY = 10
CONTEXT = 10
LN_V = math.log(VOCABULARY)
"""Loss of a reader who sees nothing."""


@dataclass(frozen=True)
class Configuration:
    """One network of the post: attention layers of one head, no positional encoding."""

    depth: int
    width: int
    residual: bool = False
    mlp: bool = False

    def __str__(self) -> str:
        layers = "1 layer" if self.depth == 1 else f"{self.depth} layers"
        extras = (" + residual" if self.residual else "") + (" + MLP" if self.mlp else "")
        return f"{layers}, d {self.width}{extras}"


ONE = Configuration(1, 2)
TWO = Configuration(2, 2)
TWO_WIDE = Configuration(2, 10)
THREE = Configuration(3, 2)
THREE_WIDE = Configuration(3, 10)
RESIDUAL = Configuration(3, 10, residual=True)
RESIDUAL_MLP = Configuration(3, 10, residual=True, mlp=True)
CONFIGURATIONS = (ONE, TWO, THREE, TWO_WIDE, THREE_WIDE, RESIDUAL, RESIDUAL_MLP)
"""The post does not say at which depth and width residual and MLP are added; the last of its sequence is taken."""

PUBLISHED: dict[Configuration, tuple[float, ...]] = {
    ONE: (2.19, 2.19, 2.19, 2.19, 2.19, 2.19, 2.19, 2.19, 2.19, 0.0),
    TWO: (1.13, 2.06, 2.15, 2.18, 2.18, 2.18, 2.18, 2.18, 2.19, 0.0),
    TWO_WIDE: (0.0, 1.65, 1.88, 1.97, 1.97, 1.97, 1.97, 1.97, 1.97, 0.0),
    THREE_WIDE: (0.0, 1.57, 1.91, 2.00, 2.05, 2.10, 2.15, 2.20, 1.62, 0.0),
    RESIDUAL: (0.0, 0.06, 0.95, 1.22, 1.68, 1.71, 1.78, 1.55, 0.55, 0.0),
    RESIDUAL_MLP: (0.0, 0.05, 0.15, 0.29, 0.32, 1.51, 0.92, 0.04, 0.0, 0.0),
}
"""Final loss in nats by target position."""


def orderless_loss() -> float:
    """Least loss of a reader who knows how often each token occurs and which is the last, but not their order.

    E ln((C - 1) / c) with c = 1 + Binomial(C - 2, 1 / V) the target's own count, for a target before the last place.
    """
    repeats = np.arange(CONTEXT - 1)
    return float(binom.pmf(repeats, CONTEXT - 2, 1 / VOCABULARY) @ np.log((CONTEXT - 1) / (1 + repeats)))


Rows = Float64[np.ndarray, "n_seeds context"]
Losses = dict[Configuration, Seeded]
"""Final loss by configuration: a row per seed, a column per target position."""
Quantity = Callable[[Rows], Any]
"""A number of every seed."""
EXTENDED = {str(each): (each, THREE_WIDE) for each in (RESIDUAL, RESIDUAL_MLP)}
"""Networks with residual connections, beside the plain one."""
STACKS = (TWO, THREE, TWO_WIDE, THREE_WIDE)
"""Layers without residual connections, of which the post shows a plateau."""
SOLVED = 0.1
"""Nats below which a target counts as retrieved."""
NEAR = 0.15
"""Nats within which a loss counts as the published one: five reading errors, for optimiser and steps are unknown."""
MIDDLE = slice(3, 8)
"""Targets 3 ... 7: where the post shows its plateau."""
FLAT = 0.25
"""A plateau varies by less than this share of ln V."""


def position_copy_findings(losses: Losses) -> list[Finding]:
    """Every statement of the post, in its order.

    Args:
        losses: Whatever configurations were trained; statements about others are marked as not run.
    """
    easiest = {"easiest earlier token above half of ln V by": ONE}
    alone = _each(losses, easiest, lambda rows: rows[:, :-1].min(axis=1) - LN_V / 2)
    alone |= _each(losses, {f"current token below {SOLVED} nats by": ONE}, lambda rows: SOLVED - rows[:, -1])
    gain = _paired(losses, {"first token, one layer minus two": (ONE, TWO)}, lambda rows: rows[:, 0])
    plain, deep = ({str(each): each for each in networks} for networks in (STACKS, [n for n in losses if n.depth > 1]))
    plateau = _each(losses, plain, lambda rows: FLAT * LN_V - np.ptp(rows[:, MIDDLE], axis=1))
    lower = _paired(losses, EXTENDED, lambda rows: -rows[:, 1:-1].mean(axis=1))
    spikier = _paired(losses, EXTENDED, lambda rows: np.abs(np.diff(rows[:, 1:-1], axis=1)).max(axis=1))
    # Means of fixed places: a maximum over eight interior places would exceed one over two ends by noise alone.
    lost = _each(losses, deep, lambda rows: rows[:, 1:-1].mean(axis=1) - rows[:, [0, -1]].mean(axis=1))
    kinds = "two layers differ in kind: early and late tokens are retrieved, those in the middle hardly."
    same = "width 2 or 10 and 2 or 3 layers change nothing in kind: only first and last tokens are retrieved reliably."
    long = "without residual the losses of the middle form a long plateau."
    bias = "stacked causal attention has an architectural bias towards losing the middle."
    middle, step = "mean loss of targets 1 to 8", "largest step between neighbouring targets 1 to 8"
    return [
        weighed(
            "Figure 1, left", "one layer cannot retrieve any previous token, but retrieves the current one.", alone
        ),
        weighed("Figure 1, right", kinds, _ends(losses, TWO) | gain),
        weighed("Figure 2", same, _ends(losses, *STACKS)),
        weighed("Figure 2", long, plateau, quantity=f"range over targets 3 to 7 below {FLAT:g} ln V by"),
        weighed(
            "Figure 3",
            "residual connections and MLPs destroy the plateau.",
            lower,
            quantity=f"{middle}, plain minus extended:",
        ),
        weighed(
            "Figure 3",
            "and replace it by a more spiky structure.",
            spikier,
            quantity=f"{step}, extended minus plain:",
        ),
        weighed("Comment", bias, lost, quantity=f"{middle} minus mean of the two ends:"),
        *[_numbers(losses, configuration) for configuration in CONFIGURATIONS if configuration in PUBLISHED],
    ]


def _each(losses: Losses, named: Mapping[str, Configuration], quantity: Quantity) -> dict[str, Difference]:
    """A quantity of every network that was trained."""
    return {name: difference(quantity(losses[each].rows)) for name, each in named.items() if each in losses}


def _ends(losses: Losses, *networks: Configuration) -> dict[str, Difference]:
    """Loss of the middle above that of the first and of the last target."""
    tests: dict[str, Difference] = {}
    for each in networks:
        first, last = {f"{each}: middle minus first": each}, {f"{each}: middle minus last": each}
        tests |= _each(losses, first, lambda rows: rows[:, MIDDLE].mean(axis=1) - rows[:, 0])
        tests |= _each(losses, last, lambda rows: rows[:, MIDDLE].mean(axis=1) - rows[:, -1])
    return tests


def _paired(
    losses: Losses, named: Mapping[str, tuple[Configuration, Configuration]], quantity: Quantity
) -> dict[str, Difference]:
    """A quantity of one network minus that of another, seed by seed."""
    tests = {}
    for name, networks in named.items():
        if all(each in losses for each in networks):
            first, second = (losses[each] for each in networks)
            shared, alone = sorted({*first.seeds} & {*second.seeds}), len({*first.seeds} ^ {*second.seeds})
            left_out = f" ({alone} seeds without their pair left out)" if alone else ""
            if shared:
                tests[f"{name}{left_out}"] = difference(quantity(first.at(shared)) - quantity(second.at(shared)))
    return tests


def _numbers(losses: Losses, configuration: Configuration) -> Finding:
    """The values read off the figure against the mean and the best seed."""
    published = np.array(PUBLISHED[configuration])
    where = f"Numbers, {configuration}"
    reported = f"final losses {_listed(published)} (read off the figure, +-0.03)."
    if configuration not in losses:
        return Finding(where, reported, UNTRAINED, NOT_RUN)
    mean, best = losses[configuration].rows.mean(axis=0), losses[configuration].rows.min(axis=0)
    near, near_best = (int(np.sum(np.abs(values - published) <= NEAR)) for values in (mean, best))
    count = len(published)
    found = (
        f"mean over seeds {_listed(mean)}, {near} of {count} within {NEAR} nats; best seed {_listed(best)}, "
        f"{near_best} of {count}; mean absolute difference {np.abs(mean - published).mean():.2f}."
    )
    verdict = REPRODUCED if near == count else IN_PART if near > count // 2 else NOT_REPRODUCED
    return Finding(where, reported, found, UNDECIDED if len(losses[configuration].seeds) < UNITS_FOR_CLAIM else verdict)


def _listed(values: Float64[np.ndarray, "context"]) -> str:
    return " ".join(f"{value:.2f}" for value in values)


@PAPERS.register("position-copy-liu2026")
class CopyExperiment(StudyExperiment):
    """The post's networks trained again, and its statements put to the test."""

    paper = SOURCE
    folder = "liu2026"

    def judge(
        self, members: Sequence[TrainedMember], options: TrainingSchedule, settings: StudySettings
    ) -> Reproduction:
        """Statements, tables and figures from trained members."""
        outcomes, losses = Outcomes([_outcome(trained) for trained in members]), Losses()
        for configuration in CONFIGURATIONS:
            cells = [{**vars(configuration), "target": target} for target in range(CONTEXT)]
            if seeds := outcomes.common_seeds(*cells):  # those with all targets finished
                rows = np.stack([outcomes.values("loss", cell, seeds) for cell in cells], axis=1)
                losses[configuration] = Seeded(tuple(seeds), rows)
        described = {**settings.describe(), "steps": options.steps}
        return position_copy_page(losses, outcomes.facts(), settings=described, seed=settings.seed)


def _outcome(trained: TrainedMember) -> Outcome:
    config = trained.member.config
    factors = {
        "depth": config.architecture.depth,
        "width": config.width,
        "residual": config.residual == "added",
        "mlp": config.mlp,
        "target": getattr(trained.member.task, "target"),  # noqa: B009 - tasks of this study are position copies
    }
    losses = trained.evaluations.get("loss")
    return Outcome(
        factors, trained.member.seed, trained.status, {} if losses is None else {"loss": np.array(losses[-1])}
    )


def position_copy_page(
    losses: Losses, facts: Mapping[str, Any], *, settings: Mapping[str, Any], seed: int
) -> Reproduction:
    """Statements, tables and figures.

    Args:
        losses: Of trained members, or of the record of a reproduction.
        facts: How many members there are, and what did not finish.
        settings: For the record; `steps` among them.
        seed: For the record.
    """
    arrays: dict[str, np.ndarray] = {}
    for configuration, seeded in losses.items():
        arrays |= {f"{configuration}/loss": seeded.rows, f"{configuration}/seeds": np.array(seeded.seeds)}
    seeds = max((len(seeded.seeds) for seeded in losses.values()), default=0)
    findings = position_copy_findings(losses)
    return Reproduction(
        experiment=CopyExperiment.name,
        title=f"Position copy: {len(losses)} networks, {CONTEXT} targets, {seeds} seeds, {settings['steps']} steps",
        rows=finding_rows(findings),
        statements=said_of(findings, facts),
        numbers=facts,
        tables=[*findings_tables(findings), losses_table(losses)],
        figures=position_copy_figures(losses),
        arrays=arrays,
        settings=dict(settings),
        seeds={"seed": seed},
    )


_COLOURS = {
    ONE: SKY,
    TWO: BLUE,
    THREE: PURPLE,
    TWO_WIDE: ORANGE,
    THREE_WIDE: VERMILION,
    RESIDUAL: GREEN,
    RESIDUAL_MLP: BLUE,
}


def position_copy_figures(losses: Losses) -> list[Figure]:
    """The post's three figures with intervals over seeds and its values dashed."""
    targets, figures = np.arange(CONTEXT, dtype=np.float64), []
    baselines = {"ln V: nothing known": (LN_V, "dot"), "all but the order known": (orderless_loss(), "dashdot")}
    for slug, title, panel in (
        ("layers", "One layer names only the last token; what does a second add?", (ONE, TWO)),
        ("sizes", "Two and three layers, width 2 and 10", (TWO, THREE, TWO_WIDE, THREE_WIDE)),
        ("residual", "With residual connections and MLPs", (THREE_WIDE, RESIDUAL, RESIDUAL_MLP)),
    ):
        curves = []
        for each in (configuration for configuration in panel if configuration in losses):
            rows, colour = losses[each].rows, _COLOURS[each]
            ends = mean_ends(rows, least=0.0)
            curves.append(Curve(str(each), targets, rows.mean(axis=0), Stroke(colour, "solid"), *ends))
            if each in PUBLISHED:
                published = np.array(PUBLISHED[each])
                curves.append(Curve(f"{each}, published", targets, published, Stroke(colour, "dash")))
        if curves:
            for name, (level, dash) in baselines.items():
                curves.append(Curve(name, targets[[0, -1]], np.full(2, level), Stroke(FAINT, dash)))
            labels = ("target position k", "final loss (nats)")
            figures.append(Figure(f"position-copy-{slug}", title, *labels, tuple(curves), markers=True))
    return figures


def losses_table(losses: Losses) -> Table:
    """Mean and best seed by target, with what was read off the figures."""
    header = ["configuration", "seeds", "row", *(f"k = {target}" for target in range(CONTEXT))]
    cells: list[Sequence[str]] = []
    for configuration in CONFIGURATIONS:
        if configuration not in losses:
            continue
        rows = losses[configuration].rows
        low, high = mean_ends(rows, least=0.0)
        lines = {"mean": [f"{value:.2f}" for value in rows.mean(axis=0)]}
        if len(rows) > 1:
            lines["95 %"] = [f"{a:.2f}, {b:.2f}" for a, b in zip(low, high, strict=True)]
        lines["best seed"] = [f"{value:.2f}" for value in rows.min(axis=0)]
        if configuration in PUBLISHED:
            lines["published"] = [f"{value:.2f}" for value in PUBLISHED[configuration]]
        cells += [[str(configuration), str(len(rows)), name, *values] for name, values in lines.items()]
    return Table("Final loss (nats) by target position", header, cells)
