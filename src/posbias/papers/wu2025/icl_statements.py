"""What Wu et al. report of depth, encodings, training data and sinks, each statement with its test on trained members.

A gap is accuracy where place a holds the right label and place b a copy of its item, minus the same with the labels'
roles exchanged: positive means a bias towards the earlier place. Whether the published code's flags explain a
difference (standard deviation 1/d, `--not_res` inverted, decay lost) is answered by running both readings: the paper's
and what the code does.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Float64

from posbias.papers.findings import (
    IN_PART,
    NOT_REPRODUCED,
    REPRODUCED,
    UNDECIDED,
    Difference,
    Finding,
    Outcomes,
    Tests,
    difference,
    judged,
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
    "scale": "variance",
}
"""What a cell is unless it says otherwise."""
ENCODINGS = {"none": "none", "decay": "decay", "rope": "RoPE", "sinusoidal": "sin"}
"""Encodings as figures name them."""

PerSeedGaps = Float64[np.ndarray, "n_seeds 3"]


@dataclass(frozen=True, eq=False)
class Cells:
    """The outcomes of one variant of the task (mixture or fixed vocabulary, one scale)."""

    outcomes: Outcomes
    base: Mapping[str, Any]
    """Factors that all its cells share, over those of `PLAIN`."""
    design: str = "gaps"
    """`gaps`: the source's evaluation sets; `unconfounded`: the right label stands nowhere else in the context."""

    def factors(self, **changed: Any) -> dict[str, Any]:
        """All factors of a cell."""
        return {**PLAIN, **self.base, **changed}

    def has(self, *cells: Mapping[str, Any]) -> bool:
        """Whether all these cells have finished members of common seeds."""
        return bool(self.outcomes.common_seeds(*(self.factors(**cell) for cell in cells)))

    def values(self, name: str, *cells: Mapping[str, Any]) -> list[Float64[np.ndarray, "n_seeds ..."]]:
        """An array of every cell over their common seeds."""
        chosen = [self.factors(**cell) for cell in cells]
        seeds = self.outcomes.common_seeds(*chosen)
        return [self.outcomes.values(name, cell, seeds) for cell in chosen]

    def gaps(self, *cells: Mapping[str, Any]) -> list[PerSeedGaps]:
        """The three gaps of every cell over their common seeds."""
        return self.values(self.design, *cells)

    def depths(self, **changed: Any) -> list[int]:
        """Depths that were trained for a cell, in order."""
        factors = self.factors(**changed)
        del factors["depth"]
        return sorted(
            depth for depth in self.outcomes.levels("depth", **factors) if self.has({**changed, "depth": depth})
        )


def slope(rows: Sequence[Float64[np.ndarray, "n_seeds"]], at: Sequence[int]) -> Difference:
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


def retrieval_findings(cells: Cells, figures: Figures) -> list[Finding]:
    """Every statement, for one variant of the task.

    Args:
        cells: The members of that variant.
        figures: What the source calls its figures for it.
    """
    statements: tuple[Callable[[Cells, Figures], Finding], ...] = (
        _depth_amplifies,
        _end_gap_is_small,
        _encodings_reduce_primacy,
        _decay_is_stronger,
        _residual,
        _deep_rope_u,
        _mask_alone_favours_first,
        _mask_alone_misses_last,
        _both_ends,
        _first_above_last,
        _mask_alone_everywhere,
        _trained_place,
        _u_only_from_ends,
    )
    reported = [each for each in statements if not (figures.fixed and each is _deep_rope_u)]
    return [statement(cells, figures) for statement in reported]


def _depth_amplifies(cells: Cells, figures: Figures) -> Finding:
    tests = {}
    for encoding in RELATIVE:
        depths = cells.depths(encoding=encoding)
        if len(depths) > 1:
            rows = cells.gaps(*({"encoding": encoding, "depth": depth} for depth in depths))
            tests[ENCODINGS[encoding]] = slope([row[:, FIRST_LAST] for row in rows], depths)
    reported = "without residual connections more layers mean more bias to the first place, whatever the encoding."
    return weighed(figures.depth, reported, tests, found="Change of the gap first vs last per layer:")


