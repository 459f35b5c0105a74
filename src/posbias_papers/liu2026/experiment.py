"""Position copy (Liu 2026) run again: one small network per target position, over seeds.

Final losses beside those read off the post's figures and the baselines, its statements with verdicts, and whether
influence at initialisation and after training predicts which targets are learnt.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from jaxtyping import Float64

from posbias.display.figures import BLUE, FAINT, GREEN, ORANGE, PURPLE, SKY, VERMILION, Curve, Figure, Stroke
from posbias.report.tables import Table
from posbias.statistics import mean_ends
from posbias.training import TrainedMember, TrainingSchedule
from posbias_papers.closing_loop import (
    Loop,
    agreements,
    loop_arrays,
    loop_figure,
    with_control,
)
from posbias_papers.findings import (
    Outcome,
    Outcomes,
    Seeded,
    finding_rows,
)
from posbias_papers.influence_profiles import KINDS, MOMENTS, profiles_by_moment
from posbias_papers.liu2026.partial_information import partial_information_losses
from posbias_papers.liu2026.published import (
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
    VOCABULARY,
    Configuration,
    blind_loss,
    published_losses,
)
from posbias_papers.liu2026.statements import Losses, position_copy_findings
from posbias_papers.pages.reproduce import PAPERS, Facts
from posbias_papers.reproduction import Reproduction
from posbias_papers.study_runs import StudyExperiment, StudySettings

FINAL, SPEED = "a low final loss", "fast learning"


@PAPERS.register("position-copy-liu2026")
class PositionCopy(StudyExperiment):
    """The post's networks trained again, and its statements put to the test."""

    paper = SOURCE
    folder = "liu2026"

    def judge(
        self, members: Sequence[TrainedMember], options: TrainingSchedule, settings: StudySettings
    ) -> Reproduction:
        """Statements, tables and figures from trained members."""
        outcomes = position_copy_outcomes(members, seed=settings.seed)
        losses, speeds = (by_target(outcomes, name) for name in ("loss", "course"))
        outcome = CopyOutcome(losses, speeds, position_copy_loops(outcomes), outcomes.facts())
        return position_copy_page(outcome, settings={**settings.describe(), "steps": options.steps}, seed=settings.seed)


def position_copy_outcomes(members: Sequence[TrainedMember], *, seed: int) -> Outcomes:
    """Final loss, learning and influence profiles of every member."""
    finished = [trained for trained in members if trained.parameters is not None]
    by_member = profiles_by_moment(finished, seed=seed)
    profiles = {trained.member.name: arrays for trained, arrays in zip(finished, by_member, strict=True)}
    return Outcomes([_outcome(trained, profiles.get(trained.member.name, {})) for trained in members])


def _outcome(trained: TrainedMember, profiles: Mapping[str, np.ndarray]) -> Outcome:
    config = trained.member.config
    factors = {
        "depth": config.architecture.depth,
        "width": config.width,
        "residual": config.residual == "added",
        "mlp": config.mlp,
        "target": getattr(trained.member.task, "target"),  # noqa: B009 - tasks of this study are position copies
    }
    arrays: dict[str, np.ndarray] = {"course": np.array(np.mean(trained.losses) / blind_loss()), **profiles}
    if "loss" in trained.evaluations:
        arrays["loss"] = trained.evaluations["loss"][-1]
    return Outcome(factors, trained.member.seed, trained.status, arrays)


@dataclass(frozen=True, eq=False)
class CopyOutcome:
    """Trained outcomes that statements, tables and figures are made of."""

    losses: Losses
    speeds: Losses
    """Training loss over ln V, averaged over all steps."""
    loops: Sequence[Loop]
    facts: Facts = field(default_factory=dict)
    """How many members there are, and what did not finish."""


def position_copy_page(outcome: CopyOutcome, *, settings: Mapping[str, Any], seed: int) -> Reproduction:
    """Statements, tables and figures.

    Args:
        outcome: Of trained members, or of the record of a reproduction.
        settings: For the record; `steps` among them.
        seed: For the record.
    """
    losses, speeds, loops = outcome.losses, outcome.speeds, outcome.loops
    findings = position_copy_findings(losses)
    results = agreements(loops)
    seeds = max((len(rows) for rows in losses.values()), default=0)
    figures = [loop_figure(f"position-copy-loop-{n}", results, name) for n, name in enumerate((FINAL, SPEED))]
    return Reproduction(
        experiment=PositionCopy.name,
        title=f"Position copy: {len(losses)} networks, {CONTEXT} targets, {seeds} seeds, {settings['steps']} steps",
        rows=[*finding_rows(findings), *[agreement.row() for agreement in results]],
        facts=outcome.facts,
        tables=[losses_table(losses)],
        figures=[*position_copy_figures(losses, speeds), *[figure for figure in figures if figure is not None]],
        arrays={**_arrays(losses, speeds), **loop_arrays(loops)},
        settings=dict(settings),
        seeds={"seed": seed},
    )


