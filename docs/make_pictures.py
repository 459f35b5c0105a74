"""Draws the pictures of the docs but `explorer.png`, a screenshot: `python docs/make_pictures.py [RUN]` (about 10 s).

RUN is a finished `posbias audit demo --length 256 --count 16`, by default runs/demo, where `make audit` leaves it. The
measured curves come from its record and from the record of the study of trained models, the rest is computed here. The
same records give the same pictures.
"""

import argparse
import io
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure as Canvas
from matplotlib.ticker import FuncFormatter, NullFormatter
from PIL import Image

import posbias as pb
from posbias.comparison.stored import Subject
from posbias.results.drawing import DASHES, STYLE
from posbias.results.figures import (
    BLUE,
    FLAT,
    GREEN,
    GRID,
    MEASURED,
    ORANGE,
    PURPLE,
    RUNS,
    SKY,
    THEORY_STROKES,
    VERMILION,
    Curve,
    Figure,
    Stroke,
    profile_figure,
)
from posbias.results.naming import THEORIES, label
from posbias.results.result import report_of
from posbias_papers.birth2603.claims import continuous_density
from posbias_papers.rollout2602.table import bloom_influence, published_models

IMAGES = Path(__file__).parent / "images"
STUDY = Path(__file__).parents[1] / "studies" / "trained_models" / "record"
"""A record for each model."""
MITIGATED = Path(__file__).parents[1] / "studies" / "mitigation" / "records"
EXPERIMENTS = Path(__file__).parents[1] / "studies" / "experiments"
COPY_TITLES = {"sizes": "Two and three layers, width 2 and 10", "residual": "With residual connections and MLPs"}
DEPTH_TITLES = {
    "mixture-plain-1": "Gap first vs last, no residual connections",
    "mixture-residual-1": "Gap first vs last, with residual connections",
}
DATA_TITLES = {
    "mixture-first-and-last": "Accuracy by place, trained on both ends",
    "mixture-sinks": "Attention sinks, by token",
}
COLOURS = 96
"""Colours of a PNG: enough for the palette, its bands and smooth edges, and a third of the bytes."""
COLUMN_CHARACTERS = 20
"""Longest name that leaves room for a second column of the legend."""
RAMP = tuple(
    Stroke(colour, dash)
    for colour, dash in (
        (SKY, "solid"),
        (BLUE, "longdash"),
        (GREEN, "dash"),
        (ORANGE, "dashdot"),
        (VERMILION, "solid"),
        (PURPLE, "dot"),
    )
)
"""Strokes of one theory under several settings, in order."""
INFLUENCE = "influence (flat line = 1)"


@dataclass(frozen=True)
class Panel:
    """One half of a picture."""

    figure: Figure
    """Its title stands above the panel; log_range None draws a linear axis."""
    log_positions: bool = False


def main() -> None:
    """Draw every picture into docs/images."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", nargs="?", default="runs/demo", help="directory of the audit")
    trained, birth = pb.load_record(parser.parse_args().run).subjects
    pictures: dict[str, Callable[[], list[Panel] | Canvas]] = {
        "before_after": before_after,
        "attention_only": attention_only,
        "rollout": partial(rollout, birth),
        "rollout_content": rollout_content,
        "closed_form": closed_form,
        "continuous": continuous,
        "mean_field": partial(mean_field, birth),
        "power_rollout": partial(power_rollout, trained, birth),
        "attention_rollout": partial(attention_rollout, trained, birth),
        "audit": partial(audit, trained, birth),
        "trained_models": partial(trained_models, pb.load_record(STUDY)),
        "shared_direction": partial(shared_direction, pb.load_record(STUDY)),
        "position_copy": partial(stored, "position-copy", COPY_TITLES),
        "icl_depth": partial(stored, "icl", DEPTH_TITLES),
        "icl_data": partial(stored, "icl", DATA_TITLES),
        "closing_loop": closing_loop,
    }
    IMAGES.mkdir(exist_ok=True)
    for name, panels in pictures.items():
        with matplotlib.rc_context(STYLE):
            content = png(panels())
        (IMAGES / f"{name}.png").write_bytes(content)
        print(f"docs/images/{name}.png  {len(content) / 1024:.0f} KB")


def before_after() -> list[Panel]:
    """The demo model's answers by position, without a fitted method and with it."""
    runs = {
        "demo_documents_accuracy": (
            "Answers from four documents",
            {"unchanged": "unchanged", "demo_docs_kb": "fitted"},
        ),
        "demo_key_value_8": ("Retrieval of eight values", {"unchanged": "unchanged", "from_question_8.json": "fitted"}),
    }
    panels = []
    for run, (title, names) in runs.items():
        (figure,) = report_of(pb.load_record(MITIGATED / run)).picture
        shown = {curve.name: curve for curve in figure.curves}
        strokes = {"unchanged": MEASURED, "fitted": RUNS[0]}
        curves = [replace(shown[arm], name=name, stroke=strokes[name]) for arm, name in names.items()]
        panels.append(Panel(replace(figure, title=title, curves=tuple(curves), y_label="share of right answers")))
    return panels


