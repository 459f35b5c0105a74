"""What Wu et al. report of depth, encodings and training data, each statement with its test on trained members."""

from collections.abc import Callable

import numpy as np

from posbias.papers.findings import IN_PART, Finding, Tests, judged, weighed
from posbias.papers.paired import NOT_REPRODUCED, REPRODUCED, UNDECIDED, Difference, difference
from posbias.papers.wu2025.icl_cells import ENCODINGS, FIRST_LAST, FIRST_MIDDLE, MIDDLE_LAST, Cells, Figures, slope

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