def _end_gap_is_small(cells: Cells, figures: Figures) -> Finding:
    tests = {}
    for encoding in RELATIVE:
        depths = cells.depths(encoding=encoding)
        if depths:
            gaps = np.abs(cells.gaps({"encoding": encoding, "depth": depths[-1]})[0])
            smaller = (gaps[:, FIRST_MIDDLE] + gaps[:, FIRST_LAST]) / 2 - gaps[:, MIDDLE_LAST]
            tests[f"{ENCODINGS[encoding]}, {depths[-1]} layers"] = difference(smaller)
    reported = "the gap between middle and last is notably smaller than those with the first place."
    return weighed(figures.depth, reported, tests, found="Mean size of the gaps with the first place minus it:")


def _encodings_reduce_primacy(cells: Cells, figures: Figures) -> Finding:
    tests = {
        f"{ENCODINGS[encoding]}, {depth} layers": _less(cells, "none", encoding, depth)
        for encoding in ("decay", "rope")
        for depth in cells.depths(encoding=encoding)
        if cells.has({"encoding": "none", "depth": depth}, {"encoding": encoding, "depth": depth})
    }
    reported = "decay and RoPE reduce the bias to the first place that the causal mask brings."
    return weighed(figures.depth, reported, tests, found="Gap first vs last without encoding minus with it:")


def _decay_is_stronger(cells: Cells, figures: Figures) -> Finding:
    tests = {
        f"{depth} layers": _less(cells, "rope", "decay", depth)
        for depth in cells.depths(encoding="decay")
        if cells.has({"encoding": "rope", "depth": depth}, {"encoding": "decay", "depth": depth})
    }
    reported = "decay does so more than RoPE."
    return weighed(figures.depth, reported, tests, found="Gap first vs last with RoPE minus with decay:")


def _less(cells: Cells, more: str, less: str, depth: int) -> Difference:
    """Gap first vs last of one encoding minus that of another, seed by seed."""
    first, second = cells.gaps({"encoding": more, "depth": depth}, {"encoding": less, "depth": depth})
    return difference(first[:, FIRST_LAST] - second[:, FIRST_LAST])


def _residual(cells: Cells, figures: Figures) -> Finding:
    """Mixture: not monotone in depth for some encoding; fixed vocabulary: depth amplifies."""
    tests, steps = {}, {}
    for encoding in RELATIVE:
        depths = cells.depths(encoding=encoding, residual=True)
        if len(depths) < 2:
            continue
        rows = cells.gaps(*({"encoding": encoding, "depth": depth, "residual": True} for depth in depths))
        tests[ENCODINGS[encoding]] = slope([row[:, FIRST_LAST] for row in rows], depths)
        for before, after, low, high in zip(rows, rows[1:], depths, depths[1:], strict=False):
            name = f"{ENCODINGS[encoding]}, {low} to {high} layers"
            steps[name] = difference(after[:, FIRST_LAST] - before[:, FIRST_LAST])
    if figures.fixed:
        reported = "even with residual connections more layers mean more bias to the first place."
        return weighed(figures.residual, reported, tests, found="Change of the gap first vs last per layer:")
    reported = "with residual connections the effect of depth is not monotone and depends on the encoding."
    return judged(figures.residual, reported, steps, rule=_not_monotone, found="Change of the gap first vs last:")


def _not_monotone(steps: Tests, quantities: int | None) -> str:
    """Whether depth both raises and lowers the gap for some encoding (reproduced), or for different ones (in part).

    Some step is claimed to have a sign, not every: all steps hold together.
    """
    signs: dict[str, set[str]] = {}
    for name, step in steps.items():
        found = step.supports(1, quantities=quantities or len(steps))
        signs.setdefault(name.partition(",")[0], set()).add(found)
    both = {REPRODUCED, NOT_REPRODUCED}
    if any(both <= found for found in signs.values()):
        return REPRODUCED
    if both <= set().union(*signs.values()):
        return IN_PART
    several = len(steps) > len(signs)
    return NOT_REPRODUCED if several and UNDECIDED not in set().union(*signs.values()) else UNDECIDED