def by_target(outcomes: Outcomes, name: str) -> Losses:
    """A number of every member as [seed, target] by configuration; only seeds with all targets finished."""
    seeded: Losses = {}
    for configuration in CONFIGURATIONS:
        cells = _cells(configuration)
        seeds = outcomes.common_seeds(*cells)
        if seeds:
            rows = np.stack([outcomes.values(name, cell, seeds) for cell in cells], axis=1)
            seeded[configuration] = Seeded(tuple(seeds), rows)
    return seeded


def _cells(configuration: Configuration) -> list[dict[str, Any]]:
    """The factors of a network's members, one for each target."""
    return [{**configuration.factors, "target": target} for target in range(CONTEXT)]


def position_copy_loops(outcomes: Outcomes) -> list[Loop]:
    """Influence of the k-th position in the network that is to copy it, beside how that went."""
    loops = []
    losses, speeds = by_target(outcomes, "loss"), by_target(outcomes, "course")
    for configuration, seeded in losses.items():
        predicted = {}
        for kind, moment in (("mean_field", "initial"), *((kind, moment) for kind in KINDS for moment in MOMENTS)):
            profiles = [outcomes.values(f"{kind}/{moment}", cell, seeded.seeds) for cell in _cells(configuration)]
            predicted[kind, moment] = np.stack([rows[:, target] for target, rows in enumerate(profiles)], axis=1)
        loops.append(
            Loop(str(configuration), with_control(predicted), {FINAL: -seeded.rows, SPEED: -speeds[configuration].rows})
        )
    return loops


def _arrays(losses: Losses, speeds: Losses) -> dict[str, Any]:
    arrays: dict[str, Any] = {}
    for configuration, seeded in losses.items():
        arrays |= {f"{configuration}/loss": seeded.rows, f"{configuration}/seeds": np.array(seeded.seeds)}
    return {**arrays, **{f"{configuration}/course": seeded.rows for configuration, seeded in speeds.items()}}


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
KNOWING = {
    "nothing": ("ln V: nothing known", "dot"),
    "counts_linear": ("counts known, read linearly", "dash"),
    "counts_and_own": ("all but the order known", "dashdot"),
}
"""Baselines drawn in, by their name in `partial_information_losses`."""
X_LABEL = "target position k"
LOSS = "final loss (nats)"


def position_copy_figures(losses: Losses, speeds: Losses) -> list[Figure]:
    """The post's three figures with intervals over seeds and its values dashed, then how fast targets are learnt.

    Args:
        losses: Final loss by configuration, [seed, target].
        speeds: Training loss over ln V, averaged over all steps, [seed, target]: small where learnt early.
    """
    figures = [
        _losses_figure(
            f"position-copy-{slug}",
            title,
            {configuration: losses[configuration] for configuration in panel if configuration in losses},
        )
        for slug, title, panel in _PANELS
        if any(configuration in losses for configuration in panel)
    ]
    return [*figures, _speed_figure(speeds)] if speeds else figures


def _losses_figure(slug: str, title: str, losses: Losses) -> Figure:
    targets = np.arange(CONTEXT, dtype=np.float64)
    curves = []
    for configuration, seeded in losses.items():
        curves.append(_curve(str(configuration), seeded.rows, Stroke(_COLOURS[configuration], "solid"), emphasis=True))
        published = published_losses(configuration)
        if published is not None:
            name = f"{configuration}, published"
            curves.append(Curve(name, targets, published, Stroke(_COLOURS[configuration], "dash")))
    levels = partial_information_losses(CONTEXT, VOCABULARY)
    for knowledge, (name, dash) in KNOWING.items():
        curves.append(Curve(name, targets[[0, -1]], np.full(2, levels[knowledge]), Stroke(FAINT, dash)))
    return Figure(slug, title, X_LABEL, LOSS, tuple(curves), markers=True)


def _speed_figure(speeds: Losses) -> Figure:
    curves = tuple(
        _curve(
            str(configuration), seeded.rows, Stroke(_COLOURS[configuration], "dash" if configuration.mlp else "solid")
        )
        for configuration, seeded in speeds.items()
    )
    title = "Which targets are learnt early: mean of the training loss over all steps, as a share of ln V"
    return Figure("position-copy-speed", title, X_LABEL, "mean training loss / ln V", curves, markers=True)


def _curve(name: str, rows: Float64[np.ndarray, "n_seeds context"], stroke: Stroke, *, emphasis: bool = False) -> Curve:
    targets = np.arange(rows.shape[1], dtype=np.float64)
    return Curve(name, targets, rows.mean(axis=0), stroke, *mean_ends(rows, least=0.0), emphasis)


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
