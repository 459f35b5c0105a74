"""An attention run in tables and figures."""

from dataclasses import replace

import numpy as np
from jaxtyping import Float, Float64

from posbias.display.figures import (
    BLUE,
    FLAT,
    GREEN,
    INK,
    ORANGE,
    PURPLE,
    VERMILION,
    Curve,
    Figure,
    HeatMap,
    Panel,
    Stroke,
    drawn_positions,
    profiles_figure,
)
from posbias.display.wording import ATTENTION_GLOSSARY, ATTENTION_ROLLOUTS, label
from posbias.measurement.attention.result import AttentionStatistics
from posbias.measurement.attention.statistics import HeadStatistic
from posbias.profiles import Profile
from posbias.report.layout import caveats_of
from posbias.report.page import REPORTS, Report, check_finished
from posbias.report.tables import Table, number_text

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
ROLLOUT_STROKES = {
    "rollout": Stroke(PURPLE, "longdash"),
    "attention_only": Stroke(ORANGE, "dashdot"),
    "norm_weighted": Stroke(GREEN, "dash"),
    "power": Stroke(BLUE, "solid"),
}

Line = Float64[np.ndarray, "n_points"]


@REPORTS.register("attention")
def attention_report(run: AttentionStatistics) -> Report:
    """Report of what attention looks like: the whole model, every layer, and the rollouts."""
    check_finished(run.record)
    figures = attention_figures(run)
    return Report(
        f"{run.title}: {_prompts(run)}",
        kicker="posbias · what attention looks like",
        verdict=_verdict(run),
        picture=figures[:1],
        summary=[_whole_table(run)],
        figures=figures[1:],
        tables=[_layer_table(run), *([_rollout_table(run)] if run.rollouts else [])],
        left_out=list(run.left_out),
        caveats=caveats_of(run.record),
        record=run.record,
        glossary=ATTENTION_GLOSSARY,
    )


def _verdict(run: AttentionStatistics) -> list[str]:
    """How far attention looks back, what the first position takes, and how much of a layer attention is."""
    return [
        f"Attention looks back {run.distance.overall.text('.0f', unit=' positions')} on average; even attention "
        f"would look back {run.even_distance.mean():.0f}.",
        f"The first position takes more than {run.sink_thresholds[-1]:g} of the attention in "
        f"{run.first_sink(-1).text('.0f', scale=100, unit=' %')} of queries, layers and heads.",
        f"Attention contributes {run.mixing.tokens.overall.text('.2f')} of a layer's output; the residual stream "
        "carries the rest.",
    ]


def _whole_table(run: AttentionStatistics) -> Table:
    content, similarity, mixing, monotonicity = run.content, run.similarity, run.mixing, run.monotonicity
    rows = [
        ("attention distance, positions", run.distance, 1, f"{run.even_distance.mean():.1f} (even attention)"),
        ("entropy / largest", run.entropy, 3, "1 (even attention)"),
        ("content logit, diagonal", content.diagonal, 3, ""),
        ("content logit, off-diagonal", content.off_diagonal, 3, ""),
        ("content logit, difference", content.difference, 3, "0 (no content)"),
        ("the same without the model's scale, as published", content.published, 2, "0 (no content)"),
        ("similarity, diagonal", similarity.diagonal, 3, "1 (all equal)"),
        ("similarity, off-diagonal", similarity.off_diagonal, 3, "1 (all equal)"),
        ("diagonal entries outside the bins", similarity.diagonal_outside, 3, ""),
        ("off-diagonal entries outside the bins", similarity.off_diagonal_outside, 3, ""),
        ("mixing, token mean", mixing.tokens, 3, ""),
        ("mixing, Frobenius", mixing.frobenius, 3, ""),
        ("prefixes whose mass rises", monotonicity.violated, 3, "0 (monotone)"),
        ("mean rise of those", monotonicity.gap, 4, "0 (monotone)"),
    ]
    if run.learned_sink is not None:
        rows.append(("share of the learned sinks", run.learned_sink, 3, ""))
    cells = [[text, statistic.overall.text(f".{digits}f"), flat] for text, statistic, digits, flat in rows]
    if (of_mean := similarity.of_mean) is not None:
        for name, values in {"diagonal": of_mean.diagonal, "off-diagonal": of_mean.off_diagonal}.items():
            text = f"similarity of the mean over prompts, as published, {name}"
            cells.append([text, number_text(float(values.mean())), "1 (all equal)"])
    for index, threshold in enumerate(run.sink_thresholds):
        cells.append([f"queries that give position 0 more than {threshold:g}", run.first_sink(index).text(), ""])
    return Table(f"Attention of {run.title}, {_prompts(run)}", ("what", "mean [95 %]", "flat line"), cells)


