"""Statements of Wu et al. on depth, encodings, training data and sinks, each with its test on trained members.

A gap is accuracy where place a holds the right label and place b a copy of its item, minus the same with the labels'
roles exchanged: positive means a bias towards the earlier place.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Float64

from posbias_papers.findings import (
    IN_PART,
    NOT_REPRODUCED,
    REPRODUCED,
    UNDECIDED,
    Difference,
    Finding,
    Outcomes,
    Tests,
    difference,
    weighed,
)

GAPS = ("first vs middle", "first vs last", "middle vs last")
FIRST_MIDDLE, FIRST_LAST, MIDDLE_LAST = range(3)
PLAIN: dict[str, Any] = {
    "mask": "causal",
    "encoding": "none",
    "depth": 2,
    "residual": False,
    "answers": "any",
    "items": "mixture",
}
"""What a cell is unless it says otherwise."""
ENCODINGS = {"none": "none", "decay": "decay", "rope": "RoPE", "sinusoidal": "sin"}
"""Encodings as figures name them."""

PerSeed = Float64[np.ndarray, "n_seeds"]
PerSeedGaps = Float64[np.ndarray, "n_seeds 3"]
Cell = Mapping[str, Any]
"""Factors in which a cell differs from `PLAIN`."""


@dataclass(frozen=True, eq=False)
class Cells:
    """The outcomes of one variant of the task (mixture or fixed vocabulary)."""

    outcomes: Outcomes
    base: Mapping[str, Any]
    """Factors that all its cells share, over those of `PLAIN`."""

    def factors(self, **changed: Any) -> dict[str, Any]:
        """All factors of a cell."""
        return {**PLAIN, **self.base, **changed}

    def has(self, *cells: Cell) -> bool:
        """True if all these cells have finished members of common seeds."""
        return bool(self.outcomes.common_seeds(*(self.factors(**cell) for cell in cells)))

    def values(self, name: str, *cells: Cell) -> list[Float64[np.ndarray, "n_seeds ..."]]:
        """An array of every cell over their common seeds."""
        chosen = [self.factors(**cell) for cell in cells]
        seeds = self.outcomes.common_seeds(*chosen)
        return [self.outcomes.values(name, cell, seeds) for cell in chosen]

    def gaps(self, *cells: Cell) -> list[PerSeedGaps]:
        """The three gaps of every cell over their common seeds."""
        return self.values("gaps", *cells)

    def depths(self, **changed: Any) -> list[int]:
        """Depths that were trained for a cell, in order."""
        factors = self.factors(**changed)
        del factors["depth"]
        return sorted(
            depth for depth in self.outcomes.levels("depth", **factors) if self.has({**changed, "depth": depth})
        )


def slope(rows: Sequence[PerSeed], at: Sequence[int]) -> Difference:
    """Least-squares slope per unit of `at`, seed by seed."""
    centred = np.asarray(at, dtype=np.float64) - np.mean(at)
    return difference(centred @ np.stack(rows) / np.sum(centred**2))


class Figures:
    """Numbers of the source's figures for a variant of the task."""

    def __init__(self, items: str) -> None:
        mixture = items == "mixture"
        self.fixed = not mixture
        self.depth = "Figures 2 and 4" if mixture else "Figure 9"
        self.residual = "Figures 2 and 5" if mixture else "Figure 10"
        self.ends = "Figure 3" if mixture else "Figure 11a"
        self.places = "Figure 6" if mixture else "Figures 11b-d"
        self.sinks = "Figure 8" if mixture else "Figure 13"


RELATIVE = ("none", "decay", "rope")
"""Encodings of the study of depth."""
ABSOLUTE = ("sinusoidal", "rope")
"""Encodings that, by the source, can place a bias anywhere."""
ENDS = "first_and_last"
NAMED = ("first", "middle", "last")
ABOVE = 0.1
"""Gap in accuracy from which an end counts as above the middle; training on both ends gives .1 to .3."""
SINK_WINDOWS = (5, 9, 13)
SINK_PREFIXES = {length: {"mask": f"prefix(length={length})"} for length in (2, 4, 6)}


