"""The figures of an attention run: curves over layers and positions, and the matrices behind them."""

from dataclasses import replace

import numpy as np

from posbias.report.attention_view import AttentionView, Line
from posbias.report.figures import Curve, Figure, profiles_figure
from posbias.report.heatmaps import HeatMap, Panel
from posbias.report.palette import BLUE, FLAT, GREEN, INK, ORANGE, PURPLE, VERMILION, Stroke, drawn_positions
from posbias.report.wording import ATTENTION_ROLLOUTS, label

LAYER = "layer (0 is nearest the input)"
PANELS = 6
"""Layers whose mean kernel is drawn."""
MAP_POSITIONS = 256
"""Columns of a map over positions; longer prompts are averaged in cells."""
KERNEL_DECADES = 4.0
"""Decades of attention that the colours of a mean kernel span."""
ROLLOUT_DECADES = 5.0
"""Most decades of influence that the figure of the rollouts shows."""
THRESHOLD_COLOURS = (BLUE, VERMILION, GREEN, PURPLE, ORANGE)

Strokes = {
    "rollout": Stroke(PURPLE, "longdash"),
    "attention_only": Stroke(ORANGE, "dashdot"),
    "norm_weighted": Stroke(GREEN, "dash"),
    "power": Stroke(BLUE, "solid"),
}


def attention_figures(view: AttentionView) -> list[Figure | HeatMap]:
    """All figures, in the order of the page."""
    figures: list[Figure | HeatMap] = [
        _distance_figure(view),
        _entropy_figure(view),
        _kernel_map(view),
        _sink_figure(view),
        _sink_layer_figure(view),
        _content_figure(view),
        _content_map(view),
        _similarity_figure(view),
        _mixing_figure(view),
        _mixing_map(view),
        _monotonicity_figure(view),
        _rollout_figure(view),
    ]
    return figures


def _distance_figure(view: AttentionView) -> Figure:
    mean = view.overall("distance")
    even = view.array("distance/even")
    curves = _with_heads(view, "distance", "mean over heads", BLUE)
    curves.append(_layers("even attention", Line(even, None, None), FLAT))
    title = (
        f"{view.title}: attention looks back {mean.text('.0f', unit=' positions')} on average;"
        f" even attention would look back {even.mean():.0f}"
    )
    return Figure("distance", title, LAYER, "attention distance (positions)", tuple(curves), markers=True)


def _entropy_figure(view: AttentionView) -> Figure:
    mean = view.overall("entropy")
    curves = _with_heads(view, "entropy", "mean over heads", BLUE)
    curves.append(_layers("even attention", Line(np.ones(view.depth), None, None), FLAT))
    title = f"{view.title}: the entropy of attention is {mean.text('.2f')} of the largest possible"
    return Figure("entropy", title, LAYER, "entropy / log(visible keys)", tuple(curves), markers=True)


def _kernel_map(view: AttentionView) -> HeatMap:
    kernels = view.array("kernels/mean").astype(np.float64)
    cells = kernels.shape[-1]
    chosen = np.unique(np.linspace(0, view.depth - 1, min(PANELS, view.depth)).round().astype(int))
    hidden = np.triu(np.ones((cells, cells), bool), 1)
    panels = tuple(Panel(f"layer {layer}", np.where(hidden, np.nan, kernels[layer])) for layer in chosen)
    top = max(float(np.nanmax(panel.values)) for panel in panels)
    size = view.n_positions / cells
    each = "" if cells == view.n_positions else f", in cells of {size:.3g} positions"
    return HeatMap(
        "kernels",
        f"{view.title}: where each query's attention goes, mean over prompts and heads{each}",
        "key position",
        "query position",
        "share of the query's attention",
        panels,
        x=(size / 2 - 0.5, view.n_positions - size / 2 - 0.5),
        y=(size / 2 - 0.5, view.n_positions - size / 2 - 0.5),
        scale="logarithmic",
        floor=top * 10**-KERNEL_DECADES,
    )