def _deep_rope_u(cells: Cells, figures: Figures) -> Finding:
    depths = cells.depths(encoding="rope", residual=True)
    tests = {}
    if depths:
        gaps = cells.gaps({"encoding": "rope", "depth": depths[-1], "residual": True})[0]
        tests = _ends(f"{depths[-1]} layers", gaps)
    reported = "deep RoPE with residual connections is lost in the middle without any bias in the data."
    return weighed(figures.residual, reported, tests)


def _ends(case: str, gaps: np.ndarray) -> dict[str, Difference]:
    """A U: first above middle, last above middle."""
    return {
        f"{case}: first vs middle": difference(gaps[:, FIRST_MIDDLE]),
        f"{case}: last vs middle": difference(-gaps[:, MIDDLE_LAST]),
    }


def _biased(answers: str, mask: str, encoding: str) -> dict[str, object]:
    """A cell of the studies of biased data: two layers with residual connections."""
    return {"answers": answers, "mask": mask, "encoding": encoding, "residual": True}


def _mask_alone_favours_first(cells: Cells, figures: Figures) -> Finding:
    tests = {}
    causal, full = _biased(ENDS, "causal", "none"), _biased(ENDS, "full", "none")
    if cells.has(causal, full):
        first, second = cells.gaps(causal, full)
        tests["causal"] = difference(first[:, FIRST_LAST])
        tests["causal minus no mask"] = difference(first[:, FIRST_LAST] - second[:, FIRST_LAST])
    reported = "trained on first and last, the causal mask without encoding favours the first place, no mask does not."
    return weighed(figures.ends, reported, tests, found="Gap first vs last:")


def _mask_alone_misses_last(cells: Cells, figures: Figures) -> Finding:
    tests = {}
    cell = _biased(ENDS, "causal", "none")
    if cells.has(cell):
        gaps = cells.gaps(cell)[0]
        tests["first vs middle"] = difference(gaps[:, FIRST_MIDDLE])
        tests["middle vs last"] = difference(gaps[:, MIDDLE_LAST])
    reported = "the causal mask without encoding captures the bias at the first place and not at the last."
    return weighed(figures.ends, reported, tests)


def _both_ends(cells: Cells, figures: Figures) -> Finding:
    tests: dict[str, Difference] = {}
    for mask in ("full", "causal"):
        for encoding in ABSOLUTE:
            cell = _biased(ENDS, mask, encoding)
            if cells.has(cell):
                tests.update(_ends(f"{ENCODINGS[encoding]}, {mask}", cells.gaps(cell)[0]))
    reported = "sin and RoPE capture both ends under either mask: lost in the middle."
    return weighed(figures.ends, reported, tests)


def _first_above_last(cells: Cells, figures: Figures) -> Finding:
    tests = {}
    for encoding in ABSOLUTE:
        cell = _biased(ENDS, "causal", encoding)
        if cells.has(cell):
            tests[ENCODINGS[encoding]] = difference(cells.gaps(cell)[0][:, FIRST_LAST])
    reported = "and the first place does slightly better than the last."
    return weighed(figures.ends, reported, tests, found="Gap first vs last, causal:")


def _mask_alone_everywhere(cells: Cells, figures: Figures) -> Finding:
    tests = {}
    for answers in NAMED:
        cell = _biased(answers, "causal", "none")
        if cells.has(cell):
            tests[f"trained on {answers}"] = difference(cells.gaps(cell)[0][:, FIRST_LAST])
    reported = "the causal mask without encoding favours the beginning wherever the answers stood in training."
    return weighed(figures.places, reported, tests, found="Gap first vs last:")


