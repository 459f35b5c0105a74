"""Position copy (Liu 2026) run again: one small network per target position, over seeds.

Final losses beside those read off the post's figures and the baselines, and its statements with verdicts.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from posbias.display.figures import BLUE, FAINT, GREEN, ORANGE, PURPLE, SKY, VERMILION, Curve, Figure, Stroke
from posbias.report.tables import Table
from posbias.statistics import mean_ends
from posbias.training import TrainedMember, TrainingSchedule
from posbias_papers.findings import (
    Outcome,
    Outcomes,
    Seeded,
    finding_rows,
    findings_tables,
    said_of,
)
from posbias_papers.liu2026.statements import (
    CONFIGURATIONS,
    CONTEXT,
    ONE,
    RESIDUAL,
    RESIDUAL_MLP,
    SOURCE,
    THREE,
    THREE_WIDE,
    TWO,
    TWO_WIDE,
    Losses,
    blind_loss,
    orderless_loss,
    position_copy_findings,
    published_losses,
)
from posbias_papers.pages.reproduce import PAPERS
from posbias_papers.reproduction import Reproduction
from posbias_papers.study_runs import StudyExperiment, StudySettings


@PAPERS.register("position-copy-liu2026")
class CopyExperiment(StudyExperiment):
    """The post's networks trained again, and its statements put to the test."""

    paper = SOURCE
    folder = "liu2026"

    def judge(
        self, members: Sequence[TrainedMember], options: TrainingSchedule, settings: StudySettings
    ) -> Reproduction:
        """Statements, tables and figures from trained members."""
        outcomes = Outcomes([_outcome(trained) for trained in members])
        described = {**settings.describe(), "steps": options.steps}
        return position_copy_page(final_losses(outcomes), outcomes.facts(), settings=described, seed=settings.seed)


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
    seeds = max((len(rows) for rows in losses.values()), default=0)
    findings = position_copy_findings(losses)
    return Reproduction(
        experiment=CopyExperiment.name,
        title=f"Position copy: {len(losses)} networks, {CONTEXT} targets, {seeds} seeds, {settings['steps']} steps",
        rows=finding_rows(findings),
        statements=said_of(findings, facts),
        facts=facts,
        tables=[*findings_tables(findings), losses_table(losses)],
        figures=position_copy_figures(losses),
        arrays=arrays,
        settings=dict(settings),
        seeds={"seed": seed},
    )


def final_losses(outcomes: Outcomes) -> Losses:
    """Final loss as [seed, target] by configuration; only seeds with all targets finished."""
    losses: Losses = {}
    for configuration in CONFIGURATIONS:
        cells = [{**configuration.factors, "target": target} for target in range(CONTEXT)]
        seeds = outcomes.common_seeds(*cells)
        if seeds:
            rows = np.stack([outcomes.values("loss", cell, seeds) for cell in cells], axis=1)
            losses[configuration] = Seeded(tuple(seeds), rows)
    return losses


_COLOURS = {
    ONE: SKY,
    TWO: BLUE,
    THREE: PURPLE,
    TWO_WIDE: ORANGE,
    THREE_WIDE: VERMILION,
    RESIDUAL: GREEN,
    RESIDUAL_MLP: BLUE,
}
_PANELS = (
    ("layers", "One layer names only the last token; what does a second add?", (ONE, TWO)),
    ("sizes", "Two and three layers, width 2 and 10", (TWO, THREE, TWO_WIDE, THREE_WIDE)),
    ("residual", "With residual connections and MLPs", (THREE_WIDE, RESIDUAL, RESIDUAL_MLP)),
)
X_LABEL = "target position k"
LOSS = "final loss (nats)"


def position_copy_figures(losses: Losses) -> list[Figure]:
    """The post's three figures with intervals over seeds and its values dashed."""
    return [
        _losses_figure(
            f"position-copy-{slug}",
            title,
            {configuration: losses[configuration] for configuration in panel if configuration in losses},
        )
        for slug, title, panel in _PANELS
        if any(configuration in losses for configuration in panel)
    ]


def _losses_figure(slug: str, title: str, losses: Losses) -> Figure:
    targets = np.arange(CONTEXT, dtype=np.float64)
    curves = []
    for configuration, seeded in losses.items():
        rows, stroke = seeded.rows, Stroke(_COLOURS[configuration], "solid")
        curves.append(
            Curve(str(configuration), targets, rows.mean(axis=0), stroke, *mean_ends(rows, least=0.0), emphasis=True)
        )
        published = published_losses(configuration)
        if published is not None:
            name = f"{configuration}, published"
            curves.append(Curve(name, targets, published, Stroke(_COLOURS[configuration], "dash")))
    baselines = {"ln V: nothing known": (blind_loss(), "dot"), "all but the order known": (orderless_loss(), "dashdot")}
    for name, (level, dash) in baselines.items():
        curves.append(Curve(name, targets[[0, -1]], np.full(2, level), Stroke(FAINT, dash)))
    return Figure(slug, title, X_LABEL, LOSS, tuple(curves), markers=True)


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
        published = published_losses(configuration)
        if published is not None:
            lines["published"] = [f"{value:.2f}" for value in published]
        cells += [[str(configuration), str(len(rows)), name, *values] for name, values in lines.items()]
    return Table("Final loss (nats) by target position", header, cells)