def retrieval_findings(cells: Cells, figures: Figures) -> list[Finding]:
    """Every statement, for one variant of the task.

    Args:
        cells: The members of that variant.
        figures: The source's figures for it.
    """
    deep_rope = [] if figures.fixed else [_deep_rope_u(cells, figures)]
    return [
        *_on_depth(cells, figures),
        _residual(cells, figures),
        *deep_rope,
        *_trained_on_both_ends(cells, figures),
        *_trained_on_one_place(cells, figures),
    ]


def _slopes(cells: Cells, *, residual: bool = False) -> dict[str, Difference]:
    """Change of the gap first vs last per layer, by encoding."""
    slopes = {}
    for encoding in RELATIVE:
        depths = cells.depths(encoding=encoding, residual=residual)
        if len(depths) > 1:
            rows = cells.gaps(*({"encoding": encoding, "residual": residual, "depth": depth} for depth in depths))
            slopes[ENCODINGS[encoding]] = slope([row[:, FIRST_LAST] for row in rows], depths)
    return slopes


def _less(cells: Cells, more: str, less: str) -> dict[int, Difference]:
    """Gap first vs last of one encoding minus that of another, seed by seed, by depth."""
    by_depth = {}
    for depth in cells.depths(encoding=less):
        pair: tuple[Cell, Cell] = ({"encoding": more, "depth": depth}, {"encoding": less, "depth": depth})
        if cells.has(*pair):
            first, second = cells.gaps(*pair)
            by_depth[depth] = difference(first[:, FIRST_LAST] - second[:, FIRST_LAST])
    return by_depth


def _each(cells: Cells, named: Mapping[str, Cell], quantity: Callable[[PerSeedGaps], PerSeed]) -> dict[str, Difference]:
    """A quantity of the gaps of every cell that was trained."""
    return {name: difference(quantity(cells.gaps(cell)[0])) for name, cell in named.items() if cells.has(cell)}


def _ends(cells: Cells, named: Mapping[str, Cell]) -> dict[str, Difference]:
    """A U: first above middle, last above middle."""
    tests: dict[str, Difference] = {}
    for name, cell in named.items():
        tests |= _each(cells, {f"{name}: first vs middle": cell}, lambda gaps: gaps[:, FIRST_MIDDLE])
        tests |= _each(cells, {f"{name}: last vs middle": cell}, lambda gaps: -gaps[:, MIDDLE_LAST])
    return tests


def _biased(answers: str, mask: str, encoding: str) -> Cell:
    """A cell of the studies of biased data: two layers with residual connections."""
    return {"answers": answers, "mask": mask, "encoding": encoding, "residual": True}


def _on_depth(cells: Cells, figures: Figures) -> list[Finding]:
    """Depth amplifies, the end gap is small, encodings reduce primacy, and decay does so more than RoPE."""

    def smaller(signed: PerSeedGaps) -> PerSeed:
        gaps = np.abs(signed)
        return np.asarray((gaps[:, FIRST_MIDDLE] + gaps[:, FIRST_LAST]) / 2 - gaps[:, MIDDLE_LAST])

    deepest = {
        f"{ENCODINGS[encoding]}, {depth} layers": {"encoding": encoding, "depth": depth}
        for encoding in RELATIVE
        for depth in cells.depths(encoding=encoding)[-1:]
    }
    reduced = {
        f"{ENCODINGS[encoding]}, {depth} layers": test
        for encoding in ("decay", "rope")
        for depth, test in _less(cells, "none", encoding).items()
    }
    stronger = {f"{depth} layers": test for depth, test in _less(cells, "rope", "decay").items()}
    return [
        weighed(
            figures.depth,
            "without residual connections more layers mean more bias to the first place, whatever the encoding.",
            _slopes(cells),
            quantity="Change of the gap first vs last per layer:",
        ),
        weighed(
            figures.depth,
            "the gap between middle and last is notably smaller than those with the first place.",
            _each(cells, deepest, smaller),
            quantity="Mean size of the gaps with the first place minus it:",
        ),
        weighed(
            figures.depth,
            "decay and RoPE reduce the bias to the first place that the causal mask brings.",
            reduced,
            quantity="Gap first vs last without encoding minus with it:",
        ),
        weighed(
            figures.depth,
            "decay does so more than RoPE.",
            stronger,
            quantity="Gap first vs last with RoPE minus with decay:",
        ),
    ]


