"""An attention run in tables and figures, from its record alone (layout of the arrays: auditing/attention.py)."""

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
from posbias.errors import UsageError
from posbias.measurement.attention.statistics import MeanKernels
from posbias.profiles import Profile
from posbias.report.layout import caveats_of
from posbias.report.page import REPORTS, Report
from posbias.report.tables import Table, interval_text, number_text
from posbias.runs.records import Record
from posbias.statistics import Interval, mean_of

LAYER = "layer (0 is nearest the input)"
SHARES = ("entropy", "learned_sink", "similarity/", "sinks", "monotonicity/", "mixing/", "rollouts/")
"""What the names of numbers in [0, 1] begin with."""
PANELS = 6
"""Layers whose mean kernel is drawn."""
MAP_POSITIONS = 256
"""Columns of a map over positions; longer prompts are averaged in cells."""
KERNEL_CELLS = 128
"""Side of a mean kernel as it is drawn; larger ones are averaged."""
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
ANOTHER = Stroke(VERMILION, "dash")
"""Of the second of two curves."""

Line = Float64[np.ndarray, "n_points"]


class _View:
    """An attention run as its report reads it: values per layer, head and position with their intervals."""

    def __init__(self, record: Record) -> None:
        self.record = record
        self.title = str(record.resolved.get("title", "model"))
        self.thresholds = [float(threshold) for threshold in record.scalars["sink_thresholds"]]
        self.n_positions = int(record.arrays["sinks/per_prompt"].shape[-1])
        count, self.depth = record.arrays["distance/per_prompt"].shape[:2]
        self.prompts = f"{'1 prompt' if count == 1 else f'{count} prompts'} of {self.n_positions} tokens"

    def array(self, name: str) -> np.ndarray:
        if name not in self.record.arrays:
            raise UsageError(f"the {self.record.verb} run {self.record.run_id} has no array {name}")
        return self.record.arrays[name]

    def by_head(self, name: str) -> Float64[np.ndarray, "layers heads"]:
        """Mean over prompts."""
        return np.asarray(self.array(f"{name}/per_prompt").mean(axis=0))

    def overall(self, name: str) -> Interval:
        """Mean over layers (and heads) and prompts, with its 95 % interval over prompts."""
        values = self.array(f"{name}/per_prompt")
        each = values.reshape(len(values), -1).mean(axis=1)
        return mean_of(each).interval(least=0.0 if each.min() >= 0 else -np.inf, most=_most(name))

    def ends(self, name: str) -> tuple[np.ndarray | None, np.ndarray | None]:
        """The ends of an interval; None where a single prompt leaves it open."""
        low, high = self.array(f"{name}/low"), self.array(f"{name}/high")
        known = np.isfinite([low, high]).any()
        return (low, np.minimum(high, _most(name))) if known else (None, None)

    def sinks(self, threshold: int) -> tuple[Line, Line | None, Line | None]:
        """Sink score of every position, with the ends of its interval."""
        low, high = (None if end is None else end[threshold] for end in self.ends("sinks"))
        return self.array("sinks/per_prompt")[:, threshold].mean(axis=0), low, high

    def by_layer(self, name: str) -> Line:
        """Mean over prompts, and over heads where there are heads."""
        values = self.array(f"{name}/per_prompt")
        return np.asarray(values.reshape(*values.shape[:2], -1).mean(axis=(0, 2)))

    def over_layers(self, name: str, text: str, stroke: Stroke) -> Curve:
        """The same as a curve with its interval."""
        return _over_layers(text, self.by_layer(name), stroke, *self.ends(name))

    def with_heads(self, name: str, text: str = "mean over heads") -> list[Curve]:
        """The same, and the heads at both ends."""
        heads = self.by_head(name)
        ends = {"highest head": heads.max(axis=1), "lowest head": heads.min(axis=1)} if heads.shape[1] > 1 else {}
        outer = [_over_layers(end, values, Stroke(BLUE, "dot")) for end, values in ends.items()]
        return [self.over_layers(name, text, Stroke(BLUE, "solid")), *outer]

    def layer_figure(self, slug: str, title: str, y_label: str, curves: list[Curve]) -> Figure:
        return Figure(slug, f"{self.title}: {title}", LAYER, y_label, tuple(curves), markers=True)