def attention_only() -> list[Panel]:
    """Depth piles everything on the first token; masks and encodings slow it down."""
    depths = {
        f"depth {depth}": uniform(depth=depth, mixing=1.0, n_positions=256, theory="attention_only")
        for depth in (1, 2, 4, 8, 16)
    }
    settings: dict[str, dict[str, Any]] = {
        "causal, no encoding": {},
        "sliding_window(width=32)": {"mask": "sliding_window(width=32)"},
        "alibi": {"encoding": "alibi"},
        "decay(rate=0.2)": {"encoding": "decay(rate=0.2)"},
        "prefix(length=64)": {"mask": "prefix(length=64)"},
    }
    kinds = {
        name: predicted(pb.Architecture(depth=6, heads=8, **setting), 256, "attention_only")
        for name, setting in settings.items()
    }
    return [
        Panel(stroked("Uniform causal attention, by depth", depths)),
        Panel(stroked("Six layers of attention, by mask and encoding", kinds)),
    ]


def rollout(birth: Subject) -> list[Panel]:
    """What mixing does, and how far the rollout is from a model at birth."""
    mixings = {
        f"mixing {mixing:g}": predicted(pb.Architecture(depth=32, heads=32, encoding="alibi", mixing=mixing), 256)
        for mixing in (0.03, 0.1, 0.3, 1.0)
    }
    return [
        Panel(stroked("32 layers of ALiBi: stronger residuals, more recency", mixings)),
        Panel(beside(birth, "The demo model at birth, with its measured mixing", ("rollout", "attention_only"))),
    ]


def rollout_content() -> list[Panel]:
    """What a diagonal content logit does, and the published fit of BLOOM-176B with and without its scale."""
    offsets = {
        f"content {content:+g}": predicted(
            pb.Architecture(depth=32, heads=32, encoding="alibi", mixing=0.1, content=content), 256, "rollout_content"
        )
        for content in (-4.0, 0.0, 2.0, 4.0)
    }
    model = next(model for model in published_models() if model.name == "bloom-176b")
    measured = bloom_influence()
    contents: dict[str, Any] = {
        "no content": 0.0,
        "as published": model.content_unscaled,
        "as BLOOM scales it": model.content_scaled,
    }
    variants = {
        name: pb.predict(
            pb.Architecture(
                depth=model.depth,
                heads=model.heads,
                encoding=f"alibi(slopes={list(model.slopes_published)})",
                mixing=model.mixing,
                content=content,
            ),
            model.n_positions,
            theory="rollout_content",
        ).profile
        for name, content in contents.items()
    }
    named = {with_distance(name, profile, measured): profile for name, profile in variants.items()}
    return [
        Panel(stroked("32 layers of ALiBi, mixing 0.1: attention to oneself", offsets)),
        Panel(stroked("BLOOM-176B, published influence", named, measured={"measured (probability)": measured})),
    ]


def closed_form() -> list[Panel]:
    """The exact profile at lengths no matrix reaches, and its shape by depth."""
    curves = []
    for stroke, n_positions in zip(RAMP, (10**3, 10**6, 10**9, 10**12), strict=False):
        positions = np.unique(np.geomspace(1, n_positions, 400).astype(np.int64)) - 1
        influence = pb.closed_form(n_positions=n_positions, positions=positions, mixing=[0.1] * 32)
        exponent = round(np.log10(n_positions))
        curves.append(Curve(f"N = 10^{exponent}", positions + 1.0, influence * n_positions, stroke))
    lengths = Figure(
        "lengths",
        "32 layers, mixing 0.1: every length is exact",
        "position, counted from 1",
        INFLUENCE,
        tuple(curves),
        log_range=(0.01, 1e11),
    )
    depths = {
        f"{depth} layers": uniform(depth=depth, mixing=0.2, n_positions=2048, theory="closed_form")
        for depth in (6, 12, 24, 48)
    }
    return [Panel(lengths, log_positions=True), Panel(stroked("N = 2048, mixing 0.2: an L and one spike", depths))]