def _layer_table(run: AttentionStatistics) -> Table:
    shown = {
        "distance": (run.distance, 1),
        "entropy": (run.entropy, 3),
        "content diff": (run.content.difference, 2),
        "sim diag": (run.similarity.diagonal, 3),
        "sim off": (run.similarity.off_diagonal, 3),
        "mixing": (run.mixing.tokens, 3),
        "monotone rise": (run.monotonicity.violated, 3),
    }
    header = ["layer", *shown, *(f"sink 0 > {threshold:g}" for threshold in run.sink_thresholds)]
    columns = [(statistic.value, digits) for statistic, digits in shown.values()]
    columns += [(sinks[:, 0], 3) for sinks in run.sinks_by_layer]
    cells = [
        [str(layer), *(number_text(float(values[layer]), digits) for values, digits in columns)]
        for layer in range(run.depth)
    ]
    return Table("Layer by layer, means over prompts and heads", header, cells)


def _rollout_table(run: AttentionStatistics) -> Table:
    header = ("rollout", "first tenth", "middle tenth", "last tenth", "first position", "W1 to the flat line")
    shares = ("first_tenth", "middle_tenth", "last_tenth", "first_token")
    cells = []
    for name, summary in run.rollout_shares.items():
        texts = [summary[share].text(".1f", scale=100, unit=" %") for share in shares]
        cells.append([label(ATTENTION_ROLLOUTS, name), *texts, summary["flat"].text()])
    return Table("Rollouts of its own attention (flat line: 10 % in every tenth)", header, cells)


def attention_figures(run: AttentionStatistics) -> list[Figure | HeatMap]:
    """All figures, in the order of the page: what the table of layers does not say."""
    even, distance = run.even_distance, run.distance.overall
    return [
        Figure(
            "distance",
            f"{run.title}: attention looks back {distance.text('.0f', unit=' positions')} on average; "
            f"even attention would look back {even.mean():.0f}",
            LAYER,
            "attention distance (positions)",
            (*_head_curves(run.distance), _over_layers("even attention", even, FLAT)),
            markers=True,
        ),
        _kernel_map(run),
        _sink_figure(run),
        _content_map(run),
        _mixing_map(run),
        *([_rollout_figure(run)] if run.rollouts else []),
    ]


def _prompts(run: AttentionStatistics) -> str:
    return f"{'1 prompt' if run.count == 1 else f'{run.count} prompts'} of {run.n_positions} tokens"


def _head_curves(statistic: HeadStatistic) -> list[Curve]:
    """Means of every layer with their intervals, and the heads at both ends."""
    heads = statistic.by_head
    ends = {"highest head": heads.max(axis=1), "lowest head": heads.min(axis=1)} if heads.shape[1] > 1 else {}
    outer = [_over_layers(end, values, Stroke(BLUE, "dot")) for end, values in ends.items()]
    mean = _over_layers("mean over heads", statistic.value, Stroke(BLUE, "solid"), statistic.low, statistic.high)
    return [mean, *outer]


def _over_layers(
    name: str, values: Float[np.ndarray, "layers"], stroke: Stroke, low: Line | None = None, high: Line | None = None
) -> Curve:
    return Curve(name, np.arange(values.size, dtype=np.float64), values, stroke, low=low, high=high)