def _most(name: str) -> float:
    """The largest value that the truth can have; records of older versions have intervals that exceed it."""
    return 1.0 if name.startswith(SHARES) else np.inf


@REPORTS.register("attention")
def attention_report(record: Record) -> Report:
    """What attention looks like: the whole model, every layer, and the rollouts."""
    if "distance/per_prompt" not in record.arrays:
        raise UsageError(f"the run {record.run_id} did not finish ({record.error}); only finished runs can be drawn")
    view = _View(record)
    figures = attention_figures(view)
    return Report(
        f"{view.title}: {view.prompts}",
        kicker="posbias · what attention looks like",
        verdict=_verdict(view),
        picture=figures[:1],
        summary=[_whole_table(view)],
        figures=figures[1:],
        tables=[_layer_table(view), _rollout_table(view)],
        left_out=record.scalars["left_out"],
        caveats=caveats_of(record),
        record=record,
        glossary=ATTENTION_GLOSSARY,
    )


def _verdict(view: _View) -> list[str]:
    """How far attention looks back, what the first position takes, and how much of a layer attention is."""
    even, (share, low, high) = view.array("distance/even").mean(), view.sinks(len(view.thresholds) - 1)
    sink = Interval(float(share[0]), *(np.inf if end is None else float(end[0]) for end in (low, high)))
    return [
        f"How far it looks back: {view.overall('distance').text('.0f', unit=' positions')} on average, where even "
        f"attention would look back {even:.0f}.",
        f"What the first position takes: more than {view.thresholds[-1]:g} of the attention in "
        f"{sink.text('.0f', scale=100, unit=' %')} of queries, layers and heads.",
        f"How much attention counts: it contributes {view.overall('mixing/tokens').text('.2f')} of a layer's output, "
        "the rest passes by it.",
    ]


def _whole_table(view: _View) -> Table:
    rows = [
        ("attention distance, positions", "distance", 1, f"{view.array('distance/even').mean():.1f} (even attention)"),
        ("entropy / largest", "entropy", 3, "1 (even attention)"),
        ("content logit, diagonal", "content/diagonal", 3, ""),
        ("content logit, off-diagonal", "content/off_diagonal", 3, ""),
        ("content logit, difference", "content/difference", 3, "0 (no content)"),
        ("the same without the model's scale, as published", "content/published", 2, "0 (no content)"),
        ("similarity, diagonal", "similarity/diagonal", 3, "1 (all equal)"),
        ("similarity, off-diagonal", "similarity/off_diagonal", 3, "1 (all equal)"),
        ("diagonal entries outside the bins", "similarity/diagonal_outside", 3, ""),
        ("off-diagonal entries outside the bins", "similarity/off_diagonal_outside", 3, ""),
        ("mixing, token mean", "mixing/tokens", 3, ""),
        ("mixing, Frobenius", "mixing/frobenius", 3, ""),
        ("prefixes whose mass rises", "monotonicity/violated", 3, "0 (monotone)"),
        ("mean rise of those", "monotonicity/gap", 4, "0 (monotone)"),
    ]
    if "learned_sink/per_prompt" in view.record.arrays:
        rows.append(("share of the learned sinks", "learned_sink", 3, ""))
    cells = [[text, view.overall(name).text(f".{digits}f"), flat] for text, name, digits, flat in rows]
    for name in ("diagonal", "off_diagonal"):
        key = f"similarity/of_mean/{name}"
        if key in view.record.arrays:
            text = f"similarity of the mean over prompts, as published, {name.replace('_', '-')}"
            cells.append([text, number_text(float(view.array(key).mean())), "1 (all equal)"])
    for index, threshold in enumerate(view.thresholds):
        value, low, high = (np.inf if line is None else float(line[0]) for line in view.sinks(index))
        text = f"queries that give position 0 more than {threshold:g}"
        cells.append([text, Interval(value, low, high).text(), ""])
    return Table(f"Attention of {view.title}, {view.prompts}", ("what", "mean [95 %]", "flat line"), cells)