def _residual(cells: Cells, figures: Figures) -> Finding:
    """Mixture: not monotone in depth for some encoding; fixed vocabulary: depth amplifies."""
    if figures.fixed:
        return weighed(
            figures.residual,
            "even with residual connections more layers mean more bias to the first place.",
            _slopes(cells, residual=True),
            quantity="Change of the gap first vs last per layer:",
        )
    steps = {}
    for encoding in RELATIVE:
        depths = cells.depths(encoding=encoding, residual=True)
        rows = cells.gaps(*({"encoding": encoding, "depth": depth, "residual": True} for depth in depths))
        for before, after, low, high in zip(rows, rows[1:], depths, depths[1:], strict=False):
            name = f"{ENCODINGS[encoding]}, {low} to {high} layers"
            steps[name] = difference(after[:, FIRST_LAST] - before[:, FIRST_LAST])
    return weighed(
        figures.residual,
        "with residual connections the effect of depth is not monotone and depends on the encoding.",
        steps,
        quantity="Change of the gap first vs last:",
        rule=_not_monotone,
    )


def _not_monotone(steps: Tests) -> str:
    """Verdict on depth: reproduced if it raises and lowers the gap for one encoding, in part if for different ones.

    Some step is claimed to have a sign, not every: all steps hold together.
    """
    signs: dict[str, set[str]] = {}
    for name, step in steps.items():
        signs.setdefault(name.partition(",")[0], set()).add(step.supports(quantities=len(steps)))
    up_and_down = {REPRODUCED, NOT_REPRODUCED}
    if any(up_and_down <= supported for supported in signs.values()):
        return REPRODUCED
    if up_and_down <= set().union(*signs.values()):
        return IN_PART
    several = len(steps) > len(signs)
    return NOT_REPRODUCED if several and UNDECIDED not in set().union(*signs.values()) else UNDECIDED


def _deep_rope_u(cells: Cells, figures: Figures) -> Finding:
    depths = cells.depths(encoding="rope", residual=True)[-1:]
    tests = _ends(
        cells, {f"{depth} layers": {"encoding": "rope", "depth": depth, "residual": True} for depth in depths}
    )
    return weighed(
        figures.residual,
        "deep RoPE with residual connections is lost in the middle without any bias in the data.",
        tests,
    )


def _trained_on_both_ends(cells: Cells, figures: Figures) -> list[Finding]:
    """The mask alone favours the first place and misses the last; sin and RoPE capture both ends."""
    causal, full = _biased(ENDS, "causal", "none"), _biased(ENDS, "full", "none")
    favoured = {}
    if cells.has(causal, full):
        masked, unmasked = (gaps[:, FIRST_LAST] for gaps in cells.gaps(causal, full))
        favoured = {"causal": difference(masked), "causal minus no mask": difference(masked - unmasked)}
    missed = _each(cells, {"first vs middle": causal}, lambda gaps: gaps[:, FIRST_MIDDLE])
    missed |= _each(cells, {"middle vs last": causal}, lambda gaps: gaps[:, MIDDLE_LAST])
    either = {
        f"{ENCODINGS[encoding]}, {mask}": _biased(ENDS, mask, encoding)
        for mask in ("full", "causal")
        for encoding in ABSOLUTE
    }
    under_mask = {ENCODINGS[encoding]: _biased(ENDS, "causal", encoding) for encoding in ABSOLUTE}
    return [
        weighed(
            figures.ends,
            "trained on first and last, the causal mask without encoding favours the first place, no mask does not.",
            favoured,
            quantity="Gap first vs last:",
        ),
        weighed(
            figures.ends,
            "the causal mask without encoding captures the bias at the first place and not at the last.",
            missed,
        ),
        weighed(
            figures.ends,
            "sin and RoPE capture both ends under either mask: lost in the middle.",
            _ends(cells, either),
        ),
        weighed(
            figures.ends,
            "and the first place does slightly better than the last.",
            _each(cells, under_mask, lambda gaps: gaps[:, FIRST_LAST]),
            quantity="Gap first vs last, causal:",
        ),
    ]