def continuous() -> list[Panel]:
    """The limit beside the exact form: two ways to read it at the head, and the first token by depth."""
    n_positions = 2048
    exact = uniform(depth=12, mixing=1.0, n_positions=n_positions, theory="closed_form")
    cells = uniform(depth=12, mixing=1.0, n_positions=n_positions, theory="continuous")
    positions = np.arange(1.0, 101.0)
    midpoints = continuous_density((positions - 0.5) / n_positions, [1.0] * 12) / n_positions
    rows = {
        "exact (closed form)": exact.influence[:100],
        "limit, averaged over cells": cells.influence[:100],
        "limit, sampled at midpoints": midpoints,
    }
    head = Figure(
        "head",
        "12 layers of attention: the first 100 positions",
        "position, counted from 1",
        "influence (share)",
        tuple(
            Curve(name, positions, row, stroke)
            for (name, row), stroke in zip(rows.items(), limit_strokes(), strict=True)
        ),
        log_range=(1e-6, 2.0),
    )
    depths = np.arange(1, 31)
    first = {name: np.array([read(int(depth)) for depth in depths]) for name, read in first_token(n_positions).items()}
    by_depth = Figure(
        "first-token",
        "N = 2048: share of the first token, by depth",
        "layers of pure attention",
        "influence of the first token (share)",
        tuple(
            Curve(name, depths.astype(float), row, stroke)
            for (name, row), stroke in zip(first.items(), limit_strokes(), strict=True)
        ),
    )
    return [Panel(head, log_positions=True), Panel(by_depth)]


def first_token(n_positions: int) -> dict[str, Callable[[int], float]]:
    """The first token's share of pure attention as a function of depth, three ways."""

    def share(theory: str, depth: int) -> float:
        return float(uniform(depth=depth, mixing=1.0, n_positions=n_positions, theory=theory).influence[0])

    def midpoint(depth: int) -> float:
        return float(continuous_density(np.array([0.5 / n_positions]), [1.0] * depth)[0]) / n_positions

    return {
        "exact (closed form)": partial(share, "closed_form"),
        "limit, averaged over cells": partial(share, "continuous"),
        "limit, sampled at midpoints": midpoint,
    }


def limit_strokes() -> list[Stroke]:
    """Strokes of the exact form and of the limit's two readings."""
    return [THEORY_STROKES["closed_form"], THEORY_STROKES["continuous"], Stroke(VERMILION, "dot")]


def mean_field(birth: Subject) -> list[Panel]:
    """Profiles at birth, and what is left when the measurement is divided out."""
    measured = birth.measured["jacobian"].profile.influence
    positions = np.arange(measured.size, dtype=np.float64)
    ratios = tuple(
        Curve(label(THEORIES, name), positions, birth.theories[name].profile.influence / measured, THEORY_STROKES[name])
        for name in ("mean_field", "rollout")
    )
    one = Curve("measured", positions[[0, -1]], np.ones(2), MEASURED)
    ratio = Figure(
        "ratio",
        "The same, predicted over measured",
        "position in the context",
        "predicted / measured",
        (*ratios, one),
        log_range=(0.01, 20.0),
    )
    return [
        Panel(beside(birth, "The demo model at birth (8 initialisations)", ("mean_field", "rollout"))),
        Panel(ratio),
    ]


def power_rollout(trained: Subject, birth: Subject) -> list[Panel]:
    """Where it holds, and where it does not."""
    return [
        Panel(beside(trained, "The demo model as trained (16 prompts)", ("power_rollout",))),
        Panel(beside(birth, "The demo model at birth: not for untrained models", ("power_rollout",))),
    ]


def attention_rollout(trained: Subject, birth: Subject) -> list[Panel]:
    """Real attention in place of the architecture's changes little."""
    names = ("attention_rollout", "rollout")
    return [
        Panel(beside(trained, "The demo model as trained (16 prompts)", names)),
        Panel(beside(birth, "The demo model at birth (8 initialisations)", names)),
    ]


def audit(trained: Subject, birth: Subject) -> list[Panel]:
    """At birth beside as trained, each with the theory made for it and the published rollout, on one scale."""
    panels = [
        beside(birth, f"At birth: {first_tenth(birth)} of influence on the first tenth", ("mean_field", "rollout")),
        beside(trained, f"As trained: {first_tenth(trained)} on the first tenth", ("power_rollout", "rollout")),
    ]
    return [Panel(replace(figure, log_range=(0.02, 120.0))) for figure in panels]


def first_tenth(subject: Subject) -> str:
    """The measured share of the first tenth, in words."""
    return f"{100 * subject.summaries['jacobian']['first_tenth'].value:.0f} %"