def _kernel_map(run: AttentionStatistics) -> HeatMap:
    kernels = run.kernels.drawn().mean.astype(np.float64)
    cells = kernels.shape[-1]
    chosen = np.unique(np.linspace(0, run.depth - 1, min(PANELS, run.depth)).round().astype(int))
    hidden = np.triu(np.ones((cells, cells), bool), 1)
    panels = tuple(Panel(f"layer {layer}", np.where(hidden, np.nan, kernels[layer])) for layer in chosen)
    size = run.n_positions / cells
    in_cells = "" if cells == run.n_positions else f", in cells of {size:.3g} positions"
    return HeatMap(
        "kernels",
        f"{run.title}: where each query's attention goes, mean over prompts and heads{in_cells}",
        "key position",
        "query position",
        "share of the query's attention",
        panels,
        x=(size / 2 - 0.5, run.n_positions - size / 2 - 0.5),
        y=(size / 2 - 0.5, run.n_positions - size / 2 - 0.5),
        scale="logarithmic",
        floor=max(float(np.nanmax(panel.values)) for panel in panels) * 10**-KERNEL_DECADES,
    )


def _sink_figure(run: AttentionStatistics) -> Figure:
    shown = drawn_positions(run.n_positions)
    curves = []
    for index, threshold in enumerate(run.sink_thresholds):
        low, high = run.sinks.low[index, shown], run.sinks.high[index, shown]
        value = run.sinks.value[index, shown]
        stroke = Stroke(THRESHOLD_COLOURS[index % len(THRESHOLD_COLOURS)], "solid")
        curves.append(Curve(f"attention above {threshold:g}", shown.astype(np.float64), value, stroke, low, high))
    first = float(curves[-1].y[0])
    inside = np.concatenate([curve.y[1:-10] if curve.y.size > 20 else curve.y for curve in curves])
    positive = inside[inside > 0]
    bottom = max(float(positive.min()) / 2 if positive.size else 1e-4, 1e-6)
    return Figure(
        "sinks",
        f"{run.title}: position 0 takes more than {run.sink_thresholds[-1]:g} of the attention in {100 * first:.0f} %"
        " of queries, layers and heads",
        "position in the context",
        "share of the queries that see it",
        tuple(curves),
        log_range=(min(bottom, 0.5), 1.3),
        linear_range=(0.0, max(1.25 * float(inside.max()), 0.01)),
    )


def _content_map(run: AttentionStatistics) -> HeatMap:
    values = run.content.difference.by_head
    return HeatMap(
        "content-heads",
        f"{run.title}: diagonal less off-diagonal content logit of every head, mean over prompts",
        "head",
        LAYER,
        "logit",
        (Panel("", values),),
        x=(0.0, float(values.shape[1] - 1)),
        y=(0.0, float(values.shape[0] - 1)),
        scale="diverging",
    )


def _mixing_map(run: AttentionStatistics) -> HeatMap:
    values = run.mixing.by_position
    cells = min(run.n_positions, MAP_POSITIONS)
    first = -(-np.arange(cells) * run.n_positions // cells)
    size = np.diff(np.append(first, run.n_positions))
    width = run.n_positions / cells
    return HeatMap(
        "mixing-positions",
        f"{run.title}: mixing of every position, mean over prompts",
        "position in the context",
        LAYER,
        "|a| / (|x| + |a|)",
        (Panel("", np.add.reduceat(values, first, axis=1) / size),),
        x=(width / 2 - 0.5, run.n_positions - width / 2 - 0.5),
        y=(0.0, float(run.depth - 1)),
    )


def _rollout_figure(run: AttentionStatistics) -> Figure:
    """Every rollout's profile, in the order of the record."""
    theories = {
        label(ATTENTION_ROLLOUTS, name): (Profile.mean_of(rows), ROLLOUT_STROKES.get(name, Stroke(INK, "dot")))
        for name, rows in run.rollouts.items()
    }
    title = f"{run.title}: what rolling out its own attention says of each position's influence on the last"
    figure = profiles_figure("rollouts", title, theories)
    smallest = min(float(curve.y[curve.y > 0].min()) for curve in figure.curves)
    top = max(float(curve.y.max()) for curve in figure.curves)
    return replace(figure, log_range=(max(smallest / 2, top * 10**-ROLLOUT_DECADES), 1.6 * top))
