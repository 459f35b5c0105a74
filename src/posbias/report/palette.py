"""One look for every figure: colour-blind safe colours (Okabe and Ito), and a dash per theory for print.

Measurements are black, the flat line grey, each theory keeps its colour and dash in every figure of every report.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Int64

from posbias.errors import UsageError

INK = "#1a1a1a"
FAINT = "#8a8a8a"
GRID = "#e6e6e6"
BLUE, ORANGE, GREEN, VERMILION, PURPLE, SKY, YELLOW = (
    "#0072B2",
    "#E69F00",
    "#009E73",
    "#D55E00",
    "#CC79A7",
    "#56B4E9",
    "#B8A800",
)
DRAWN_POSITIONS = 4096
"""Positions drawn of a longer profile: more than a screen has pixels, dense at both ends."""


@dataclass(frozen=True)
class Stroke:
    """How a curve is drawn."""

    colour: str
    dash: str
    """As plotly spells it: "solid", "dash", "dot", "dashdot", "longdash"."""


MEASURED = Stroke(INK, "solid")
FLAT = Stroke(FAINT, "dot")

_THEORIES = {
    "power_rollout": Stroke(BLUE, "solid"),
    "rollout": Stroke(VERMILION, "dash"),
    "attention_only": Stroke(ORANGE, "dashdot"),
    "attention_rollout": Stroke(PURPLE, "longdash"),
    "rollout_content": Stroke(YELLOW, "dash"),
    "closed_form": Stroke(GREEN, "dash"),
    "continuous": Stroke(SKY, "dashdot"),
    "mean_field": Stroke(GREEN, "solid"),
    "shared_direction": Stroke(SKY, "solid"),
}
_OTHERS = tuple(
    Stroke(colour, dash) for dash in ("dot", "longdashdot") for colour in (GREEN, PURPLE, SKY, YELLOW, BLUE)
)
RUNS = tuple(
    Stroke(colour, dash)
    for dash in ("solid", "dash", "dot")
    for colour in (BLUE, VERMILION, GREEN, ORANGE, PURPLE, SKY)
)
"""Strokes of runs that are drawn side by side, in order."""


def ramp(count: int) -> list[Stroke]:
    """Strokes of an ordered sequence, from pale to dark."""
    pale, dark = np.array([170, 205, 235]), np.array([10, 30, 80])
    shades = [pale + (dark - pale) * step / max(count - 1, 1) for step in range(count)]
    return [Stroke("#" + "".join(f"{round(float(part)):02x}" for part in shade), "solid") for shade in shades]


def theory_strokes(names: Sequence[str]) -> dict[str, Stroke]:
    """A stroke for every theory; those without one of their own get what is left, in order."""
    strokes: dict[str, Stroke] = {}
    spare = 0
    for name in names:
        if name in _THEORIES:
            strokes[name] = _THEORIES[name]
        else:
            strokes[name] = _OTHERS[spare % len(_OTHERS)]
            spare += 1
    return strokes


def drawn_positions(n_positions: int) -> Int64[np.ndarray, "n_drawn"]:
    """The positions of a long profile that are drawn: all up to a limit, then evenly plus densely at both ends."""
    if n_positions < 1:
        raise UsageError(f"a profile needs at least 1 position, got {n_positions}")
    if n_positions <= DRAWN_POSITIONS:
        return np.arange(n_positions)
    even = np.linspace(0, n_positions - 1, DRAWN_POSITIONS // 2)
    from_end = np.geomspace(1, n_positions, DRAWN_POSITIONS // 4) - 1
    return np.unique(np.concatenate([even, from_end, n_positions - 1 - from_end]).astype(np.int64))


def clear_title(text: str, width: int = 96) -> list[str]:
    """A title broken into lines of at most `width` characters, at spaces."""
    lines = [""]
    for word in text.split():
        if lines[-1] and len(lines[-1]) + 1 + len(word) > width:
            lines.append(word)
        else:
            lines[-1] = f"{lines[-1]} {word}".strip()
    return lines