def predicted(architecture: pb.Architecture, n_positions: int, theory: str = "rollout") -> pb.Profile:
    """A theory's profile of an architecture."""
    return pb.predict(architecture, n_positions, theory=theory).profile


def uniform(*, depth: int, mixing: float, n_positions: int, theory: str) -> pb.Profile:
    """Uniform causal attention, by any theory that knows it."""
    return predicted(pb.Architecture(depth=depth, heads=1, mixing=mixing), n_positions, theory)


def stroked(
    title: str, profiles: Mapping[str, pb.Profile], *, measured: Mapping[str, pb.Profile] | None = None
) -> Figure:
    """Profiles of one theory under several settings."""
    theories = [profile.curve(name, stroke) for (name, profile), stroke in zip(profiles.items(), RAMP, strict=False)]
    measurements = [profile.curve(name) for name, profile in (measured or {}).items()]
    return profile_figure("panel", title, theories, measured=measurements)


def beside(subject: Subject, title: str, names: Sequence[str]) -> Figure:
    """The measured Jacobian profile of a subject with some of its theories, each with its distance."""
    measured = subject.measured["jacobian"].profile
    theories = []
    for name in names:
        profile = subject.theories[name].profile
        legend = with_distance(label(THEORIES, name), profile, measured)
        theories.append(pb.Profile(profile.influence).curve(legend, THEORY_STROKES[name]))
    figure = profile_figure("panel", title, theories, measured=[measured.curve("measured (Jacobian)")])
    flat = pb.compare(pb.Profile.uniform(measured.n_positions), measured).wasserstein
    curves = (*figure.curves[:-1], replace(figure.curves[-1], name=f"flat line, W1 {flat:.3f}"))
    return replace(figure, curves=curves)


def with_distance(name: str, profile: pb.Profile, measured: pb.Profile) -> str:
    """The legend's entry: what it is and how far from the measurement."""
    return f"{name}, W1 {pb.compare(profile, measured).wasserstein:.3f}"


def trained_models(study: pb.Record) -> Canvas:
    """The shortest length of the study, a row per text, a column per model: the measured Jacobian and two theories."""
    curves = {
        "measured": ("norms/jacobian", "black"),
        "power rollout": (f"theory/{study.scalars['chosen_form']}", VERMILION),
        "published rollout": ("theory/published", SKY),
    }
    return of_study(study, curves, between=(0.03, 250))


def shared_direction(study: pb.Record) -> Canvas:
    """The same with the form that has a shared direction, near the flat line."""
    curves = {
        "measured": ("norms/jacobian", "black"),
        "power rollout": (f"theory/{study.scalars['chosen_form']}", VERMILION),
        "with a shared direction": ("theory/shared/jacobian", GREEN),
    }
    return of_study(study, curves, between=(0.3, 30))


def of_study(study: pb.Record, curves: Mapping[str, tuple[str, str]], *, between: tuple[float, float]) -> Canvas:
    """Profiles by name (the array's name within a cell, colour): texts by models that have all of them."""
    names = [tuple(name.split("/")[:3]) for name in study.arrays if name.endswith("norms/jacobian")]
    shortest = min(int(n_positions) for _, n_positions, _ in names)
    found, texts = (sorted({name[part] for name in names}) for part in (0, 2))
    every = [
        {path.split("/")[0] for path in study.arrays if path.endswith(f"/{array}")} for array, _ in curves.values()
    ]
    models = [model for model in found if all(model in those for those in every)]
    canvas = Canvas(figsize=(11.0, 7.0), dpi=100, layout="constrained")
    FigureCanvasAgg(canvas)
    grid = canvas.subplots(len(texts), len(models), sharex=True, sharey=True, squeeze=False)
    for row, text in zip(grid, texts, strict=True):
        for axes, model in zip(row, models, strict=True):
            for name, (array, colour) in curves.items():
                profile = study.arrays[f"{model}/{shortest}/{text}/{array}"]
                axes.plot(profile * shortest, color=colour, label=name, linewidth=1.1)
            axes.axhline(1, color="grey", linestyle=":", label="flat line")
            axes.set_yscale("log")
            axes.set_ylim(*between)
            axes.set_title(f"{model}, {text}", loc="left", fontsize=9)
    grid[0][0].legend(frameon=False, fontsize=8)
    canvas.supxlabel("position")
    canvas.supylabel(INFLUENCE)
    return canvas


def stored(run: str, titles: Mapping[str, str]) -> list[Panel]:
    """Figures of a reproduced experiment by slug, from its record, under shorter titles."""
    figures = {figure.slug: figure for figure in pb.load_record(EXPERIMENTS / run).figures}
    return [Panel(replace(figures[f"{run}-{slug}"], title=title)) for slug, title in titles.items()]