def _trained_place(cells: Cells, figures: Figures) -> Finding:
    tests = {}
    for answers in NAMED:
        for encoding in ABSOLUTE:
            cell = _biased(answers, "causal", encoding)
            if cells.has(cell):
                gaps = cells.gaps(cell)[0]
                first, middle, last = gaps[:, FIRST_MIDDLE], gaps[:, MIDDLE_LAST], -gaps[:, FIRST_LAST]
                ahead = {
                    "first": first + gaps[:, FIRST_LAST],
                    "middle": middle - first,
                    "last": last - gaps[:, MIDDLE_LAST],
                }[answers]
                tests[f"{ENCODINGS[encoding]}, {answers}"] = difference(ahead / 2)
    reported = "sin and RoPE let the model favour the trained place, wherever it is."
    return weighed(figures.places, reported, tests, found="Mean gap of the trained place against the two others:")


def _u_only_from_ends(cells: Cells, figures: Figures) -> Finding:
    """A U needs the end that was not trained above the middle; the lower of both ends would be low by noise alone."""
    tests = {}
    for answers in NAMED:
        for encoding in ABSOLUTE:
            cell = _biased(answers, "causal", encoding)
            if cells.has(cell):
                gaps = cells.gaps(cell)[0]
                first, last = gaps[:, FIRST_MIDDLE], -gaps[:, MIDDLE_LAST]
                needed = {"first": last, "middle": (first + last) / 2, "last": first}[answers]
                tests[f"{ENCODINGS[encoding]}, {answers}"] = difference(ABOVE - needed)
    reported = "no lost-in-the-middle from data biased to one place only."
    found = f"Gap of the end that was not trained (trained on middle: of both) against the middle, below {ABOVE} by:"
    return weighed(figures.places, reported, tests, found=found)


SINK_WINDOWS = (5, 9, 13)
SINK_PREFIXES = (2, 4, 6)


def sink_findings(cells: Cells, figures: Figures) -> list[Finding]:
    """Every statement on sinks, for one variant of the task. Arguments as `icl_statements.retrieval_findings`."""
    return [statement(cells, figures) for statement in (_causal, _window, _prefix)]


def _causal(cells: Cells, figures: Figures) -> Finding:
    tests = {}
    if cells.has({}):
        tests["causal"] = difference(_lead(cells.values("sinks", {})[0], 1))
    reported = "under the causal mask the attention sink is the first token."
    return weighed(figures.sinks, reported, tests, found="Sink score of the first token minus the largest other:")


def _window(cells: Cells, figures: Figures) -> Finding:
    tests = {}
    windows = [{"mask": f"sliding_window(width={width})"} for width in SINK_WINDOWS]
    if cells.has(*windows):
        rows = [_lead(values, 1) for values in cells.values("sinks", *windows)]
        tests["per token of window"] = slope(rows, SINK_WINDOWS)
    reported = "the larger the window, the more the first token is the sink."
    return weighed(figures.sinks, reported, tests, found="Change of its lead over the largest other score:")


def _prefix(cells: Cells, figures: Figures) -> Finding:
    tests = {}
    for length in SINK_PREFIXES:
        cell = {"mask": f"prefix(length={length})"}
        if cells.has(cell):
            tests[f"K = {length}"] = difference(_lead(cells.values("sinks", cell)[0], length))
    reported = "under a prefix mask all K prefix tokens are sinks, not the first alone."
    return weighed(figures.sinks, reported, tests, found="Least sink score of the prefix minus the largest other:")


def sink_control(cells: Cells, figures: Figures) -> Finding:
    """The control that the source has not: attention at initialisation, nearly uniform, passes tau early on as well."""
    tests = {}
    for name, cell in {
        "causal": {},
        **{f"prefix {length}": {"mask": f"prefix(length={length})"} for length in SINK_PREFIXES},
    }.items():
        if cells.has(cell):
            count = 1 if name == "causal" else int(name.split()[1])
            after, before = cells.values("sinks", cell)[0], cells.values("sinks/initial", cell)[0]
            tests[name] = difference(_lead(after, count) - _lead(before, count))
    reported = "sinks emerge in training: the score before the first step is lower."
    return weighed(
        f"{figures.sinks}, control", reported, tests, found="Lead of the sink tokens, trained minus initial:"
    )