def _by_trained_place(
    cells: Cells, quantities: Mapping[str, Callable[[PerSeedGaps], PerSeed]]
) -> dict[str, Difference]:
    """A quantity of its own for each trained place, with sin and RoPE."""
    tests: dict[str, Difference] = {}
    for answers in NAMED:
        named = {f"{ENCODINGS[encoding]}, {answers}": _biased(answers, "causal", encoding) for encoding in ABSOLUTE}
        tests |= _each(cells, named, quantities[answers])
    return tests


def _trained_on_one_place(cells: Cells, figures: Figures) -> list[Finding]:
    """The mask alone favours the beginning anyway; sin and RoPE the trained place; a U comes from both ends only.

    A U needs the end that was not trained above the middle; the lower of both ends would be low by noise alone.
    """
    alone = {f"trained on {answers}": _biased(answers, "causal", "none") for answers in NAMED}
    above_others: dict[str, Callable[[PerSeedGaps], PerSeed]] = {
        "first": lambda gaps: (gaps[:, FIRST_MIDDLE] + gaps[:, FIRST_LAST]) / 2,
        "middle": lambda gaps: (gaps[:, MIDDLE_LAST] - gaps[:, FIRST_MIDDLE]) / 2,
        "last": lambda gaps: (-gaps[:, FIRST_LAST] - gaps[:, MIDDLE_LAST]) / 2,
    }
    no_u: dict[str, Callable[[PerSeedGaps], PerSeed]] = {
        "first": lambda gaps: ABOVE + gaps[:, MIDDLE_LAST],
        "middle": lambda gaps: ABOVE - (gaps[:, FIRST_MIDDLE] - gaps[:, MIDDLE_LAST]) / 2,
        "last": lambda gaps: ABOVE - gaps[:, FIRST_MIDDLE],
    }
    return [
        weighed(
            figures.places,
            "the causal mask without encoding favours the beginning wherever the answers stood in training.",
            _each(cells, alone, lambda gaps: gaps[:, FIRST_LAST]),
            quantity="Gap first vs last:",
        ),
        weighed(
            figures.places,
            "sin and RoPE let the model favour the trained place, wherever it is.",
            _by_trained_place(cells, above_others),
            quantity="Mean gap of the trained place against the two others:",
        ),
        weighed(
            figures.places,
            "no lost-in-the-middle from data biased to one place only.",
            _by_trained_place(cells, no_u),
            quantity="Gap of the end that was not trained (trained on middle: of both) against the middle, below "
            f"{ABOVE} by:",
        ),
    ]


def sink_findings(cells: Cells, figures: Figures) -> list[Finding]:
    """Every statement on sinks, for one variant of the task. Arguments as `retrieval_findings`."""
    first, growing = {}, {}
    if cells.has({}):
        first["causal"] = difference(_lead(cells.values("sinks", {})[0], 1))
    windows: list[Cell] = [{"mask": f"sliding_window(width={width})"} for width in SINK_WINDOWS]
    if cells.has(*windows):
        rows = [_lead(values, 1) for values in cells.values("sinks", *windows)]
        growing["per token of window"] = slope(rows, SINK_WINDOWS)
    prefixes = {
        f"K = {length}": difference(_lead(cells.values("sinks", cell)[0], length))
        for length, cell in SINK_PREFIXES.items()
        if cells.has(cell)
    }
    return [
        weighed(
            figures.sinks,
            "under the causal mask the attention sink is the first token.",
            first,
            quantity="Sink score of the first token minus the largest other:",
        ),
        weighed(
            figures.sinks,
            "the larger the window, the more the first token is the sink.",
            growing,
            quantity="Change of its lead over the largest other score:",
        ),
        weighed(
            figures.sinks,
            "under a prefix mask all K prefix tokens are sinks, not the first alone.",
            prefixes,
            quantity="Least sink score of the prefix minus the largest other:",
        ),
    ]


def _lead(sinks: np.ndarray, count: int) -> np.ndarray:
    """Least score of the first `count` tokens minus the largest of the others."""
    return np.asarray(sinks[:, :count].min(axis=1) - sinks[:, count:].max(axis=1))