def closing_loop() -> Canvas:
    """Influence before the first step against what was learnt there, a dot per architecture and place, over seeds."""
    canvas = Canvas(figsize=(11.0, 5.2), dpi=150, layout="constrained")
    FigureCanvasAgg(canvas)
    panels = {
        "position-copy": (
            "a low final loss",
            "Position copy, a network per target",
            "minus the final loss over ln V",
        ),
        "icl": ("high final accuracy", "In-context retrieval, eight places", "accuracy minus the architecture's mean"),
    }
    for axes, (run, (outcome, title, scale)) in zip(canvas.subplots(1, 2), panels.items(), strict=True):
        arrays = pb.load_record(EXPERIMENTS / run).arrays
        names = [name.split("/", 1)[1].rsplit("/", 1)[0] for name in arrays if name.endswith(f"/{outcome}")]
        families = {name: name.partition("(")[0] if "(" in name else ", ".join(name.split(", ")[:2]) for name in names}
        strokes = dict(zip(dict.fromkeys(families.values()), (*RUNS[:6], MEASURED), strict=False))
        for name, family in families.items():
            influence = arrays[f"loop/{name}/jacobian/initial"].mean(axis=0)
            learnt = arrays[f"loop/{name}/{outcome}"].mean(axis=0)
            shown = learnt / np.log(10) if run == "position-copy" else learnt - learnt.mean()
            legend = family if name == next(first for first in names if families[first] == family) else None
            axes.scatter(influence, shown, s=20, color=strokes[family].colour, label=legend)
        axes.set_xscale("log")
        axes.set_title(title, loc="left", fontsize=11.5, fontweight="bold")
        axes.set_xlabel("influence on the last position at initialisation (Jacobian)")
        axes.set_ylabel(scale)
        axes.grid(color=GRID, linewidth=0.8)
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(loc="upper left", bbox_to_anchor=(0, -0.14), ncols=2, frameon=False, fontsize=8)
    return canvas


def png(picture: Sequence[Panel] | Canvas) -> bytes:
    """A picture, or panels side by side in the report's style, legible at half its width; a PNG with fewer colours."""
    if isinstance(picture, Canvas):
        canvas = picture
    else:
        canvas = Canvas(figsize=(11.0, 5.2), dpi=150, layout="constrained")
        FigureCanvasAgg(canvas)
        for axes, panel in zip(canvas.subplots(1, len(picture), squeeze=False)[0], picture, strict=True):
            draw(axes, panel)
    buffer = io.BytesIO()
    canvas.savefig(buffer, format="png", metadata={"Software": None})
    reduced = io.BytesIO()
    few = Image.open(buffer).convert("RGB").quantize(COLOURS, dither=Image.Dither.NONE)
    few.save(reduced, format="png", optimize=True)
    return reduced.getvalue()


def draw(axes: Axes, panel: Panel) -> None:
    """One panel with its title above and its legend below."""
    figure = panel.figure
    for curve in figure.curves:
        draw_curve(axes, curve)
    axes.set_title(figure.title, loc="left", fontsize=11.5, fontweight="bold")
    axes.set_xlabel(figure.x_label)
    axes.set_ylabel(figure.y_label)
    axes.grid(color=GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.margins(x=0.01)
    if panel.log_positions:
        axes.set_xscale("log")
    if figure.log_range is None:
        if min(float(curve.y.min()) for curve in figure.curves) >= 0:
            axes.set_ylim(bottom=0)
    else:
        axes.set_yscale("log")
        axes.set_ylim(figure.log_range)
        if figure.log_range[1] / figure.log_range[0] < 1e6:
            axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axes.yaxis.set_minor_formatter(NullFormatter())
    columns = 2 if max(len(curve.name) for curve in figure.curves) <= COLUMN_CHARACTERS else 1
    axes.legend(loc="upper left", bbox_to_anchor=(0, -0.14), ncols=columns, frameon=False, handlelength=3.2)


def draw_curve(axes: Axes, curve: Curve) -> None:
    """A line and its interval, if it has one."""
    if curve.low is not None and curve.high is not None:
        axes.fill_between(curve.x, curve.low, curve.high, color=curve.stroke.colour, alpha=0.16, linewidth=0)
    axes.plot(
        curve.x,
        curve.y,
        label=curve.name,
        color=curve.stroke.colour,
        linestyle=DASHES[curve.stroke.dash],
        zorder=3 if curve.stroke == MEASURED else 2,
        linewidth=1.2 if curve.stroke == MEASURED else 1.4 if curve.stroke == FLAT else 2.2,
    )


if __name__ == "__main__":
    main()