def _layer_table(view: _View) -> Table:
    shown = {
        "distance": ("distance", 1),
        "entropy": ("entropy", 3),
        "content/difference": ("content diff", 2),
        "similarity/diagonal": ("sim diag", 3),
        "similarity/off_diagonal": ("sim off", 3),
        "mixing/tokens": ("mixing", 3),
        "monotonicity/violated": ("monotone rise", 3),
    }
    header = ["layer", *(text for text, _ in shown.values())]
    header += [f"sink 0 > {threshold:g}" for threshold in view.thresholds]
    columns = [(view.by_layer(name), digits) for name, (_, digits) in shown.items()]
    columns += [(sinks[:, 0], 3) for sinks in view.array("sinks/by_layer")]
    cells = [
        [str(layer), *(number_text(float(values[layer]), digits) for values, digits in columns)]
        for layer in range(view.depth)
    ]
    return Table("Layer by layer, means over prompts and heads", header, cells)


def _rollout_table(view: _View) -> Table:
    header = ("rollout", "first tenth", "middle tenth", "last tenth", "first position", "W1 to the flat line")
    shares = ("first_tenth", "middle_tenth", "last_tenth", "first_token")
    cells = []
    for name, summary in view.record.scalars["rollouts"].items():
        texts = [interval_text(summary[share], ".1f", scale=100, unit=" %") for share in shares]
        cells.append([label(ATTENTION_ROLLOUTS, name), *texts, interval_text(summary["flat"])])
    return Table("Rollouts of its own attention (flat line: 10 % in every tenth)", header, cells)


def attention_figures(view: _View) -> list[Figure | HeatMap]:
    """All figures, in the order of the page."""
    even, distance, entropy = view.array("distance/even"), view.overall("distance"), view.overall("entropy")
    content, mixing = view.overall("content/difference"), view.overall("mixing/tokens")
    return [
        view.layer_figure(
            "distance",
            f"attention looks back {distance.text('.0f', unit=' positions')} on average; "
            f"even attention would look back {even.mean():.0f}",
            "attention distance (positions)",
            [*view.with_heads("distance"), _over_layers("even attention", even, FLAT)],
        ),
        view.layer_figure(
            "entropy",
            f"the entropy of attention is {entropy.text('.2f')} of the largest possible",
            "entropy / log(visible keys)",
            [*view.with_heads("entropy"), _over_layers("even attention", np.ones(view.depth), FLAT)],
        ),
        _kernel_map(view),
        _sink_figure(view),
        _sink_layer_figure(view),
        view.layer_figure(
            "content",
            f"by content alone a token {'prefers' if content.value > 0 else 'avoids'} itself, "
            f"{content.text('+.2f')} in the logit on average",
            "content logit, diagonal less off-diagonal",
            [
                *view.with_heads("content/difference", "diagonal less off-diagonal, mean over heads"),
                _over_layers("no content", np.zeros(view.depth), FLAT),
            ],
        ),
        _content_map(view),
        _similarity_figure(view),
        view.layer_figure(
            "mixing",
            f"attention contributes {mixing.text('.2f')} of a layer's output, token mean",
            "mixing coefficient",
            [
                view.over_layers("mixing/tokens", "token mean (code)", Stroke(BLUE, "solid")),
                view.over_layers("mixing/frobenius", "Frobenius (paper)", ANOTHER),
            ],
        ),
        _mixing_map(view),
        _monotonicity_figure(view),
        _rollout_figure(view),
    ]


def _over_layers(
    name: str, values: Float[np.ndarray, "layers"], stroke: Stroke, low: Line | None = None, high: Line | None = None
) -> Curve:
    return Curve(name, np.arange(values.size, dtype=np.float64), values, stroke, low=low, high=high)


def _kernel_map(view: _View) -> HeatMap:
    mean, squared, bounds = (view.array(f"kernels/{name}") for name in ("mean", "squared", "bounds"))
    cells = min(mean.shape[-1], KERNEL_CELLS)
    kernels = MeanKernels(mean, squared, None, bounds).coarser(cells).mean.astype(np.float64)
    chosen = np.unique(np.linspace(0, view.depth - 1, min(PANELS, view.depth)).round().astype(int))
    hidden = np.triu(np.ones((cells, cells), bool), 1)
    panels = tuple(Panel(f"layer {layer}", np.where(hidden, np.nan, kernels[layer])) for layer in chosen)
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
        floor=max(float(np.nanmax(panel.values)) for panel in panels) * 10**-KERNEL_DECADES,
    )