def _lead(sinks: np.ndarray, count: int) -> np.ndarray:
    """Least score of the first `count` tokens minus the largest of the others."""
    return np.asarray(sinks[:, :count].min(axis=1) - sinks[:, count:].max(axis=1))


WHERE = "Their code"


def flag_findings(paper: Cells, code: Cells) -> list[Finding]:
    """What each flag would change.

    Args:
        paper: Members with components of variance 1/d, as the paper says.
        code: The same with standard deviation 1/d, as the published code draws them.
    """
    return [
        _scale_of_accuracy(paper, code),
        _scale_of_depth(paper, code),
        _inverted_residual(paper),
        _lost_decay(paper),
    ]


def _scale_of_accuracy(paper: Cells, code: Cells) -> Finding:
    """Whether the code's smaller vectors are learnt less well, which would call for its many steps."""
    tests: dict[str, Difference] = {}
    for encoding in RELATIVE:
        for depth in code.depths(encoding=encoding):
            cell = {"encoding": encoding, "depth": depth}
            seeds = paper.outcomes.common_seeds(paper.factors(**cell), code.factors(**cell))
            if seeds:
                rows = [which.outcomes.values("novel", which.factors(**cell), seeds) for which in (paper, code)]
                lost = rows[0] - rows[1]
                tests[f"{ENCODINGS[encoding]}, {depth} layers"] = difference(lost)
    reported = "items and labels of norm 1/8 (std 1/d, the code) are learnt less well than of norm 1 (variance 1/d)."
    return weighed(WHERE, reported, tests, found="Accuracy on novel classes with variance 1/d minus with std 1/d:")


def _scale_of_depth(paper: Cells, code: Cells) -> Finding:
    """The depth effect with the code's smaller vectors."""
    tests = {}
    for encoding in RELATIVE:
        depths = code.depths(encoding=encoding)
        if len(depths) > 1:
            rows = code.gaps(*({"encoding": encoding, "depth": depth} for depth in depths))
            tests[ENCODINGS[encoding]] = slope([row[:, FIRST_LAST] for row in rows], depths)
    reported = "with std 1/d, as the code draws vectors, more layers mean more bias to the first place."
    return weighed(WHERE, reported, tests, found="Change of the gap first vs last per layer, std 1/d:")


def _inverted_residual(paper: Cells) -> Finding:
    """The statement about no residual, on members with residual connections."""
    tests = {}
    for encoding in RELATIVE:
        depths = paper.depths(encoding=encoding, residual=True)
        if len(depths) > 1:
            rows = paper.gaps(*({"encoding": encoding, "depth": depth, "residual": True} for depth in depths))
            tests[ENCODINGS[encoding]] = slope([row[:, FIRST_LAST] for row in rows], depths)
    reported = (
        "`--not_res` is inverted; were the figures' labels exchanged, depth would amplify the bias with residual "
        "connections."
    )
    return weighed(WHERE, reported, tests, found="Change of the gap first vs last per layer, with residual:")


def _lost_decay(paper: Cells) -> Finding:
    """`--pe decay` is silently no encoding; then the two would not differ."""
    tests = {}
    for depth in paper.depths(encoding="decay"):
        cells = ({"encoding": "none", "depth": depth}, {"encoding": "decay", "depth": depth})
        if paper.has(*cells):
            first, second = paper.gaps(*cells)
            tests[f"{depth} layers"] = difference(first[:, FIRST_LAST] - second[:, FIRST_LAST])
    reported = (
        "`--pe decay` is silently no encoding; the published decay bars differ from those without, so it was not used."
    )
    return weighed(WHERE, reported, tests, found="Gap first vs last without encoding minus with decay:")
