"""Tables of what a measurement says about itself: what half precision cost, what experiments found, how it forms."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from posbias.comparison import STATISTICS
from posbias.comparison.metrics import METRICS
from posbias.profiles import uniform_profile
from posbias.report.wording import FOUND, KINDS, SUBJECTS, label

if TYPE_CHECKING:
    from posbias.report.layout import RunView

Cells = tuple[list[str], list[list[str]]]
SHARES = ("first_tenth", "middle_tenth", "last_tenth", "first_token", "last_token")
SHOWN_LAYERS = 7
"""Layers of a depth table or figure: first, last, and evenly between."""


def precision_cells(views: Sequence["RunView"]) -> Cells:
    """Per kind, the profile in the model's precision against that of a float32 copy with the same random draws."""
    header = ["model", "measured", "W1 to float32", "median change", "largest change", "prompts checked"]
    cells = []
    for view in views:
        for kind, loss in view.precision.items():
            row = [view.title, label(KINDS, kind)]
            row += [_range(loss[name], style) for name, style in _LOSSES.items()]
            cells.append([*row, str(len(loss["wasserstein"]))])
    return header, cells


def detail_cells(views: Sequence["RunView"]) -> Cells:
    """What kinds with passes of their own found on the prompts, the mean and the range over prompts."""
    header = ["model", "measured", "found", "mean", "smallest", "largest"]
    cells = []
    for view in views:
        for kind, found in view.details.items():
            for name, values in found.items():
                numbers = np.asarray(values, dtype=np.float64)
                texts = [f"{value:.4g}" for value in (numbers.mean(), numbers.min(), numbers.max())]
                cells.append([view.title, label(KINDS, kind), name.replace("_", " "), *texts])
    return header, cells


def found_cells(views: Sequence["RunView"]) -> Cells:
    """What theories found beside their profiles, with intervals where they have them."""
    header = ["prediction", "found", "value [95 %]"]
    cells = []
    for view in views:
        for name, stored in view.found.items():
            value, low, high = (stored[part] for part in ("value", "low", "high"))
            ends = "" if low is None or high is None else f" [{low:.3f}, {high:.3f}]"
            cells.append([view.title, label(FOUND, name), "–" if value is None else f"{value:.3f}{ends}"])
    return header, cells


def depth_cells(views: Sequence["RunView"]) -> Cells:
    """Shares of the influence on the stream after some layers, and how far that profile is from the final one's."""
    header = ["model", "after layer", "first tenth", "middle tenth", "last tenth", "first position", "last position"]
    header += ["W1 to flat", "W1 to last layer"]
    distance = METRICS["wasserstein"]
    cells = []
    for view in views:
        for subject in view.subjects:
            if subject.depth is None:
                continue
            name = f"{view.title} {label(SUBJECTS, subject.name)}" if subject.name in SUBJECTS else view.title
            flat, last = uniform_profile(subject.depth.influence.shape[1]).influence, subject.depth.influence[-1]
            for row in shown_rows(len(subject.depth.layers)):
                profile = subject.depth.influence[row]
                shares = [f"{100 * float(STATISTICS[share](profile)):.1f} %" for share in SHARES]
                distances = [f"{float(distance(profile, other)):.3f}" for other in (flat, last)]
                cells.append([name, str(int(subject.depth.layers[row])), *shares, *distances])
    return header, cells


def shown_rows(count: int) -> list[int]:
    """Which of `count` layers are shown: first, last, and evenly between."""
    return sorted({int(row) for row in np.linspace(0, count - 1, min(count, SHOWN_LAYERS)).round()})


_LOSSES = {"wasserstein": ".4f", "median_relative": ".2%", "largest_relative": ".2%"}


def _range(values: Sequence[float | None], style: str) -> str:
    """One number, or the smallest and largest of several; a dash for an infinite one."""
    texts = ["–" if value is None else format(value, style) for value in values]
    if len(texts) == 1:
        return texts[0]
    finite = [value for value in values if value is not None]
    return f"{format(min(finite), style)} to {format(max(finite), style)}" if finite else "–"