def _sink_figure(view: AttentionView) -> Figure:
    shown = drawn_positions(view.n_positions)
    curves = []
    for index, (threshold, colour) in enumerate(zip(view.thresholds, _cycle(view), strict=True)):
        line = view.sinks(index)
        low, high = (None if end is None else end[shown] for end in (line.low, line.high))
        name = f"attention above {threshold:g}"
        curves.append(Curve(name, shown.astype(np.float64), line.value[shown], Stroke(colour, "solid"), low, high))
    first = float(view.sinks(len(view.thresholds) - 1).value[0])
    inside = np.concatenate([curve.y[1:-10] if curve.y.size > 20 else curve.y for curve in curves])
    positive = inside[inside > 0]
    bottom = max(float(positive.min()) / 2 if positive.size else 1e-4, 1e-6)
    return Figure(
        "sinks",
        f"{view.title}: position 0 takes more than {view.thresholds[-1]:g} of the attention in {100 * first:.0f} % of"
        " queries, layers and heads",
        "position in the context",
        "share of the queries that see it",
        tuple(curves),
        log_range=(min(bottom, 0.5), 1.3),
        linear_range=(0.0, max(1.25 * float(inside.max()), 0.01)),
    )


def _sink_layer_figure(view: AttentionView) -> Figure:
    by_layer = view.array("sinks/by_layer")
    curves = []
    for index, (threshold, colour) in enumerate(zip(view.thresholds, _cycle(view), strict=True)):
        others = by_layer[index][:, 1 : -view.n_positions // 10 or None].max(axis=1, initial=0)
        first = Line(by_layer[index][:, 0], None, None)
        curves.append(_layers(f"position 0, above {threshold:g}", first, Stroke(colour, "solid")))
        curves.append(_layers(f"best other, above {threshold:g}", Line(others, None, None), Stroke(colour, "dot")))
    top = int(by_layer[-1][:, 0].argmax())
    title = f"{view.title}: the sink on position 0 is strongest in layer {top}"
    return Figure("sinks-by-layer", title, LAYER, "share of queries and heads", tuple(curves), markers=True)


def _content_figure(view: AttentionView) -> Figure:
    mean = view.overall("content/difference")
    curves = _with_heads(view, "content/difference", "diagonal less off-diagonal, mean over heads", BLUE)
    curves.append(_layers("no content", Line(np.zeros(view.depth), None, None), FLAT))
    side = "prefers" if mean.value > 0 else "avoids"
    title = f"{view.title}: by content alone a token {side} itself, {mean.text('+.2f')} in the logit on average"
    return Figure("content", title, LAYER, "content logit, diagonal less off-diagonal", tuple(curves), markers=True)


def _content_map(view: AttentionView) -> HeatMap:
    values = view.by_head("content/difference")
    return HeatMap(
        "content-heads",
        f"{view.title}: diagonal less off-diagonal content logit of every head, mean over prompts",
        "head",
        LAYER,
        "logit",
        (Panel("", values),),
        x=(0.0, float(values.shape[1] - 1)),
        y=(0.0, float(values.shape[0] - 1)),
        scale="diverging",
    )


def _similarity_figure(view: AttentionView) -> Figure:
    curves = [
        _layers("diagonal, single prompts", view.by_layer("similarity/diagonal"), Stroke(VERMILION, "solid")),
        _layers("off-diagonal, single prompts", view.by_layer("similarity/off_diagonal"), Stroke(BLUE, "solid")),
    ]
    for name, colour in (("diagonal", VERMILION), ("off_diagonal", BLUE)):
        key = f"similarity/of_mean/{name}"
        if key in view.record.arrays:
            line = Line(view.array(key).mean(axis=1), None, None)
            curves.append(_layers(f"{name.replace('_', '-')}, mean over prompts", line, Stroke(colour, "dash")))
    own, off = (view.overall(f"similarity/{name}").value for name in ("diagonal", "off_diagonal"))
    title = f"{view.title}: similarity of content logits, {own:.2f} on the diagonal and {off:.2f} off it (1: all equal)"
    return Figure("similarity", title, LAYER, "1 - entropy / log(bins)", tuple(curves), markers=True)


def _mixing_figure(view: AttentionView) -> Figure:
    mean = view.overall("mixing/tokens")
    curves = (
        _layers("token mean (code)", view.by_layer("mixing/tokens"), Stroke(BLUE, "solid")),
        _layers("Frobenius (paper)", view.by_layer("mixing/frobenius"), Stroke(VERMILION, "dash")),
    )
    title = f"{view.title}: attention contributes {mean.text('.2f')} of a layer's output, token mean"
    return Figure("mixing", title, LAYER, "mixing coefficient", curves, markers=True)


def _mixing_map(view: AttentionView) -> HeatMap:
    values = view.array("mixing/by_position")
    cells = min(view.n_positions, MAP_POSITIONS)
    first = -(-np.arange(cells) * view.n_positions // cells)
    size = np.diff(np.append(first, view.n_positions))
    width = view.n_positions / cells
    return HeatMap(
        "mixing-positions",
        f"{view.title}: mixing of every position, mean over prompts",
        "position in the context",
        LAYER,
        "|a| / (|x| + |a|)",
        (Panel("", np.add.reduceat(values, first, axis=1) / size),),
        x=(width / 2 - 0.5, view.n_positions - width / 2 - 0.5),
        y=(0.0, float(view.depth - 1)),
    )


def _monotonicity_figure(view: AttentionView) -> Figure:
    curves = [_layers("single prompts", view.by_layer("monotonicity/violated"), Stroke(BLUE, "solid"))]
    mean = view.overall("monotonicity/violated")
    if "monotonicity/of_mean/violated" in view.record.arrays:
        line = Line(view.array("monotonicity/of_mean/violated"), None, None)
        curves.append(_layers("mean over prompts", line, Stroke(VERMILION, "dash")))
    share = mean.text(".0f", scale=100, unit=" %")
    title = f"{view.title}: {share} of neighbouring queries' prefix masses rise, single prompts"
    return Figure("monotonicity", title, LAYER, "share of prefixes that rise", tuple(curves), markers=True)


def _rollout_figure(view: AttentionView) -> Figure:
    theories = {
        label(ATTENTION_ROLLOUTS, name): (profile, Strokes.get(name, Stroke(INK, "dot")))
        for name, profile in view.rollouts().items()
    }
    title = f"{view.title}: what rolling out its own attention says of each position's influence on the last"
    figure = profiles_figure("rollouts", title, theories)
    smallest = min(float(curve.y[curve.y > 0].min()) for curve in figure.curves)
    top = max(float(curve.y.max()) for curve in figure.curves)
    return replace(figure, log_range=(max(smallest / 2, top * 10**-ROLLOUT_DECADES), 1.6 * top))


def _with_heads(view: AttentionView, name: str, mean: str, colour: str) -> list[Curve]:
    """The mean over heads with its interval, and the heads at both ends."""
    heads = view.by_head(name)
    ends = [
        _layers(text, Line(values, None, None), Stroke(colour, "dot"))
        for text, values in (("highest head", heads.max(axis=1)), ("lowest head", heads.min(axis=1)))
    ]
    return [_layers(mean, view.by_layer(name), Stroke(colour, "solid")), *(ends if heads.shape[1] > 1 else [])]


def _layers(name: str, line: Line, stroke: Stroke) -> Curve:
    layers = np.arange(line.value.size, dtype=np.float64)
    return Curve(name, layers, line.value, stroke, low=line.low, high=line.high)


def _cycle(view: AttentionView) -> list[str]:
    return [THRESHOLD_COLOURS[index % len(THRESHOLD_COLOURS)] for index in range(len(view.thresholds))]
