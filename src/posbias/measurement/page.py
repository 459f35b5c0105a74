"""What attention looks like, in words, tables and figures: the whole model, every layer, and the rollouts."""

from dataclasses import replace

import numpy as np

from posbias.measurement.attention_statistics import AttentionStatistics, PromptMean
from posbias.profiles import Profile
from posbias.results.figures import Curve, Figure, HeatMap, profile_figure
from posbias.results.naming import ATTENTION_ROLLOUTS, STATISTICS, label
from posbias.results.page import Report
from posbias.results.tables import Table, number_text

PANELS = 6
"""Layers whose mean kernel is drawn."""
GLOSSARY = {
    "Interval": "In brackets, the 95 % interval over prompts; none with a single prompt.",
    "Distance": "How many positions back a query's attention lies on average, over queries, heads and prompts. Even"
    " attention spreads equally over all keys that the mask lets a query see.",
    "Entropy": "Of each query's attention, divided by its largest possible value. 1 is even, 0 a single key.",
    "Sink": "A position that takes more than a threshold of the attention of the queries that see it. A learned sink"
    " (GPT-OSS) is a place of each head's softmax that is no position; distance and entropy are those of the rest.",
    "Content logits": "Query times key times the model's scale, without positions: before rotation, ALiBi and soft cap."
    " Diagonal: a token with itself; off-diagonal: with the tokens before it. Published measurements leave the scale"
    " out.",
    "Mixing": "How large the attention branch is beside the stream it is added to: 0 is none, 1 is all.",
    "Rollouts": "Layer by layer, attention is multiplied up into one influence per position. Measured mixing: a layer"
    " stands still with one minus its mixing. Attention only: it never does. Norm-weighted: attention times the length"
    " of what it moves (Kobayashi et al. 2020). Power: squared attention with each head's gain, without MLPs.",
}


def attention_report(run: AttentionStatistics) -> Report:
    """Report of what attention looks like: the whole model, every layer, and the rollouts."""
    back, first = run.distance.overall, run.first_sink(-1)
    verdict = [
        f"Attention looks back {back.text('.0f', unit=' positions')} on average; even attention "
        f"would look back {run.even_distance.mean():.0f}.",
        f"The first position takes more than {run.sink_thresholds[-1]:g} of the attention in "
        f"{first.text('.0f', scale=100, unit=' %')} of queries, layers and heads.",
    ]
    if run.mixing is not None:
        share = run.mixing.tokens.overall.text(".2f")
        verdict.append(f"Attention contributes {share} of a layer's output; the residual stream carries the rest.")
    figures: list[Figure | HeatMap] = [_kernel_map(run), _sink_figure(run)]
    if run.rollouts:
        theories = [Profile.mean_of(rows).curve(label(ATTENTION_ROLLOUTS, name)) for name, rows in run.rollouts.items()]
        title = f"{run.title}: what rolling out its own attention says of each position's influence on the last"
        figures.append(profile_figure("rollouts", title, theories))
    layers = f"{run.title}: how far attention looks back, layer by layer"
    prompts = f"{'1 prompt' if run.count == 1 else f'{run.count} prompts'} of {run.n_positions} tokens"
    return Report(
        f"{run.title}: {prompts}",
        kicker="posbias · what attention looks like",
        verdict=verdict,
        picture=[
            replace(run.shown().figure(), slug="distance", title=layers, x_label="layer (0 is nearest the input)")
        ],
        summary=[_whole_table(run, f"Attention of {run.title}, {prompts}")],
        figures=figures,
        tables=[_layer_table(run), _rollout_table(run)],
        left_out=list(run.left_out),
        glossary=GLOSSARY,
    )


def _whole_table(run: AttentionStatistics, title: str) -> Table:
    content, mixing = run.content, run.mixing
    rows: list[tuple[str, PromptMean, int, str]] = [
        ("attention distance, positions", run.distance, 1, f"{run.even_distance.mean():.1f} (even attention)"),
        ("entropy / largest", run.entropy, 3, "1 (even attention)"),
        ("content logit, diagonal", content.diagonal, 3, ""),
        ("content logit, off-diagonal", content.off_diagonal, 3, ""),
        ("content logit, difference", content.difference, 3, "0 (no content)"),
        ("the same without the model's scale, as published", content.published, 2, "0 (no content)"),
    ]
    if mixing is not None:
        rows += [("mixing, token mean", mixing.tokens, 3, ""), ("mixing, Frobenius", mixing.frobenius, 3, "")]
    if run.learned_sink is not None:
        rows.append(("share of the learned sinks", run.learned_sink, 3, ""))
    cells = [[text, statistic.overall.text(f".{digits}f"), flat] for text, statistic, digits, flat in rows]
    for index, threshold in enumerate(run.sink_thresholds):
        cells.append([f"queries that give position 0 more than {threshold:g}", run.first_sink(index).text(), ""])
    return Table(title, ("what", "mean [95 %]", "flat line"), cells)


def _layer_table(run: AttentionStatistics) -> Table:
    shown = {
        "distance": (run.distance, 1),
        "entropy": (run.entropy, 3),
        "content diff": (run.content.difference, 2),
        **({} if run.mixing is None else {"mixing": (run.mixing.tokens, 3)}),
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
    shares = ("first_tenth", "middle_tenth", "last_tenth", "first_token")
    rows = [
        {
            "rollout": label(ATTENTION_ROLLOUTS, name),
            **{label(STATISTICS, share): summary[share].text(".1f", scale=100, unit=" %") for share in shares},
            "W1 to the flat line": summary["flat"].text(),
        }
        for name, summary in run.rollout_shares.items()
    ]
    return Table.of("Rollouts of its own attention (flat line: 10 % in every tenth)", rows)


def _kernel_map(run: AttentionStatistics) -> HeatMap:
    kernels = run.kernels.astype(np.float64)
    cells = kernels.shape[-1]
    chosen = np.unique(np.linspace(0, run.depth - 1, min(PANELS, run.depth)).round().astype(int))
    hidden = np.triu(np.ones((cells, cells), bool), 1)
    panels = {f"layer {layer}": np.where(hidden, np.nan, kernels[layer]) for layer in chosen}
    size = run.n_positions / cells
    in_cells = "" if cells == run.n_positions else f", in cells of {size:.3g} positions"
    largest = max(float(np.nanmax(panel)) for panel in panels.values())
    return HeatMap(
        "kernels",
        f"{run.title}: where each query's attention goes, mean over prompts and heads{in_cells}",
        "key position",
        "query position",
        "share of the query's attention",
        panels,
        x=(size / 2 - 0.5, run.n_positions - size / 2 - 0.5),
        y=(size / 2 - 0.5, run.n_positions - size / 2 - 0.5),
        ends=(largest * 1e-4, largest),
        logarithmic=True,
    )


def _sink_figure(run: AttentionStatistics) -> Figure:
    positions, sinks = np.arange(run.n_positions, dtype=np.float64), run.sinks
    curves = [
        Curve(f"attention above {threshold:g}", positions, value, low=low, high=high)
        for threshold, value, low, high in zip(run.sink_thresholds, sinks.value, sinks.low, sinks.high, strict=True)
    ]
    inside = max(float(curve.y[1:-10].max(initial=0.0)) for curve in curves)
    return Figure(
        "sinks",
        f"{run.title}: positions that take more attention than a threshold",
        "position in the context",
        "share of the queries that see it",
        tuple(curves),
        log_range=(1e-4, 1.3),
        linear_range=(0.0, max(1.25 * inside, 0.01)),
    )