def _sink_figure(view: _View) -> Figure:
    shown = drawn_positions(view.n_positions)
    curves = []
    for index, threshold in enumerate(view.thresholds):
        value, low, high = (None if line is None else line[shown] for line in view.sinks(index))
        assert value is not None
        stroke = Stroke(THRESHOLD_COLOURS[index % len(THRESHOLD_COLOURS)], "solid")
        curves.append(Curve(f"attention above {threshold:g}", shown.astype(np.float64), value, stroke, low, high))
    first = float(curves[-1].y[0])
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


def _sink_layer_figure(view: _View) -> Figure:
    by_layer = view.array("sinks/by_layer")
    curves = []
    for index, threshold in enumerate(view.thresholds):
        colour = THRESHOLD_COLOURS[index % len(THRESHOLD_COLOURS)]
        others = by_layer[index][:, 1 : -view.n_positions // 10 or None].max(axis=1, initial=0)
        first = by_layer[index][:, 0]
        curves.append(_over_layers(f"position 0, above {threshold:g}", first, Stroke(colour, "solid")))
        curves.append(_over_layers(f"best other, above {threshold:g}", others, Stroke(colour, "dot")))
    title = f"the sink on position 0 is strongest in layer {int(by_layer[-1][:, 0].argmax())}"
    return view.layer_figure("sinks-by-layer", title, "share of queries and heads", curves)


def _content_map(view: _View) -> HeatMap:
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


def _similarity_figure(view: _View) -> Figure:
    colours = {"diagonal": VERMILION, "off_diagonal": BLUE}
    curves = [
        view.over_layers(f"similarity/{name}", f"{name.replace('_', '-')}, single prompts", Stroke(colour, "solid"))
        for name, colour in colours.items()
    ]
    for name, colour in colours.items():
        key = f"similarity/of_mean/{name}"
        if key in view.record.arrays:
            text = f"{name.replace('_', '-')}, mean over prompts"
            curves.append(_over_layers(text, view.array(key).mean(axis=1), Stroke(colour, "dash")))
    own, off = (view.overall(f"similarity/{name}").value for name in colours)
    title = f"similarity of content logits, {own:.2f} on the diagonal and {off:.2f} off it (1: all equal)"
    return view.layer_figure("similarity", title, "1 - entropy / log(bins)", curves)


def _mixing_map(view: _View) -> HeatMap:
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


def _monotonicity_figure(view: _View) -> Figure:
    curves = [view.over_layers("monotonicity/violated", "single prompts", Stroke(BLUE, "solid"))]
    if "monotonicity/of_mean/violated" in view.record.arrays:
        curves.append(_over_layers("mean over prompts", view.array("monotonicity/of_mean/violated"), ANOTHER))
    share = view.overall("monotonicity/violated").text(".0f", scale=100, unit=" %")
    title = f"{share} of neighbouring queries' prefix masses rise, single prompts"
    return view.layer_figure("monotonicity", title, "share of prefixes that rise", curves)


def _rollout_figure(view: _View) -> Figure:
    """Every rollout's profile, in the order of the record."""
    profiles = {
        name: Profile(view.array(f"rollouts/{name}/influence"), *view.ends(f"rollouts/{name}"))
        for name in view.record.scalars["rollouts"]
    }
    theories = {
        label(ATTENTION_ROLLOUTS, name): (profile, ROLLOUT_STROKES.get(name, Stroke(INK, "dot")))
        for name, profile in profiles.items()
    }
    title = f"{view.title}: what rolling out its own attention says of each position's influence on the last"
    figure = profiles_figure("rollouts", title, theories)
    smallest = min(float(curve.y[curve.y > 0].min()) for curve in figure.curves)
    top = max(float(curve.y.max()) for curve in figure.curves)
    return replace(figure, log_range=(max(smallest / 2, top * 10**-ROLLOUT_DECADES), 1.6 * top))
