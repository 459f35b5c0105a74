"""Position copy as figures and tables: losses by target beside the published ones and the baselines, and learning."""

from collections.abc import Sequence

import numpy as np
from jaxtyping import Float64

from posbias.papers.liu2026.published import (
    CONFIGURATIONS,
    CONTEXT,
    ONE,
    RESIDUAL,
    RESIDUAL_MLP,
    THREE,
    THREE_WIDE,
    TWO,
    TWO_WIDE,
    VOCABULARY,
    published_losses,
)
from posbias.papers.liu2026.statements import Losses
from posbias.report.figures import BLUE, FAINT, GREEN, ORANGE, PURPLE, SKY, VERMILION, Curve, Figure, Stroke
from posbias.report.tables import Table
from posbias.statistics import mean_ends
from posbias.tasks.synthetic.copying_baselines import partial_information_losses

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
        _losses_figure(f"position-copy-{slug}", title, {shown: losses[shown] for shown in panel if shown in losses})
        for slug, title, panel in _PANELS
        if any(shown in losses for shown in panel)
    ]
    return [*figures, _speed_figure(speeds)] if speeds else figures


def _losses_figure(slug: str, title: str, shown: Losses) -> Figure:
    targets = np.arange(CONTEXT, dtype=np.float64)
    curves = []
    for configuration, seeded in shown.items():
        curves.append(_curve(str(configuration), seeded.rows, Stroke(_COLOURS[configuration], "solid"), emphasis=True))
        published = published_losses(configuration)
        if published is not None:
            name = f"{configuration}, published"
            curves.append(Curve(name, targets, published, Stroke(_COLOURS[configuration], "dash")))
    levels = partial_information_losses(CONTEXT, VOCABULARY)
    for known, (name, dash) in KNOWING.items():
        curves.append(Curve(name, targets[[0, -1]], np.full(2, levels[known]), Stroke(FAINT, dash)))
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
